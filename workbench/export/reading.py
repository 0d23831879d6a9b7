"""The lines of a script that read its text, as a run has read and checked it, and the function that makes rows of it.

However a file is read, it becomes `rows`: a dictionary for each document or conversation.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base.errors import ConfigurationError
from workbench.base.tokens import END_OF_TEXT
from workbench.export.lines import Lines, broken, literal, near
from workbench.texts import chat, corpus, files, formats, readers
from workbench.training.job import Job

ROWS_OF_TEXT = '''
def make_rows(text, tokenizer, most=None):
    """Rows of LENGTH tokens, of the first `most`; a shorter rest is dropped."""
    ids = tokenizer(text, verbose=False)["input_ids"][:most]
    rows = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})'''
ROWS_OF_CONVERSATIONS = '''
def make_rows(conversations, tokenizer, most=None):
    """Rows of LENGTH tokens, of `most` in all; a shorter rest is dropped, and rows in which nothing counts."""
    template = tokenizer.get_chat_template()
    pairs = [pair for row in conversations for pair in LABELS]
    rows = [list(zip(*pairs[i : i + LENGTH])) for i in range(0, len(pairs) - LENGTH + 1, LENGTH)]
    rows = [(ids, labels) for ids, labels in rows if {*labels[1:]} != {-100}][: most and most // LENGTH]
    return Dataset.from_dict({"input_ids": [ids for ids, _ in rows], "labels": [labels for _, labels in rows]})'''
CUT = f"cut = int(len({{}}) * {1 - corpus.HELD_OUT_SHARE})  # the rest is held out"


class Reading(NamedTuple):
    """What the lines that follow need to know of those that read.

    Attributes:
        train, held_out: expressions, of which `make_rows` makes rows.
        make_rows: its source.
        examples: the expression of which a technique makes rows of its own.
        labelling: the lines that make it.
        template: for conversations, where the tokenizer has none.
    """

    train: str
    held_out: str
    make_rows: str = ROWS_OF_TEXT
    examples: str = ""
    labelling: tuple[str, ...] = ()
    template: str = ""


def read_text(lines: Lines, job: Job) -> Reading:
    """Add the lines that read a job's text. Raises ConfigurationError: it is a folder."""
    name = job.recipe.corpus
    if name in corpus.embedded():
        train, held_out = corpus.embedded_files(name)
        return Reading(read_whole(train), read_whole(held_out))
    source = readers.find_text(name, "")
    if source.is_folder:
        raise ConfigurationError(f"script: {name!r} is a folder. Put its documents into one file: .jsonl or .parquet.")
    if source.loss:
        return read_conversations(lines, job, source)
    if not source.downloaded and readers.kind_of(source.path) in readers.PLAIN:
        lines.add(opening(source, ""), '    text = file.read().replace("\\r\\n", "\\n")')
    else:
        add_rows(lines, source)
        between = literal(job.material.tokenizer.eos_token or END_OF_TEXT)
        lines.add(
            f"documents = [row[{literal(source.column)}] for row in rows]",
            'documents = [text.replace("\\r\\n", "\\n") for text in documents if text and text.strip()]',
            f"text = {between}.join(documents)",
        )
    lines.add(CUT.format("text"))
    return Reading("text[:cut]", "text[cut:]")


def read_conversations(lines: Lines, job: Job, source: readers.TextSource) -> Reading:
    """Add the lines that read conversations, of which a run leaves out what is null, and those that lack something."""
    add_rows(lines, source)
    lines.sources.add(without_nulls)
    lines.add("rows = [json.loads(json.dumps(row), object_hook=without_nulls) for row in rows]")
    form = source.form or formats.TEXT
    if is_plain(source, form):
        present = [f"{literal(name)} in row" for name in form.required]
        lines.add(f"rows = [row for row in rows if {' and '.join(present)}]")
    else:
        arguments = ", ".join(["row", *map(literal, form.arguments)])
        lines.add(
            f"rows = [{lines.sources.add(form.read)}({arguments}) for row in rows]",
            "rows = [row for row in rows if isinstance(row, dict)]  # else it says why it is left out",
        )
    lines.add(CUT.format("rows"))
    everything = ", answers=False" if source.loss == chat.ALL else ""
    labels = f"{lines.sources.add(chat.labels_of)}(row, tokenizer, template{everything})"
    tokenizer = job.material.tokenizer
    return Reading(
        "rows[:cut]",
        f"rows[cut : cut + {corpus.HELD_OUT_TOKENS}]",
        make_rows=ROWS_OF_CONVERSATIONS.replace("LABELS", labels),
        examples="train",
        labelling=("template = tokenizer.get_chat_template()", f"train = tuple({labels} for row in rows[:cut])"),
        template="" if tokenizer.chat_template else chat.template_of(tokenizer),
    )


def read_whole(path: Path) -> str:
    return f'Path({literal(near(str(path)))}).read_text("utf-8")'


def is_plain(source: readers.TextSource, form: formats.Format) -> bool:
    """Whether all rows are conversations as they stand, but for nulls."""
    if set(form.required) - {"messages", "prompt", "completion"}:
        return False
    for path in source.files():
        for _, row in files.rows_of_file(path, source.encoding, source.columns):
            present = {name: row[name] for name in form.present(row)}
            plain = json.loads(json.dumps(present, default=str), object_hook=without_nulls)
            if plain.keys() >= set(form.required) and plain != form.read(row, *form.arguments):
                return False
    return True


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """The row without the names that have no value."""
    return {name: value for name, value in row.items() if value is not None}


def add_rows(lines: Lines, source: readers.TextSource) -> None:
    """Add the lines that read `rows` from a file, or from a data set of the hub."""
    path = [literal(near(str(source.path)))]
    ending = "hub" if source.downloaded else readers.kind_of(source.path)
    columns = literal(source.present_columns())
    if ending == "hub":
        arguments = [f"{name}={literal(value)}" for name, value in source.load_arguments if value]
        lines.add(broken("rows = load_dataset(", arguments, f").select_columns({columns})"))
    elif ending == "saved":
        lines.add(broken("rows = load_from_disk(", path, f").select_columns({columns})"))
    elif ending in (".arrow", ".feather"):
        lines.add(f"rows = {lines.sources.add(files.saved)}(Path({path[0]})).select_columns({columns})")
    elif ending == ".parquet":
        lines.add(broken("rows = ParquetFile(", path, f").read({columns}).to_pylist()"))
    elif ending in (*readers.OBJECTS, *files.SEPARATORS) and files.note_of(source.path, source.encoding):
        function = lines.sources.add(files.objects if ending in readers.OBJECTS else files.csv_rows)
        lines.add(f"rows = [row for _, row in {function}(Path({path[0]}), {literal(source.encoding)})]")
    elif ending == ".jsonl":
        lines.add(opening(source), "    rows = [json.loads(line) for line in file if line.strip()]")
    elif ending == ".json":
        lines.add(opening(source), f"    rows = json.load(file){under_data(source)}")
    else:
        delimiter = files.SEPARATORS[ending]
        separator = "" if delimiter == "," else f", delimiter={literal(delimiter)}"
        lines.add(
            "csv.field_size_limit(2**26)  # characters; the module's own limit is 131,072",
            opening(source),
            f"    rows = list(csv.DictReader(file, strict=True{separator}))",
        )


def opening(source: readers.TextSource, newline: str = "\n") -> str:
    """The line that opens the file, in which line ends stay as they are."""
    arguments = [literal(near(str(source.path)))]
    function = "open"
    if source.path.suffix.lower() == ".gz":
        function = "gzip.open"
        arguments.append('"rt"')
    arguments += [f"encoding={literal(source.encoding)}", f"newline={literal(newline)}"]
    return broken(f"with {function}(", arguments, ") as file:")


def under_data(source: readers.TextSource) -> str:
    """Where the rows are in a file of JSON: it is a list of them, or has it under the name `data`."""
    with readers.opened(source.path, source.encoding) as file:
        return "" if file.read(2**16).lstrip().startswith("[") else '["data"]'
