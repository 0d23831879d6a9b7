import subprocess
import sys

import pytest

import workbench


@pytest.mark.parametrize(
    "statement", ["import workbench", "from workbench import Recipe", "import workbench.records.record"]
)
def test_importing_is_light(statement):
    heavy = "[m for m in ('torch', 'transformers', 'peft', 'datasets', 'pandas', 'matplotlib') if m in sys.modules]"
    program = f"import sys; {statement}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", workbench.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(workbench, name).__name__.rpartition(".")[2] == name
    assert name in dir(workbench)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'ran'"):
        _ = workbench.ran


def test_a_name_is_not_hidden_by_a_module_of_the_same_name():
    import workbench.records.record  # noqa: F401

    assert callable(workbench.records)
    assert isinstance(workbench.Record, type)
