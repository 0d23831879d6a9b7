import subprocess
import sys

import pytest

import workbench

LIGHT = """
import sys
for statement in ("import workbench", "from workbench import Recipe", "import workbench.journal.record"):
    exec(statement)
    heavy = ("torch", "transformers", "peft", "datasets", "pandas", "matplotlib")
    print(statement, [name for name in heavy if name in sys.modules])
"""


def test_importing_is_light():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "import workbench []",
        "from workbench import Recipe []",
        "import workbench.journal.record []",
    ]


def test_every_exported_name_is_there(subtests):
    for name in workbench.__all__:
        with subtests.test(name=name):
            assert getattr(workbench, name).__name__.rpartition(".")[2] == name
            assert name in dir(workbench)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'ran'"):
        _ = workbench.ran


def test_a_name_is_not_hidden_by_a_module_of_the_same_name():
    import workbench.journal.record
    import workbench.training.job as job

    assert workbench.training.job is job
    assert workbench.journal.record.Record is workbench.Record
    assert callable(workbench.records)
    assert isinstance(workbench.Record, type)
