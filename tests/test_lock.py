"""`tools/lock.py` reads pins and locks, and writes what it reads. What the files say is `tests/lint.py`'s."""

import lock

REQUIREMENTS = """
# a comment
Ruamel.yaml__x==1.2
deepspeed==0.19.8; sys_platform == 'linux'
"""
DIGESTS = {"0" * 64, "f" * 64}


def test_pins_have_canonical_names_and_the_systems_that_they_are_for():
    assert lock.pins(REQUIREMENTS) == {"ruamel-yaml-x==1.2": "", "deepspeed==0.19.8": "sys_platform == 'linux'"}


def test_a_lock_that_is_written_is_read(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")
    monkeypatch.setattr(lock, "PINS", tmp_path / "requirements.txt")
    locked = {"ruamel-yaml-x==1.2": {"f" * 64}, "deepspeed==0.19.8": DIGESTS}
    lock.write(tmp_path / "requirements.lock", locked, "A title.")
    text = (tmp_path / "requirements.lock").read_text(encoding="utf-8")
    assert lock.entries(text) == locked
    assert text == (
        "# A title. Written by tools/lock.py.\n"
        "deepspeed==0.19.8 ; sys_platform == 'linux' \\\n"
        f"    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'f' * 64}\n"
        f"ruamel-yaml-x==1.2 \\\n    --hash=sha256:{'f' * 64}\n"
    )
