"""Texts that cannot be used, through the Python API and the command line; in notebooks: test_in_notebooks.py. Of
long texts: test_token_cache.py."""

import gzip
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from workbench.base.errors import ConfigurationError
from workbench.models.load import quiet
from workbench.texts import corpus, files
from workbench.texts import source as reading
from workbench.training.run import run

LINES = "a line of text\n" * 3


def file(name: str, content: bytes | str) -> Callable[[Path], str]:
    """Makes a file; the name it is given by is `name`, options included."""

    def make(folder: Path) -> str:
        plain = name.rpartition(":")[0] or name
        (folder / plain).write_bytes(content.encode() if isinstance(content, str) else content)
        return str(folder / name)

    return make


def parquet(
    column: str, values: list, cut: slice = slice(None), damage: bytes = b"", packing: str = "snappy"
) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        import pyarrow as pa
        from pyarrow.parquet import write_table

        path = folder / "own.parquet"
        write_table(pa.table({column: values, "id": range(len(values))}), path, compression=packing)
        data = path.read_bytes()[cut]
        path.write_bytes(data[:4] + damage + data[4 + len(damage) :])
        return str(path)

    return make


def saved(values: dict[str, list], splits: bool = False, spoil: str = "") -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        from datasets import Dataset, DatasetDict

        dataset = Dataset.from_dict(values)
        with quiet():
            (DatasetDict(train=dataset, test=dataset) if splits else dataset).save_to_disk(folder / "saved")
        if spoil:
            (folder / "saved" / spoil).write_bytes(b"{")
        return str(folder / "saved")

    return make


def folder_of(**files: bytes | str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "own").mkdir()
        for name, content in files.items():
            file(name.replace("_", "."), content)(folder / "own")
        return str(folder / "own")

    return make


def said(
    *messages: object, times: int = 1, then: Iterable[object] = (), option: str = "", **more: object
) -> Callable[[Path], str]:
    """Conversations of these messages and other columns, and after them some of one message each."""
    rows = [{"messages": [*messages], **more}] * times + [{"messages": [message]} for message in then]
    return file(f"a.jsonl{option}", "".join(json.dumps(row) + "\n" for row in rows))


def inside(make: Callable[[Path], object], name: str = "b.txt") -> Callable[[Path], str]:
    """A folder with a good text, and beside it what `make` makes of the path of `name`."""

    def made(folder: Path) -> str:
        (folder / "own").mkdir()
        (folder / "own" / "a.txt").write_text(LINES)
        make(folder / "own" / name)
        return str(folder / "own")

    return made


def with_option(make: Callable[[Path], str], option: str) -> Callable[[Path], str]:
    return lambda folder: f"{make(folder)}:{option}"


def other(make: Callable[[Path], object]) -> Callable[[Path], str]:
    def made(folder: Path) -> str:
        make(folder / "own.txt")
        return str(folder / "own.txt")

    return made


ROWS = 'text,id\n"one",1\n"two, and more",2\n'
JSON = '{"text": "one"}\n{"text": "two"}\n'
SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
COLUMNS = "text=…, messages=…, conversations=…, prompt=…, completion=…, instruction=…, output=…, input=…, loss=…"
UNKNOWN = "has columns of no format that is read by itself. It has: "
ADDRESSES = (
    ":text=COLUMN if one column holds the whole text, or in its place: messages=COLUMN; prompt=COLUMN,",
    "completion=COLUMN, which are joined as they are; instruction=COLUMN,output=COLUMN, ",
)
Faults = dict[str, tuple[Any, ...]]  # what makes the text, and parts of the message
NAMES: Faults = {
    "missing": (lambda _: "novle.txt", "there is no file 'novle.txt' (looked in /", "Embedded: shakespeare"),
    "missing with option": (lambda _: "no.csv:text=a", "there is no file 'no.csv:text=a'", "Embedded"),
    "in a missing folder": (lambda _: "/no/such/place.txt", "there is no file '/no/such/place.txt'"),
    "nobody's home": (lambda _: "~nobody-here/x.txt", "there is no file"),
    "too long a name": (lambda _: "x" * 5000, "there is no file"),
    "a device": (lambda _: "/dev/zero", "/dev/zero is not a regular file", "Give a file"),
    "a pipe": (other(os.mkfifo), "own.txt is not a regular file"),
    "a dangling link": (other(lambda path: path.symlink_to("nowhere")), "there is no file"),
    "a link to itself": (other(lambda path: path.symlink_to("own.txt")), "there is no file"),
    "a file as a folder": (lambda folder: f"{file('a.txt', LINES)(folder)}/b.txt", "there is no file"),
    "Word": (file("a.docx", "x"), "a.docx ends in .docx", "Give .txt, .md, .jsonl, .json, .csv, .tsv, .parquet"),
    "PDF": (file("a.PDF", "x"), "ends in .PDF, which is not read"),
    "Arrow": (file("a.arrow", "x"), "ends in .arrow, which is not read. Give .txt"),
    "Feather": (file("a.feather", "x"), "ends in .feather, which is not read"),
}
OPTIONS: Faults = {
    "a column alone": (file("a.csv:body", ROWS), "a.csv:body': name a column by what it holds, such as text=body."),
    "a column=": (file("a.jsonl:column=body", JSON), "name a column by what it holds, such as text=body."),
    "a column of a text": (file("a.txt:no", LINES), "a.txt:no': .txt has no no, only encoding=… can be given. Leave"),
    "a column of Markdown": (file("a.md:messages=x", LINES), ".md has no messages, only encoding"),
    "a column without a kind": (file("README:column=x", LINES), "plain text has no column, only encoding"),
    "a column of a folder": (with_option(folder_of(a_txt="x", b_md="x"), "text=a"), ".md has no text, only enc"),
    "an encoding of Parquet": (with_option(parquet("text", ["one"]), "encoding=x"), f"no encoding, only {COLUMNS}"),
    "a split of a file": (file("a.jsonl:split=test", JSON), f"has no split, only {COLUMNS}, encoding=… can be given."),
    "an empty column": (file("a.csv:text=", ROWS), "a.csv:text=': text is empty. Give one text, or none."),
    "an empty encoding": (file("a.txt:encoding=", LINES), "encoding is empty. Give one encoding"),
    "two columns": (file("a.csv:text=text,text=id", ROWS), "text is given twice. Give one text"),
    "half a format": (
        file("a.csv:prompt=text", ROWS),
        "prompt is no whole format. Give one of these: text=…; messages=…; conversations=…; prompt=…,completion=…; ins",
    ),
    "two formats": (file("a.csv:text=text,messages=id", ROWS), "text, messages is no whole format"),
    "no such column": (
        file("a.csv:text=x", ROWS),
        "a.csv:text=x has no column 'x'. It has: 'text' ('one'), 'id' ('1')",
    ),
    "no such input": (
        file("a.csv:instruction=text,output=id,input=x", ROWS),
        "has no column 'x'. It has: 'text' ('one')",
    ),
    "an empty option": (file("a.csv:", ROWS), "a.csv:': there is an empty option. Leave the last colon or comma out."),
    "a nameless option": (file("a.txt:=x", LINES), ".txt has no option without a name, only encoding=…"),
    "unknown option": (file("a.txt:encodign=utf-8", LINES), ".txt has no encodign, only encoding=… can be given"),
    "unknown encoding": (file("a.txt:encoding=latin-17", LINES), "no encoding 'latin-17'. Common ones: utf-8"),
    "no text encoding": (file("a.txt:encoding=base64", LINES), "no encoding 'base64'"),
    "a loss of texts": (file("a.jsonl:loss=all", JSON), "has texts, no conversations: of these all counts. Leave"),
    "a loss of a text": (file("a.txt:loss=all", LINES), ".txt has no loss, only encoding=… can be given. Leave"),
    "another loss": (said(*SAID, option=":loss=some"), "there is no loss 'some'. Known: answers, all."),
}
BYTES: Faults = {
    "empty": (file("a.txt", ""), "a.txt is empty", "Give a file with text"),
    "blank": (file("a.txt", "\n \t\r\n\n"), "a.txt is empty: 1 blank documents left out"),
    "Latin-1": (
        file("a.txt", b"first\nsecond\nthird, a caf\xe9\n"),
        "a.txt is not UTF-8 (byte 0xe9 in line 3). Name its encoding, such as /",
        "a.txt:encoding=cp1252, or convert it: iconv -f cp1252 -t utf-8 a.txt > fixed.txt",
    ),
    "far down": (file("a.txt", b"\n" * reading.CHUNK + b"caf\xe9 au lait\n"), f"byte 0xe9 in line {reading.CHUNK + 1}"),
    "cut off": (file("a.txt", LINES.encode() + b"\xc3"), "byte 0xc3 in line 4, where it ends inside a character: was"),
    "UTF-8": (file("a.txt:encoding=cp1252", "déjà vu, naïve\n"), "a.txt is UTF-8, not cp1252: its letters would"),
    "UTF-8 read as ASCII": (file("a.txt:encoding=ascii", "café"), "is not ASCII (byte 0xc3 in line 1). Name its"),
    "UTF-16 without a mark": (file("a.txt", "some text".encode("utf-16-le")), "a.txt is not a text file in UTF-8: it"),
    "no mark of UTF-16": (file("a.txt:encoding=utf-16", LINES), "is not UTF-16 (UTF-16 stream does not start with"),
    "binary": (file("a.txt", bytes(range(256))), "it contains zero bytes. Give a file with text in it, or name its"),
    "gzip": (file("a.txt", gzip.compress(LINES.encode())), "a.txt is not a text file: it begins like a gzip"),
    "zip": (file("a.txt", b"PK\x03\x04rest"), "begins like a zip file", "Unpack"),
    "PDF as text": (file("a.txt", "%PDF-1.7 ..."), "begins like a PDF file"),
    "Parquet as CSV": (file("a.csv", b"PAR1..PAR1"), "begins like a Parquet file"),
    "HTML": (file("a.txt", "\n<!DOCTYPE HTML>\n<p>"), "a.txt is a page of HTML, or XML. Save the text itself."),
    "HTML as Markdown": (file("a.md", "\ufeff<html lang=en>"), "a.md is a page of HTML"),
    "JSON lines": (file("a.txt", JSON), "a.txt is JSON, not a plain text. If it holds examples, name it .jsonl or"),
    "a list of JSON": (file("a.md", '[\n  {\n    "text": "one"\n  }\n]'), "a.md is JSON, not a plain text"),
    "a pointer": (file("a.parquet", "version https://git-lfs.github.com/spec/v1\n"), "is a pointer of Git LFS,"),
    "XML": (file("a", '<?xml version="1.0"?>'), "is a page of HTML, or XML"),
}
JSON_LINES: Faults = {
    "empty jsonl": (file("a.jsonl", ""), "a.jsonl is empty"),
    "broken JSON": (file("a.jsonl", JSON + '{"text": "thr'), "a.jsonl, line 3 is not JSON", "one whole object"),
    "an array": (file("a.jsonl", '[["one"]]'), "a.jsonl, row 1 is a list, not an object", '{"text": "…"}'),
    "spread over lines": (file("a.jsonl", '{\n"text": "one"\n}'), "line 1 is not JSON"),
    "too deep": (file("a.jsonl", "[" * 100_000), "a.jsonl cannot be read as a list of objects (maximum"),
    "a name twice": (file("a.jsonl", '{"id": {"a": 1, "a": 2}}'), "line 1 is not JSON (the name 'a' is there twice"),
    "other key": (file("a.jsonl", JSON + '{"body": "x"}'), "line 3 has no column 'text'. It has: 'body' ('x'). Say"),
    "a number": (file("a.jsonl", JSON + '{"text": 3}'), "line 3: 'text' holds a int, not a text. Name a column of"),
    "a list": (file("a.jsonl", '{"text": ["a"]}'), "line 1: 'text' holds a list"),
    "half a surrogate": (file("a.jsonl", JSON + r'{"text": "a \ud800"}'), "line 3: character 3 is half of a surr"),
    "only nulls": (file("a.jsonl", '{"text": null}\n' * 2), "is empty: 2 null texts left out"),
    "Latin-1 jsonl": (file("a.jsonl", JSON.encode() + b'{"text": "caf\xe9"}'), "0xe9 in line 3", "a.jsonl:enc"),
}
NO_LIST = "It must be [{…}, …], or have an object per line; pandas writes the list with orient="
JSON_IN_ONE_PIECE: Faults = {
    "empty json": (file("a.json", ""), "cannot be read as a list of objects (Expecting value: line 1", NO_LIST),
    "a JSON without rows": (file("a.json", "[]"), "a.json is empty: there is no document in it"),
    "rows under a name": (
        file("a.json", '{"data": [{"text": "one"}]}'),
        "(it is a dict with data). It must be [{…}, …]",
    ),
    "columns": (
        file("a.json", '{"text":\n["one", "two"]}'),
        "a.json cannot be read as a list of objects (it is a dict",
    ),
    "a broken list": (
        file("a.json", '[{"text": "one"},\n{"text": }]'),
        "as a list of objects (Expecting value: line 2",
    ),
    "a list of lists": (file("a.json", '[{"text": "one"}, ["two"]]'), "a.json, row 2 is a list, not an object"),
    "a name twice in a list": (file("a.json", '[{"text": "a", "text": "b"}]'), "the name 'text' is there twice"),
    "other key in a list": (file("a.json", '[{"text": "one"}, {"body": "x"}]'), "a.json, row 2 has no column 'text'."),
}
TOO_MUCH = "holds more than 100 times its own "
PACKED: Faults = {
    "a cut gzip": (file("a.jsonl.gz", gzip.compress(JSON.encode() * 99)[:-9]), "is empty or damaged", "again"),
    "a damaged gzip": (file("a.txt.gz", gzip.compress(LINES.encode() * 99)[:20] + b"\xff" * 20), "is empty or damaged"),
    "no gzip at all": (file("a.csv.gz", ROWS), "a.csv.gz is empty or damaged (Not a gzipped file"),
    "an empty gzip": (file("a.txt.gz", b""), "a.txt.gz is empty"),
    "gzip in gzip": (file("a.txt.gz", gzip.compress(gzip.compress(b"x"))), "it begins like a gzip file"),
    "a packed Parquet": (file("a.parquet.gz", gzip.compress(b"x")), "a.parquet.gz ends in .parquet.gz, which is not"),
    "an archive": (file("a.tar.gz", gzip.compress(b"x")), "ends in .tar.gz, which is not read. Give .txt"),
    "packed Latin-1": (file("a.txt.gz", gzip.compress(b"one\ncaf\xe9\n")), "byte 0xe9 in line 2", "a.txt.gz:encoding"),
    "a packed page": (file("a.txt.gz", gzip.compress(b"<html>")), "a.txt.gz is a page of HTML"),
    "a packed broken line": (file("a.jsonl.gz", gzip.compress(JSON.encode() + b"{")), "a.jsonl.gz, line 3 is not JSON"),
    "32 MB in 32 KB": (file("a.txt.gz", gzip.compress(b"a" * 2**25)), TOO_MUCH, "Unpack it and look at it first"),
    "32 MB of JSON": (file("a.jsonl.gz", gzip.compress(b'{"text": "' + b"a" * 2**25)), TOO_MUCH),
    "32 MB of JSON in one piece": (file("a.json.gz", gzip.compress(b'[{"text": "' + b"a" * 2**25)), TOO_MUCH),
    "32 MB of CSV": (file("a.csv.gz", gzip.compress(b"text\n" + b"a" * 2**25)), TOO_MUCH),
    "a long text in a small Parquet": (parquet("text", ["a" * 2**25], packing="zstd"), TOO_MUCH),
    "one text in many rows of a small Parquet": (parquet("text", ["word " * 2**9] * 2**13, packing="zstd"), TOO_MUCH),
}
CONVERSATIONS: Faults = {
    "messages are a text": (file("a.jsonl", '{"messages": "hi"}'), "'hi' is no list of messages. A message is {"),
    "no messages": (said(), "a.jsonl is empty: 1 conversations without messages left out"),
    "no role": (said({"content": "x"}), "a.jsonl, line 1: {'content': 'x'} has no role. A message is"),
    "no content": (said(SAID[1], {"role": "user"}), "line 1: {'role': 'user'} has no content that is a text"),
    "a role that is a number": (said({"role": 1, "content": "x"}), "{'role': 1, 'content': 'x'} has no role"),
    "another role": (said(*SAID, {"role": "robot"}), "1: the role 'robot' is not known", "text: 'user' 1 times,"),
    "a number": (said({"role": "user", "content": 1}), "{'role': 'user', 'content': 1} has no content that is a text"),
    "a picture": (said({"role": "user", "content": [{"image": 7}]}), "the part {'image': 7} of a message has no"),
    "half a weight": (said({**SAID[1], "weight": 0.5}), "line 1: weight is 0.5: only 0 and 1, or false and true, are"),
    "printed": (file("a.csv", f'messages\n"{SAID}"\n'), "line 2: ", " is no JSON (", "If Python printed it, write"),
    "tools that are no list": (said(*SAID, tools={"name": "f"}), "line 1: the tools are a dict, not a list"),
    "a system that is no text": (said(*SAID, system=5), "line 1: 'system' is 5, not a text. A message is"),
    "a number and a text": (file("a.jsonl", '{"prompt": 1, "completion": "b"}'), "line 1: 1 is no list of messages"),
    "an output that is no text": (file("a.jsonl", '{"instruction": "x", "output": 1}'), "line 1: 'output' is no text"),
    "half an exchange": (file("a.jsonl", '{"prompt": "", "completion": ""}\n{"prompt": ""}'), "2 has no column"),
    "half a surrogate said": (said({"role": "user", "content": "\ud800"}), "line 1: character 40 is half of a surr"),
    "no word": (parquet("messages", [[{"role": "user"}], SAID]), "row 1: {'role': 'user', 'content': None} has no"),
    "messages named as a text": (said(*SAID, option=":text=messages"), "'messages' holds a list, not a text. Name a"),
    "no answers": (said(SAID[0], times=99), "the training part of ", "gives no block of 32 tokens in which one"),
    "one conversation": (said(*SAID), "the training part of ", "gives no block", "Use more conversations"),
    "no answer held out": (said(*SAID, times=180, then=[SAID[0]] * 20), "the held-out part of ", "gives no block of"),
}
OTHER_EXAMPLES: Faults = {
    "other columns": (file("a.jsonl", '{"id": 1, "body": "x"}'), f"{UNKNOWN}'id' (1), 'body' ('x'). Say", *ADDRESSES),
    "other columns of a table": (parquet("body", ["one"]), f"{UNKNOWN}'body' ('one'), 'id' (0). Say", *ADDRESSES),
    "another list": (file("a.jsonl", '{"turns": [{"role": "user"}]}'), f"{UNKNOWN}'turns' ([{{'role': 'user'}}])"),
    "preferences": (
        file("a.jsonl", '{"prompt": "x", "chosen": "y", "rejected": "z"}'),
        "has the columns prompt, chosen, rejected: it has preferences, which supervised training does not use. Give",
    ),
    "preferences of texts": (
        file("a.csv", "chosen,rejected,text\nx,y,z\n"),
        "it has preferences, which supervised training does not use. To train on the texts alone, write /",
    ),
    "KTO": (said(*SAID, kto_tag=True), "it has the labels of KTO, which"),
    "TRL's KTO": (file("a.csv", "prompt,completion,label\nx,y,True\n"), "it has labels, as for KTO or a classifi"),
    "a classifier": (file("a.csv", "text,label\nx,1\n"), "labels, as for KTO or a classifier", "a.csv:text=text"),
    "labels": (parquet("labels", [[1, 2]]), "it has labels, as for a classifier or of tokens, which"),
    "tokens": (parquet("input_ids", [[1, 2]]), "it has the tokens of some tokenizer: give the texts that they were"),
    "loose messages": (file("a.csv", "role,content\nuser,x\n"), "none says to which conversation it belongs"),
    "ShareGPT's": (file("a.csv", "from,value\ngpt,x\n"), "each row is one message, and none says to which convers"),
    "a text beside messages": (
        said(*SAID, text="x"),
        "has the columns messages, text, which can be read in 2 ways. Say which: /",
        "a.jsonl:messages=messages",
    ),
    "a text beside an instruction": (
        file("a.csv", "instruction,input,output,text\na,b,c,d\n"),
        "a.csv:text=text or ",
        "a.csv:instruction=instruction,output=output,input=input",
    ),
}
CSV: Faults = {
    "empty csv": (file("a.csv", ""), "a.csv is empty", "with a header and rows"),
    "header only": (file("a.csv", "text,id\n"), "a.csv is empty: it has no rows below a header"),
    "too many fields": (file("a.csv", ROWS + "three, four, 3\n"), "line 4 has 3 fields, but the header has 2"),
    "too few fields": (file("a.csv", ROWS + "three\n"), "a.csv, line 4 has 1 fields", "double quotes"),
    "a row of two lines": (file("a.csv", 'text,id\n"a\nb",1\nc\n'), "a.csv, line 4 has 1 fields"),
    "open quote": (file("a.csv", ROWS + '"three,3\nfour,4\n'), "line 4 is not CSV", "Close every double quote"),
    "stray quote": (file("a.csv", ROWS + '"three" four,3\n'), "a.csv, line 4 is not CSV"),
    "a column twice": (file("a.csv", "text,text\na,b\n"), "two columns 'text'. Rename one"),
    "only blanks": (file("a.csv", "text,id\n  ,1\n,2\n"), "is empty: 2 blank documents left out"),
    "no header": (file("a.csv", "words,1\nmore,0\n"), f"{UNKNOWN}'words' ('more'), '1' ('0'). If these are a row,"),
    "semicolons": (file("a.csv", ROWS.replace(",", ";")), "has the header 'text;id', whose fields are not separated"),
    "tabs": (file("a.csv", "text\tid\nx\t1\n"), r"not separated by ',' alone", r"read_csv(…, sep='\t').to_csv(…)"),
    "commas in a .tsv": (file("a.tsv", ROWS), r"not separated by '\t' alone", "sep=','"),
    "spaces before quotes": (file("a.csv", '"id", "text"\n1, "x"\n'), "whose fields are not separated by ',' alone"),
}
DATA_SETS: Faults = {
    "0-byte parquet": (file("a.parquet", ""), "a.parquet is empty or damaged", "Write or copy it again"),
    "truncated parquet": (parquet("text", ["one"] * 99, slice(0, -40)), "is empty or damaged"),
    "damaged parquet": (parquet("text", ["one"] * 99, damage=b"\xff" * 60), "own.parquet is empty or damaged"),
    "no text in it": (parquet("text", [1, 2]), "own.parquet, row 1: 'text' holds a int"),
    "no rows": (parquet("text", []), "own.parquet is empty"),
    "null parquet": (parquet("text", [None, None, ""]), "1 blank documents left out; 2 null texts left out"),
    "splits": (saved({"text": ["a"]}, splits=True), "holds the splits test, train. Give one: ", "saved/train"),
    "damaged state": (saved({"text": ["a"]}, spoil="state.json"), "is empty or damaged", "Write or copy it again"),
    "damaged arrow": (saved({"text": ["a"]}, spoil="data-00000-of-00001.arrow"), "is empty or damaged"),
    "saved empty": (saved({"text": []}), "saved is empty or damaged"),
}
FOLDERS: Faults = {
    "an empty folder": (folder_of(), "own' has no text in it (it is empty). Put .txt"),
    "only pictures": (folder_of(a_png="x", b_pdf="x"), "has no text in it (only .pdf, .png)"),
    "one bad of two": (folder_of(a_txt="good", b_txt=b"caf\xe9 x"), "own/b.txt is not UTF-8 (byte 0xe9 in line 1)"),
    "all blank": (folder_of(a_txt="", b_txt=" "), "own is empty: 2 blank documents left out"),
    "texts and examples": (folder_of(a_md="x", b_jsonl=JSON), "own has files of several kinds (.jsonl, text), which"),
    "two names": (folder_of(a_jsonl=JSON, b_jsonl=JSON), "own do not say which are for training: a.jsonl, b.jsonl."),
    "two kinds": (
        folder_of(a_jsonl=JSON, a_csv=ROWS),
        "kinds (.csv, .jsonl), which may hold the same examples. Keep one",
    ),
    "no training split": (folder_of(test_jsonl=JSON), "own has files of other splits than train alone: test.jsonl."),
    "other columns in one": (folder_of(a1_jsonl=JSON, a2_jsonl='{"body": "x"}'), "own/a2.jsonl, line 1 has no column"),
    "a dangling link in it": (inside(lambda path: path.symlink_to("no")), "own/b.txt is a link that leads nowhere"),
    "a link to itself in it": (inside(lambda path: path.symlink_to("b.txt")), "own/b.txt is a link that leads"),
    "a link to its own folder": (inside(lambda path: path.symlink_to("."), "sub"), "own/sub is a link to a folder,"),
    "a pipe in it": (inside(os.mkfifo), "own/b.txt is not a regular file. Give a file"),
    "a device in it": (inside(lambda path: path.symlink_to("/dev/zero")), "own/b.txt is not a regular file"),
}
LENGTHS: Faults = {
    "one word": (file("a.txt", "word"), "Use a longer text"),
    "blank end": (file("a.txt", "word " * 90 + " " * 500), "the last tenth of", "is blank. Trim the file"),
    "too short": (file("a.txt", LINES), "training blocks of 32 tokens, but a batch needs 8", "Use a longer text"),
    "one short document": (file("a.jsonl", '{"text": "a few words only"}'), "but a batch needs 8. Use a longer"),
}
FAULTS: dict[str, Faults] = {
    "names": NAMES | OPTIONS,
    "bytes": BYTES,
    "JSON": JSON_LINES | JSON_IN_ONE_PIECE,
    "packed": PACKED,
    "conversations": CONVERSATIONS,
    "other examples": OTHER_EXAMPLES,
    "CSV": CSV,
    "data sets": DATA_SETS,
    "folders and lengths": FOLDERS | LENGTHS,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_it_is_refused_before_a_model_loads(kind, tmp_path, recipe, refused, subtests):
    for number, (fault, (make, *reasons)) in enumerate(FAULTS[kind].items()):
        with subtests.test(fault):
            folder = tmp_path / str(number)
            folder.mkdir()
            name = make(folder)
            arguments = [recipe.model, "--sequence-length", "32", "--corpus", name]
            refused(partial(replace, recipe, corpus=name), arguments, ("corpus: ", *reasons))


TEMPLATES = (
    ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
    ("{% for message in messages %}{{ message.content + 1 }}{% endfor %}", "can only concatenate str"),
    ("{% for", "the chat template cannot be used ("),
    ("{{ messages | length }}", "it writes the beginning of a conversation otherwise than the whole"),
)


def test_a_template_that_fails_is_told_with_the_row(tmp_path, recipe, gpt2_folder, no_model, subtests):
    name = file("a.jsonl", "\n" + f"{json.dumps({'messages': SAID})}\n" * 200)(tmp_path)
    for number, (template, reason) in enumerate(TEMPLATES):
        with subtests.test(template):
            folder = shutil.copytree(gpt2_folder, tmp_path / f"model-{number}")
            (folder / "chat_template.jinja").write_text(template)
            with pytest.raises(ConfigurationError) as caught:
                run(replace(recipe, model=f"random:{folder}", corpus=name), device="cpu")
            assert f"corpus: {name}, line 2: the chat template cannot be used (" in str(caught.value)
            assert reason in str(caught.value)
            assert "let all tokens count: loss=all" in str(caught.value)


def test_what_is_more_than_can_be_held_is_refused(tmp_path, monkeypatch, subtests):
    """No more than the limit is ever in memory, nor of what a packed file holds."""
    monkeypatch.setattr(files, "HELD_WHOLE", 8 << 20)
    whole = "is a list of more than 8,388,608 characters. Write it as .jsonl, a row per line."
    for name, begin, message in (
        ("a.jsonl", b'{"text": "', "line 1 is not JSON .Unterminated string"),
        ("a.json", b'[{"text": "', whole),
        ("a.json.gz", b'[{"text": "', TOO_MUCH),
        ("a.txt.gz", b"", TOO_MUCH),
    ):
        with subtests.test(name):
            content = begin + b"a" * 70_000_000
            (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
            tracemalloc.start()
            with pytest.raises(ConfigurationError, match=message):
                corpus.load_corpus(str(tmp_path / name))
            assert tracemalloc.get_traced_memory()[1] < 60 << 20
            tracemalloc.stop()


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch, subtests):
    def denied(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    names = [file(kind, "text\nx\n")(tmp_path) for kind in ("a.txt", "a.csv", "a.jsonl")]
    monkeypatch.setattr(Path, "open", denied)  # the tests may run as root, for whom no file is closed
    message = "cannot be read: Permission denied. Check its permissions"
    for name in names:
        with subtests.test(name), pytest.raises(ConfigurationError, match=message):
            corpus.load_corpus(name)


def test_a_folder_in_it_without_permission_is_refused(tmp_path, monkeypatch):
    name, scandir = inside(Path.mkdir, "sub")(tmp_path), os.scandir

    def denied(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ConfigurationError, match=r"own/sub cannot be read: Permission denied. Check its permissions"):
        corpus.load_corpus(name)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path, subtests):
    """No record could hold it, and a message could not be printed."""
    for place in ("own", "other/sub"):
        (tmp_path / place).mkdir(parents=True)
        name = os.fsdecode(os.fsencode(tmp_path / place) + b"/caf\xe9.txt")
        Path(name).write_text(LINES)
        message = r"the name '.*caf\\udce9.txt' is not UTF-8.*Rename it"
        for start in (name, str(tmp_path / place.partition("/")[0])):
            with subtests.test(ascii(start)):
                with pytest.raises(ConfigurationError, match=message) as caught:
                    corpus.load_corpus(start)
                str(caught.value).encode()


def test_what_names_nothing_is_refused(tmp_path, monkeypatch, subtests):
    """Above all, the empty name is not the current folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.txt").write_text(LINES)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    message = r"corpus: there is no file .*nor an embedded text. Embedded: "
    for name in ("", " ", "a\0b", "a\0b:text", ":", ":text", "~", "~/no.txt", "\udce9.txt", "x" * 5000, "*.txt"):
        with subtests.test(ascii(name)[:40]):
            with pytest.raises(ConfigurationError, match=message) as caught:
                corpus.load_corpus(name)
            assert len(str(caught.value).encode()) < 500 + len(str(tmp_path))


def test_what_is_another_way_to_write_a_path_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_of(train_txt=LINES, test_txt="held back")(tmp_path)
    of_file = ("own/train.txt", "own/train.txt/", "own//train.txt", "~/own/train.txt")
    for name in ("own", "own/", "./own", "~/own", "own/../own", *of_file):
        assert corpus.load_corpus(name).train + corpus.load_corpus(name).held_out == LINES


def test_an_embedded_text_says_that_it_is_not_the_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert corpus.load_corpus("shakespeare").remarks == ()
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "own.txt").write_text(LINES)
    told = "'shakespeare' is the embedded text; what has this name in the working folder is ./shakespeare"
    assert corpus.load_corpus("shakespeare").remarks == (told,)
    assert corpus.load_corpus("./shakespeare").train in LINES


def test_a_pipe_that_looks_like_a_saved_data_set_is_none(tmp_path):
    name = inside(os.mkfifo, "dataset_dict.json")(tmp_path)
    assert corpus.load_corpus(name).remarks == ("1 files of other kinds or splits left out",)


def test_no_encoding_whatever_gives_a_traceback(tmp_path):
    """All that Python has, also such as `idna` and `punycode`, of texts that are in none of them."""
    import encodings
    import pkgutil

    known = [module.name for module in pkgutil.iter_modules(encodings.__path__)]
    files = {"a.txt": bytes(range(1, 256)), "b.txt": "café 日本\n".encode(), "c.csv": b'text\n"caf\xe9"\n'}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content * 9)
        for encoding in known:
            with suppress(ConfigurationError):
                corpus.load_corpus(f"{tmp_path / name}:encoding={encoding}")


def test_a_field_of_a_csv_that_is_endless_is_refused(tmp_path):
    name = file("a.csv", 'text\n"' + ("an open quote " * 1000 + "\n") * 5000)(tmp_path)
    with pytest.raises(
        ConfigurationError, match="line 2 is not CSV .field larger than field limit.*Close every double"
    ):
        corpus.load_corpus(name)


def test_a_header_of_many_columns_is_shown_in_part(tmp_path):
    name = file("a.csv", ",".join(f"column{i}{'x' * 200}" for i in range(500)) + "\n1" + ",1" * 499)(tmp_path)
    with pytest.raises(ConfigurationError, match=r"It has: 'column0x.* and 488 more\. If these") as caught:
        corpus.load_corpus(name)
    assert len(str(caught.value)) < 2500


def test_a_dataset_itself_is_no_corpus(recipe):
    from datasets import Dataset

    dataset = Dataset.from_dict({"text": ["a"]})
    with pytest.raises(ConfigurationError, match="recipe: corpus must be a text, got Dataset"):
        replace(recipe, corpus=dataset)
