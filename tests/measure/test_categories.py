import pytest

from workbench.base.categories import Category, Phase, format_bytes, parse_bytes
from workbench.base.errors import ConfigurationError


def test_bytes_are_shown_in_binary_units(subtests):
    shown = {
        0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 100 * 1024: "100 KiB", 1024**2: "1.0 MiB",
        1024**3: "1.0 GiB", 5 * 1024**4: "5120 GiB", -1536: "-1.5 KiB",
    }  # fmt: skip
    for number, text in shown.items():
        with subtests.test(number=number):
            assert format_bytes(number) == text


def test_the_names_are_plain_text_as_they_stand_in_a_record():
    assert [str(category) for category in Category] == [
        "weights", "gradients", "optimizer_states", "activations", "logits_and_loss", "temporaries", "unattributed",
    ]  # fmt: skip
    assert [str(phase) for phase in Phase] == ["forward", "backward", "optimizer_step", "evaluation"]


def test_amounts_as_people_write_them(subtests):
    written = {
        "8GiB": 8 * 2**30, "8 GiB": 8 * 2**30, "8192MiB": 8 * 2**30, "8gib": 8 * 2**30, " 8 GB ": 8 * 10**9,
        "8gb": 8 * 10**9, "0.5 GiB": 2**29, "1.5KiB": 1536, "1 TiB": 2**40, "100 B": 100, "7 bytes": 7, 12345: 12345,
        "1,024 MiB": 2**30, "1,024.5 KiB": 1024 * 1024 + 512, "12,345,678 B": 12345678,
    }  # fmt: skip
    for amount, nbytes in written.items():
        with subtests.test(amount=amount):
            assert parse_bytes(amount, "budget") == nbytes


UNCLEAR = ("8", "8G", "8 Gi", "8Gb", "GiB", "", "8 GiB 2", "-8GiB", "0GiB", "0.1 B", "1e9 B", "nan GiB", 0, -5, True,
           "1,5 GiB", "1,0240 MiB", "1024,000 B", ",500 B")  # fmt: skip


def test_an_unclear_amount_is_refused_with_the_cure(subtests):
    for amount in UNCLEAR:
        with subtests.test(amount=amount):
            with pytest.raises(ConfigurationError) as caught:
                parse_bytes(amount, "budget")
            assert f"budget: {amount!r} is not an amount of memory." in str(caught.value)
            assert "8GiB (2^30 bytes each), 512MiB, or 8GB (10^9 bytes each)" in str(caught.value)
