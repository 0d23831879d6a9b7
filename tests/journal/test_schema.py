"""Records that an older or a newer workbench wrote. `schema_1.json` is a real one, from before the field was there."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.advise.compare import caption, compare
from workbench.advise.frame import records, to_frame
from workbench.base.errors import ConfigurationError
from workbench.journal.record import SCHEMA_VERSION, Record, Status, read_all
from workbench.journal.store import mark_killed

OLD = Path(__file__).parent / "schema_1.json"


@pytest.fixture
def rewritten(tmp_path):
    """The old record with other values, in a file of its own."""

    def made(**changes):
        path = tmp_path / "record.json"
        path.write_text(json.dumps({**json.loads(OLD.read_text()), **changes}))
        return path

    return made


def test_an_old_record_is_read_in_todays_form():
    old = json.loads(OLD.read_text())
    record = Record.read(OLD)
    assert "schema_version" not in old
    assert record.schema_version == SCHEMA_VERSION
    assert (record.rank, record.world_size) == (0, 1)
    assert (record.device_kind, record.device_name, record.threads) == ("cpu", "AMD EPYC", 2)
    assert record.device == old.pop("device")
    assert record.recipe_settings == old.pop("recipe")
    owner = old.pop("owner")
    assert record.owner == {"host": owner["host"], "pid": owner["pid"], "start": f"{owner['began']:.6f}"}
    assert all(getattr(record, name) == value for name, value in old.items())


def test_written_again_it_is_a_record_of_today(tmp_path):
    record = Record.read(OLD)
    path = record.save(tmp_path)
    data = json.loads(path.read_text())
    assert data["schema_version"] == SCHEMA_VERSION
    assert "device" not in data
    assert Record.read(path) == record


def test_it_is_in_the_table_and_compares_with_a_run_of_today(tmp_path):
    shutil.copy(OLD, tmp_path / "old.json")
    old = Record.read(OLD)
    today = replace(old, id="today", created_at="2999-01-01T00:00:00.000+00:00", label="lora(rank=8)")
    today.save(tmp_path)
    frame = records(tmp_path)
    assert list(frame["device"]) == ["AMD EPYC (cpu, 2 threads)"] * 2
    assert set(compare(frame).index) == {"baseline", "lora(rank=8)"}
    assert caption(compare(to_frame([old]))).endswith("cpu-tracker on AMD EPYC (cpu, 2 threads).")


def test_an_old_run_whose_process_is_gone_is_marked(rewritten):
    path = rewritten(status="running", owner={})
    (marked,) = mark_killed(path.parent)
    assert (marked.status, marked.device_name) == (Status.KILLED, "AMD EPYC")


DEVICES = {
    "NVIDIA A10 (cuda)": ("cuda", "NVIDIA A10", None),
    "AMD EPYC (cpu, 2 threads)": ("cpu", "AMD EPYC", 2),
    "Intel(R) Xeon(R) CPU @ 2.20GHz (cpu, 16 threads)": ("cpu", "Intel(R) Xeon(R) CPU @ 2.20GHz", 16),
    "arm (mps)": ("mps", "arm", None),
    "a sentence of another kind": ("", "a sentence of another kind", None),
    "": ("", "", None),
}


def test_the_old_text_of_the_device_becomes_fields(rewritten, subtests):
    for device, fields in DEVICES.items():
        with subtests.test(device=device):
            record = Record.read(rewritten(device=device))
            assert (record.device_kind, record.device_name, record.threads) == fields
            assert record.device == device


def test_a_newer_record_is_called_newer_and_skipped(rewritten, capsys):
    path = rewritten(schema_version=SCHEMA_VERSION + 1, id={"unlike": "today's"}, status="of another kind")
    words = (
        f"records: {path} was written by a newer workbench (schema {SCHEMA_VERSION + 1}; this one reads up to "
        f"{SCHEMA_VERSION}). Update the workbench."
    )
    with pytest.raises(ConfigurationError) as caught:
        Record.read(path)
    assert str(caught.value) == words
    kept = Record.read(OLD)
    kept.save(path.parent)
    assert read_all(path.parent) == [kept]
    assert capsys.readouterr().err == f"warning: {words}\n"


def test_a_field_that_the_schema_does_not_have_is_an_error(rewritten, subtests):
    """Today's schema has no `device`, which the old record brings."""
    for changes in ({"colour": 2}, {"schema_version": SCHEMA_VERSION}, {"device": 3}):
        with subtests.test(changes=changes), pytest.raises(ConfigurationError, match="is not a record"):
            Record.read(rewritten(**changes))


def test_a_schema_version_is_a_number_from_one(rewritten, subtests):
    for schema in (None, 0, -1, 1.5, True, "3", [3]):
        refused = pytest.raises(ConfigurationError, match=r"is not a record \(its schema_version is .* Move it away")
        with subtests.test(schema=schema), refused:
            Record.read(rewritten(schema_version=schema))
