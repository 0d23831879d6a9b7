"""What the tests share: a GPT-2 of 0.4 M parameters made from a config, a short text, and runs that are made once."""

import gc
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import needs
import pytest
import torch
from cpu_budget import CpuBudget

from workbench.base.device import current_emulated_gpu
from workbench.base.paths import CORPORA, MODELS
from workbench.journal.record import Record
from workbench.recipe import Recipe

VOCABULARY, LAYERS, EMBEDDING, HEADS, POSITIONS = 4096, 2, 64, 4, 128
END_OF_TEXT_ID = 0


os.environ["WORKBENCH_ENGINE"] = "shadow"  # the same predictions wherever the tests run; the emulator has its own tests
SKIPPED_HERE = {}  # marker: why
# minutes each: begun first, or one process would be busy with them when the other has nothing left
LONG_FILES = (
    "test_notebooks_run",
    "test_on_an_emulated_gpu",
    "test_playground",
    "test_ranks",
    "test_losses",
    "test_contract",
)
if not torch.cuda.is_available():
    SKIPPED_HERE["gpu"] = "needs a CUDA device, and PyTorch sees none on this machine"
if current_emulated_gpu():
    SKIPPED_HERE["values"] = "looks at losses, texts or speed, and an emulated GPU computes nothing"

# the models are so small that threads wait for each other, above all where another test process has the other core
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-budget", type=float, help="how much a test that is not dear may cost, in multiples of the mean"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuBudget(config))
    config.pluginmanager.register(needs)


@pytest.fixture(scope="session", autouse=True)
def paid_before_the_first_test(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Under a budget, no test pays for what a test process does once: its imports, and the start of its predictions."""
    if request.config.getoption("cpu_budget") is None:
        return
    from workbench.prediction.predict import predict

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(tmp_path_factory.mktemp("before-the-first-test")))
        predict(Recipe(model="gpt2-tiny", effective_batch_size=1, sequence_length=8), "cpu")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # a file shares its fixtures, so it stays in one process; a notebook is a group of its own
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)
    for item in items:
        for marker in filter(item.get_closest_marker, SKIPPED_HERE):
            item.add_marker(pytest.mark.skip(reason=SKIPPED_HERE[marker]))


@pytest.fixture(autouse=True)
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the learner's own `data/runs`."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("WORKBENCH_RUNS", str(folder))
    return folder


@pytest.fixture(scope="session")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the lessons predict, and the tests of what they are made of: the same recipes on the same
    cards. All test processes share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "predictions"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def predicted_once(runs_folder: Path, predictions: Path) -> None:
    runs_folder.mkdir()
    (runs_folder / "predictions").symlink_to(predictions)


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config and the tokenizer of a very small GPT-2, without weights and without dropout."""
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("models") / "gpt2-test"
    GPT2Config(
        vocab_size=VOCABULARY, n_layer=LAYERS, n_embd=EMBEDDING, n_head=HEADS, n_positions=POSITIONS,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID,
    ).save_pretrained(folder)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "gpt2-tiny" / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each kind in `models/architectures.toml` a folder: its config and gpt2-tiny's tokenizer, without weights."""
    from transformers import AutoConfig

    made = tmp_path_factory.mktemp("kinds")
    written = tomllib.loads(Path(__file__).with_name("models").joinpath("architectures.toml").read_text())
    for kind, own in written["kinds"].items():
        settings = {name: value for name, value in {**written["common"], **own}.items() if value != []}
        AutoConfig.for_model(kind, **settings).save_pretrained(made / kind)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODELS / "gpt2-tiny" / name, made / kind / name)
    return made


@pytest.fixture(scope="session")
def model_name(gpt2_folder: Path) -> str:
    return f"random:{gpt2_folder}"


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 10,000 tokens of Shakespeare."""
    path = tmp_path_factory.mktemp("texts") / "play.txt"
    path.write_text(
        (CORPORA / "shakespeare" / "train.txt").read_text(encoding="utf-8")[20_000:60_000], encoding="utf-8"
    )
    return path


@pytest.fixture(scope="session")
def recipe(model_name: str, text_file: Path) -> Recipe:
    """Six steps of a batch of 8 × 32 tokens, no techniques, a learning rate at which the loss moves."""
    import workbench.training.run  # noqa: F401  # with all its libraries

    gc.collect()
    gc.freeze()  # or every run would walk the half million objects of the libraries again and again
    return Recipe(
        model=model_name, corpus=str(text_file), effective_batch_size=8, sequence_length=32, steps=6,
        learning_rate=3e-3, dropout=0.0,
    )  # fmt: skip


@pytest.fixture(scope="session")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Record]:
    """`run`, with the model kept, merged if it can be. The same recipe is run once, however many tests look at it."""
    from workbench.training.job import WHY_UNMERGEABLE
    from workbench.training.run import run

    folder, done = tmp_path_factory.mktemp("shared-runs"), dict[Recipe, Record]()

    def once(recipe: Recipe) -> Record:
        if recipe not in done:
            mergeable = not any(technique.brings & WHY_UNMERGEABLE.keys() for technique in recipe.techniques)
            done[recipe] = run(recipe, device="cpu", save="merged" if mergeable else "adapter", folder=folder)
        return done[recipe]

    return once


class Onlooker:
    """Of a training in the background: keeps how it ended, and does something with each step."""

    def __init__(self) -> None:
        self.each: Callable[[], object] = lambda: None
        self.ended_as: list[tuple[object, str]] = []

    def on_begin(self, recipe: object) -> None:
        pass

    def on_progress(self, record: object) -> None:
        self.each()

    def on_end(self, record: object, words: str) -> None:
        self.ended_as.append((record, words))


@pytest.fixture
def onlooker() -> Onlooker:
    return Onlooker()
