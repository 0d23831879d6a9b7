from workbench.base.device import Device
from workbench.prediction.predict import CPU, predict, predict_peak


def test_the_peak_is_predicted_for_the_device_of_the_record(recipe):
    here = Device("cpu", "any")
    assert predict_peak(recipe.to_dict(), here) == predict(recipe, CPU).peak_allocated_bytes
    there = Device("cuda", "NVIDIA T4", 15 * 2**30)
    assert predict_peak(recipe.to_dict(), there) == predict(recipe, "t4").peak_allocated_bytes


def test_of_a_device_that_nobody_knows_nothing_is_predicted(recipe):
    assert predict_peak(recipe.to_dict(), Device("mps", "Apple M1")) is None


def test_what_cannot_be_predicted_has_no_peak(recipe):
    unknown = {**recipe.to_dict(), "model": "random:no such"}
    assert predict_peak(unknown, Device("cpu")) is None
