"""Whatever kind of file the user's texts are in, the same documents come out; what is wrong is in tests/faults."""

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from workbench.__main__ import absolute
from workbench.base import tokens as text_tokens
from workbench.base.errors import ConfigurationError
from workbench.base.paths import CORPORA
from workbench.base.tokens import END_OF_TEXT
from workbench.export.script import script
from workbench.export.sources import Sources
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.models.load import load_tokenizer, quiet
from workbench.models.source import locate
from workbench.texts import corpus, files
from workbench.texts import readers as texts
from workbench.texts import source as reading
from workbench.training.run import run

DOCUMENTS = [
    "One, with a comma\nand a line",
    'Two "quoted" words',
    "Drei: naïve café 日本 🙂",
    " four \r\n",
    "five" * 9,
]
CLEAN = [text.replace("\r\n", "\n") for text in DOCUMENTS]


def write(folder: Path, kind: str, documents: list[str | None], column: str = "text") -> str:
    """A file of a kind with these documents; the name to read it by."""
    path = folder / f"own.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps({"id": 1, column: text}) for text in documents), encoding="utf-8")
    elif kind in ("csv", "tsv"):
        buffer = io.StringIO()
        rows = [["id", column], *([str(i), text] for i, text in enumerate(documents))]
        csv.writer(buffer, delimiter="," if kind == "csv" else "\t").writerows(rows)
        path.write_bytes(buffer.getvalue().encode())
    elif kind == "parquet":
        dataset(documents, column).to_parquet(path)
    elif kind == "saved":
        dataset(documents, column).save_to_disk(path)
    elif kind == "folder":
        path.mkdir()
        for i, text in enumerate(documents):
            (path / f"{i}.txt").write_bytes((text or "").encode())
    return str(path) if column == "text" else f"{path}:text={column}"


def dataset(documents, column="text"):
    from datasets import Dataset

    return Dataset.from_dict({"id": list(range(len(documents))), column: documents})


UNREAD = "not read: the columns 'id'"
FILES = ("jsonl", "csv", "tsv", "parquet", "saved")
KINDS = (*FILES, "folder")


@pytest.fixture(autouse=True, scope="module")
def quiet_datasets():
    with quiet():
        yield


def read(name: str) -> corpus.Corpus:
    return corpus.load_corpus(name)


def test_every_kind_gives_the_same_text_and_the_same_hash(tmp_path, subtests):
    plain = tmp_path / "plain.txt"
    plain.write_bytes(END_OF_TEXT.join(CLEAN).encode())
    for kind in KINDS:
        with subtests.test(kind):
            own = read(write(tmp_path, kind, DOCUMENTS))
            assert own.train + own.held_out == END_OF_TEXT.join(CLEAN)
            assert own.sha256 == read(str(plain)).sha256
            assert (own.documents, own.remarks) == (5, () if kind == "folder" else (UNREAD,))


def test_another_column_is_named_by_what_it_holds(tmp_path, subtests):
    for kind in FILES:
        with subtests.test(kind):
            name = write(tmp_path, kind, DOCUMENTS, "body")
            assert read(name).train + read(name).held_out == END_OF_TEXT.join(CLEAN)
            path, columns = name.removesuffix(":text=body"), r"It has: 'id' \(.*\), 'body' \('One, "
            for wrong, message in (
                (path, f"{columns}.* {path}:text=COLUMN if"),
                (f"{path}:text=bodies", f"has no column 'bodies'. {columns}"),
                (f"{path}:body", "name a column by what it holds, such as text=body"),
            ):
                with pytest.raises(ConfigurationError, match=message):
                    read(wrong)


def test_nulls_and_blanks_are_left_out_and_counted(tmp_path, subtests):
    without = read(write(tmp_path, "csv", DOCUMENTS))
    for kind in ("jsonl", "parquet", "saved"):
        with subtests.test(kind):
            own = read(write(tmp_path, kind, [*DOCUMENTS[:2], None, " \n", "", *DOCUMENTS[2:], None]))
            assert own.sha256 == without.sha256
            assert own.documents == 5
            assert own.remarks == (UNREAD, "2 blank documents left out", "2 null texts left out")


def test_what_was_left_out_is_in_the_record(recipe, tmp_path, text_file):
    play = text_file.read_text(encoding="utf-8")
    own = write(tmp_path, "jsonl", [play[:20_000], " ", None, play[20_000:]])
    record = run(replace(recipe, corpus=own, steps=1), device="cpu")
    remarks = [UNREAD, "1 blank documents left out", "1 null texts left out"]
    assert record.warnings == [f"corpus: {remark}" for remark in remarks]


def test_a_folder_is_read_in_the_order_of_its_names_and_says_what_it_left_out(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, text in (("c.md", "last"), ("a.txt", "first"), ("b/x.txt", "second"), (".hidden/x.txt", "no")):
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "LICENSE").write_text("no")
    own = read(str(tmp_path))
    assert own.train + own.held_out == END_OF_TEXT.join(["first", "second", "last"])
    assert own.remarks == ("2 files of other kinds or splits left out",)


def test_documents_are_joined_with_the_end_of_text_token(tmp_path):
    tokenizer = gpt2_tokenizer()
    own = read(write(tmp_path, "jsonl", ["one two three", "four five six"] * 40))
    tokens = [token for row in corpus.make_blocks(own, tokenizer, 8, 1).train["input_ids"] for token in row]
    one, two = tokenizer("one two three")["input_ids"], tokenizer("four five six")["input_ids"]
    end = [tokenizer.eos_token_id]
    assert tokens[:16] == one + end + two + end + one + end + two + end


def test_a_colon_may_be_part_of_the_name(tmp_path):
    path = tmp_path / "a:b.txt"
    path.write_text("some text here")
    assert read(str(path)).train.startswith("some")
    for name, encoding in (("latin-1", "iso8859-1"), ("UTF8", "utf-8-sig")):
        assert texts.find_text(f"{path}:encoding={name}", "").encoding == encoding


def test_line_ends_split_by_a_chunk_are_one(tmp_path, monkeypatch):
    path = tmp_path / "dos.txt"
    path.write_bytes(("é\r\n\r\r\n" * 50).encode())
    for size in (1, 2, 3, 5, 1000):
        monkeypatch.setattr(reading, "CHUNK", size)
        assert "".join(text for _, text in texts.TextSource(str(path), path).rows()) == "é\n\r\n" * 50


def test_a_name_is_made_absolute_with_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.csv").write_text("text\nx\n")
    (tmp_path / "many").mkdir()
    assert absolute("my.csv:text=body") == f"{tmp_path / 'my.csv'}:text=body"
    assert absolute("many/") == str(tmp_path / "many")
    for unchanged in ("many", "shakespeare", "30", "[1, 2]", "no.csv:text=body", "a\0b", "x" * 5000):
        assert absolute(unchanged) == unchanged


# ---- what a loader may do to a text, and none of ours does ----

ODD = ["NA", "null", "2020-01-01", "007", "1e5", "true", "", "lone \r stays", "a\r\r\nb", "end \r"]


def test_what_looks_like_a_number_a_date_or_a_null_stays_a_text(tmp_path, subtests):
    expected = [text.replace("\r\n", "\n") or reading.BLANK for text in ODD]
    for kind in FILES:
        with subtests.test(kind):
            source = texts.find_text(write(tmp_path, kind, ODD), "")
            assert [text for _, text in source.rows()] == expected


def test_a_name_is_no_pattern(tmp_path, subtests):
    for name in ("a[1].jsonl", "a*b.csv", "x#1?.parquet", "a::b.jsonl"):
        with subtests.test(name):
            path = Path(write(tmp_path, name.rpartition(".")[2], DOCUMENTS))
            assert read(str(path.rename(tmp_path / name))).documents == 5


def test_the_plain_functions_alone_read_what_a_run_reads(tmp_path, subtests):
    sources, scope = Sources(), {}
    sources.add(files.rows_of_file)
    sources.add(files.pieces_of)
    imports = [f"from {module} import {what}" if what else f"import {module}" for module, what in sources.imports]
    exec("\n".join([*imports, *sources.definitions.values()]), scope)  # in an exported script there is nothing else
    for kind in ("txt", *FILES):
        with subtests.test(kind):
            name = write(tmp_path, kind, [*DOCUMENTS, None, " "])
            if kind == "txt":
                Path(name).write_bytes(END_OF_TEXT.join(DOCUMENTS).encode())
                rows = ["".join(scope["pieces_of"](Path(name), "utf-8", 100))]
            else:
                rows = [row["text"] for _, row in scope["rows_of_file"](Path(name), "utf-8", ["text"])]
            kept = [text.replace("\r\n", "\n") for text in rows if text and text.strip()]
            own = read(name)
            assert END_OF_TEXT.join(kept) == own.train + own.held_out == END_OF_TEXT.join(CLEAN)


READ = """
import sys
from workbench.texts.corpus import load_corpus
load_corpus("shakespeare")
for name in sys.argv[1:4]:
    load_corpus(name)
print(*{"datasets", "pyarrow", "pandas", "torch"} & set(sys.modules))
for name in sys.argv[4:]:
    load_corpus(name)
"""


def test_files_of_lines_are_read_without_datasets_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    names = [write(tmp_path, kind, DOCUMENTS) for kind in FILES]
    process = subprocess.run([sys.executable, "-c", READ, *names], capture_output=True, text=True, check=True)
    assert process.stdout == "\n"
    assert not list((tmp_path / "cache").rglob("*"))


# ---- long texts ----


@pytest.fixture
def small_memory(monkeypatch):
    """What is long, shortened: 20 KB do not fit, and pieces are of 1,000 characters."""
    monkeypatch.setattr(corpus, "IN_MEMORY_CHARACTERS", 20_000)
    monkeypatch.setattr(text_tokens, "PIECE_CHARACTERS", 1_000)
    monkeypatch.setattr(reading, "CHUNK", 777)


def test_pieces_have_the_tokens_of_the_whole(monkeypatch, subtests):
    monkeypatch.setattr(text_tokens, "PIECE_CHARACTERS", 97)
    play = (CORPORA / "shakespeare" / "held_out.txt").read_text(encoding="utf-8")[:50_000]
    odd = "  two  spaces\n\n\n\ttabs\t\n don't I'll 12345 6.7 日本語 🙂🙂\u00a0nbsp\u3000wide "
    odd += f"{END_OF_TEXT} x{END_OF_TEXT}\n"
    tokenizers = {"gpt2": gpt2_tokenizer(), "gpt2-tiny": load_tokenizer(locate("gpt2-tiny"))}
    for name, tokenizer in tokenizers.items():
        for text in (play, odd * 30, "a" * 5_000, " " * 5_000, "a b" * 900):
            with subtests.test(tokenizer=name, text=text[:20]):
                pieces = list(text_tokens.encode_text([text], tokenizer))
                assert [token for piece in pieces for token in piece] == tokenizer(text)["input_ids"]
                assert len(pieces) > 5 or " " not in text.strip()


def test_a_long_text_gives_the_same_blocks_as_a_short_one(tmp_path, text_file, small_memory, monkeypatch, subtests):
    play = text_file.read_text(encoding="utf-8")
    parts = [play[i : i + 3_000] for i in range(0, len(play), 3_000)]
    tokenizer = gpt2_tokenizer()
    for kind in ("txt", "jsonl", "folder"):
        name = str(text_file) if kind == "txt" else write(tmp_path, kind, parts)
        with subtests.test(kind):
            long = read(name)
            assert isinstance(long.train, corpus.Stream)
            blocks = corpus.make_blocks(long, tokenizer, 32, 4)
            with monkeypatch.context() as in_memory:
                in_memory.setattr(corpus, "IN_MEMORY_CHARACTERS", 1 << 24)
                short = read(name)
                expected = corpus.make_blocks(short, tokenizer, 32, 4)
            assert "".join(long.train) == short.train
            assert (long.held_out, long.sha256, len(long.train)) == (short.held_out, short.sha256, len(short.train))
            assert blocks.train["input_ids"][:] == expected.train["input_ids"][:]
            assert blocks.held_out["input_ids"][:] == expected.held_out["input_ids"][:]


def test_a_run_on_a_long_text_has_the_losses_of_one_in_memory(recipe, small_memory, monkeypatch, runs_folder):
    recipe = replace(recipe, steps=2)
    long = run(recipe, device="cpu")
    monkeypatch.setattr(corpus, "IN_MEMORY_CHARACTERS", 1 << 24)
    short = run(recipe, device="cpu")
    assert long.losses == short.losses
    assert long.held_out_loss == short.held_out_loss
    assert len(list((runs_folder / "tokens").iterdir())) == 1


def test_the_tokens_of_a_long_text_are_made_once_and_again_when_it_changes(tmp_path, small_memory, runs_folder):
    path = tmp_path / "long.txt"

    def token_files():
        corpus.make_blocks(read(str(path)), gpt2_tokenizer(), 32, 4)
        return {(file.name, file.stat().st_ino, file.stat().st_mtime_ns) for file in (runs_folder / "tokens").iterdir()}

    path.write_text("some words " * 4_000)
    first = token_files()
    assert len(first) == 1
    assert token_files() == first
    path.write_text("other words " * 4_000)
    assert len(token_files() - first) == 1


def test_the_survey_of_a_long_text_is_kept_until_its_file_changes(tmp_path, small_memory):
    path = tmp_path / "long.txt"
    path.write_text("some words " * 4_000)
    first = read(str(path))
    assert read(str(path)) is first
    path.write_text("other words " * 4_000)
    assert read(str(path)).sha256 != first.sha256


# ---- the exported script reads them too ----


def parts_read_by(source: str) -> tuple[str, str]:
    """What the script trains on and what it holds out: `main` as far as the tokenizer."""
    head, main = source[: source.index("\n    tokenizer = ")].split("def main():\n")
    scope = {}
    exec(compile(head + dedent(main), "script", "exec"), scope)
    return scope["text"][: scope["cut"]], scope["text"][scope["cut"] :]


def test_the_script_reads_the_same_text(recipe, tmp_path, subtests):
    for kind in FILES:
        with subtests.test(kind):
            name = write(tmp_path, kind, [*DOCUMENTS * 90, "  "], "body")
            source = script(replace(recipe, corpus=name, sequence_length=8))
            assert "workbench" not in source
            own = read(name)
            assert parts_read_by(source) == (own.train, own.held_out)


def test_the_script_reads_another_encoding(recipe, tmp_path):
    path = tmp_path / "old.txt"
    path.write_bytes(("naïve café\r\n" * 900).encode("latin-1"))
    source = script(replace(recipe, corpus=f"{path}:encoding=latin-1", sequence_length=8))
    assert parts_read_by(source)[0] == read(f"{path}:encoding=latin-1").train


def test_the_script_reads_a_plain_text_as_it_is(recipe, tmp_path):
    """A mark at its beginning, three kinds of line ends, and what looks like other kinds."""
    path = tmp_path / "own.md"
    path.write_bytes('\ufeffone\r\ntwo\rthree\n\x1c\u2028{four}"\r\n'.encode() * 200)
    own = read(str(path))
    assert parts_read_by(script(replace(recipe, corpus=str(path), sequence_length=8))) == (own.train, own.held_out)


def test_the_script_of_a_folder_is_refused_with_the_cure(recipe, tmp_path):
    name = write(tmp_path, "folder", DOCUMENTS * 90)
    with pytest.raises(ConfigurationError, match="is a folder. Put its documents into one file"):
        script(replace(recipe, corpus=name, sequence_length=8))
