"""The script reads what a run reads, in every format and kind of file, and has its losses to the last bit."""

import csv
import gzip
import io
import json
import re
import runpy
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from textwrap import dedent

import datasets
import pytest
from datasets import Dataset

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
TEXTS = [{"n": 1, "text": f"{asked}\r\n{told}"} for asked, told in QUESTIONS]
TEXTS[3]["text"], TEXTS[4]["text"] = None, " "
ALPACA = [{"instruction": asked, "input": told[:-9], "output": told} for asked, told in QUESTIONS]


def named(rows, **names):
    """The rows with other names of columns, and the address that gives each by what it holds."""
    address = ",".join(f"{name}={other}" for name, other in names.items())
    return [{names.get(name, name): value for name, value in row.items()} for row in rows], f":{address}"


CALLED = [
    {"from": "function_call", "value": '{"name": "f", "arguments": {"n": 1}}'},
    {"from": "observation", "value": "2"},
]
FORMATS = {
    "texts": (TEXTS, ""),
    "named texts": named(TEXTS, text="body"),
    "messages": (CHATS, ""),
    "named messages": named(CHATS, messages="dialog"),
    "parts": ([{"messages": [{**one, "content": [{"text": one["content"]}]} for one in said]} for said in SAID], ""),
    "what is around": ([{"messages": said, "system": "Be.", "tools": [{"name": "f"}], "id": 1} for said in SAID], ""),
    "some with a system": ([{"messages": said, "system": "Be." if n % 2 else None} for n, said in enumerate(SAID)], ""),
    "ShareGPT": (SHARED, ""),
    "ShareGPT with calls": ([{"conversations": row["conversations"] + CALLED} for row in SHARED], ":loss=all"),
    "pairs": (PAIRS, ""),
    "named pairs": named(PAIRS, prompt="question", completion="answer"),
    "exchanges": (EXCHANGES, ""),
    "exchanges with a text": ([{**row, "completion": row["completion"][0]["content"]} for row in EXCHANGES], ""),
    "alpaca": (ALPACA, ""),
    "named alpaca": named(ALPACA, instruction="question", output="answer", input="context"),
}
KINDS = (".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz", "")
MORE = [
    ("named alpaca", ".csv"), ("exchanges", ".csv"), ("what is around", ".tsv"), ("what is around", ".parquet"),
    ("named pairs", ""),
]  # fmt: skip


def content(rows, kind):
    if kind.startswith(".json"):
        return json.dumps(rows) if kind == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    file = io.StringIO()
    table = csv.DictWriter(file, [*rows[0]], delimiter="\t" if kind == ".tsv" else ",")
    table.writeheader()
    for row in rows:
        table.writerow({name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()})
    return file.getvalue()


def written(rows, path):
    """Writes them in the kind that the path has; without an ending as `datasets` saves them."""
    if path.suffix in ("", ".parquet"):
        dataset = Dataset.from_list(rows)
        (dataset.to_parquet if path.suffix else dataset.save_to_disk)(path)
    else:
        data = content(rows, Path(path.name.removesuffix(".gz")).suffix).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path.name


def parts_read_by(source):
    """What the script trains on and what it holds out: `main` as far as the tokenizer."""
    head, main = source[: source.index("\n    tokenizer = ")].split("def main():\n")
    scope = {}
    exec(compile(head + dedent(main), "script", "exec"), scope)
    whole, cut = scope["text" if "text" in scope else "rows"], scope["cut"]
    return whole[:cut], whole[cut:]


def parts_of_run(name):
    text = load_corpus(name)
    if not text.loss:
        return text.train, text.held_out
    return [*map(json.loads, text.train)], [*map(json.loads, text.held_out.split("\n"))]


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
    ("form", "kind"), [*product(FORMATS, [".jsonl"]), *product(["named texts", "messages"], KINDS), *MORE]
)
def test_a_script_reads_what_a_run_reads(short, tmp_path, form, kind):
    rows, options = FORMATS[form]
    name = written(rows, tmp_path / f"rows{kind}") + options
    assert parts_read_by(script(replace(short, corpus=name))) == parts_of_run(name)


PLAIN = "".join(f"{asked}\r\n{told} \u00e9\n" for asked, told in QUESTIONS)
OTHER_FORMS = {
    "list.jsonl": content(TEXTS, ".json").encode(),
    "lines.json": b"\n" + content(CHATS, ".jsonl").encode(),
    "below.csv": b"\n\n" + content(TEXTS, ".csv").encode(),
    "below.tsv.gz": gzip.compress(b"\r\n" + content(TEXTS, ".tsv").encode()),
    "mark.csv": content(PAIRS, ".csv").encode("utf-8-sig"),
    "mark.jsonl": content(CHATS, ".jsonl").encode("utf-16"),
    "mark.md": PLAIN.encode("utf-16"),
    "plain.txt.gz": gzip.compress(PLAIN.encode()),
    "plain": PLAIN.encode(),
    "old.txt:encoding=latin-1": PLAIN.encode("latin-1"),
    "old.csv:text=body,encoding=cp1252": content([{"body": f"{told} \u00e9"} for _, told in QUESTIONS], ".csv").encode(
        "cp1252"
    ),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_a_script_reads_other_forms_of_files(short, tmp_path, name):
    (tmp_path / name.partition(":")[0]).write_bytes(OTHER_FORMS[name])
    assert parts_read_by(script(replace(short, corpus=name))) == parts_of_run(name)


@pytest.mark.parametrize(
    ("rows", "name", "options"),
    [
        (CHATS, "chats.jsonl", ""), (CHATS, "chats.parquet", ":loss=all"), (EXCHANGES, "exchanges.json", ""),
        (SHARED, "saved", ""), (ALPACA, "alpaca.csv", ":instruction=instruction,output=output"),
    ],
)  # fmt: skip
def test_conversations_are_labelled_as_in_a_run(short, tmp_path, rows, name, options):
    asked = replace(short, corpus=written(rows, tmp_path / name) + options)
    assert executed(script(asked)) == expected(asked)


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
