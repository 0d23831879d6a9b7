"""Texts that cannot be used, through the Python API and the command line; in notebooks: test_in_notebooks.py. Of
long texts: test_token_cache.py."""

import gzip
import os
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

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


def parquet(column: str, values: list, cut: slice = slice(None), damage: bytes = b"") -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        import pyarrow as pa
        from pyarrow.parquet import write_table

        path = folder / "own.parquet"
        write_table(pa.table({column: values, "id": pa.array(range(len(values)))}), path)
        data = path.read_bytes()[cut]
        path.write_bytes(data[:4] + damage + data[4 + len(damage) :])
        return str(path)

    return make


def packed_parquet(values: list[str]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        import pyarrow as pa
        from pyarrow.parquet import write_table

        write_table(pa.table({"text": values}), folder / "small.parquet", compression="zstd")
        return str(folder / "small.parquet")

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


def folder_of(**files: bytes) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / "own").mkdir()
        for name, content in files.items():
            (folder / "own" / name.replace("_", ".")).write_bytes(content)
        return str(folder / "own")

    return make


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
CHAT = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}\n'
Faults = dict[str, tuple[Callable[[Path], str], tuple[str, ...]]]
NAMES: Faults = {
    "missing": (lambda _: "novle.txt", ("there is no file 'novle.txt' (looked in /", "Embedded: shakespeare")),
    "missing with option": (lambda _: "no.csv:body", ("there is no file 'no.csv:body'", "Embedded")),
    "in a missing folder": (lambda _: "/no/such/place.txt", ("there is no file '/no/such/place.txt'",)),
    "nobody's home": (lambda _: "~nobody-here/x.txt", ("there is no file",)),
    "too long a name": (lambda _: "x" * 5000, ("there is no file",)),
    "a device": (lambda _: "/dev/zero", ("/dev/zero is not a regular file", "Give a file")),
    "a pipe": (other(os.mkfifo), ("own.txt is not a regular file",)),
    "a dangling link": (other(lambda path: path.symlink_to("nowhere")), ("there is no file",)),
    "a link to itself": (other(lambda path: path.symlink_to("own.txt")), ("there is no file",)),
    "a file as a folder": (lambda folder: f"{file('a.txt', LINES)(folder)}/b.txt", ("there is no file",)),
    "a column of a text": (
        file("a.txt:nosuch", LINES),
        ("a.txt:nosuch': .txt has no column, only encoding=… can be given. Leave 'nosuch' out.",),
    ),
    "a column of Markdown": (file("a.md:column=text", LINES), (".md has no column, only encoding",)),
    "a column without a kind": (file("README:body", LINES), ("plain text has no column, only encoding",)),
    "a column of a folder of texts": (
        with_option(folder_of(a_txt=b"x", b_md=b"x"), "body"),
        ("own:body': .md has no column",),
    ),
    "an encoding of Parquet": (
        with_option(parquet("text", ["one"]), "encoding=latin-1"),
        (".parquet has no encoding, only column=…, loss=…, prompt=…, completion=… can be given. Leave 'enc",),
    ),
    "an encoding of a saved one": (with_option(saved({"text": ["a"]}), "encoding=utf-8"), ("saved has no encoding",)),
    "an empty column": (file("a.csv:column=", "text\nx\n"), ("a.csv:column=': column is empty. Give one column",)),
    "an empty option": (file("a.csv:", "text\nx\n"), ("a.csv:': column is empty. Give one column, or none",)),
    "an option too many": (file("a.csv:text,", "text\nx\n"), ("column is empty",)),
    "an empty encoding": (file("a.txt:encoding=", LINES), ("encoding is empty. Give one encoding",)),
    "two columns": (file("a.csv:column=text,column=id", ROWS), ("column is given twice. Give one column",)),
    "two encodings": (file("a.txt:encoding=utf-8,encoding=utf-8", LINES), ("encoding is given twice",)),
    "a nameless option": (file("a.txt:=x", LINES), (".txt has no option without a name, only encoding=…",)),
    "unknown option": (
        file("a.txt:encodign=utf-8", LINES),
        (".txt has no encodign, only encoding=… can be given. Leave",),
    ),
    "unknown encoding": (file("a.txt:encoding=latin-17", LINES), ("no encoding 'latin-17'. Common ones: utf-8",)),
    "no text encoding": (file("a.txt:encoding=base64", LINES), ("no encoding 'base64'",)),
    "Word": (file("a.docx", "x"), ("a.docx ends in .docx", "Give .txt, .md, .jsonl, .json, .csv, .tsv, .parquet")),
    "PDF": (file("a.PDF", "x"), ("ends in .PDF, which is not read",)),
}
BYTES: Faults = {
    "empty": (file("a.txt", ""), ("a.txt is empty", "Give a file with text")),
    "blank": (file("a.txt", "\n \t\r\n\n"), ("a.txt is empty: 1 blank documents left out",)),
    "only a mark": (file("a.txt", b"\xef\xbb\xbf"), ("a.txt is empty",)),
    "a mark and blanks": (file("a.txt", b"\xef\xbb\xbf\n\n"), ("a.txt is empty",)),
    "Latin-1": (
        file("a.txt", "first\nsecond\nthird, a café\n".encode("latin-1")),
        ("a.txt is not UTF-8: byte 0xe9 in line 3", "a.txt:encoding=cp1252", "iconv -f cp1252 -t utf-8 a.txt"),
    ),
    "Latin-1 far down": (
        file("a.txt", b"x" * 99 + b"\n" * reading.CHUNK + b"caf\xe9 au lait\n"),
        (f"byte 0xe9 in line {reading.CHUNK + 1}",),
    ),
    "cut inside a character": (
        file("a.txt", LINES.encode() + "café".encode()[:-1]),
        ("ends inside a character (byte 0xc3 in line 4)", "Copy it again", "a.txt:encoding=cp1252"),
    ),
    "UTF-16": (file("a.txt", "some text".encode("utf-16")), ("contains zero bytes", "a.txt:encoding=utf-16")),
    "no mark of UTF-16": (
        file("a.txt:encoding=utf-16", LINES),
        ("a.txt is not UTF-16: UTF-16 stream does not start with BOM", "a.txt:encoding=utf-8"),
    ),
    "UTF-8 read as ASCII": (file("a.txt:encoding=ascii", "café"), ("is not ASCII: byte 0xc3 in line 1",)),
    "binary": (file("a.txt", bytes(range(256))), ("a.txt is not a text file: it contains zero bytes",)),
    "gzip": (file("a.txt", gzip.compress(LINES.encode())), ("a.txt is not a text file: it begins like a gzip",)),
    "zip": (file("a.txt", b"PK\x03\x04rest"), ("begins like a zip file", "Unpack")),
    "PDF as text": (file("a.txt", "%PDF-1.7 ..."), ("begins like a PDF file",)),
    "Parquet as CSV": (file("a.csv", b"PAR1..PAR1"), ("begins like a Parquet file",)),
}
JSON_LINES: Faults = {
    "empty jsonl": (file("a.jsonl", ""), ("a.jsonl is empty",)),
    "blank jsonl": (file("a.jsonl", "\n\n"), ("a.jsonl is empty",)),
    "broken JSON": (file("a.jsonl", JSON + '{"text": "thr'), ("a.jsonl, line 3 is not JSON", "one whole object")),
    "an array": (file("a.jsonl", '[["one"]]'), ("line 1 is a list, not an object", '{"text": "…"}')),
    "a string": (file("a.jsonl", '"one"'), ("line 1 is a str, not an object",)),
    "spread over lines": (file("a.jsonl", '{\n"text": "one"\n}'), ("line 1 is not JSON",)),
    "too deep": (file("a.jsonl", "[" * 100_000), ("a.jsonl is not JSON of rows (maximum recursion",)),
    "other key": (file("a.jsonl", JSON + '{"body": "x"}'), ("line 3 has no column 'text'; it has body. Name one: ",)),
    "a number": (file("a.jsonl", JSON + '{"text": 3}'), ("line 3: 'text' holds a int, not a text",)),
    "a list": (file("a.jsonl", '{"text": ["a"]}'), ("line 1: 'text' holds a list",)),
    "half a surrogate": (file("a.jsonl", JSON + r'{"text": "a \ud800"}'), ("line 3: character 3 is half of a surr",)),
    "only nulls": (file("a.jsonl", '{"text": null}\n' * 2), ("is empty: 2 null texts left out",)),
    "Latin-1 jsonl": (file("a.jsonl", JSON.encode() + b'{"text": "caf\xe9"}'), ("0xe9 in line 3", "a.jsonl:enc")),
}
JSON_IN_ONE_PIECE: Faults = {
    "empty json": (file("a.json", ""), ("a.json is not JSON of rows (Expecting value: line 1 column 1",)),
    "a JSON without rows": (file("a.json", "[]"), ("a.json is empty: there is no document in it",)),
    "an object": (file("a.json", '{"text": 1}'), ("it is a dict", "It must be one list of objects")),
    "data is no list": (file("a.json", '{"data": {"text": "one"}}'), ("it is a dict",)),
    "a broken list": (
        file("a.json", '[{"text": "one"},\n{"text": }]'),
        ("not JSON of rows (Expecting value: line 2 col",),
    ),
    "a list of lists": (file("a.json", '[{"text": "one"}, ["two"]]'), ("a.json, row 2 is a list, not an object",)),
    "JSON that is too deep": (file("a.json", "[" * 100_000), ("a.json is not JSON of rows (", "one list of objects")),
    "other key in a list": (
        file("a.json", '{"data": [{"text": "one"}, {"body": "x"}]}'),
        ("a.json, row 2 has no column 'text'; it has body. Name one: ", "a.json:column=body"),
    ),
    "a number in a list": (file("a.json", '[{"text": 3}]'), ("a.json, row 1: 'text' holds a int",)),
    "Latin-1 json": (file("a.json", b'[{"text": "caf\xe9"}]'), ("0xe9 in line 1", "a.json:encoding=cp1252")),
}
TOO_MUCH = "holds more than 100 times its own "
PACKED: Faults = {
    "a cut gzip": (file("a.jsonl.gz", gzip.compress(JSON.encode() * 99)[:-9]), ("is empty or damaged", "again")),
    "a damaged gzip": (
        file("a.txt.gz", gzip.compress(LINES.encode() * 99)[:20] + b"\xff" * 20),
        ("a.txt.gz is empty or damaged",),
    ),
    "no gzip at all": (file("a.csv.gz", ROWS), ("a.csv.gz is empty or damaged (Not a gzipped file",)),
    "an empty gzip": (file("a.txt.gz", b""), ("a.txt.gz is empty",)),
    "gzip in gzip": (file("a.txt.gz", gzip.compress(gzip.compress(b"x"))), ("it begins like a gzip file",)),
    "a packed Parquet": (
        file("a.parquet.gz", gzip.compress(b"x")),
        ("a.parquet.gz ends in .parquet.gz, which is not",),
    ),
    "an archive": (file("a.tar.gz", gzip.compress(b"x")), ("ends in .tar.gz, which is not read. Give .txt",)),
    "packed Latin-1": (
        file("a.txt.gz", gzip.compress(b"one\ncaf\xe9\n")),
        ("byte 0xe9 in line 2", "a.txt.gz:encoding"),
    ),
    "a packed broken line": (
        file("a.jsonl.gz", gzip.compress(JSON.encode() + b"{")),
        ("a.jsonl.gz, line 3 is not JSON",),
    ),
    "a packed short row": (
        file("a.csv.gz", gzip.compress(f"{ROWS}three".encode())),
        ("a.csv.gz, line 4 has 1 fields",),
    ),
    "32 MB in 32 KB": (file("a.txt.gz", gzip.compress(b"a" * 2**25)), (TOO_MUCH, "Unpack it and look at it first")),
    "32 MB of JSON": (file("a.jsonl.gz", gzip.compress(b'{"text": "' + b"a" * 2**25)), (TOO_MUCH,)),
    "32 MB of JSON in one piece": (file("a.json.gz", gzip.compress(b'[{"text": "' + b"a" * 2**25)), (TOO_MUCH,)),
    "32 MB of CSV": (file("a.csv.gz", gzip.compress(b"text\n" + b"a" * 2**25)), (TOO_MUCH,)),
    "a long text in a small Parquet": (packed_parquet(["a" * 2**25]), (TOO_MUCH,)),
    "one text in many rows of a small Parquet": (packed_parquet(["word " * 2**9] * 2**13), (TOO_MUCH,)),
    "a column of a packed text": (file("a.txt.gz:body", gzip.compress(b"x")), (".txt has no column, only encoding",)),
}
CONVERSATIONS: Faults = {
    "messages are a text": (
        file("a.jsonl", '{"messages": "hi"}'),
        ("line 1 has no column 'text'; it has messages. Name one: ",),
    ),
    "no messages": (
        file("a.jsonl", '{"messages": []}\n' * 2),
        ("a.jsonl is empty: 2 conversations without messages left out",),
    ),
    "no role": (
        file("a.jsonl", CHAT + '{"messages": [{"content": "x"}]}'),
        ("a.jsonl, line 2: {'content': 'x'} has no role. A message is", '{"role": "user", "content": "…"}'),
    ),
    "keys that no template knows": (
        file("a.jsonl", '{"messages": [{"speaker": "human", "content": "x"}]}'),
        ("line 1: {'speaker': 'human', 'content': 'x'} has no role",),
    ),
    "no content": (
        file("a.jsonl", '{"messages": [{"role": "user"}]}'),
        ("line 1: {'role': 'user'} has no content that is a text",),
    ),
    "a role that is a number": (
        file("a.json", '[{"messages": [{"role": 1, "content": "x"}]}]'),
        ("row 1: {'role': 1, 'content': 'x'} has no role",),
    ),
    "content that is a number": (
        file("a.jsonl", '{"messages": [{"role": "user", "content": 1}]}'),
        ("{'role': 'user', 'content': 1} has no content that is a text",),
    ),
    "a message that is a text": (
        file("a.jsonl", '{"messages": ["hi"]}'),
        ("line 1: 'hi' is no message. A message is",),
    ),
    "a text and messages": (
        file("a.jsonl", '{"prompt": "x", "completion": [{"role": "a", "content": "b"}]}'),
        ("line 1: 'x' is no list of messages",),
    ),
    "half an exchange": (
        file("a.jsonl", '{"prompt": "x", "completion": "y"}\n{"prompt": "x"}'),
        ("line 2 has no column 'completion'; it has prompt. The rows before it have one: complete it",),
    ),
    "half a surrogate said": (
        file("a.jsonl", r'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        ("line 1: character 40 is half of a surrogate pair",),
    ),
    "a message without a word": (
        parquet("messages", [[{"role": "user", "name": "x"}], [{"role": "assistant", "content": "so many words"}]]),
        ("own.parquet, row 1: {'role': 'user', 'name': 'x', 'content': None} has no content that is a text",),
    ),
    "another list": (
        file("a.jsonl", '{"turns": [{"role": "user"}]}'),
        ("it has turns. None holds a text. Write rows with a text",),
    ),
    "another list named": (
        file("a.jsonl:turns", '{"turns": [{"role": "user"}]}'),
        ("line 1: 'turns' holds a list, not a text. Choose another column, or for conversations name it messages.",),
    ),
    "a loss of texts": (file("a.jsonl:loss=all", JSON), ("has texts, no conversations: of these all counts. Leave",)),
    "a loss of a text": (file("a.txt:loss=all", LINES), (".txt has no loss, only encoding=… can be given. Leave",)),
    "another loss": (file("a.jsonl:loss=some", CHAT), ("there is no loss 'some'. Known: answers, all.",)),
    "a split of a file": (file("a.jsonl:split=test", JSON), (".jsonl has no split, only column=…",)),
    "no answers": (
        file("a.jsonl", '{"messages": [{"role": "user", "content": "so many words"}]}\n' * 99),
        ("the training part of ", "gives no block of 32 tokens in which one counts. Use more conversations"),
    ),
    "one conversation": (file("a.jsonl", CHAT), ("the training part of ", "gives no block", "Use more conversations")),
    "no answer held out": (
        file("a.jsonl", CHAT * 180 + '{"messages": [{"role": "user", "content": "so many words"}]}\n' * 20),
        ("the held-out part of ", "gives no block of 32 tokens in which one counts"),
    ),
}
CSV: Faults = {
    "empty csv": (file("a.csv", ""), ("a.csv is empty", "with a header and rows")),
    "header only": (file("a.csv", "text,id\n"), ("a.csv is empty: it has no rows below a header",)),
    "no text column": (
        file("a.csv", "id,body\n1,x\n"),
        ("no column 'text'; it has id, body. Name one, ", "a.csv:column=COL"),
    ),
    "wrong column": (
        file("a.csv:bodies", "id,body\n1,x\n"),
        ("no column 'bodies'; it has id, body. Name one of these.",),
    ),
    "too many fields": (file("a.csv", ROWS + "three, four, 3\n"), ("line 4 has 3 fields, but the header has 2",)),
    "too few fields": (file("a.csv", ROWS + "three\n"), ("a.csv, line 4 has 1 fields", "double quotes")),
    "a row of two lines": (file("a.csv", 'text,id\n"a\nb",1\nc\n'), ("a.csv, line 4 has 1 fields",)),
    "open quote": (file("a.csv", ROWS + '"three,3\nfour,4\n'), ("line 4 is not CSV", "Close every double quote")),
    "stray quote": (file("a.csv", ROWS + '"three" four,3\n'), ("a.csv, line 4 is not CSV",)),
    "a column twice": (file("a.csv", "text,text\na,b\n"), ("two columns 'text'. Rename one",)),
    "only blanks": (file("a.csv", "text,id\n  ,1\n,2\n"), ("is empty: 2 blank documents left out",)),
    "no header": (file("a.csv", "some words,1\nmore words,0\n"), ("it has some words, 1.", "is there no header?")),
}
DATA_SETS: Faults = {
    "0-byte parquet": (file("a.parquet", ""), ("a.parquet is empty or damaged", "Write or copy it again")),
    "fake parquet": (file("a.parquet", LINES), ("is empty or damaged",)),
    "truncated parquet": (parquet("text", ["one"] * 99, slice(0, -40)), ("is empty or damaged",)),
    "damaged parquet": (parquet("text", ["one"] * 99, damage=b"\xff" * 60), ("own.parquet is empty or damaged",)),
    "no such column": (parquet("body", ["one"]), ("own.parquet has no column 'text'; it has body, id. Name one, ",)),
    "no text in it": (parquet("text", [1, 2]), ("own.parquet, row 1: 'text' holds a int",)),
    "bytes": (parquet("text", [b"one"]), ("row 1: 'text' holds a bytes",)),
    "no rows": (parquet("text", []), ("own.parquet is empty",)),
    "null parquet": (parquet("text", [None, None, ""]), ("1 blank documents left out; 2 null texts left out",)),
    "splits": (saved({"text": ["a"]}, splits=True), ("holds the splits test, train. Give one: ", "saved/train")),
    "saved without text": (saved({"body": ["a"]}), ("no column 'text'; it has body. Name one: ", ":column=body")),
    "damaged state": (saved({"text": ["a"]}, spoil="state.json"), ("is empty or damaged", "Write or copy it again")),
    "damaged arrow": (saved({"text": ["a"]}, spoil="data-00000-of-00001.arrow"), ("is empty or damaged",)),
    "saved empty": (saved({"text": []}), ("saved is empty or damaged",)),
}
FOLDERS: Faults = {
    "an empty folder": (folder_of(), ("own' has no text in it (it is empty). Put .txt",)),
    "only pictures": (folder_of(a_png=b"x", b_pdf=b"x"), ("has no text in it (only .pdf, .png)",)),
    "one bad of two": (folder_of(a_txt=b"good", b_txt=b"caf\xe9 x"), ("own/b.txt is not UTF-8: byte 0xe9 in line 1",)),
    "all blank": (folder_of(a_txt=b"", b_txt=b" "), ("own is empty: 2 blank documents left out",)),
    "a dangling link in it": (
        inside(lambda path: path.symlink_to("nowhere")),
        ("own/b.txt is a link that leads nowhere. Give a file",),
    ),
    "a link to itself in it": (inside(lambda path: path.symlink_to("b.txt")), ("own/b.txt is a link that leads",)),
    "a link to its own folder": (
        inside(lambda path: path.symlink_to("."), "sub"),
        ("own/sub is a link to a folder, which is not followed. Put the folder there, or remove it.",),
    ),
    "a pipe in it": (inside(os.mkfifo), ("own/b.txt is not a regular file. Give a file",)),
    "a device in it": (inside(lambda path: path.symlink_to("/dev/zero")), ("own/b.txt is not a regular file",)),
}
LENGTHS: Faults = {
    "one word": (file("a.txt", "word"), ("Use a longer text",)),
    "blank end": (file("a.txt", "word " * 90 + " " * 500), ("the last tenth of", "is blank. Trim the file")),
    "too short": (file("a.txt", LINES), ("training blocks of 32 tokens, but a batch needs 8", "Use a longer text")),
    "one short document": (file("a.jsonl", '{"text": "a few words only"}'), ("but a batch needs 8. Use a longer",)),
}
FAULTS: dict[str, Faults] = {
    "names": NAMES,
    "bytes": BYTES,
    "JSON": JSON_LINES | JSON_IN_ONE_PIECE,
    "packed": PACKED,
    "conversations": CONVERSATIONS,
    "CSV": CSV,
    "data sets": DATA_SETS,
    "folders and lengths": FOLDERS | LENGTHS,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_it_is_refused_before_a_model_loads(kind, tmp_path, recipe, refused, subtests):
    for number, (fault, (make, reasons)) in enumerate(FAULTS[kind].items()):
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
    name = file("a.jsonl", "\n" + CHAT * 200)(tmp_path)
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
    whole = "is one piece of JSON of more than 8,388,608 characters. Write it as .jsonl, a row in each line"
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
    folder_of(a_txt=LINES.encode())(tmp_path)
    for name in ("own", "own/", "./own", "~/own", "~/own/a.txt", "own/a.txt/", "own//a.txt", "own/../own/a.txt"):
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
    name = inside(os.mkfifo, "state.json")(tmp_path)
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
    name = file("a.csv", 'text\n"' + "an open quote\n" * 5_400_000)(tmp_path)
    with pytest.raises(
        ConfigurationError, match="line 2 is not CSV .field larger than field limit.*Close every double"
    ):
        corpus.load_corpus(name)


def test_a_header_of_many_columns_is_shown_in_part(tmp_path):
    name = file("a.csv", ",".join(f"column{i}{'x' * 200}" for i in range(500)) + "\n1" + ",1" * 499)(tmp_path)
    with pytest.raises(ConfigurationError, match="has no column 'text'; it has column0x") as caught:
        corpus.load_corpus(name)
    assert len(str(caught.value)) < 2500


def test_a_dataset_itself_is_no_corpus(recipe):
    from datasets import Dataset

    dataset = Dataset.from_dict({"text": ["a"]})
    with pytest.raises(ConfigurationError, match="recipe: corpus must be a text, got Dataset"):
        replace(recipe, corpus=dataset)
