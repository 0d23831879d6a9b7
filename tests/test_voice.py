"""`tests/voice.py` sees what it forbids, and nothing else. That package and tools have none of it is `make lint`'s."""

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

MUMBLED = """\
# of each row

# so many,
# as they come
def joined_rows(rows):
    \"\"\"Of rows, the text.\"\"\"
    rows.told = True
class Table:
    \"\"\"The same of a table.\"\"\"
    def _found(self):
        \"\"\"Yield what
        is there.\"\"\"
"""

SPOKEN = """\
# The rows are joined,
# and so on.
def join_rows(rows):
    \"\"\"Return the text of the rows.\"\"\"
    rows.tail = True  # a test reads it
class Table:
    @property
    def padded_rows(self):
        \"\"\"The rows, padded.\"\"\"
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


def test_words_that_leave_out_the_noun_or_the_verb_are_seen():
    rules = [f"{line}: {rule.partition(':')[0]}" for line, rule in voice.faults_of_words(MUMBLED)]
    assert sorted(rules) == [
        "10: the name '_found' is a riddle",
        "1: a comment opens with 'of'",
        "3: a comment opens with 'so'",
        "5: a docstring opens with 'Of'",
        "5: the function 'joined_rows' is a participle",
        "7: the name 'told' is a riddle",
        "8: a docstring opens with 'The same'",
    ]
    assert [*voice.faults_of_words(SPOKEN)] == []


def test_a_fault_is_printed_with_its_file(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "workbench" / "room" / "file.py", tmp_path / "tools" / "program.py"]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text("# of the rows\nfound = 1\n", encoding="utf-8")
    monkeypatch.setattr(voice, "ROOT", tmp_path)
    assert voice.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "workbench/room/file.py:1: a comment opens with 'of': let it stand without the line before it",
        "workbench/room/file.py:2: the name 'found' is a riddle: name the thing",
        "tools/program.py:1: a comment opens with 'of': let it stand without the line before it",
        "tools/program.py:2: the name 'found' is a riddle: name the thing",
        "how the code reads: 4 faults",
    ]
    for file in files:
        file.write_text("", encoding="utf-8")
    assert voice.main() == 0
