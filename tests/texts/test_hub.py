"""Data sets of a hub on this machine."""

import json
import os
import socket
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest
from fake_hub import TOKEN, hub_at, serving
from huggingface_hub import constants

from workbench.__main__ import absolute, main
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.texts import corpus, download

TEXTS = [{"text": f"some words, number {n}"} for n in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(40)
]
CONFIGS = (
    "---\nconfigs:\n- config_name: one\n  data_files: one.jsonl\n- config_name: two\n  data_files: two.jsonl\n---\n"
)
NAMES = [
    "user/texts", "old-name", "user/chats", "user/chats:test", "user/chats:split=test,loss=all",
    "user/several:config=one", "user/several:config=two,text=body",
    "gated/texts", "private/texts", "user/nothing", "user/several", "json",
    "user/several:config=three", "user/texts:column=body", "user/texts:text=body", "user/chats:dev",
    "user/texts:train[:10%", "user/texts:train[:0%]", "user/texts:train[:50%]",
    "user/chats:split=train[10:20]+test[:25%],loss=all", "user/several:config=two",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    repositories = {
        "user/texts/train.jsonl": TEXTS, "gated/texts/train.jsonl": TEXTS, "private/texts/train.jsonl": TEXTS,
        "user/plain/train.jsonl": TEXTS[:30], "user/chats/train.jsonl": CHATS, "user/chats/test.jsonl": CHATS[:20],
        "user/several/one.jsonl": TEXTS[:20], "user/several/two.jsonl": [{"body": row["text"]} for row in TEXTS[:20]],
    }  # fmt: skip
    for name, rows in repositories.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "user/several/README.md").write_text(CONFIGS)
    return folder


def read(names):
    """What becomes of each name."""
    answers, fields = {}, ("name", "sha256", "documents", "loss", "remarks")
    for name in names:
        try:
            text = corpus.load_corpus(name)
            answers[name] = {field: getattr(text, field) for field in fields}
        except Exception as error:
            answers[name] = {"error": type(error).__name__, "message": str(error)}
    return answers


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory):
    """Online; then with a token; then with no hub; then offline by order. And what the hub was asked."""
    home, home_of_another = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("another")
    with serving(folder) as server:
        port = server.server_port
        with hub_at(port, home):
            online, requests = read(NAMES), list(server.asked)
        with hub_at(port, home_of_another, token=TOKEN):
            known = read(["gated/texts", "private/texts"])
        tokens = {token for path, token in server.asked[len(requests) :] if "texts" in path}
    with hub_at(port, home):
        gone = read(["user/texts", "user/chats:test", "texts", "user/nothing", "user/texts:train[:50%]"])
    with hub_at(port, home, offline=True):
        offline = read(["user/texts", "user/chats:test", "user/nothing"])
    return {"online": online, "asked": requests, "known": known, "tokens": tokens, "gone": gone, "offline": offline}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return corpus.load_corpus(str(path)).sha256


def test_a_data_set_is_read_as_a_file_with_its_rows_would_be(answers, tmp_path):
    texts, chats = answers["online"]["user/texts"], answers["online"]["user/chats"]
    assert (texts["name"], texts["documents"], texts["loss"]) == ("user/texts", 40, "")
    assert texts["sha256"] == written(tmp_path / "texts.jsonl", TEXTS)
    assert chats["sha256"] == written(tmp_path / "chats.jsonl", CHATS)
    assert chats["loss"] == "answers"


@pytest.mark.parametrize("without_links", [False, True], ids=["links", "no_links"])
@pytest.mark.parametrize("name", ["user/texts", "user/nested"])
def test_a_damaged_file_is_named_before_it_is_used_and_fetched_anew(folder, tmp_path, monkeypatch, name, without_links):
    (folder / "user/nested/data").mkdir(parents=True, exist_ok=True)
    (folder / "user/nested/data/train.txt").write_text("words\n" * 40)  # which can be read, damaged or not
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", without_links)
    with serving(folder) as server, hub_at(server.server_port, tmp_path):
        server.fault = ("damage", "train.")
        with pytest.raises(ConfigurationError, match=r"train\.\w+ in .* is damaged: it is not what the hub stated"):
            corpus.load_corpus(name)
        server.fault = ("", "")
        assert corpus.load_corpus(name).documents == 40
        (fetched,) = tmp_path.rglob("train.*")
        assert fetched.is_symlink() != without_links


@pytest.mark.parametrize("fault", ["GET hang", "GET 429"])
def test_files_that_do_not_come_are_given_up_and_the_wait_is_announced(folder, tmp_path, monkeypatch, capsys, fault):
    monkeypatch.setattr("workbench.base.hub.STALLED_S", 1.0)
    monkeypatch.setattr("workbench.base.limits.NOTICE_S", 0.1)
    with serving(folder) as server, hub_at(server.server_port, tmp_path):
        server.fault = (fault, "train.jsonl")
        with pytest.raises(UnavailableError, match=r"the .*hub sends nothing more \(nothing has come for 1 s"):
            corpus.load_corpus("user/texts")
    assert "hub: waiting for the files of user/texts from http://" in capsys.readouterr().err


def test_a_full_disk_is_named_and_not_the_network(folder, tmp_path, monkeypatch):
    def fill(*_, **__):
        raise OSError(28, "No space left on device")

    with serving(folder) as server, hub_at(server.server_port, tmp_path):
        monkeypatch.setattr("pyarrow.RecordBatchStreamWriter.write_table", fill)
        monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.write_table", fill)
        with pytest.raises(UnavailableError, match=r"cannot be written into the cache .* \(the disk is full\)"):
            corpus.load_corpus("user/texts")


def test_an_old_name_leads_to_the_new_one_and_stays_in_the_recipe(answers):
    assert answers["online"]["old-name"] == {**answers["online"]["old-name"], "name": "old-name", "documents": 30}


def test_splits_configs_columns_and_what_counts_are_options(answers, tmp_path):
    online, test = answers["online"], written(tmp_path / "test.jsonl", CHATS[:20])
    assert online["user/chats:test"]["sha256"] == online["user/chats:split=test,loss=all"]["sha256"] == test
    assert online["user/chats:split=test,loss=all"]["loss"] == "all"
    one, two = online["user/several:config=one"], online["user/several:config=two,text=body"]
    assert one["sha256"] == two["sha256"] == written(tmp_path / "one.jsonl", TEXTS[:20])


def test_the_rows_of_splits_that_are_not_read_are_counted(answers):
    online, gone = answers["online"], answers["gone"]
    assert online["user/texts"]["remarks"] == ()
    assert online["user/chats"]["remarks"] == ("the rows of other splits are left out: test with 20",)
    assert online["user/chats:test"]["remarks"] == gone["user/chats:test"]["remarks"]
    assert gone["user/chats:test"]["remarks"] == ("the rows of other splits are left out: train with 40",)
    assert online["user/chats:split=train[10:20]+test[:25%],loss=all"]["remarks"] == ()


def test_parts_of_splits_are_what_a_file_with_these_rows_would_be(answers, tmp_path):
    online, both = answers["online"], CHATS[10:20] + CHATS[:5]
    half = written(tmp_path / "half.jsonl", TEXTS[:20])
    assert online["user/texts:train[:50%]"]["sha256"] == answers["gone"]["user/texts:train[:50%]"]["sha256"] == half
    assert online["user/chats:split=train[10:20]+test[:25%],loss=all"]["sha256"] == written(tmp_path / "b.jsonl", both)


REFUSED = (
    ("user/nothing", "has no public dataset 'user/nothing' (HTTP 404). Check the spelling; for a private one log in"),
    ("json", "there is no file 'json' (looked in /"),
    ("json", "nor an embedded text, and the Hugging Face hub has no public dataset 'json'"),
    ("private/texts", "has no public dataset 'private/texts' (HTTP 401). Check the spelling; for a private one log in"),
    ("gated/texts", "'gated/texts' is gated on the Hugging Face hub (HTTP 403). Accept its conditions at http://127"),
    ("gated/texts", "/datasets/gated/texts and log in with `hf auth login`"),
    ("user/several", "Please pick one among the available configs: ['one', 'two']"),
    ("user/several:config=three", "'three' not found. Available: ['one', 'two']"),
    ("user/chats:dev", "Unknown split \"dev\". Should be one of ['train', 'test']"),
    ("user/texts:column=body", "name a column by what it holds, such as text=body"),
    ("user/texts:text=body", "has no column 'body'. It has: 'text' ('some words, number 0')"),
    (
        "user/several:config=two",
        "It has: 'body' ('some words, number 0'). Say what to read: user/several:config=two,te",
    ),
    ("user/texts:train[:10%", "Unrecognized instruction format: train[:10%"),
    ("user/texts:train[:0%]", "corresponds to no data"),
)


def test_what_cannot_be_had_is_told_with_the_cure(answers, subtests):
    for name, message in REFUSED:
        with subtests.test(name=name, message=message):
            assert answers["online"][name]["error"] == "ConfigurationError"
            assert message in answers["online"][name]["message"]


def test_the_users_token_opens_what_is_gated_or_private(answers):
    assert answers["tokens"] == {f"Bearer {TOKEN}"}
    assert {answer["documents"] for answer in answers["known"].values()} == {40}
    assert {token for _, token in answers["asked"]} == {None}


def test_what_is_cached_is_read_without_a_hub_and_the_rest_is_refused(answers):
    for state in ("gone", "offline"):
        for name in ("user/texts", "user/chats:test"):
            assert answers[state][name]["sha256"] == answers["online"][name]["sha256"]
        nothing = answers[state]["user/nothing"]
        assert nothing["error"] == "UnavailableError"
        assert "is not in the local cache, and the Hugging Face hub cannot be reached" in nothing["message"]
    assert answers["gone"]["texts"]["sha256"] == answers["online"]["user/texts"]["sha256"]
    assert "(HF_HUB_OFFLINE is set)" in answers["offline"]["user/nothing"]["message"]


READ = """
import json, sys
from workbench.texts.corpus import load_corpus
print(json.dumps([load_corpus(name).sha256 for name in sys.argv[1:]]))
"""


@pytest.mark.dear
def test_a_process_finds_the_hub_where_its_environment_says(folder, tmp_path):
    names = ["user/texts", "user/chats:test"]
    expected = [written(tmp_path / "a.jsonl", TEXTS), written(tmp_path / "b.jsonl", CHATS[:20])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment["HF_HOME"] = str(tmp_path / "home")
    command = [sys.executable, "-c", READ, *names]
    with serving(folder) as server:
        environment["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        online = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    gone = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(online.stdout) == json.loads(gone.stdout) == expected


# ---- what asks no hub, and what is no hub to ask ----


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(download, "repository_info", lambda *_: pytest.fail("asked"))


FILES = (
    "novel.txt", "rows.jsonl:text=body", "a.json", "a.csv.gz", "a.gz", "./user/set", "~/set", "/user/set", "a/b/c",
    "a b", "é", "user/rows.parquet", "x" * 97, "-set", "user\\set", "user/", "",
)  # fmt: skip


def test_what_looks_like_a_file_asks_no_hub(no_hub, subtests):
    message = "there is no file .*, nor an embedded text. Embedded: shakespeare"
    for name in FILES:
        with subtests.test(name), pytest.raises(ConfigurationError, match=message):
            corpus.load_corpus(name)


def test_what_is_there_comes_before_the_hub(tmp_path, monkeypatch, no_hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imdb").write_text("some words in a file")
    (tmp_path / "user" / "set").mkdir(parents=True)
    (tmp_path / "user" / "set" / "a.txt").write_text("some words in a folder")
    assert corpus.load_corpus("imdb").documents == corpus.load_corpus("user/set").documents == 1
    assert corpus.load_corpus("shakespeare").name == "shakespeare"
    assert absolute("user/other:test") == "user/other:test"


def test_options_are_checked_first(no_hub, subtests):
    for name, message in (
        ("imdb:encoding=latin-1", "hub has no encoding, only text=…, .*, input=…, loss=…, split=…, config=…"),
        ("imdb:test,train", "split is given twice"),
        ("imdb:", "there is an empty option"),
        ("imdb:rows=3", "hub has no rows, only text=…, messages=…"),
        ("imdb:column=body", "name a column by what it holds, such as text=body"),
    ):
        with subtests.test(name), pytest.raises(ConfigurationError, match=message):
            corpus.load_corpus(name)


@pytest.fixture
def nowhere(monkeypatch, tmp_path, request):
    """A hub whose name nobody knows, whose name is never answered, whose address swallows all, or that is offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param == "offline")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "data"))
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    given_up = threading.Event()
    if request.param == "silent name":
        # a command that waits for the answer fails after it
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [] if given_up.wait(60) else pytest.fail("waited"))
    if request.param == "black hole":
        with socket.socket() as full:  # where two wait already, a third one gets no answer at all
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            waiting = [socket.socket() for _ in range(3)]
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{full.getsockname()[1]}")
            yield
            for one in waiting:
                one.close()
        return
    yield
    given_up.set()


COMMANDS = (["run"], ["predict", "--gpu", "t4"], ["plan", "--gpu", "t4"], ["script"])


@pytest.mark.parametrize("nowhere", ["unknown name", "silent name", "black hole", "offline"], indirect=True)
def test_every_command_says_that_there_is_no_hub_and_waits_for_no_answer(nowhere, request, capsys, subtests):
    """Where a name is never answered, or an address, each takes a second: a text and a model are enough there."""
    commands = [[name, "gpt2-tiny", "--corpus", "user/nothing", *more] for name, *more in COMMANDS]
    commands += [[name, "user/nothing", *more] for name, *more in COMMANDS]
    commands += [["scan", "user/nothing", "--model", "gpt2-tiny", "--gpu", "t4"]]
    slow = request.node.callspec.params["nowhere"] in ("silent name", "black hole")
    for command in commands[:: len(COMMANDS)][:2] if slow else commands:
        with subtests.test(command=command):
            assert main(command) == 3
            message = capsys.readouterr().err
            assert "'user/nothing' is not in the local cache, and the Hugging Face hub cannot be reached" in message


def test_a_hub_that_fails_is_not_taken_for_one_without_the_data_set(monkeypatch):
    failing = Mock(side_effect=UnavailableError("corpus: HTTP 503"))
    monkeypatch.setattr(download, "repository_info", failing)
    with pytest.raises(UnavailableError, match="HTTP 503"):
        corpus.load_corpus("user/failing")
