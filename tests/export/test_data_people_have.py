"""The script of conversations, and of a data set of the hub: the losses of a run, to the last bit."""

import csv
import gzip
import json
import re
import runpy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import feather

from workbench.export.script import script
from workbench.techniques import Lora, Padding, SequenceLength, Streaming
from workbench.texts import readers
from workbench.texts.corpus import load_corpus
from workbench.training.job import prepare
from workbench.training.run import run
from workbench.training.world import World

MARKING = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
)
QUESTIONS = [(f"What is {n} and one?", f"It is {n + 1}, said {n}.") for n in range(80)]
SAID = [[{"role": "user", "content": asked}, {"role": "assistant", "content": told}] for asked, told in QUESTIONS]
CHATS = [{"messages": said} for said in SAID]
CHATS[3] = {"messages": None}
CHATS[4] = {"messages": [*SAID[4], {"role": "user", "content": "And?", "name": None}, SAID[5][1]]}
EXCHANGES = [{"prompt": said[:1], "completion": said[1:]} for said in SAID]
SHARED = [
    {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": told}]} for asked, told in QUESTIONS
]
PAIRS = [{"prompt": asked, "completion": told} for asked, told in QUESTIONS]


def written(rows, path):
    if path.suffix in (".jsonl", ".gz"):
        with (gzip.open if path.suffix == ".gz" else open)(path, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    elif not path.suffix:
        Dataset.from_list(rows).save_to_disk(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, [*rows[0]], delimiter="\t" if path.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return path.name


def executed(source):
    """The losses that a script finds; that a process of its own finds them, too, is in test_forms.py."""
    Path("train.py").write_text(source, encoding="utf-8")
    runpy.run_path("train.py", run_name="__main__")
    history = json.loads(Path("fine-tuned", "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry], history[-1]["eval_loss"]


def expected(recipe):
    record = run(recipe, device="cpu")
    return record.losses, record.held_out_loss


@pytest.fixture
def short(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return replace(recipe, steps=2) | Lora(rank=2)


@pytest.mark.parametrize(
    ("rows", "name", "options"),
    [
        (CHATS, "chats.jsonl", ""), (CHATS, "chats.parquet", ":loss=all"), (EXCHANGES, "exchanges.json", ""),
        (SHARED, "saved", ""),
    ],
)  # fmt: skip
def test_conversations_are_labelled_as_in_a_run(short, tmp_path, rows, name, options):
    asked = replace(short, corpus=written(rows, tmp_path / name) + options)
    assert executed(script(asked)) == expected(asked)


@pytest.mark.dear
def test_so_they_are_in_other_files(short, tmp_path, subtests):
    for rows, name in ((PAIRS, "pairs.csv"), (SHARED, "shared.json"), (CHATS, "chats.jsonl.gz"), (PAIRS, "pairs.tsv")):
        with subtests.test(name):
            asked = replace(short, corpus=written(rows, tmp_path / name))
            assert executed(script(asked)) == expected(asked)


def test_texts_are_read_from_other_files_as_in_a_run(short, tmp_path, subtests):
    """What `main` has read before it makes a tokenizer."""
    documents = [{"text": f"{asked}\r\n{told}"} for asked, told in QUESTIONS * 4] + [{"text": None}, {"text": " "}]
    names = [written(documents, tmp_path / name) for name in ("all.json", "all.jsonl.gz", "saved")]
    (tmp_path / "data.json").write_text(json.dumps({"data": documents}))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    (tmp_path / "all.arrow").write_bytes(arrow.read_bytes())
    with gzip.open(tmp_path / "plain.txt.gz", "wt", newline="") as file:
        file.write("".join(row["text"] for row in documents if row["text"]))
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in documents))
    feather.write_feather(pa.Table.from_pylist(documents), tmp_path / "other.arrow")
    with (tmp_path / "semicolons.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([["text", "n"], *([row["text"], 1] for row in documents)])
    with (tmp_path / "below.csv").open("w", newline="") as file:
        file.write("\n\n")
        csv.writer(file).writerows([["text", "n"], *([row["text"], 1] for row in documents)])
    names += ["data.json", "all.arrow", "plain.txt.gz", "lines.json", "other.arrow", "semicolons.csv", "below.csv"]
    for name in names:
        with subtests.test(name):
            source = script(replace(short, corpus=name))
            head, main = source[: source.index("\n    tokenizer = ")].split("def main():\n")
            scope = {}
            exec(compile(head + dedent(main), "script", "exec"), scope)
            text = load_corpus(name)
            parts = scope["text"][: scope["cut"]], scope["text"][scope["cut"] :]
            assert parts == (str(text.train), str(text.held_out))


OTHER_KINDS = {
    "alpaca.json": [{"instruction": asked, "input": "", "output": told} for asked, told in QUESTIONS],
    "liked.jsonl": [{"prompt": asked, "completion": told, "label": told[-2] != "1"} for asked, told in QUESTIONS],
    "chosen.parquet": [{"prompt": said[:1], "chosen": said[1:], "rejected": said[:1]} for said in SAID],
    "printed.csv": [{"messages": str(said)} for said in SAID],
    "turns.json": [{"conversation": [{"human": asked, "assistant": told}] * 2} for asked, told in QUESTIONS],
    "parts.jsonl": [
        {"messages": [{**part, "content": [{"type": "text", "value": part["content"]}]} for part in said]}
        for said in SAID
    ],
    "roles.tsv": [{"messages": str([{**said[0], "role": "human"}, {**said[1], "weight": 1}])} for said in SAID],
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_rows_of_other_kinds_become_the_conversations_of_a_run(short, tmp_path, name):
    asked = replace(short, corpus=written(OTHER_KINDS[name], tmp_path / name))
    source = script(asked)
    head, main = source[: source.index("\n    tokenizer = ")].split("def main():\n")
    scope = {}
    exec(compile(head + dedent(main), "script", "exec"), scope)
    text = load_corpus(name)
    assert scope["rows"][: scope["cut"]] == [json.loads(line) for line in text.train]


def test_the_rows_of_a_json_file_may_stand_under_data(short, tmp_path):
    (tmp_path / "shared.json").write_text(json.dumps({"data": SHARED}))
    asked = replace(short, corpus="shared.json")
    source = script(asked)
    assert 'rows = json.load(file)["data"]' in source
    assert executed(source) == expected(asked)


DEAR = pytest.mark.dear  # the same is shown of plain texts in test_export.py


@pytest.mark.parametrize(
    ("technique", "rows", "options"),
    [
        (Padding(dynamic=False), PAIRS, ""), (Streaming(shuffle_buffer=8), CHATS, ""),
        (SequenceLength(tokens=8), CHATS, ""), pytest.param(Padding(), CHATS, "", marks=DEAR),
        pytest.param(Padding(group_by_length=True), SHARED, ":loss=all", marks=DEAR),
    ],
)  # fmt: skip
def test_techniques_make_the_rows_of_a_run_of_them(short, tmp_path, technique, rows, options):
    asked = replace(short | technique, corpus=written(rows, tmp_path / "chats.jsonl") + options)
    assert executed(script(asked)) == expected(asked)


@pytest.mark.dear
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize(
    ("rows", "name"), [(CHATS, "chats.jsonl"), (EXCHANGES, "exchanges.json"), (PAIRS, "pairs.tsv")]
)
def test_trls_trainer_takes_them_as_they_are_labelled(short, tmp_path, monkeypatch, rows, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = replace(short, corpus=written(rows, tmp_path / name))
    (losses, held_out), (known, last) = executed(script(asked, "trl")), expected(asked)
    assert [*losses, held_out] == pytest.approx([*known, last], rel=1e-6)


def test_a_template_that_marks_answers_is_the_models_own(short, tmp_path):
    folder = Path(short.model.removeprefix("random:"))
    tokenizer = prepare(short, World.find("cpu")).material.tokenizer
    tokenizer.chat_template = MARKING
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(tmp_path)
    asked = replace(short, model=f"random:{tmp_path}", corpus=written(CHATS, tmp_path / "chats.jsonl"))
    source = script(asked)
    assert "chat_template = " not in source
    assert executed(source) == expected(asked)


@pytest.mark.parametrize("rows", [[{"text": f"{asked} {told}"} for asked, told in QUESTIONS * 4], CHATS])
def test_a_data_set_of_the_hub_is_asked_for_by_its_name(short, tmp_path, monkeypatch, rows):
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    monkeypatch.setattr(readers, "data_set_files", lambda *_: (tuple((tmp_path / "saved").glob("*.arrow")), {}))
    asked = replace(short, corpus="user/set:split=test,config=small")
    source = script(asked)
    assert re.search(r'load_dataset\(\s*path="user/set", name="small", split="test"', source)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.load_from_disk("saved"))
    assert executed(source) == expected(asked)
