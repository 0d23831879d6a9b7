"""Fill in the site's front page: the template is `docs/front/index.html`, `tools/front_page.py` predicted the numbers.

`docs/conf.py` puts it into the site. Without an address of the repository the page has no link to one, and its picture
has a relative address, which other sites do not follow.
"""

import json
from typing import Any

import jinja2
from markupsafe import Markup

from workbench.base.paths import ROOT
from workbench.lessons.cards import step_on_card
from workbench.techniques import GradientCheckpointing

FRONT = ROOT / "docs" / "front"
DATA = ROOT / "data" / "front" / "predictions.json"
PICTURE = "front.png"
DESCRIPTION = (
    "What fine-tuning GPT-2, Qwen, Llama or SmolLM needs of your GPU, which techniques make it fit, and what each "
    "costs. Predicted on PyTorch's own allocator; lessons, a live panel and plain scripts."
)
# Readers without JavaScript see a table of these sets, at 8 × 1,024 tokens.
TABLE = {
    "as the Trainer runs it": "full",
    "checkpointing and chunked loss": "full+chunk+ckpt",
    "these with bf16 weights": "bf16+chunk+ckpt",
    "these with LoRA": "lora+chunk+ckpt",
}
TOKENS = 8192


def fill_page(repository: str = "") -> str:
    """Return the page in HTML. `repository` is an address on GitHub, or nothing."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((FRONT / "index.html").read_text(encoding="utf-8"))
    # "</script>" in a title would end the script that holds the data
    script_data = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    address = repository.removesuffix("/").removesuffix(".git")
    raw_folder = f"{address}/raw/main/docs/front/" if address else ""
    return template.render(
        description=DESCRIPTION,
        repository=address,
        picture=f"{raw_folder}{PICTURE}",
        made_words=made_in_words(data["made"]),
        check_words=check_in_words(data["check"]),
        headline=data["headline"],
        table=table(data),
        step=Markup(step_on_card(GradientCheckpointing()).data),  # the picture of lesson 03
        data=Markup(script_data),
    )


def table(data: dict[str, Any]) -> dict[str, Any]:
    """Return the GiB that each model needs on a card like the reference, with CUDA's context."""
    tokens = data["columns"].index("tokens")
    reserved = data["columns"].index("reserved")
    context = data["made"]["context"]
    rows = []
    for model in data["models"]:
        needs = []
        for curve in TABLE.values():
            reserved_by_tokens = {point[tokens]: point[reserved] for point in model["points"][curve]}
            need = reserved_by_tokens[TOKENS] + context
            needs.append(f"{need / 1024:.1f}")
        rows.append((model["title"], needs))
    return {"columns": list(TABLE), "rows": rows}


def made_in_words(facts: dict[str, Any]) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"Predicted, nothing was run: {facts['predictions']:,} training steps on an emulated {facts['card']}, which "
        f"is PyTorch's own CUDA allocator without a GPU (source {facts['source']}; {libraries}; workbench "
        f"{facts['workbench']}). Other cards are taken to differ by CUDA's context, cuBLAS's workspaces and their "
        "memory. Between two predicted points the page interpolates along the tokens of a pass if both have the same "
        "answer, and says “close” if not."
    )


def check_in_words(check: dict[str, Any]) -> str:
    wrong = "never the wrong verdict"
    if check["wrong"]:
        wrong = f"{check['wrong']} times the wrong verdict"
    return (
        f"Held against {check['choices']} other choices of model, set, batch, length and card, each predicted for "
        f"itself: {wrong}, {check['close']} times “close”. What is needed was off by {check['mean_error']:.1%} on "
        f"average and {check['worst_error']:.0%} at worst ({check['worst']}); the tensors alone by "
        f"{check['worst_tensors_error']:.0%} at worst."
    )
