"""The lines of a script that read its text as a run does, and the function that makes rows of it.

However a file is read, it becomes `rows`: a dictionary for each document or conversation.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from workbench.base.errors import ConfigurationError
from workbench.base.tokens import END_OF_TEXT
from workbench.export.lines import Lines, literal, relative_path, wrap_call
from workbench.texts import chat, corpus, files, readers
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
    """The result of adding the lines that read: names and sources that the following lines use.

    Attributes:
        train, held_out: expressions for `make_rows`.
        make_rows: the source of that function.
        labelling: for conversations, the lines that assign `train`, of which a technique makes its own rows. It is
            empty for a text, of which a technique makes them as it stands.
        template: the chat template of conversations whose tokenizer has none; otherwise "".
    """

    train: str
    held_out: str
    make_rows: str = ROWS_OF_TEXT
    labelling: tuple[str, ...] = ()
    template: str = ""


def read_text(lines: Lines, job: Job) -> Reading:
    """Add the lines that read a job's text. Raises ConfigurationError: it is a folder."""
    name = job.recipe.corpus
    if name in corpus.list_embedded():
        train, held_out = corpus.find_embedded(name)
        return Reading(read_whole(train), read_whole(held_out))
    source = readers.find_text(name, "")
    if source.is_folder:
        raise ConfigurationError(f"script: {name!r} is a folder. Put its documents into one file: .jsonl or .parquet.")
    if source.loss:
        return read_conversations(lines, job, source)
    if not source.downloaded and readers.kind_of(source.path) in readers.PLAIN:
        lines.add(opening_line(source, ""), '    text = file.read().replace("\\r\\n", "\\n")')
    else:
        add_rows(lines, source)
        between = literal(job.material.tokenizer.eos_token or END_OF_TEXT)
        lines.add(
            f"documents = [row[{literal(*source.arguments)}] for row in rows]",
            'documents = [text.replace("\\r\\n", "\\n") for text in documents if text and text.strip()]',
            f"text = {between}.join(documents)",
        )
    lines.add(CUT.format("text"))
    return Reading("text[:cut]", "text[cut:]")


def read_conversations(lines: Lines, job: Job, source: readers.TextSource) -> Reading:
    """Add the lines that read conversations. As in a run, names without a value are left out, and so are conversations
    that lack something."""
    add_rows(lines, source)
    if is_plain(source):
        lines.sources.add(without_nulls)
        lines.add("rows = [json.loads(json.dumps(row), object_hook=without_nulls) for row in rows]")
        present = [f"{literal(name)} in row" for name in source.required]
        lines.add(f"rows = [row for row in rows if {' and '.join(present)}]")
    else:
        arguments = ", ".join(["row", *map(literal, source.arguments)])
        lines.add(
            f"rows = [{lines.sources.add(source.form.read)}({arguments}) for row in rows]",
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
        labelling=("template = tokenizer.get_chat_template()", f"train = tuple({labels} for row in rows[:cut])"),
        template="" if tokenizer.chat_template else chat.template_of(tokenizer),
    )


def read_whole(path: Path) -> str:
    """Return the expression that reads a whole file."""
    return f'Path({literal(relative_path(str(path)))}).read_text("utf-8")'


def is_plain(source: readers.TextSource) -> bool:
    """Whether all rows are conversations as they stand, apart from names without a value."""
    read = source.form.read
    if read is None or set(source.required) - {"messages", "prompt", "completion"}:
        return False
    for path in source.files():
        for _, row in files.rows_of_file(path, source.encoding_of(path), source.columns):
            present = {name: row[name] for name in source.columns if name in row}
            plain = json.loads(json.dumps(present, default=str), object_hook=without_nulls)
            if plain.keys() >= set(source.required) and plain != read(row, *source.arguments):
                return False
    return True


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without the names that have no value."""
    return {name: value for name, value in row.items() if value is not None}


def add_rows(lines: Lines, source: readers.TextSource) -> None:
    """Add the lines that read `rows` from a file, or from a data set of the hub."""
    path = [literal(relative_path(str(source.path)))]
    ending = "hub" if source.downloaded else readers.kind_of(source.path)
    encoding = literal(source.encoding_of(source.path)) if ending != "hub" else ""
    columns = literal([name for name in source.columns if name in source.first_values()])
    if ending == "hub":
        arguments = [f"{name}={literal(value)}" for name, value in source.load_arguments if value]
        lines.add(wrap_call("rows = load_dataset(", arguments, f").select_columns({columns})"))
    elif ending == "saved":
        lines.add(wrap_call("rows = load_from_disk(", path, f").select_columns({columns})"))
    elif ending == ".parquet":
        lines.add(wrap_call("rows = ParquetFile(", path, f").read({columns}).to_pylist()"))
    elif ending in readers.OBJECTS and files.is_of_lines(source.path, source.encoding_of(source.path)):
        lines.add(opening_line(source), "    rows = [json.loads(line) for line in file if line.strip()]")
    elif ending in readers.OBJECTS:
        lines.add(opening_line(source), "    rows = json.load(file)")
    elif begins_blank(source):
        lines.add(f"rows = [row for _, row in {lines.sources.add(files.csv_rows)}(Path({path[0]}), {encoding})]")
    else:
        delimiter = files.SEPARATORS[ending]
        separator = "" if delimiter == "," else f", delimiter={literal(delimiter)}"
        lines.add(
            "csv.field_size_limit(2**26)  # characters; the module's own limit is 131,072",
            opening_line(source),
            f"    rows = list(csv.DictReader(file, strict=True{separator}))",
        )


def begins_blank(source: readers.TextSource) -> bool:
    """Whether a file has blank lines above its header, which `csv.DictReader` takes for the header."""
    with readers.open_file(source.path, source.encoding_of(source.path)) as file:
        return not file.readline().strip()


def opening_line(source: readers.TextSource, newline: str = "\n") -> str:
    """Return the line that opens a file, and that leaves line ends as they are."""
    arguments = [literal(relative_path(str(source.path)))]
    function = "open"
    if source.path.suffix.lower() == ".gz":
        function = "gzip.open"
        arguments.append('"rt"')
    arguments += [f"encoding={literal(source.encoding_of(source.path))}", f"newline={literal(newline)}"]
    return wrap_call(f"with {function}(", arguments, ") as file:")
