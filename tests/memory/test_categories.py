import pytest

from workbench.memory.categories import Category, Phase, format_bytes


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (100 * 1024, "100 KiB"),
        (1024**2, "1.0 MiB"), (1024**3, "1.0 GiB"), (5 * 1024**4, "5120 GiB"), (-1536, "-1.5 KiB"),
    ],
)  # fmt: skip
def test_bytes_are_shown_in_binary_units(number, text):
    assert format_bytes(number) == text


def test_the_names_are_plain_text_as_they_stand_in_a_record():
    assert [str(category) for category in Category] == [
        "weights", "gradients", "optimizer_states", "activations", "logits_and_loss", "temporaries", "unattributed",
    ]  # fmt: skip
    assert [str(phase) for phase in Phase] == ["forward", "backward", "optimizer_step", "evaluation"]
