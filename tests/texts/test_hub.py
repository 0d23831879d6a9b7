"""Data sets of a hub on this machine, asked by processes of their own, as `datasets` reads its address once."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from fake_hub import TOKEN, serving
from huggingface_hub import constants

from workbench import hub
from workbench.__main__ import absolute, main
from workbench.errors import ConfigurationError, UnavailableError
from workbench.texts import corpus

READ = """
import json, sys, time
from workbench.texts.corpus import load_corpus
for name in sys.argv[1:]:
    start = time.monotonic()
    try:
        text = load_corpus(name)
        told = {"name": text.name, "sha256": text.sha256, "documents": text.documents, "loss": text.loss}
    except Exception as error:
        told = {"error": type(error).__name__, "words": str(error)}
    print(json.dumps({**told, "seconds": time.monotonic() - start}))
"""
TEXTS = [{"text": f"some words, number {n}"} for n in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(40)
]
CONFIGS = (
    "---\nconfigs:\n- config_name: one\n  data_files: one.jsonl\n- config_name: two\n  data_files: two.jsonl\n---\n"
)
NAMES = [
    "user/texts", "old-name", "user/chats", "user/chats:test", "user/chats:split=test,loss=all",
    "user/several:config=one", "user/several:config=two,column=body",
    "gated/texts", "private/texts", "user/nothing", "user/several", "json",
    "user/several:config=three", "user/texts:column=body", "user/chats:dev", "user/texts:train[:10%",
    "user/texts:train[:0%]", "user/texts:train[:50%]", "user/chats:split=train[10:20]+test[:25%],loss=all",
    "user/several:config=two",
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


def read(names, port, home, **environment):
    """What became of each name, in a process that finds the hub at a port."""
    hidden = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), **environment}
    command = [sys.executable, "-c", READ, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=hidden | settings)
    assert done.returncode == 0, done.stderr
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory):
    """Online; then with a token; then with no hub; then offline by order. And what the hub was asked."""
    home = tmp_path_factory.mktemp("home")
    with serving(folder) as server:
        online, asked = read(NAMES, server.server_port, home), list(server.asked)
        known = read(["gated/texts", "private/texts"], server.server_port, tmp_path_factory.mktemp("a"), HF_TOKEN=TOKEN)
        tokens = {token for path, token in server.asked[len(asked) :] if "texts" in path}
        port = server.server_port
    gone = read(["user/texts", "user/chats:test", "texts", "user/nothing", "user/texts:train[:50%]"], port, home)
    offline = read(["user/texts", "user/chats:test", "user/nothing"], port, home, HF_HUB_OFFLINE="1")
    return {"online": online, "asked": asked, "known": known, "tokens": tokens, "gone": gone, "offline": offline}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return corpus.load_corpus(str(path)).sha256


def test_a_data_set_is_read_as_a_file_with_its_rows_would_be(found, tmp_path):
    texts, chats = found["online"]["user/texts"], found["online"]["user/chats"]
    assert (texts["name"], texts["documents"], texts["loss"]) == ("user/texts", 40, "")
    assert texts["sha256"] == written(tmp_path / "texts.jsonl", TEXTS)
    assert chats["sha256"] == written(tmp_path / "chats.jsonl", CHATS)
    assert chats["loss"] == "answers"


def test_an_old_name_leads_to_the_new_one_and_stays_in_the_recipe(found):
    assert found["online"]["old-name"] == {**found["online"]["old-name"], "name": "old-name", "documents": 30}


def test_splits_configs_columns_and_what_counts_are_options(found, tmp_path):
    online, test = found["online"], written(tmp_path / "test.jsonl", CHATS[:20])
    assert online["user/chats:test"]["sha256"] == online["user/chats:split=test,loss=all"]["sha256"] == test
    assert online["user/chats:split=test,loss=all"]["loss"] == "all"
    one, two = online["user/several:config=one"], online["user/several:config=two,column=body"]
    assert one["sha256"] == two["sha256"] == written(tmp_path / "one.jsonl", TEXTS[:20])


def test_parts_of_splits_are_what_a_file_with_these_rows_would_be(found, tmp_path):
    online, both = found["online"], CHATS[10:20] + CHATS[:5]
    half = written(tmp_path / "half.jsonl", TEXTS[:20])
    assert online["user/texts:train[:50%]"]["sha256"] == found["gone"]["user/texts:train[:50%]"]["sha256"] == half
    assert online["user/chats:split=train[10:20]+test[:25%],loss=all"]["sha256"] == written(tmp_path / "b.jsonl", both)


@pytest.mark.parametrize(("name", "words"), [
    ("user/nothing", "has no public dataset 'user/nothing' (HTTP 404). Check the spelling; for a private one log in"),
    ("json", "there is no file 'json' (looked in /"),
    ("json", "nor an embedded text, and the Hugging Face hub has no public dataset 'json'"),
    ("private/texts", "has no public dataset 'private/texts' (HTTP 401). Check the spelling; for a private one log in"),
    ("gated/texts", "'gated/texts' is gated on the Hugging Face hub (HTTP 403). Accept its conditions at http://127"),
    ("gated/texts", "/datasets/gated/texts and log in with `hf auth login`"),
    ("user/several", "Please pick one among the available configs: ['one', 'two']"),
    ("user/several:config=three", "'three' not found. Available: ['one', 'two']"),
    ("user/chats:dev", 'Unknown split "dev". Should be one of [\'train\', \'test\']'),
    ("user/texts:column=body", "has no column 'body'; it has text. Name one: user/texts:column=text"),
    ("user/several:config=two", "has no column 'text'; it has body. Name one: user/several:config=two,column=body"),
    ("user/texts:train[:10%", "Unrecognized instruction format: train[:10%"),
    ("user/texts:train[:0%]", "corresponds to no data"),
])  # fmt: skip
def test_what_cannot_be_had_is_told_with_the_cure(found, name, words):
    assert found["online"][name]["error"] == "ConfigurationError"
    assert words in found["online"][name]["words"]


def test_the_users_token_opens_what_is_gated_or_private(found):
    assert found["tokens"] == {f"Bearer {TOKEN}"}
    assert {told["documents"] for told in found["known"].values()} == {40}
    assert {token for _, token in found["asked"]} == {None}


def test_what_is_cached_is_read_without_a_hub_and_the_rest_is_refused_in_time(found):
    for state, seconds in (("gone", 2.5), ("offline", 2.5)):
        told = found[state]
        for name in ("user/texts", "user/chats:test"):
            assert told[name]["sha256"] == found["online"][name]["sha256"]
        assert told["user/nothing"]["error"] == "UnavailableError"
        assert "is not in the local cache, and the Hugging Face hub cannot be reached" in told["user/nothing"]["words"]
        assert told["user/nothing"]["seconds"] < seconds
    assert found["gone"]["texts"]["sha256"] == found["online"]["user/texts"]["sha256"]
    assert "(HF_HUB_OFFLINE is set)" in found["offline"]["user/nothing"]["words"]


# ---- what asks no hub, and what is no hub to ask ----


@pytest.mark.parametrize("name", [
    "novel.txt", "rows.jsonl:body", "a.json", "a.csv.gz", "a.gz", "./user/set", "~/set", "/user/set", "a/b/c", "a b",
    "é",
    "user/rows.parquet", "x" * 97, "-set", "user\\set", "user/", "",
])  # fmt: skip
def test_what_looks_like_a_file_asks_no_hub(name, monkeypatch):
    monkeypatch.setattr(hub, "require", lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigurationError, match="there is no file .*, nor an embedded text. Embedded: shakespeare"):
        corpus.load_corpus(name)


def test_what_is_there_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "require", lambda *_: pytest.fail("asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imdb").write_text("some words in a file")
    (tmp_path / "user" / "set").mkdir(parents=True)
    (tmp_path / "user" / "set" / "a.txt").write_text("some words in a folder")
    assert corpus.load_corpus("imdb").documents == corpus.load_corpus("user/set").documents == 1
    assert corpus.load_corpus("shakespeare").name == "shakespeare"
    assert absolute("user/other:test") == "user/other:test"


@pytest.mark.parametrize(("name", "words"), [
    ("imdb:encoding=latin-1", "'imdb:encoding=latin-1': hub has no encoding, only column=…"),
    ("imdb:test,train", "split is given twice"), ("imdb:", "split is empty"), ("imdb:rows=3", "no option 'rows'"),
])  # fmt: skip
def test_options_are_checked_first(name, words, monkeypatch):
    monkeypatch.setattr(hub, "require", lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigurationError, match=words):
        corpus.load_corpus(name)


@pytest.fixture
def nowhere(monkeypatch, tmp_path, request):
    """A hub whose name nobody knows, whose name is never answered, whose address swallows all, or that is offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param == "offline")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "data"))
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    if request.param == "silent name":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(5) or [])
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


COMMANDS = (["run"], ["predict", "--gpu", "t4"], ["plan", "--gpu", "t4"], ["script"])


@pytest.mark.parametrize("nowhere", ["unknown name", "silent name", "black hole", "offline"], indirect=True)
def test_every_command_says_within_two_seconds_that_there_is_no_hub(nowhere, capsys):
    commands = [[name, "gpt2-tiny", "--corpus", "user/nothing", *more] for name, *more in COMMANDS]
    commands += [[name, "user/nothing", *more] for name, *more in COMMANDS]
    commands += [["scan", "user/nothing", "--model", "gpt2-tiny", "--gpu", "t4"]]
    for command in commands:
        start = time.monotonic()
        assert main(command) == 3, command
        assert time.monotonic() - start < 2, command
        told = capsys.readouterr().err
        assert "'user/nothing' is not in the local cache, and the Hugging Face hub cannot be reached" in told


def test_a_hub_that_fails_is_not_taken_for_one_without_the_data_set(monkeypatch):
    monkeypatch.setattr(hub, "require", lambda *_: (_ for _ in ()).throw(UnavailableError("corpus: HTTP 503")))
    with pytest.raises(UnavailableError, match="HTTP 503"):
        corpus.load_corpus("user/failing")
