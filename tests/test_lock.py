"""The locked files say the same as requirements.txt, and nothing about where it was fetched from."""

import re

import pytest
from lock import OTHER_BUILDS, PINS, ROOT, entries, pins

LOCKS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("requirements.lock", "requirements-cuda.lock")}


def test_the_lock_has_the_pins_of_the_requirements_and_no_others():
    assert set(entries(LOCKS["requirements.lock"])) == set(pins(PINS.read_text(encoding="utf-8"))), "run tools/lock.py"


def test_what_is_for_some_platforms_is_locked_for_them():
    told = {pin: platforms for pin, platforms in pins(PINS.read_text(encoding="utf-8")).items() if platforms}
    assert told == {"deepspeed==0.19.8": "sys_platform == 'linux'"}
    for pin, platforms in told.items():
        assert f"\n{pin} ; {platforms} \\\n    --hash" in LOCKS["requirements.lock"]


@pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS)
def test_every_pin_has_hashes_and_no_line_an_address(lock):
    for pin, digests in entries(lock).items():
        assert re.fullmatch(r"[a-z0-9-]+==[\w.+!-]+", pin)
        assert digests
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests), pin
    assert "//" not in lock
    assert "index" not in lock.split("\n", 1)[1]


def test_the_cpu_build_and_the_cuda_build_of_pytorch_are_both_listed():
    (torch,) = (digests for pin, digests in entries(LOCKS["requirements.lock"]).items() if pin.startswith("torch=="))
    (cpu,) = OTHER_BUILDS.values()
    assert cpu < torch


def test_what_cuda_needs_is_apart():
    extra = set(entries(LOCKS["requirements-cuda.lock"]))
    assert not extra & set(entries(LOCKS["requirements.lock"]))
    assert all(pin.startswith(("nvidia-", "cuda-", "triton==")) for pin in extra)
