"""Models of a hub on this machine: fetched, proved, and taken from the cache while the hub misbehaves."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from fake_hub import COMMIT, OTHER, hub_at, serving
from huggingface_hub import constants
from safetensors.torch import save_file

from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.base.paths import MODELS
from workbench.models.load import load_tokenizer
from workbench.models.source import locate, locate_config

NAME = "user/tiny"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repositories")
    for name in (NAME, "user/shards", "user/plain"):
        (folder / name).mkdir(parents=True)
        for file in FILES:
            shutil.copy(MODELS / "gpt2-tiny" / file, folder / name)
    for part in (1, 2):
        save_file({f"w{part}": torch.ones(9)}, folder / "user/shards" / f"model-0000{part}-of-00002.safetensors")
    weights = {f"w{part}": f"model-0000{part}-of-00002.safetensors" for part in (1, 2)}
    (folder / "user/shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    save_file({"w": torch.ones(999)}, folder / NAME / "model.safetensors")
    (folder / NAME / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / NAME / "onnx").mkdir()
    (folder / NAME / "onnx" / "model.safetensors").write_bytes(b"of another program")
    (folder / "user/plain/tokenizer.json").unlink()
    (folder / "user/none").mkdir()
    (folder / "user/none/README.md").write_text("A card.")
    with serving(folder) as server:
        yield server


@pytest.fixture
def server(served):
    served.fault = ("", "")
    served.commit = COMMIT
    served.asked.clear()
    return served


@pytest.fixture
def home(tmp_path, server):
    """An empty cache, and the hub."""
    with hub_at(server.server_port, tmp_path):
        yield tmp_path


@pytest.fixture
def whole(home):
    """A cache with the model in it."""
    locate(NAME)
    return home


def test_a_model_is_fetched_and_is_a_folder_from_then_on(server, whole):
    source = locate(NAME)
    assert (source.name, source.random, str(source.address)) == (NAME, False, NAME)
    files = {path.name for path in whole.rglob("snapshots/*/*")}
    assert files == {*FILES, "model.safetensors"}  # neither pickled ones nor those of other programs
    assert source.location.endswith(COMMIT)
    server.asked.clear()
    locate(NAME)
    assert [path for path, _ in server.asked] == [f"/api/models/{NAME}"]  # whether there is a newer one, and no more


def test_a_newer_commit_is_fetched_and_without_the_hub_the_last_one_is_used(server, whole):
    server.commit = "1" * 40
    assert locate(NAME).location.endswith("1" * 40)
    server.fault = ("503", "")
    assert locate(NAME).location.endswith("1" * 40)


def test_the_users_token_is_sent(server, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    locate(NAME)
    assert {token for _, token in server.asked} == {"Bearer hf_of_the_user"}


def test_shards_are_fetched_and_a_missing_one_is_named(server, home, monkeypatch):
    locate("user/shards")
    next(home.rglob("model-00002-of-00002.safetensors")).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnavailableError, match="is in the local cache without model-00002-of-00002.safetensors"):
        locate("user/shards")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_offline_a_partial_cache_says_what_is_missing(whole, monkeypatch, name):
    next(whole.rglob(name)).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnavailableError, match=f"is in the local cache without {name}, .*HF_HUB_OFFLINE is set"):
        locate(NAME)


def test_a_model_without_a_tokenizer_of_its_own_is_known_as_such_offline(home, monkeypatch):
    first = locate("random:user/plain")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("random:user/plain") == first
    assert len(load_tokenizer(first)) == 50257


def test_what_is_no_model_is_refused(home):
    with pytest.raises(ConfigurationError, match="'user/none' on the hub has no config.json"):
        locate("user/none")
    with pytest.raises(ConfigurationError, match=r"'user/plain' on the hub has no \*.safetensors weights"):
        locate("user/plain")


# ---- a hub that misbehaves ----

FAULTS = {
    "hang": "does not answer in time",
    "drip": "does not answer (in time|as a hub)",
    "redirect": "only leads to other addresses, without an end",
    "429": "answers HTTP 429, too many requests: wait some minutes",
    "503": r"answers HTTP 503\. Try again later",
    "nonsense": "does not answer as a hub.* may want a login in the browser",
    "login": "does not answer as a hub.* may want a login in the browser",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("part", ["", "/resolve/"], ids=["all", "files"])
def test_what_is_whole_is_used_in_time_and_else_the_fault_is_named(
    server, whole, tmp_path, monkeypatch, capsys, fault, part
):
    monkeypatch.setattr("workbench.base.hub.HUB_PATIENCE_S", 0.3)
    monkeypatch.setattr("workbench.base.hub.PAUSES_S", (0.1,))
    server.fault = (fault, part)
    server.commit = "1" * 40 if part else COMMIT  # there is a newer one, of which no file can be had
    start = time.monotonic()
    for _ in range(3):
        assert locate(NAME).location.endswith(COMMIT)
    assert time.monotonic() - start < 2
    assert capsys.readouterr().err.count("The copy in the cache is used") == 1
    with (
        hub_at(server.server_port, whole / "another"),
        pytest.raises(UnavailableError, match=f"'{NAME}' is not in the local cache, and the .* hub {FAULTS[fault]}"),
    ):
        locate(NAME)


@pytest.mark.parametrize("without_links", [False, True], ids=["links", "no_links"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_download_is_named_before_it_is_used_and_fetched_anew(server, home, monkeypatch, name, without_links):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", without_links)
    server.fault = ("damage", name)
    with pytest.raises(ConfigurationError, match=f"{name} in .* is damaged: it is not what the hub stated.*removed"):
        locate(NAME)
    server.fault = ("", "")
    assert locate(NAME).location.endswith(COMMIT)


@pytest.mark.parametrize("without_links", [False, True], ids=["links", "no_links"])
def test_offline_a_damaged_file_is_found_too(home, monkeypatch, without_links):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_SYMLINKS", without_links)
    whole = Path(locate(NAME).location)
    assert (whole / "model.safetensors").is_symlink() != without_links
    damaged = next(whole.rglob("model.safetensors")).resolve()
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=r"model.safetensors in .* is damaged"):
        locate(NAME)


def test_after_a_download_that_did_not_end_it_says_what_the_cache_has_not(server, home):
    server.fault = ("login", "safetensors")
    with pytest.raises(UnavailableError, match=r"local cache without model.safetensors.*\. Check the network"):
        locate(NAME)


def test_a_file_in_the_store_of_several_repositories_is_proved_by_what_the_hub_stated(whole):
    """There it has the name of another hash."""
    path = next(whole.rglob("model.safetensors"))
    blob = path.resolve()
    shared = whole / "hub" / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(shared)
    assert locate(NAME).location.endswith(COMMIT)
    shared.write_bytes(bytes(shared.stat().st_size))
    with pytest.raises(ConfigurationError, match=r"model.safetensors in .* is damaged"):
        locate(NAME)
    assert not shared.exists()
    assert not blob.is_symlink()


def test_a_file_that_is_named_and_not_there_is_no_spelling_mistake(server, home):
    server.fault = ("404", "safetensors")
    with pytest.raises(UnavailableError, match="the hub names a file that it does not have .*safetensors"):
        locate(NAME)


# ---- how long it waits ----


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("workbench.base.hub.HUB_PATIENCE_S", 0.5)
    monkeypatch.setattr("workbench.base.hub.STALLED_S", 0.8)
    monkeypatch.setattr("workbench.base.hub.PAUSES_S", (0.05, 0.05))
    monkeypatch.setattr("workbench.base.limits.NOTICE_S", 0.1)


@pytest.mark.parametrize("part", ["/api/", "config.json", "safetensors"])
@pytest.mark.parametrize("status", ["500", "502", "503", "504"])
def test_a_hub_that_is_busy_for_a_moment_is_asked_again(server, home, impatient, status, part):
    server.fault = (status, part, 2)
    assert locate(NAME).location.endswith(COMMIT)


STALLED = {
    "429": r"answers HTTP 429, too many requests: wait some minutes",  # the hub says when: after 300 s
    "GET 429": r"sends nothing more \(nothing has come for 0\.8 s: Rate limited\. Waiting 301",
    "hang": "does not answer in time",
    "GET hang": r"sends nothing more \(nothing has come for 0\.8 s",
}


@pytest.mark.parametrize("fault", STALLED)
@pytest.mark.parametrize("part", ["tokenizer.json", "safetensors"])
def test_a_file_that_does_not_come_is_given_up_and_the_wait_is_announced(server, home, impatient, capsys, fault, part):
    server.fault = (fault, part)
    with pytest.raises(UnavailableError, match=rf"is in the local cache without .*, and the .*hub {STALLED[fault]}"):
        locate(NAME)
    announced = f"hub: waiting for {part if part.endswith('json') else 'model.safetensors'} of {NAME} from http://"
    assert capsys.readouterr().err.startswith(announced) == fault.startswith("GET")


def test_a_full_disk_is_named_and_not_the_network(server, home):
    """A limit on the size of files stands for the disk's."""
    resource = pytest.importorskip("resource", reason="Windows has no limit on the size of files")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    largest = max(path.stat().st_size for path in (MODELS / "gpt2-tiny").glob("tokenizer*"))
    with (server.folder / NAME / "model.safetensors").open("ab") as file:
        file.truncate(4 * largest)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * largest, hard))
        with pytest.raises(UnavailableError, match=r"cannot be written into the cache .* \(the disk is full\)\. Free"):
            locate(NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        save_file({"w": torch.ones(999)}, server.folder / NAME / "model.safetensors")


def test_a_revision_that_the_hub_names_and_does_not_have_is_named(server, home):
    server.fault = ("revision", "safetensors")
    with pytest.raises(UnavailableError, match=f"the Hugging Face hub names '{COMMIT}' as the newest revision of"):
        locate(NAME)


# ---- names, addresses, the cache ----


@pytest.mark.parametrize(
    "name",
    [
        f"{NAME}@v1",
        f"{NAME}:v1",
        f"hf://{NAME}@v1",
        f"hf://models/{NAME}@v1",
        f"https://huggingface.co/{NAME}/tree/v1",
        f"huggingface.co/{NAME}/tree/v1",
    ],
)
def test_a_revision_and_addresses_mean_what_they_say(home, name):
    source = locate(name)
    assert source.location.endswith(OTHER)
    assert str(source.address) == f"{NAME}@v1"
    assert source.name == name


REFUSED = {
    f"{NAME}@nope": f"has '{NAME}', but no revision 'nope' of it. Give a branch, a tag or a commit",
    f"{NAME}@../../x": "is no branch, tag or commit",
    f"https://huggingface.co/{NAME}/blob/main/config.json": f"the address of the file config.json; write {NAME}",
    "https://huggingface.co/datasets/user/texts": "it is the address of a dataset",
    "hf://datasets/user/texts": "it is the address of a dataset",
    "https://example.com/user/tiny": "Unrecognized host",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_addresses_are_refused_with_what_they_are(home, name):
    for find in (locate, locate_config):
        with pytest.raises(ConfigurationError, match=REFUSED[name]):
            find(name)


def test_a_page_of_a_published_model_asks_no_hub_for_a_config(server, home):
    assert locate_config("https://huggingface.co/HuggingFaceTB/SmolLM2-135M").location == "HuggingFaceTB/SmolLM2-135M"
    assert not server.asked


def test_a_wrong_endpoint_is_named(home, monkeypatch):
    for endpoint in ("hf-mirror.com", "ftp://hub"):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(ConfigurationError, match=f"HF_ENDPOINT: '{endpoint}' is not the address of a hub"):
            locate(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match=r"cannot be reached.* The hub asked is http://127.0.0.1:9, as HF_ENDP"):
        locate(NAME)


def test_a_cache_that_cannot_be_written_to_is_named(server, tmp_path):
    (tmp_path / "file").write_text("in the place of a folder")
    with (
        hub_at(server.server_port, tmp_path / "file"),
        pytest.raises(UnavailableError, match=r"cannot be written into the cache .*file.hub \(Not a dir.*set HF_HOME"),
    ):
        locate(NAME)
