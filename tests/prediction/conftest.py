from pathlib import Path

import pytest

from workbench.gpus.emulator import call


@pytest.fixture(scope="session")
def emulators_libraries():
    """The process that has imported PyTorch's CUDA build: it serves all files."""
    yield
    call.TRUNK.end()


@pytest.fixture(scope="module")
def emulator(emulator, emulators_libraries):
    """The emulated GPU, whose processes end with the file."""
    yield emulator
    call.PROCESSES.end()


@pytest.fixture(scope="session")
def shallow_gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """GPT-2 with four of its twelve layers: tensors of the same sizes, a third of the work."""
    from workbench.models.load import load_config, load_tokenizer
    from workbench.models.source import locate

    folder: Path = tmp_path_factory.mktemp("models") / "shallow-gpt2"
    source = locate("random:gpt2")
    config = load_config(source)
    config.n_layer = 4
    config.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    return f"random:{folder}"
