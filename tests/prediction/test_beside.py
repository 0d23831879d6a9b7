from dataclasses import replace

from workbench.journal.record import Record, Status
from workbench.prediction.predict import CPU, predict, predicted_peak


def test_the_peak_is_predicted_for_the_device_of_the_record(recipe):
    here = replace(Record.start(recipe), status=Status.OK, device_kind="cpu", device_name="any")
    assert predicted_peak(here) == predict(recipe, CPU).peak_allocated_bytes
    there = replace(here, device_kind="cuda", device_name="NVIDIA T4", device_bytes=15 * 2**30)
    assert predicted_peak(there) == predict(recipe, "t4").peak_allocated_bytes


def test_of_a_device_that_nobody_knows_nothing_is_predicted(recipe):
    assert predicted_peak(replace(Record.start(recipe), device_kind="mps", device_name="Apple M1")) is None


def test_what_cannot_be_predicted_has_no_peak(recipe):
    made = Record.start(recipe)
    unknown = {**made.recipe_settings, "model": "random:no such"}
    assert predicted_peak(replace(made, device_kind="cpu", recipe_settings=unknown)) is None
