"""Times in words."""

from workbench.lessons.progress import duration


def test_a_time_is_told_in_the_units_that_people_use():
    told = {
        0: "0 s",
        40.4: "40 s",
        89: "89 s",
        90: "2 minutes",
        720: "12 minutes",
        5399: "1 h 30 min",
        10184: "2 h 50 min",
    }
    assert {seconds: duration(seconds) for seconds in told} == told
