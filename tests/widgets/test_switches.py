"""What each switch says that it saves, costs and gives up, and in which order they stand."""

import ipywidgets as w
from parts import Forecast

from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY
from workbench.widgets.gauge import Limit
from workbench.widgets.savings import Savings
from workbench.widgets.switches import Switches


def offers_of(form, predictor):
    """What is offered for the form's recipe, and the switches that say so."""
    savings, switches = Savings(form.toggles), Switches(form.toggles)
    savings.predictor = predictor
    savings.quiet_s = 0.01
    savings.on_offer = lambda name: switches.show_offer(name, savings.offers[name])
    savings.show(form.recipe(), Limit("t4", 3 * 2**30))
    assert savings.wait(20)
    return savings.offers, switches


def half_with_anything(recipe, gpu):
    if recipe.techniques and recipe.techniques[0].name == "dora":
        raise ConfigurationError("not on this <card>")
    return Forecast(peak=2**30 if recipe.techniques else 3 * 2**30)


def test_each_switch_says_what_it_saves_costs_and_gives_up(form):
    form.toggles["gradient_checkpointing"].box.value = True
    offers, _ = offers_of(form, half_with_anything)
    facts = {name: toggle.facts.value for name, toggle in form.toggles.items()}
    assert "−2.0 GiB" in facts["gradient_checkpointing"], "what it saves while it is on"
    assert "enough by itself" in facts["gradient_checkpointing"]
    assert "±0 B" in facts["lora"], "beside the one that is on"
    assert "enough" not in facts["lora"]
    assert "±0 %" in facts["lora"]
    assert REGISTRY["lora"].costs in facts["lora"]
    assert "not on this &lt;card&gt;" in facts["dora"]
    assert offers["dora"] == "not on this <card>"


def test_what_costs_no_time_and_no_loss_is_free(form):
    offers_of(form, half_with_anything)
    assert "wb-free" in form.toggles["gradient_checkpointing"].facts.value
    assert "wb-free" not in form.toggles["lora"].facts.value, "another training"


def test_a_row_has_the_settings_that_are_not_the_defaults_and_its_title_once(form):
    for name, setting, value in (("gradient_accumulation", "steps", "2"), ("lora", "rank", "4")):
        form.toggles[name].box.value = True
        form.toggles[name].controls[setting].value = value
    offers_of(form, half_with_anything)
    facts = {name: toggle.facts.value for name, toggle in form.toggles.items()}
    assert "gives up </span> (steps=2) " in facts["gradient_accumulation"]
    assert "gives up </span> (rank=4) " in facts["lora"]
    assert f"gives up </span> {REGISTRY['fused_gelu'].costs}" in facts["fused_gelu"]


def test_facts_of_the_recipe_before_are_dimmed(form):
    _, switches = offers_of(form, half_with_anything)
    assert "wb-old" not in form.toggles["lora"].facts._dom_classes
    switches.dim()
    assert "wb-old" in form.toggles["lora"].facts._dom_classes


def titles_in(group):
    """Of the switches in a box or a fold, from the top."""
    rows = [view.children[0] for view in group.children if isinstance(view, w.VBox)]
    return [row.children[0].description for row in rows]


def test_switches_stand_by_what_becomes_of_the_loss_the_largest_saving_first(form):
    sizes = {"gradient_checkpointing": 1, "chunked_cross_entropy": 2, "lora": 1, "fused_gelu": 3, "streaming": 4}

    def predictor(recipe, gpu):
        size = min((sizes.get(technique.name, 4) for technique in recipe.techniques), default=4)
        return Forecast(peak=size * 2**30)

    offers, switches = offers_of(form, predictor)
    switches.arrange(offers)
    assert titles_in(switches.same)[:3] == ["Gradient checkpointing", "Chunked cross-entropy", "Fused GELU"]
    assert "Lora" not in titles_in(switches.same)
    assert switches.another.button.description == "▸ Another training: LoRA −3.0 GiB"
    assert switches.another.rows.children == ()
    switches.another.button.value = True
    assert titles_in(switches.another.rows) == ["LoRA"]
    assert switches.another.button.description.startswith("▾")
    assert "Prefix tuning · " in switches.useless.button.description
    assert len(titles_in(switches.same)) + 1 < len(form.toggles)


def test_a_group_with_a_switch_that_is_on_is_open(form):
    form.toggles["lora"].box.value = True
    offers, switches = offers_of(form, half_with_anything)
    switches.arrange(offers)
    assert titles_in(switches.another.rows) == ["LoRA"]


def test_two_engines_are_not_compared(form, monkeypatch):
    """What comes with the workbench is from an emulated GPU, and here may be none."""
    live = []

    def known(recipe, gpu):
        return Forecast(source="predicted:t4" if recipe.techniques else "emulated:t4")

    def shadow(recipe, gpu):
        live.append(recipe)
        return Forecast(source="predicted:t4", peak=2**30 if recipe.techniques else 2**31)

    monkeypatch.setattr("workbench.widgets.savings.predict", shadow)
    savings = Savings({"lora": form.toggles["lora"]})
    savings.predictor = known
    savings.quiet_s = 0
    savings.show(Recipe(), Limit("t4"))
    assert savings.wait(10)
    assert len(live) == 2
    assert savings.offers["lora"].saved_bytes == 2**30
