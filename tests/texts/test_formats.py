"""Files as people have them: what is recognised, what counts, and what is said of the rest. All content is ours."""

import json

import pytest

from workbench.base.errors import ConfigurationError
from workbench.texts import corpus, formats, readers

ROWS = 20
ASKED = [f"What comes after {n}?" for n in range(ROWS)]
ANSWERED = [f"After {n} comes {n + 1}." for n in range(ROWS)]
PAIRS = list(zip(ASKED, ANSWERED, strict=True))
USER, ANSWER = {"role": "user", "content": ASKED[0]}, {"role": "assistant", "content": ANSWERED[0]}
PLAIN = {"messages": [USER, ANSWER]}
CALL = {"type": "function", "function": {"name": "next", "arguments": {"n": 0}}}
TOOL = {"type": "function", "function": {"name": "next", "parameters": {}}}


def rows(**columns):
    """ROWS rows, of which each value is one text, or made of a question and its answer."""
    made = []
    for asked, answered in PAIRS:
        values = {name: value(asked, answered) if callable(value) else value for name, value in columns.items()}
        made.append({name.replace("__", ""): value for name, value in values.items()})
    return made


def question(asked, answered):
    return asked


def answer(asked, answered):
    return answered


def said(*roles, role="role", content="content"):
    """Two messages by these roles."""
    return lambda *texts: [{role: name, content: text} for name, text in zip(roles, texts, strict=True)]


def one(name, text, role="role", content="content"):
    return [{role: name, content: text}]


SHARED = {"role": "from", "content": "value"}
BOTH = said("user", "assistant")
# name: rows, the first conversation, remarks
KINDS = {
    "alpaca": (
        rows(instruction=question, input="Be brief.", output=answer),
        {"messages": [{"role": "user", "content": f"{ASKED[0]}\n\nBe brief."}, ANSWER]},
        ("read as questions and answers: what output says counts, after instruction and input",),
    ),
    "alpaca with a system and a history": (
        rows(instruction=question, input="", output=answer, system="s", history=[["Hi", "Hello"]]),
        {"messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
        (
            "read as questions and answers: what output says counts, after instruction and input",
            "not read: the columns 'history'",
        ),
    ),
    "dolly": (
        rows(instruction=question, context="", response=answer, category="qa"),
        PLAIN,
        (
            "read as questions and answers: what response says counts, after instruction and context",
            "not read: the columns 'category'",
        ),
    ),
    "orca": (
        rows(system_prompt="s", question=question, response=answer),
        {"messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
        ("read as questions and answers: what response says counts, after question",),
    ),
    "inputs with labels that are classes": (
        rows(input=question, output=answer, label="False positive"),
        PLAIN,
        ("read as questions and answers: what output says counts, after input", "not read: the columns 'label'"),
    ),
    "inputs and targets": (
        rows(inputs=question, targets=answer, task_name="t"),
        PLAIN,
        (
            "read as questions and answers: what targets says counts, after inputs",
            "not read: the columns 'task_name'",
        ),
    ),
    "preferences with a system": (
        rows(system="s", prompt=question, chosen=answer, rejected="No."),
        {"prompt": [{"role": "system", "content": "s"}, USER], "completion": [ANSWER]},
        ("read as preferences: the chosen answers count", "20 rejected answers left out"),
    ),
    "preferences": (
        rows(prompt=question, chosen=lambda _, text: f" {text}", rejected=" No."),
        {"prompt": ASKED[0], "completion": f" {ANSWERED[0]}"},
        ("read as preferences: the chosen answers count", "20 rejected answers left out"),
    ),
    "preferences that repeat the question": (
        rows(prompt=question, chosen=BOTH, rejected=lambda asked, _: BOTH(asked, "No.")),
        {"prompt": [USER], "completion": [ANSWER]},
        ("read as preferences: the chosen answers count", "20 rejected answers left out"),
    ),
    "preferences without a prompt": (
        rows(chosen=lambda *texts: "Q: {} A: {}".format(*texts), rejected=lambda asked, _: f"Q: {asked} A: No."),
        {"prompt": f"Q: {ASKED[0]} A:", "completion": f" {ANSWERED[0]}"},
        ("read as preferences without a prompt: the chosen answers count", "20 rejected answers left out"),
    ),
    "preferences of ShareGPT": (
        rows(
            conversations=lambda asked, _: one("human", asked, **SHARED),
            chosen=lambda _, text: one("gpt", text, **SHARED)[0],
            rejected=one("gpt", "No.", **SHARED)[0],
        ),
        {"prompt": [USER], "completion": [ANSWER]},
        ("read as preferences: the chosen answers count", "20 rejected answers left out"),
    ),
    "KTO": (
        [{"prompt": a, "completion": f" {b}", "label": n % 2 == 0} for n, (a, b) in enumerate(PAIRS)],
        {"prompt": ASKED[0], "completion": f" {ANSWERED[0]}"},
        ("10 rows whose label is false left out",),
    ),
    "KTO of messages": (
        [{"messages": BOTH(*pair), "kto_tag": n % 2 == 0} for n, pair in enumerate(PAIRS)],
        PLAIN,
        ("10 rows whose label is false left out",),
    ),
    "joined without a space": (
        rows(prompt=question, completion=answer),
        {"prompt": ASKED[0], "completion": ANSWERED[0]},
        ("20 completions follow their prompt without a space: they are joined as they are",),
    ),
    "ShareGPT with a system": (
        rows(system="s", conversations=said("human", "gpt", **SHARED)),
        {"messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
        (),
    ),
    "ShareGPT's other roles": (
        rows(conversations=said("user", "chatgpt", **SHARED)),
        PLAIN,
        (),
    ),
    "ShareGPT's calls": (
        rows(
            conversations=lambda asked, text: [
                *one("human", asked, **SHARED),
                *one("function_call", '{"name": "next", "arguments": {"n": 0}}', **SHARED),
                *one("gpt", text, **SHARED),
            ],
            tools=json.dumps([TOOL]),
        ),
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL]},
                ANSWER,
            ],
            "tools": [TOOL],
        },
        (),
    ),
    "messages by other names": (rows(messages=said("human", "gpt")), PLAIN, ()),
    "messages in capitals": (rows(messages=said("User", "Assistant")), PLAIN, ()),
    "messages in parts": (
        rows(messages=lambda asked, text: BOTH([{"type": "text", "text": asked}, {"type": "image"}], text)),
        {"messages": [{**USER, "parts_without_text": 1}, ANSWER]},
        ("20 parts of messages are no texts and left out",),
    ),
    "turns of a question and its answer": (
        rows(
            conversation=lambda asked, text: [
                {"system": "s", "input": asked, "output": text},
                {"human": "b", "assistant": "c"},
            ]
        ),
        {
            "messages": [
                {"role": "system", "content": "s"},
                USER,
                ANSWER,
                *one("user", "b"),
                *one("assistant", "c"),
            ]
        },
        (),
    ),
    "LLaMA-Factory's newer form": (
        rows(
            messages=lambda asked, text: [
                {**USER, "content": [{"type": "text", "value": asked}], "loss_weight": 0.0},
                {
                    **ANSWER,
                    "content": [{"type": "reasoning", "value": "Add 1."}, {"type": "text", "value": text}],
                    "loss_weight": 1.0,
                },
                {
                    **ANSWER,
                    "content": [{"type": "tool_call", "value": json.dumps(CALL["function"])}],
                    "loss_weight": 0.0,
                },
                {**USER, "content": [{"type": "image_url", "value": "1.jpg"}, {"type": "tool_call", "value": "next"}]},
            ]
        ),
        {
            "messages": [
                {**USER, "loss_weight": 0.0},
                {**ANSWER, "loss_weight": 1.0, "reasoning_content": "Add 1."},
                {"role": "assistant", "loss_weight": 0.0, "tool_calls": [CALL]},
                {"role": "user", "content": "", "parts_without_text": 2},
            ]
        },
        (
            "20 answers are not to be counted (weight 0, train or loss false)",
            "40 parts of messages are no texts and left out",
        ),
    ),
    "LLaMA-Factory's newer preferences": (
        rows(chosen_messages=BOTH, rejected_messages=lambda asked, _: BOTH(asked, "No.")),
        {"prompt": [USER], "completion": [ANSWER]},
        ("read as preferences without a prompt: the chosen answers count", "20 rejected answers left out"),
    ),
    "messages under a misspelt name": (
        rows(id=7, massage=BOTH),
        PLAIN,
        ("the column massage is read, which holds messages", "not read: the columns 'id'"),
    ),
    "calls without a content": (
        rows(messages=lambda asked, _: [*one("user", asked), {"role": "assistant", "tool_calls": [CALL]}]),
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
        (),
    ),
    "what is not to be counted": (
        rows(messages=lambda *texts: [{**message, "weight": 0} for message in BOTH(*texts)]),
        {"messages": [{**USER, "weight": 0}, {**ANSWER, "weight": 0}]},
        ("20 answers are not to be counted (weight 0, train or loss false)",),
    ),
    "empty answers": (
        rows(messages=lambda asked, _: BOTH(asked, " ")),
        {"messages": [USER, {"role": "assistant", "content": " "}]},
        ("20 answers are empty",),
    ),
    "no answers": (
        rows(messages=lambda asked, _: one("user", asked)),
        {"messages": [USER]},
        ("20 conversations have no answer, so that nothing of them counts",),
    ),
    "no messages": (
        [{"conversations": []}, *rows(conversations=said("human", "gpt", **SHARED))],
        PLAIN,
        ("1 conversations without messages left out",),
    ),
    "a text and messages": (rows(text="", messages=BOTH), PLAIN, ("not read: the columns 'text'",)),
}


def written(folder, name, content):
    path = folder / name
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_rows_is_recognised_and_said(tmp_path, name):
    content, first, remarks = KINDS[name]
    text = corpus.load_corpus(written(tmp_path, "rows.jsonl", content))
    assert json.loads(next(iter(text.train))) == first
    assert text.remarks == remarks
    assert text.loss == "answers"


def test_each_kind_of_the_table_reads_what_it_says():
    for kind in formats.FORMATS:
        if kind is formats.TEXT or kind.read is formats.chat:
            continue
        row = {name: name for name in kind.required} | {"label": True, "kto_tag": True, "system": "s"}
        conversation = kind.read(row, *kind.arguments)
        assert isinstance(conversation, dict), kind
        assert formats.recognise(kind.required).required == kind.required


def test_what_has_two_answers_is_refused_with_a_cure_that_reads_all(tmp_path):
    path = written(tmp_path, "rows.jsonl", rows(question=question, answer=answer, response="No."))
    with pytest.raises(ConfigurationError, match=r"it has question, answer, response. .*prompt=COLUMN,completion=COL"):
        corpus.load_corpus(path)
    text = corpus.load_corpus(f"{path}:prompt=question,completion=answer")
    assert json.loads(next(iter(text.train))) == {"prompt": ASKED[0], "completion": ANSWERED[0]}
    with pytest.raises(ConfigurationError, match="give both, prompt=COLUMN,completion=COLUMN, or a column alone"):
        corpus.load_corpus(f"{path}:prompt=question")


def test_a_question_in_messages_and_an_answer_that_is_a_text_are_named_together(tmp_path):
    asked = rows(input=lambda asked, _: one("user", asked), ideal=answer)
    path = written(tmp_path, "rows.jsonl", asked)
    text = corpus.load_corpus(f"{path}:prompt=input,completion=ideal")
    assert json.loads(next(iter(text.train))) == {"prompt": [USER], "completion": [ANSWER]}


def test_a_text_beside_what_it_was_made_of_is_said_to_be_read_alone(tmp_path):
    path = written(tmp_path, "rows.jsonl", rows(instruction=question, output=answer, text=answer))
    text = corpus.load_corpus(path)
    assert (text.loss, text.remarks) == ("", ("the column text alone is read, of rows with instruction and output",))


def test_half_a_row_is_said_to_be_half(tmp_path):
    path = written(tmp_path, "rows.jsonl", rows(instruction=question, output=answer))
    half = corpus.load_corpus(f"{path}:instruction")
    assert half.remarks == ("the column instruction alone is read, of rows with instruction and output",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (rows(messages=said("user", "bot")), "'bot' is not known, .*: 'user' 20 times, 'bot' 20 times. Rename it: sys"),
        (rows(prompt=question), "has prompts without answers"),
        (rows(prompt=lambda asked, _: one("user", asked), reward_model="x"), "has prompts without answers"),
        ([{"from": "human", "value": text} for text in ASKED], "none says to which conversation it belongs"),
        ([{"input_ids": [1, 2]}], "token numbers of some tokenizer"),
        (rows(text=answer, role="assistant", parent_id="x"), "none says to which conversation it belongs"),
        (rows(text=lambda *texts: [*texts]), "list of texts: join them"),
        (rows(messages=lambda *texts: [{**BOTH(*texts)[1], "weight": 0.5}]), "line 1: weight is 0.5: only 0 and 1"),
        (rows(description=question, data={"next": 1}), "it has description, data. Name one, if it holds all"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused_by_name(tmp_path, content, message):
    with pytest.raises(ConfigurationError, match=message):
        corpus.load_corpus(written(tmp_path, "rows.jsonl", content))


# ---- forms of files ----

TEXTS = [{"text": text, "id": n} for n, text in enumerate(ANSWERED)]
BY_NUMBER = {str(n): row for n, row in enumerate(TEXTS)}
FORMS = {
    "lines.json": ("".join(json.dumps(row) + "\n" for row in TEXTS), ("read as JSON lines",)),
    "list.jsonl": (json.dumps(TEXTS), ("read as one piece of JSON",)),
    "pretty.jsonl": (json.dumps(TEXTS, indent=1), ("read as one piece of JSON",)),
    "columns.json": (json.dumps({"text": ANSWERED, "id": [0] * ROWS}), ("read by columns",)),
    "pandas.json": (
        json.dumps({name: {n: row[name] for n, row in BY_NUMBER.items()} for name in ("text", "id")}),
        ("read by columns",),
    ),
    "under.json": (json.dumps({"version": 1, "examples": TEXTS}), ("the rows under 'examples' are read",)),
    "semicolons.csv": (
        "text;label\n" + "".join(f"{text};0\n" for text in ANSWERED),
        ("the fields are separated by ';'", "not read: the columns 'label'"),
    ),
    "spaces.csv": (
        '"id", "text"\n' + "".join(f'1, "{text}"\n' for text in ANSWERED),
        ("spaces after a separator are left out",),
    ),
    "blank.csv": ("\n\ntext,id\n" + "".join(f"{text},1\n" for text in ANSWERED), ("the header stands in line 3",)),
    "tabs.csv": ("id\ttext\n" + "".join(f"1\t{text}\n" for text in ANSWERED), (r"the fields are separated by '\t'",)),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_file_is_read_in_the_form_that_it_has(tmp_path, name):
    content, remarks = FORMS[name]
    text = corpus.load_corpus(written(tmp_path, name, content))
    assert text.train + text.held_out == corpus.END_OF_TEXT.join(ANSWERED)
    assert text.remarks == remarks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train": TEXTS, "test": TEXTS}, "several lists of rows: train, test; save the one to train on alone"),
        ({"columns": ["text"], "index": [0, 1], "data": [["a"], ["b"]]}, 'one list of objects.*orient="records"'),
        (json.dumps(TEXTS), "it is a str: was it written as JSON twice?"),
        (BY_NUMBER, 'It must be one list of objects: .*pandas writes it so with orient="records"'),
    ],
)  # fmt: skip
def test_json_that_is_no_list_of_rows_is_refused_with_the_form_that_is(tmp_path, content, message):
    with pytest.raises(ConfigurationError, match=message):
        corpus.load_corpus(written(tmp_path, "rows.json", json.dumps(content)))


def test_chats_that_a_table_holds_as_texts_are_chats(tmp_path, subtests):
    import numpy as np
    import pandas as pd

    chats = [BOTH(f'{asked} "}} {{"', answered) for asked, answered in PAIRS]
    expected = corpus.load_corpus(written(tmp_path, "rows.jsonl", [{"messages": chat} for chat in chats])).sha256
    columns = {"python": chats, "json": list(map(json.dumps, chats)), "numpy": [np.array(chat) for chat in chats]}
    for name, column in columns.items():
        with subtests.test(name):
            pd.DataFrame({"messages": column}).to_csv(tmp_path / "rows.csv", index=False)
            assert corpus.load_corpus(str(tmp_path / "rows.csv")).sha256 == expected
    lines = written(tmp_path, "lists.jsonl", chats)
    assert corpus.load_corpus(lines).sha256 == expected


def test_both_kinds_of_arrow_files_are_read(tmp_path, subtests):
    import pyarrow as pa
    from pyarrow import feather, ipc

    table = pa.table({"text": ANSWERED})
    feather.write_feather(table, tmp_path / "file.arrow", compression="uncompressed")
    feather.write_feather(table, tmp_path / "file.feather")
    with ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("file.arrow", "file.feather", "stream.arrow"):
        with subtests.test(name):
            assert corpus.load_corpus(str(tmp_path / name)).documents == ROWS


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
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    written(folder / "data", "train.jsonl", TEXTS)
    written(folder / "data", "test.jsonl", [{"text": "secret"}] * 5)
    text = corpus.load_corpus(str(folder))
    assert text.train + text.held_out == corpus.END_OF_TEXT.join(ANSWERED)
    assert text.remarks == ("the rows of other splits are left out: test with 5",)
    assert corpus.load_corpus(f"{folder}:test").documents == 5
    written(folder / "data", "train.jsonl", TEXTS[:10])
    assert corpus.load_corpus(str(folder)).documents == 10
    (folder / "data" / "train.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigurationError, match="pointer of Git LFS, without the data. Run: git lfs pull"):
        corpus.load_corpus(str(folder))


def test_a_test_split_beside_a_training_split_is_not_trained_on(tmp_path):
    for name in ("train", "test", "validation"):
        written(tmp_path, f"{name}-00000.jsonl", TEXTS if name == "train" else [{"text": "secret"}] * 3)
    text = corpus.load_corpus(str(tmp_path))
    assert "secret" not in text.train + text.held_out
    assert text.remarks == ("2 files of other kinds or splits left out",)
    assert corpus.load_corpus(f"{tmp_path}/test-00000.jsonl").documents == 3


# ---- encodings and line ends ----

TURKISH = (
    "Merhaba, kütüphanenin ne zaman açılacağını öğrenmek istiyorum. Gelecek hafta tekrar gelip ısmarladığım bütün "
    "kitapları alacağım. Cevabınız için teşekkür ederim. Şimdi güneş batıyor ve çocuklar eve dönüyor.\n" * 9
)
WESTERN = "\u201cCafé\u201d \u2013 naïve\n" * 9


@pytest.mark.parametrize(
    ("encoding", "guess", "text"),
    [
        ("cp1252", "cp1252", WESTERN),
        ("latin-1", "cp1252", "Un café naïve, déjà vu\n" * 9),
        ("cp1251", "cp1251", "Город стоит у реки, и река течёт мимо\n" * 9),
        ("cp1250", "cp1250", "Zażółć gęślą jaźń, miła łąka świeci\n" * 9),
        ("cp1250", "cp1250", "Őszintén szólva nagyon fűtött a szoba, köszönöm szépen a könyvet\n" * 9),
        ("cp1250", "cp1250", "Aş vrea să ştiu când se deschide biblioteca şi ce cărţi sunt în ea\n" * 9),
        ("cp1252", "cp1252", "J’étais à l’étranger cet été, où j’ai goûté des crêpes\n" * 9),
        ("cp1253", "cp1253", "Η πόλη βρίσκεται στο ποτάμι και το ποτάμι περνά\n" * 9),
        ("cp1254", "cp1254", TURKISH),
        ("shift_jis", "cp932", "日本語の文章です。番号は三です。\n" * 9),
        ("gbk", "gb18030", "这是一个中文句子，编号是三。\n" * 9),
        ("utf-16-le", "utf-16-le", "some words\n" * 9),
    ],
)  # fmt: skip
def test_an_encoding_is_guessed_and_the_cure_works(tmp_path, encoding, guess, text):
    path = written(tmp_path, "text.txt", text.encode(encoding))
    with pytest.raises(ConfigurationError, match=f"{path}:encoding={guess}"):
        corpus.load_corpus(path)
    read = corpus.load_corpus(f"{path}:encoding={guess}")
    assert read.train + read.held_out == text


def test_a_few_odd_bytes_in_a_long_text_are_no_other_language(tmp_path):
    text = "ham,Ok lar, joking with you, more words to say\n" * 99 + "spam,only å£100 å£1.50 ü å£ å£ å£ å£ Û÷s\n" * 2
    with pytest.raises(ConfigurationError, match="encoding=cp1252"):
        corpus.load_corpus(written(tmp_path, "text.txt", text.encode("cp1252")))


def test_an_encoding_that_is_wrong_and_can_be_read_is_refused(tmp_path):
    path = written(tmp_path, "text.txt", WESTERN.encode("cp1252"))
    with pytest.raises(ConfigurationError, match=r"byte 0x93 in line 1 is a control .*:encoding=cp1252"):
        corpus.load_corpus(f"{path}:encoding=latin-1")
    path = written(tmp_path, "text.txt", "Un café naïve, déjà vu\n")
    with pytest.raises(ConfigurationError, match="is UTF-8, not cp1252"):
        corpus.load_corpus(f"{path}:encoding=cp1252")


def test_what_was_read_wrongly_before_is_counted(tmp_path):
    text = corpus.load_corpus(written(tmp_path, "text.txt", "Caf\ufffd\n" * 9))
    assert text.remarks == ("9 characters are U+FFFD: the text was read in a wrong encoding once",)


def test_line_ends_of_old_macs_are_named(tmp_path, subtests):
    for name, content in (("a.txt", "one\rtwo\r"), ("a.csv", "text\rone\rtwo"), ("a.jsonl", '{"text": "a"}\r{}')):
        with subtests.test(name), pytest.raises(ConfigurationError, match=r"old Macs .* tr '\\r' '\\n' < a\."):
            corpus.load_corpus(written(tmp_path, name, content))
    assert corpus.load_corpus(written(tmp_path, "b.txt", "a\rb\nc\n" * 9)).train.startswith("a\rb")


def test_a_pointer_in_the_place_of_a_text_is_no_text(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for name in ("a.txt", "a.csv"):
        with pytest.raises(ConfigurationError, match="pointer of Git LFS"):
            next(readers.find_text(written(tmp_path, name, pointer), "").rows())
