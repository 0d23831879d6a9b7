"""The contract of datasets: what is read without a question, or at an address, and what is rejected. All is our own."""

import gzip
import json

import pytest

from workbench.base.errors import ConfigurationError
from workbench.texts import corpus, formats

ROWS = 20
ASKED = [f"What comes after {n}?" for n in range(ROWS)]
ANSWERED = [f"After {n} comes {n + 1}." for n in range(ROWS)]
PAIRS = list(zip(ASKED, ANSWERED, strict=True))
SYSTEM = {"role": "system", "content": "s"}
USER, ANSWER = {"role": "user", "content": ASKED[0]}, {"role": "assistant", "content": ANSWERED[0]}
BRIEF = {"role": "user", "content": f"{ASKED[0]}\n\nBe brief."}
PLAIN, JOINED = {"messages": [USER, ANSWER]}, {"prompt": ASKED[0], "completion": f" {ANSWERED[0]}"}
CALL = {"type": "function", "function": {"name": "next", "arguments": {"n": 0}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "next", "parameters": {}}}
SHARED = {"role": "from", "content": "value"}


def rows(**columns):
    """ROWS rows, of which each value is one text, or made of a question and its answer."""
    return [{name: value(*pair) if callable(value) else value for name, value in columns.items()} for pair in PAIRS]


def question(asked, answered):
    return asked


def answer(asked, answered):
    return answered


def spaced(asked, answered):
    return f" {answered}"


def one(name, text, role="role", content="content"):
    return [{role: name, content: text}]


def said(*roles, **entries):
    """Two messages by these roles."""
    return lambda *texts: [message for pair in zip(roles, texts, strict=True) for message in one(*pair, **entries)]


BOTH, OF_SHAREGPT = said("user", "assistant"), said("human", "gpt", **SHARED)
# name: rows, the first conversation or text, remarks
READ = {
    "a text": (rows(id=7, text=answer), ANSWERED[0], ("not read: the columns 'id'",)),
    "messages": (rows(id=7, messages=BOTH), PLAIN, ("not read: the columns 'id'",)),
    "ShareGPT": (rows(conversations=OF_SHAREGPT), PLAIN, ()),
    "ShareGPT with a system": (rows(system="s", conversations=OF_SHAREGPT), {"messages": [SYSTEM, USER, ANSWER]}, ()),
    "messages with a system, and another beside them": (
        rows(system="t", messages=lambda *texts: [SYSTEM, *BOTH(*texts)]),
        {"messages": [SYSTEM, USER, ANSWER]},
        (),
    ),
    "ShareGPT's calls": (
        rows(
            conversations=lambda asked, text: [
                *one("human", asked, **SHARED),
                *one("function_call", json.dumps(CALL["function"]), **SHARED),
                *one("observation", "1", **SHARED),
                *one("gpt", text, **SHARED),
            ],
            tools=json.dumps([TOOL]),
        ),
        {"messages": [USER, CALLING, *one("tool", "1"), ANSWER], "tools": [TOOL]},
        (),
    ),
    "a prompt and its completion": (rows(prompt=question, completion=spaced), JOINED, ()),
    "joined without a space": (
        rows(prompt=question, completion=answer),
        {"prompt": ASKED[0], "completion": ANSWERED[0]},
        ("20 completions follow their prompt without a space: they are joined as they are",),
    ),
    "messages and a text that answers them": (
        rows(prompt=lambda asked, _: one("user", asked), completion=answer),
        {"prompt": [USER], "completion": [ANSWER]},
        (),
    ),
    "an instruction and its output": (rows(instruction=question, output=answer), PLAIN, ()),
    "an instruction with an input": (
        rows(instruction=question, input="Be brief.", output=answer),
        {"messages": [BRIEF, ANSWER]},
        (),
    ),
    "an instruction with a system and a history": (
        rows(instruction=question, input="", output=answer, system="s", history=[["Hi", "Hello"]]),
        {"messages": [SYSTEM, USER, ANSWER]},
        ("not read: the columns 'history'",),
    ),
    "messages in parts": (
        rows(
            messages=lambda asked, text: BOTH([{"type": "text", "text": part} for part in asked.partition(" ")], text)
        ),
        PLAIN,
        (),
    ),
    "calls without a content": (
        rows(messages=lambda asked, _: [*one("user", asked), CALLING]),
        {"messages": [USER, CALLING]},
        (),
    ),
    "answers that are not to be counted": (
        rows(messages=lambda *texts: [{**message, "weight": 0} for message in BOTH(*texts)]),
        {"messages": [{**USER, "weight": 0}, {**ANSWER, "weight": 0}]},
        ("20 answers are not to be counted (weight 0, train or loss false)",),
    ),
    "empty answers": (
        rows(messages=lambda asked, _: BOTH(asked, " ")),
        {"messages": [USER, *one("assistant", " ")]},
        ("20 answers are empty",),
    ),
    "no answers": (
        rows(messages=lambda asked, _: one("user", asked)),
        {"messages": [USER]},
        ("20 conversations have no answer, so that nothing of them counts",),
    ),
    "no messages": (
        [{"conversations": []}, *rows(conversations=OF_SHAREGPT)],
        PLAIN,
        ("1 conversations without messages left out",),
    ),
    "empty texts beside messages": (rows(text="", messages=BOTH), PLAIN, ("not read: the columns 'text'",)),
    "no messages beside texts": (rows(text=answer, messages=None), ANSWERED[0], ("not read: the columns 'messages'",)),
    "a first row without values": (
        [{"text": "", "messages": None}, *rows(text=None, messages=BOTH)],
        PLAIN,
        ("not read: the columns 'text'", "1 null texts left out"),
    ),
}
# name: rows, the address, the first conversation or text
ADDRESSED = {
    "a text": (rows(body=answer), "text=body", ANSWERED[0]),
    "messages": (rows(dialog=BOTH), "messages=dialog", PLAIN),
    "ShareGPT": (rows(dialog=OF_SHAREGPT), "conversations=dialog", PLAIN),
    "a question": (rows(question=question, answer=spaced, wrong="No."), "prompt=question,completion=answer", JOINED),
    "an instruction": (
        rows(q=question, a=answer, c="Be brief."),
        "instruction=q,output=a,input=c",
        {"messages": [BRIEF, ANSWER]},
    ),
    "an instruction without its input": (
        rows(instruction=question, output=answer, input="Be brief."),
        "instruction=instruction,output=output",
        PLAIN,
    ),
    "one reading of two": (rows(text=answer, messages=BOTH), "text=text", ANSWERED[0]),
    "the other reading": (rows(text=answer, messages=BOTH), "messages=messages", PLAIN),
    "half of an example": (rows(instruction=question, output=answer), "text=instruction", ASKED[0]),
    "a text with a label": (rows(text=answer, label=1), "text=text", ANSWERED[0]),
    "preferences": (rows(prompt=question, chosen=spaced, rejected=" No."), "prompt=prompt,completion=chosen", JOINED),
}


def written(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refused(name, message):
    with pytest.raises(ConfigurationError, match=message):
        corpus.load_corpus(name)


def begins_with(text, first):
    """Whether its first example is this conversation, or this text."""
    if isinstance(first, str):
        return not text.loss and text.train.split(corpus.END_OF_TEXT)[0] == first
    return text.loss == "answers" and json.loads(next(iter(text.train))) == first


@pytest.mark.parametrize("name", READ)
def test_a_format_of_the_contract_is_read_without_a_question(tmp_path, name):
    content, first, remarks = READ[name]
    text = corpus.load_corpus(written(tmp_path, "rows.jsonl", content))
    assert begins_with(text, first)
    assert text.remarks == remarks


@pytest.mark.parametrize("name", ADDRESSED)
def test_any_column_is_read_at_an_explicit_address(tmp_path, name):
    content, address, first = ADDRESSED[name]
    name = f"{written(tmp_path, 'rows.jsonl', content)}:{address}"
    assert begins_with(corpus.load_corpus(name), first)
    if first in (PLAIN, JOINED):
        assert corpus.load_corpus(f"{name},loss=all").loss == "all"


def test_each_format_is_known_by_its_own_columns():
    for form in formats.FORMATS:
        assert formats.formats_of(form.arguments) == [form]


def test_every_role_of_the_contract_is_known_in_both_kinds_of_messages(tmp_path):
    names = ("system", "human", "user", "gpt", "assistant", "tool", "function_call", "observation")
    meant = ["system", "user", "user", "assistant", "assistant", "tool", "assistant", "tool"]
    for column, entries in (("messages", {}), ("conversations", SHARED)):
        messages = [message for name in names for message in one(name, "Hi", **entries)]
        text = corpus.load_corpus(written(tmp_path, "rows.jsonl", [{column: messages}] * ROWS))
        assert [message["role"] for message in json.loads(next(iter(text.train)))["messages"]] == meant


LOOSE = "each row is one message, and none says to which conversation it belongs"
# name: rows, a part of the message
REJECTED = {
    "preferences": (rows(prompt=question, chosen=answer, rejected="No."), "chosen, rejected: it has preferences"),
    "KTO": (rows(prompt=question, completion=answer, label=True), "it has labels, as for KTO or a classifier"),
    "KTO of messages": (rows(messages=BOTH, kto_tag=True), "it has the labels of KTO"),
    "a label": (rows(text=answer, label=1), "To train on the texts alone, write .*rows.jsonl:text=text"),
    "labels": (rows(text=answer, labels=[1]), "it has labels, as for a classifier or of tokens"),
    "tokens": (rows(input_ids=[1, 2]), "tokens of some tokenizer: give the texts that they were made of"),
    "loose messages": (rows(role="user", content=question), LOOSE),
    "loose messages of ShareGPT": (rows(**{"from": "human", "value": question}), LOOSE),
    "a text and messages": (
        rows(text=answer, messages=BOTH),
        "read in 2 ways. Say which: .*rows.jsonl:text=text or .*rows.jsonl:messages=messages",
    ),
    "a text and an instruction": (
        rows(text=answer, instruction=question, input="", output=answer),
        "Say which: .*:text=text or .*:instruction=instruction,output=output,input=input",
    ),
    "unknown columns": (
        rows(body=answer, n=3),
        r"It has: 'body' \('After 0 comes 1.'\), 'n' \(3\). Say what to read: .*rows.jsonl:text=COLUMN .*"
        "messages=COLUMN; prompt=COLUMN,completion=COLUMN, .*; instruction=COLUMN,output=COLUMN, .* input=COLUMN",
    ),
    "a prompt alone": (rows(prompt=question), r"no format that is read by itself. It has: 'prompt' \('What comes"),
    "an instruction and a response": (rows(instruction=question, response=answer), "no format that is read by itself"),
    "columns in capitals": (rows(Text=answer), r"It has: 'Text' \("),
    "an unknown role": (rows(messages=said("user", "bot")), "'bot' is not known, .*: 'user' 20 times, 'bot' 20 t"),
    "roles in capitals": (rows(messages=said("User", "assistant")), "'User' is not known, .* Rename it: system"),
    "half a weight": (rows(messages=[{**ANSWER, "weight": 0.5}]), "line 1: weight is 0.5: only 0 and 1"),
    "a weight that is a text": (rows(messages=[{**ANSWER, "train": "no"}]), "line 1: train is 'no': only 0 and 1"),
    "an image": (
        rows(messages=[{**USER, "content": [{"type": "text", "text": "Look:"}, {"type": "image"}]}]),
        "line 1: the part {'type': 'image'} of a message has no entry .text.",
    ),
    "an answer without a content": (rows(messages=[{**ANSWER, "content": None}]), "has no content that is a text"),
    "messages that are a text": (rows(messages=answer), "line 1: 'After 0 comes 1.' is no list of messages"),
    "messages that Python printed": (rows(messages=str([USER])), "line 1: .* Python printed it, .*json.dumps"),
    "tools that are no list": (rows(messages=BOTH, tools={"next": 1}), "the tools are a dict, not a list"),
    "a text and messages that answer it": (
        rows(prompt=question, completion=lambda _, text: one("assistant", text)),
        "line 1: 'What comes after 0.' is no list of messages",
    ),
    "an input that is a number": (
        rows(instruction=question, output=answer, input=3),
        "line 1: 'input' is no text",
    ),
    "texts in lists": (rows(text=lambda *texts: [*texts]), "'text' holds a list, not a text. Name a column"),
    "a row without the column": ([*rows(text=answer), {"body": "x"}], "line 21 has no column 'text'. It has: 'body'"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_the_contract_does_not_have_is_rejected_by_name(tmp_path, name):
    content, message = REJECTED[name]
    refused(written(tmp_path, "rows.jsonl", content), message)


TYPED = "name a column by what it holds, such as text=body"
# options of rows with the columns `body` and `answer`, or of a plain text: a part of the message
WRONG_OPTIONS = {
    "rows.jsonl:body": TYPED,
    "rows.jsonl:column=body": TYPED,
    "rows.jsonl:text=": "text is empty. Give one text, or none",
    "rows.jsonl:text=body,text=answer": "text is given twice",
    "rows.jsonl:text=bodies": r"has no column 'bodies'. It has: 'body' \('What comes after 0.'\), 'answer' \(",
    "rows.jsonl:prompt=body": "prompt is no whole format. Give one of these: text=…; messages=…; .*prompt=…,com",
    "rows.jsonl:prompt=body,output=answer": "prompt, output is no whole format",
    "rows.jsonl:text=body,messages=answer": "text, messages is no whole format",
    "rows.jsonl:text=body,loss=all": "has texts, no conversations: of these all counts",
    "rows.jsonl:prompt=body,completion=answer,loss=some": "there is no loss 'some'. Known: answers, all",
    "rows.jsonl:rows=3": ".jsonl has no rows, only text=…, messages=…, conversations=…, prompt=…, completion=…, inst",
    "text.txt:text=body": ".txt has no text, only encoding=… can be given",
    "text.txt:encoding=klingon": "there is no encoding 'klingon'",
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_an_option_that_names_nothing_is_rejected_with_those_that_do(tmp_path, name):
    written(tmp_path, "rows.jsonl", rows(body=question, answer=answer))
    written(tmp_path, "text.txt", "Hi")
    refused(f"{tmp_path}/{name}", WRONG_OPTIONS[name])


# ---- forms of files ----

TEXTS = [{"text": text} for text in ANSWERED]
LINES = "".join(json.dumps(row) + "\n" for row in TEXTS)
FORMS = {
    "lines.jsonl": LINES,
    "lines.json": LINES,
    "blank.jsonl": LINES.replace("\n", "\n\n"),
    "list.json": json.dumps(TEXTS),
    "list.jsonl": json.dumps(TEXTS),
    "pretty.json": json.dumps(TEXTS, indent=1),
    "pretty.jsonl": json.dumps(TEXTS, indent=1),
    "commas.csv": "id,text\n" + "".join(f"1,{text}\n" for text in ANSWERED),
    "blank.csv": "\n\ntext,id\n\n" + "".join(f"{text},1\n\n" for text in ANSWERED),
    "tabs.tsv": "id\ttext\n" + "".join(f"1\t{text}\n" for text in ANSWERED),
    "joined.txt": corpus.END_OF_TEXT.join(ANSWERED),
    "joined.md": corpus.END_OF_TEXT.join(ANSWERED),
    "joined": corpus.END_OF_TEXT.join(ANSWERED),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_file_is_read_packed_or_not(tmp_path, name):
    files = {name: FORMS[name].encode(), f"{name}.gz": gzip.compress(FORMS[name].encode())}
    for file, content in files.items():
        text = corpus.load_corpus(written(tmp_path, file, content))
        unread = ("not read: the columns 'id'",) if "id" in FORMS[name] else ()
        assert (text.train + text.held_out, text.remarks) == (corpus.END_OF_TEXT.join(ANSWERED), unread)


SEPARATED = r"fields are not separated by ',' alone. Write it so, .* read_csv\(…, sep="
PAGE = "is a page of HTML, or XML. Save the text itself"
IS_JSON = "is JSON, not a plain text. If it holds examples, name it .jsonl or .json"
TWICE = "the name 'text' is there twice in one object: keep one of the two"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
ENDING = "which is not read. Give .txt, .md, .jsonl, .json, .csv, .tsv, .parquet, packed or not"
# name of the file: content, a part of the message
REJECTED_FILES = {
    "semicolons.csv": ("id;text\n1;Hi\n", f"the header 'id;text', whose {SEPARATED}';'"),
    "tabs.csv": ("id\ttext\n1\tHi\n", rf"{SEPARATED}'\\t'"),
    "bars.csv": ("id|text\n1|Hi\n", rf"{SEPARATED}'\|'"),
    "spaces.csv": ('"id", "text"\n1, "Hi"\n', f"{SEPARATED}', '"),
    "commas.tsv": ("id,text\n1,Hi\n", r"not separated by '\\t' alone"),
    "no header.csv": ("Hi,1\nHello,0\n", "If these are a row, write a line with the columns' names above it"),
    "named.json": (json.dumps({"data": TEXTS}, indent=1), r"\(it is a dict with data\). .*or have an object per line"),
    "by columns.json": (
        json.dumps({"text": {"0": "Hi"}}, indent=1),
        'cannot be read as a list of objects .*orient="records"',
    ),
    "by columns in one line.json": (json.dumps({"text": {"0": "Hi", "1": "Hello"}}), 'orient="records"'),
    "lines.txt": (TEXTS, IS_JSON),
    "list.md": (json.dumps(TEXTS), IS_JSON),
    "pretty.txt": (json.dumps(TEXTS, indent=1), IS_JSON),
    "long object": (json.dumps({"data": TEXTS * 2000}, indent=1), IS_JSON),
    "pointer.csv": (LFS, "pointer of Git LFS"),
    "no mark.csv": ("text\nHi\n".encode("utf-16-le"), "zero bytes"),
    "semicolons and quotes.csv": ('"id";"text"\n1;"Hi"\n', f"{SEPARATED}';'"),
    "a name twice in a cell.csv": ('messages\n"[{""role"": ""user"", ""role"": ""user""}]"\n', "is there twice"),
    "two columns.jsonl": (json.dumps([{"text": "a"}, {"body": "b"}], indent=1), "row 2 has no column"),
    "two columns.json": ('{"text": "a"}\n\n{"body": "b"}\n', "line 3 has no column"),
    "twice.json": (json.dumps(json.dumps(TEXTS)), r"\(it is a str\)"),
    "lists.jsonl": ('[["Hi"], ["Hello"]]', "row 1 is a list, not an object"),
    "texts.json": ('["Hi", "Hello"]', 'row 1 is a str, not an object. Each must be one whole object: {"text": "…"}'),
    "one name twice.jsonl": ('{"text": "Hi"}\n{"text": "Hi", "text": "Hello"}\n', f"line 2 .*{TWICE}"),
    "one name twice.json": ('[{"text": "Hi", "text": "Hello"}]', TWICE),
    "one name twice inside.jsonl": ('{"messages": [{"text": 1, "text": 2}]}\n', TWICE),
    "messages by Python.csv": (f'messages\n"{[USER]}"\n', "line 2: .* is no JSON .* Python printed it, .*json.dumps"),
    "page.txt": ("\n<!DOCTYPE html>\n<p>Hi", PAGE),
    "page.md": ("<HTML><p>Hi", PAGE),
    "page": ('\ufeff<?xml version="1.0"?><p>Hi</p>', PAGE),
    "page.txt.gz": (gzip.compress(b"<html><p>Hi"), PAGE),
    "pointer.txt": (LFS, "pointer of Git LFS, without the text itself. Run: git lfs pull"),
    "pointer.jsonl": (LFS, "pointer of Git LFS"),
    "table.arrow": (b"ARROW1", f"ends in .arrow, {ENDING}"),
    "table.feather": (b"ARROW1", f"ends in .feather, {ENDING}"),
    "table.parquet.gz": (gzip.compress(b"PAR1"), f"ends in .parquet.gz, {ENDING}"),
}


@pytest.mark.parametrize("name", REJECTED_FILES)
def test_a_file_of_another_form_is_rejected_with_what_to_do(tmp_path, name):
    content, message = REJECTED_FILES[name]
    refused(written(tmp_path, name, content), message)


# ---- folders ----

CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train.jsonl
  - split: test
    path: data/test.jsonl
---
# A card, no text to train on
"""


def test_a_clone_of_a_data_set_is_loaded_as_one(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "clone"
    written(folder, "README.md", CARD)
    written(folder, "data/train.jsonl", TEXTS)
    written(folder, "data/test.jsonl", [{"text": "secret"}] * 5)
    text = corpus.load_corpus(str(folder))
    assert text.train + text.held_out == corpus.END_OF_TEXT.join(ANSWERED)
    assert text.remarks == ("the rows of other splits are left out: test with 5",)
    assert corpus.load_corpus(f"{folder}:test").documents == 5
    written(folder, "data/train.jsonl", TEXTS[:10])
    assert corpus.load_corpus(str(folder)).documents == 10
    written(folder, "data/train.jsonl", LFS)
    refused(str(folder), "pointer of Git LFS, without the data. Run: git lfs pull")


SECRET = [{"text": "secret"}] * 3
ONE_LEFT_OUT = ("1 files of other kinds or splits left out",)
# the files of a folder, the number of documents, remarks
FOLDERS = {
    "one file": ({"rows.jsonl": TEXTS}, ROWS, ()),
    "a file and its description": ({"rows.jsonl": TEXTS, "README.md": "Ours."}, ROWS, ONE_LEFT_OUT),
    "numbered parts": ({"part-1.jsonl": TEXTS, "part-2.jsonl": TEXTS}, 2 * ROWS, ()),
    "the shards of splits": (
        {"data/train-00000-of-00001.jsonl": TEXTS, "data/test-00000-of-00001.jsonl": SECRET},
        ROWS,
        ONE_LEFT_OUT,
    ),
    "texts": ({"a.txt": "Hi", "b/c.md": "Hello"}, 2, ()),
    "splits by name": (
        {"train.jsonl": TEXTS, "test.jsonl": SECRET, "validation.jsonl": SECRET},
        ROWS,
        ("2 files of other kinds or splits left out",),
    ),
    "splits in folders": ({"train/a.jsonl": TEXTS, "test/a.jsonl": SECRET}, ROWS, ONE_LEFT_OUT),
    "texts in splits": ({"train.txt": "Hi", "test.txt": "secret"}, 1, ONE_LEFT_OUT),
    "a program beside the examples": ({"data.jsonl": TEXTS, "train.py": "pass"}, ROWS, ONE_LEFT_OUT),
    "a picture beside the examples": ({"data.jsonl": TEXTS, "test.png": b"x"}, ROWS, ONE_LEFT_OUT),
}
# the files of a folder, a part of the message
REJECTED_FOLDERS = {
    "texts and examples": ({"a.txt": "Hi", "b.jsonl": TEXTS}, r"files of several kinds \(.jsonl, text\)"),
    "other names": ({"a.jsonl": TEXTS, "b.jsonl": TEXTS}, "do not say which are for training: a.jsonl, b.jsonl"),
    "another split": (
        {"data/test-00000-of-00001.jsonl": SECRET},
        "other splits than train alone: data/.*Name the",
    ),
    "only a test split": ({"test.jsonl": SECRET}, "of other splits than train alone: test.jsonl"),
    "two exports of the same": ({"rows.jsonl": TEXTS, "rows.csv": "text\nHi\n"}, r"several kinds \(.csv, .jsonl\)"),
    "tables of datasets' cache": ({"a.arrow": b"ARROW1"}, r"has no text in it \(only .arrow\)"),
    "parts of two formats": (
        {"part-1.jsonl": TEXTS, "part-2.jsonl": rows(messages=BOTH)},
        "part-2.jsonl, line 1 has no column 'text'",
    ),
}


def filled(folder, files):
    for name, content in files.items():
        written(folder, name, content)
    return str(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_of_a_folder_the_training_split_is_read(tmp_path, name):
    files, documents, remarks = FOLDERS[name]
    text = corpus.load_corpus(filled(tmp_path, files))
    assert (text.documents, text.remarks) == (documents, remarks)
    assert "secret" not in text.train + text.held_out


@pytest.mark.parametrize("name", REJECTED_FOLDERS)
def test_a_folder_that_does_not_say_what_to_train_on_is_rejected(tmp_path, name):
    files, message = REJECTED_FOLDERS[name]
    refused(filled(tmp_path, files), message)


# ---- encodings and line ends ----

WESTERN = "\u201cCafé\u201d \u2013 naïve\n" * 9
ENCODED = {
    "cp1252": (WESTERN, "0x93"),
    "latin-1": ("Un café naïve, déjà vu\n" * 9, "0xe9"),
    "cp1251": ("Город стоит у реки, и река течёт мимо\n" * 9, "0xc3"),
    "shift_jis": ("日本語の文章です。番号は三です。\n" * 9, "0x93"),
}
# name: bytes, the encoding that is named, a part of the message
NOT_IN_IT = {
    "no mark": ("some words\n".encode("utf-16-le"), "", "it contains zero bytes.*a.txt:encoding=utf-16"),
    "cut off": (WESTERN.encode()[:-4], "", "byte 0xc3 in line 9, where it ends inside a character: was it cut off"),
    "UTF-8 as another": ("à la déjà vu\n".encode(), "cp1252", "is UTF-8, not cp1252: its letters would become others"),
    "no ASCII": (WESTERN.encode(), "ascii", r"is not ASCII \(byte 0xe2 in line 1\). .*a.txt:encoding=utf-8"),
}


@pytest.mark.parametrize("encoding", ENCODED)
def test_an_encoding_is_not_guessed_and_is_read_when_it_is_named(tmp_path, encoding):
    text, byte = ENCODED[encoding]
    for name, content in (("a.txt", f"\n{text}"), ("a.csv", f'text\n"{text}"\n')):
        path = written(tmp_path, name, content.encode(encoding))
        refused(path, rf"is not UTF-8 \(byte {byte} in line 2\). Name its encoding, such as {path}:encoding=")
        read = corpus.load_corpus(f"{path}:encoding={encoding}")
        assert (read.train + read.held_out).strip() == text.strip()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_an_encoding_is_read_from_the_mark_that_states_it_or_when_it_is_named(tmp_path, encoding):
    line = json.dumps({"text": WESTERN}, ensure_ascii=False)
    for name, content in (("a.txt", WESTERN), ("a.csv", f'text\n"{WESTERN}"\n'), ("a.jsonl", line)):
        path = written(tmp_path, name, content.encode(encoding))
        for text in (corpus.load_corpus(path), corpus.load_corpus(f"{path}:encoding={encoding}")):
            assert text.train + text.held_out == WESTERN


@pytest.mark.parametrize("name", NOT_IN_IT)
def test_bytes_that_are_not_in_the_encoding_are_rejected(tmp_path, name):
    content, encoding, message = NOT_IN_IT[name]
    refused(written(tmp_path, "a.txt", content) + (encoding and f":encoding={encoding}"), message)


def test_what_was_read_wrongly_before_is_counted(tmp_path):
    text = corpus.load_corpus(written(tmp_path, "text.txt", "Caf\ufffd\n" * 9))
    assert text.remarks == ("9 characters are U+FFFD: the text was read in a wrong encoding once",)


def test_line_ends_of_old_macs_are_named(tmp_path):
    for name, content in (("a.txt", "one\rtwo\r"), ("a.csv", "text\rone\rtwo"), ("a.jsonl", '{"text": "a"}\r{}')):
        refused(written(tmp_path, name, content), r"old Macs .* tr '\\r' '\\n' < a\.")
    assert corpus.load_corpus(written(tmp_path, "b.txt", "a\rb\nc\n" * 9)).train.startswith("a\rb")


@pytest.mark.parametrize("place", ["../own", "a::b"])
def test_the_training_split_is_found_however_the_folder_is_called(tmp_path, monkeypatch, place):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    filled(tmp_path / "here" / place, {"data/train-00000-of-00001.jsonl": TEXTS})
    assert corpus.load_corpus(place).documents == ROWS


def test_a_column_without_a_name_is_no_input(tmp_path):
    path = written(tmp_path, "rows.csv", ",q,a\n" + "".join(f"{n},Hi,Hello\n" for n in range(ROWS)))
    text = corpus.load_corpus(f"{path}:instruction=q,output=a")
    assert json.loads(next(iter(text.train)))["messages"][0]["content"] == "Hi"


def test_an_input_that_is_not_there_is_refused(tmp_path):
    path = written(tmp_path, "rows.jsonl", rows(q=question, a=answer, c="Be brief."))
    refused(f"{path}:instruction=q,output=a,input=contxt", "has no column 'contxt'")


@pytest.mark.parametrize("messages", [False, True])
def test_a_system_beside_a_prompt_is_used_or_said_to_be_unread(tmp_path, messages):
    prompt, completion = ([USER], [ANSWER]) if messages else ("Hi", " Hello")
    path = written(tmp_path, "rows.jsonl", rows(system="s", prompt=prompt, completion=completion))
    text = corpus.load_corpus(path)
    assert '"s"' in next(iter(text.train)) or any("'system'" in remark for remark in text.remarks)


def test_tools_beside_two_texts_are_said_to_be_unread(tmp_path):
    path = written(tmp_path, "rows.jsonl", rows(tools=[{"name": "n"}], prompt="Hi", completion=" Hello"))
    assert any("'tools'" in remark for remark in corpus.load_corpus(path).remarks)


def test_prompts_and_completions_in_a_cell_are_read_as_messages_or_refused(tmp_path):
    cells = ",".join('"' + json.dumps([message]).replace('"', '""') + '"' for message in (USER, ANSWER))
    path = written(tmp_path, "rows.csv", "prompt,completion\n" + f"{cells}\n" * ROWS)
    assert isinstance(json.loads(next(iter(corpus.load_corpus(path).train)))["prompt"], list)


def test_a_bracket_in_another_column_does_not_hide_an_unknown_role(tmp_path):
    path = written(tmp_path, "rows.jsonl", rows(messages=[{"role": "bot", "content": "x"}], title="[1] a note"))
    refused(path, "the role 'bot' is not known")


def test_a_broken_file_is_named_before_its_loss(tmp_path):
    refused(f"{written(tmp_path, 'rows.jsonl', '{' + chr(10))}:loss=all", "line 1 is not JSON")


def test_all_columns_of_a_table_are_shown(tmp_path):
    import datasets

    datasets.Dataset.from_list([{"q": "x", "answer": "y"}]).to_parquet(tmp_path / "rows.parquet")
    refused(f"{tmp_path}/rows.parquet:prompt=q,completion=anser", "'answer'")


@pytest.mark.parametrize("options", [":", ":column=", ":text=text,"])
def test_an_option_that_is_empty_is_named(tmp_path, options):
    refused(written(tmp_path, "a.csv", "text\nx\n") + options, "is an empty option|such as text=COLUMN")


def test_a_mark_is_no_letter_of_the_encoding_that_was_named(tmp_path):
    path = written(tmp_path, "a.txt", "\ufeffsome words\n" + "more words\n" * 20)
    refused(f"{path}:encoding=cp1252", "is UTF-8, as the mark at its beginning states, not cp1252")


def test_a_system_that_is_no_text_is_refused(tmp_path):
    refused(written(tmp_path, "rows.jsonl", rows(system=["s"], messages=[USER, ANSWER])), "line 1")
