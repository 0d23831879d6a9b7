"""`tests/voice.py` sees what it forbids, and nothing else. That the package has none of it is `make lint`'s."""

import voice

UNREADABLE = """\
width, height = 3, 4
size = 1 if small else 2 if large else 3
lengths = [length for row in rows if (length := len(row))]
first = next(iter(rows))
for each in rows:
    print(each)
def write(told):
    pass
"""

READABLE = """\
class Answer:
    known: bool
    def given(self):
        return self.found(made=1)
width, height = size
width, height = height, width
first = next(iter(rows), None)
size = [1 if row else 2 for row in rows]
while (row := read()) is not None:
    print(row)
"""


def test_every_rule_sees_its_fault_and_names_the_line():
    rules = dict(voice.faults(UNREADABLE))
    assert sorted(rules) == [1, 2, 3, 4, 5, 7]
    assert "several values" in rules[1]
    assert "conditional expression" in rules[2]
    assert "walrus" in rules[3]
    assert "no default" in rules[4]
    assert "'each' is a riddle" in rules[5]
    assert "'told' is a riddle" in rules[7]


def test_what_can_be_read_is_no_fault():
    assert [*voice.faults(READABLE)] == []


def test_a_fault_is_printed_with_its_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "file.py").write_text("\nfound = 1\n", encoding="utf-8")
    monkeypatch.setattr(voice, "PACKAGE", tmp_path)
    assert voice.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "workbench/room/file.py:2: the name 'found' is a riddle: name the thing",
        "how the code reads: 1 faults",
    ]
    (tmp_path / "room" / "file.py").write_text("", encoding="utf-8")
    assert voice.main() == 0
