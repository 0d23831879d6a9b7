"""Any decoder of transformers: what is known of it, and whether run, prediction and techniques hold for it."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, GPT2Config, MptConfig

from workbench.base.errors import ConfigurationError
from workbench.models.family import MOST_POSITIONS, family_of, on_meta, positions
from workbench.models.known import PUBLISHED
from workbench.models.load import load_config
from workbench.models.source import locate_config
from workbench.prediction.predict import EMULATOR, SHADOW, Prediction, predict, predict_all
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, ChunkedCrossEntropy, FusedGelu, GradientCheckpointing, Lora
from workbench.training.run import run

KINDS = sorted(tomllib.loads(Path(__file__).with_name("architectures.toml").read_text())["kinds"])
# in the first layer: one head of keys and values with rotary positions, no positions but biases, capped logits, no
# attention, experts
DIFFERENT_KINDS = ("llama", "bloom", "gemma2", "mamba", "mixtral")
CHANGES_LOGITS = {"codegen", "cohere", "gemma2", "gptj", "phi"}
# parameters, as the models' own pages and papers say, or their files' headers
PARAMETERS = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008, "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "EleutherAI/pythia-160m": 162_322_944, "EleutherAI/pythia-1b": 1_011_781_632, "facebook/opt-125m": 125_239_296,
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304, "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920, "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248, "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "google/gemma-2-2b": 2_614_341_888, "microsoft/phi-2": 2_779_683_840, "state-spaces/mamba-130m-hf": 129_135_360,
}  # fmt: skip


@pytest.fixture
def recipe_of(kinds, text_file, tmp_path):
    (tmp_path / "short.txt").write_text(text_file.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    shape = {"corpus": str(tmp_path / "short.txt"), "sequence_length": 32, "effective_batch_size": 4, "steps": 2}
    return lambda kind: Recipe(model=f"random:{kinds / kind}", **shape)


def run_on_cpu(recipe):
    return run(recipe, device="cpu")


@pytest.mark.dear
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.smoke) if kind in DIFFERENT_KINDS else kind for kind in KINDS]
)
def test_two_steps_run_are_predicted_and_lose_nothing_to_exact_techniques(kind, recipe_of):
    recipe = recipe_of(kind)
    record = run_on_cpu(recipe)
    assert predict(recipe, "cpu").peak_allocated_bytes == pytest.approx(record.peak_allocated_bytes, rel=0.01)
    exact = recipe | GradientCheckpointing()
    exact = exact if kind in CHANGES_LOGITS else exact | ChunkedCrossEntropy(chunk=16)
    again = run_on_cpu(exact)
    assert again.losses == pytest.approx(record.losses, rel=1e-5)
    assert again.held_out_loss == pytest.approx(record.held_out_loss, rel=1e-5)
    assert again.peak_allocated_bytes <= record.peak_allocated_bytes


@pytest.mark.dear
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_each_technique_acts_or_says_why_it_cannot(kind, recipe_of, subtests):
    recipe = replace(recipe_of(kind), effective_batch_size=8, sequence_length=128)
    for name, technique in REGISTRY.items():
        with subtests.test(name):
            change = next(iter(technique.variants((9, 0))), technique())
            (answer,) = predict_all(recipe | change, ["h100"])
            assert isinstance(answer, Prediction) or name in str(answer)


def test_a_loss_that_would_miss_what_follows_the_head_is_refused_before_weights_are_loaded(recipe_of, subtests):
    for kind in sorted(CHANGES_LOGITS):
        reason = "changes its logits after the head" if kind in ("cohere", "gemma2") else "has a bias"
        for use in (run_on_cpu, predict):
            with (
                subtests.test(kind=kind, use=use.__name__),
                pytest.raises(ConfigurationError, match=f"^chunked_cross_entropy: .*{reason}"),
            ):
                use(recipe_of(kind) | ChunkedCrossEntropy())


def test_what_does_not_apply_says_why(recipe_of, subtests):
    for technique, kind, reason in [
        (FusedGelu(), "llama", "no GELU of the kind 'llama' is written out"),
        (REGISTRY["ia3"](), "granite", "PEFT does not say which activations of the kind 'granite' are scaled"),
        (REGISTRY["prefix_tuning"](), "mamba", "a 'mamba' has layers without keys and values"),
        (REGISTRY["prefix_tuning"](), "qwen3_5_text", "has layers without keys and values"),
        (Lora(rank=2), "mamba", "cannot be applied to a model of the kind 'mamba'.*Choose other settings"),
        (Lora(targets="c_attn"), "llama", "llama has no matrix 'c_attn'. Choose from down_proj, gate_proj"),
    ]:
        with (
            subtests.test(technique=technique.name, kind=kind),
            pytest.raises(ConfigurationError, match=f"^{technique.name}: .*{reason}"),
        ):
            run_on_cpu(recipe_of(kind) | technique)


def test_a_known_config_has_the_published_number_of_parameters(subtests):
    assert PUBLISHED.keys() == PARAMETERS.keys()
    for name, parameters in PARAMETERS.items():
        with subtests.test(name):
            model = on_meta(load_config(locate_config(name)))
            model.tie_weights()
            assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_a_family_is_read_from_the_model():
    family = family_of(GPT2Config(n_embd=64, n_inner=32, n_head=4))
    assert family.model_type == "gpt2"
    assert family.matrices == {"c_attn": 64, "c_fc": 32, "c_proj": 32}
    assert family.matrices_are_transposed
    assert family.dropout_fields == ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    assert family.fused_activation == {"activation_function": "gelu_pytorch_tanh"}


def test_a_config_that_contradicts_itself_is_refused(kinds, tmp_path):
    refuse_a_contradiction(kinds, tmp_path, SHADOW)


@pytest.mark.usefixtures("emulator")
def test_a_config_that_contradicts_itself_is_refused_by_the_emulator(kinds, tmp_path):
    refuse_a_contradiction(kinds, tmp_path, EMULATOR)


def refuse_a_contradiction(kinds, tmp_path, engine):
    shutil.copytree(kinds / "mixtral", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 9}))
    with pytest.raises(ConfigurationError, match="predict: this recipe cannot be .*out of range|not in range"):
        predict(Recipe(model=f"random:{tmp_path / 'model'}"), "h100", engine=engine)


def test_dropout_reaches_every_field_of_the_kind(recipe_of):
    recipe = recipe_of("opt")
    dropped = run_on_cpu(replace(recipe, dropout=0.5))
    assert dropped.losses != pytest.approx(run_on_cpu(recipe).losses, rel=1e-3)


def test_a_model_without_positions_takes_any_length(kinds):
    assert positions(AutoConfig.from_pretrained(kinds / "mamba")) == MOST_POSITIONS
    assert positions(MptConfig(max_seq_len=99)) == 99
