"""The Hugging Face hub: what it has under a name, and its files in the local cache, each proved by the hash that the
hub stated for it.

The hub is asked once, and has seconds to answer. If it does not answer, the workbench uses what is whole in the cache.
"""

import difflib
import errno
import hashlib
import logging
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError, in_a_line
from workbench.base.limits import call_while_it_moves, call_within
from workbench.base.paths import FULL

T = TypeVar("T")

CONNECTION_S = 1.0  # time for a connection to the hub
HUB_PATIENCE_S = 4.0  # time for the hub's answer, and for a first small file
STALLED_S = 20.0  # time without a new byte, after which a download is given up
BUSY = (500, 502, 503, 504)  # HTTP status of a hub that may answer if it is asked again
PAUSES_S = (0.5, 1.5)  # pauses before a busy hub is asked again
ASKED_AGAIN_S = 60.0  # time for which a hub that gave no answer is not asked again about files that the cache has
REFUSALS = (401, 403, 404)  # HTTP status: the hub also says 401 where there is no such repository
LOGIN = "log in with `hf auth login`, with a token that may read it"
ADDRESS = re.compile(r"\w+://[^/]*/?|(www\.)?(huggingface\.co|hf\.co)/")  # the beginning of a page's address, or hf://
REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*")  # a branch, a tag or a commit
REVISION_IN_ADDRESS = re.compile(r"/(?:revision|resolve|tree)/([^/?]+)")
DISK_IS_FULL = os.strerror(errno.ENOSPC)
SHA1 = re.compile("[0-9a-f]{40}")
SHA256 = re.compile("[0-9a-f]{64}")

given_up: dict["Address", float] = {}  # addresses that the cache has, and when the hub gave no answer about them


@dataclass(frozen=True)
class Address:
    """A repository of the hub: `repo_type` is "model" or "dataset", `revision` is empty for the newest."""

    repo_type: str
    repository: str
    revision: str = ""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def address_of(name: str, repo_type: str) -> Address:
    """Read a name: `owner/name`, also with `@revision`, for a model also with `:revision`; `hf://…`; the address of a
    page.

    Raises:
        ValueError: it is none of these, or the address of another kind of repository.
    """
    from huggingface_hub import constants, parse_hf_uri
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if ADDRESS.match(name):
        uri = parse_hf_uri(name, constants.ENDPOINT)
        if uri.type != repo_type:
            raise ValueError(f"it is the address of a {uri.type}")
        if uri.path_in_repo:
            raise ValueError(f"it is the address of the file {uri.path_in_repo}; write {uri.id}")
        return Address(repo_type, uri.id, uri.revision or "")
    repository, at, revision = (name.replace(":", "@", 1) if repo_type == "model" else name).partition("@")
    validate_repo_id(repository)
    if at and not REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r:.90} is no branch, tag or commit")
    return Address(repo_type, repository, revision)


# ---- questions to the hub ----


def repository_info(address: Address) -> Any:
    """Return what the hub says of a repository, asked with the user's token if there is one. Raises errors of any kind,
    for example if the hub does not answer in time."""
    from huggingface_hub import HfApi, constants

    url = urlsplit(constants.ENDPOINT)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(
            f"HF_ENDPOINT: {constants.ENDPOINT!r} is not the address of a hub. Write it with https://, or remove it."
        )
    if not (constants.HF_HUB_OFFLINE or getproxies()):
        port = url.port or (443 if url.scheme == "https" else 80)
        # The connection has a limit of its own, because the system looks up a host's name without a time-out.
        try:
            call_within(CONNECTION_S, lambda: socket.create_connection((url.hostname, port), CONNECTION_S / 2).close())
        except OSError as error:
            raise ConnectionError(f"there is no connection to {constants.ENDPOINT}") from error

    def ask() -> Any:
        info: Any = HfApi().repo_info(
            address.repository, repo_type=address.repo_type, revision=address.revision or None, timeout=HUB_PATIENCE_S
        )
        if info.gated:
            HfApi().auth_check(address.repository, repo_type=address.repo_type)
        if not info.sha or info.siblings is None:
            raise ValueError("the answer names no files")
        return info

    return ask_again_if_busy(lambda: call_within(HUB_PATIENCE_S, ask))


def ask_again_if_busy(ask: Callable[[], T]) -> T:
    """Return what `ask()` returns. If the hub is busy it is asked again, after short pauses."""
    for pause_s in PAUSES_S:
        try:
            return ask()
        except Exception as error:
            if status_of(error) not in BUSY:
                raise
            time.sleep(pause_s)
    return ask()


def first_file(address: Address, name: str) -> Path:
    """Fetch a first small file of a repository under the name of its revision, so that the cache learns which commit
    the revision is.

    Raises errors of any kind, for example if the file does not come in time: then the others would not, either.
    """
    from huggingface_hub.errors import FileMetadataError

    def fetch_first() -> Path:
        # `metadata` raises at once an error over which the download would try again and again, or take an older file.
        if not metadata(address, name, address.revision).commit_hash:
            raise FileMetadataError(f"{name} is not of a commit")
        return _download(address, name, address.revision)

    return ask_again_if_busy(lambda: call_within(HUB_PATIENCE_S, fetch_first))


def metadata(address: Address, name: str, revision: str) -> Any:
    """Return what the hub states of a file, such as its hash (`etag`). Raises errors of any kind."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(address.repository, name, repo_type=address.repo_type, revision=revision or None)
    return get_hf_file_metadata(url, timeout=HUB_PATIENCE_S)


def fetch(address: Address, name: str, revision: str) -> Path:
    """Fetch a file of a repository, and return its path in the cache. Raises errors of any kind."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    # The hub's library would wait for minutes where it is told to come back later; this raises at once.
    with suppress(RemoteEntryNotFoundError):  # the library notes in the cache that there is no such file
        ask_again_if_busy(lambda: call_within(HUB_PATIENCE_S, lambda: metadata(address, name, revision)))
    return wait_for(address, name, lambda: _download(address, name, revision))


def _download(address: Address, name: str, revision: str) -> Path:
    from huggingface_hub import hf_hub_download

    path = Path(
        hf_hub_download(
            address.repository,
            name,
            repo_type=address.repo_type,
            revision=revision or None,
            etag_timeout=HUB_PATIENCE_S,
        )
    )
    note_hash(address, path, name)
    return path


def wait_for(address: Address, what: str, load: Callable[[], T], *folders: Path) -> T:
    """Return what `load()` returns, which fetches something of a repository.

    Args:
        what: what is fetched, for the line on standard error.
        folders: other folders than that of the repository in the cache, into which it writes.

    Raises:
        StalledError: nothing has come for STALLED_S. Errors of other kinds are those of `load`.
    """
    from huggingface_hub import constants

    places = (repository_folder(address), *folders)
    notice = f"hub: waiting for {what} of {address} from {constants.ENDPOINT} (Ctrl-C gives up)"
    with _last_warning_of_the_library() as warnings:
        try:
            return call_while_it_moves(STALLED_S, load, lambda: sum(map(size_of_folder, places)), notice)
        except TimeoutError as error:
            raise StalledError(str(error), *warnings) from error


class StalledError(TimeoutError):
    """A download was given up, because nothing came any more. A second argument is what the hub's library last said."""


@contextmanager
def _last_warning_of_the_library() -> Iterator[deque[str]]:
    """Yield what will hold the last warning of `huggingface_hub`: the library logs an answer after which it waits."""
    warnings = deque[str](maxlen=1)
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("huggingface_hub")
    logger.addHandler(listener)
    try:
        yield warnings
    finally:
        logger.removeHandler(listener)


def size_of_folder(folder: Path) -> int:
    """Return the bytes of all files below a folder; a file that disappears meanwhile counts as nothing."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.lstat().st_size
    return size


def note_hash(address: Address, path: Path, name: str) -> None:
    """Write down the hash that the hub states for a file of a snapshot, unless the file is a link: then the hash is the
    name of the link's target."""
    snapshot = path.parents[name.count("/")]
    note = hash_note_path(snapshot, path)
    if not (path.is_symlink() or note.is_file()):
        note.parent.mkdir(exist_ok=True)
        note.write_text(metadata(address, name, snapshot.name).etag, encoding="utf-8")


# The fault of a hub, by the name of the error that a library raises over it, or of a class that this inherits from.
FAULTS = {
    "TooManyRedirects": "only leads to other addresses, without an end",
    "ProtocolError": "breaks off in the middle of a file",
    "ConnectionError": "cannot be reached",
    "ConnectError": "cannot be reached",
    "StalledError": "sends nothing more",
    "TimeoutError": "does not answer in time",
    "TimeoutException": "does not answer in time",
    "FileMetadataError": "does not answer as a hub; this network may want a login in the browser",
}


def fault_of(error: Exception) -> str:
    """Say in words what a hub did that gave no good answer; empty if the error is of another kind."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "cannot be reached (HF_HUB_OFFLINE is set)"
    status = status_of(error)
    if status == 429:
        return f"answers HTTP 429, too many requests: wait some minutes, or {LOGIN}"
    if status:
        return f"answers HTTP {status}"
    classes = set[str]()
    for cause in _causes(error):
        classes.update(parent.__name__ for parent in type(cause).__mro__)
    for name, fault in FAULTS.items():
        if name in classes:
            return fault + _said_last(error)
    return ""


def _said_last(error: Exception) -> str:
    """Return in brackets what the hub's library said before a download was given up; empty if it said nothing."""
    for cause in _causes(error):
        if isinstance(cause, StalledError):
            return f" ({': '.join(cause.args):.200})"
    return ""


def _causes(error: Any) -> Iterator[Any]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def disk_refusal_in(error: BaseException) -> str:
    """Return why the disk took no more of a file; empty if that is not what an error came from."""
    for cause in _causes(error):
        is_about_a_file = isinstance(cause, OSError) and cause.errno and (cause.filename or cause.errno in FULL)
        if is_about_a_file:
            return "the disk is full" if cause.errno in FULL else str(cause.strerror)
        if DISK_IS_FULL in str(cause):  # a library in Rust has the system's words alone
            return "the disk is full"
    return ""


def revision_asked_for(error: BaseException) -> str:
    """Return the revision in the address that an answer of the hub came from; empty if there is none."""
    for cause in _causes(error):
        match = REVISION_IN_ADDRESS.search(str(getattr(getattr(cause, "response", None), "url", "")))
        if match:
            return match[1]
    return ""


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an error came from; None if there was no answer."""
    for cause in _causes(error):
        status: int | None = getattr(getattr(cause, "response", None), "status_code", None)
        if status:
            return status
    return None


def hub_error(
    address: Address,
    error: Exception,
    owner: str,
    alternatives: str,
    lacking: str = "",
    known_names: Collection[str] = (),
) -> WorkbenchError:
    """Build the error that says why something of the hub cannot be had, with the cure.

    Args:
        owner: the beginning of the message.
        alternatives: what works without the hub.
        lacking: the file that the cache lacks, where it has others.
        known_names: names of which the user may have meant one.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RevisionNotFoundError

    if isinstance(error, WorkbenchError):
        return error
    status = status_of(error)
    name = str(address)
    refusal = disk_refusal_in(error)
    if refusal:
        return UnavailableError(
            f"{owner} {name!r} cannot be written into the cache {constants.HF_HUB_CACHE} "
            f"({refusal}). Free some space there, or set HF_HOME to a folder of yours."
        )
    other = ""
    if constants.ENDPOINT != "https://huggingface.co" and not constants.HF_HUB_OFFLINE:
        other = f" The hub asked is {constants.ENDPOINT}, as HF_ENDPOINT says."
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{'datasets/' if address.repo_type == 'dataset' else ''}{address.repository}"
        return ConfigurationError(
            f"{owner} {name!r} is gated on the Hugging Face hub (HTTP {status}). Accept its "
            f"conditions at {page} and {LOGIN}.{other}"
        )
    if isinstance(error, RevisionNotFoundError) and not address.revision:
        revision = revision_asked_for(error)
        return UnavailableError(
            f"{owner} the Hugging Face hub names {revision!r} as the newest revision of {name!r}, and then does not "
            f"have it. Try again later, or use {alternatives}.{other}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ConfigurationError(
            f"{owner} the Hugging Face hub has {address.repository!r}, but no revision "
            f"{address.revision!r} of it. Give a branch, a tag or a commit, as "
            f"{address.repository}@main.{other}"
        )
    of_a_file = status == 404 and any("/resolve/" in str(cause) for cause in _causes(error))
    if isinstance(error, RemoteEntryNotFoundError) or of_a_file:
        return UnavailableError(
            f"{owner} of {name!r} the hub names a file that it does not have "
            f"({in_a_line([*_causes(error)][-1])}). Try again later, or use {alternatives}.{other}"
        )
    near = difflib.get_close_matches(address.repository, known_names, 1)
    spelling = f"Check the spelling (did you mean {near[0]}?)" if near else "Check the spelling"
    if status in REFUSALS:
        return ConfigurationError(
            f"{owner} the Hugging Face hub has no public {address.repo_type} {name!r} (HTTP "
            f"{status}). {spelling}; for a private one {LOGIN}.{other}"
        )
    check = f"{spelling} and the network"
    if status:
        check = "Try again later"
    elif address.repository in known_names or lacking:
        check = "Check the network"
    state = f"is in the local cache without {lacking}" if lacking else "is not in the local cache"
    return UnavailableError(
        f"{owner} {name!r} {state}, and the Hugging Face hub {_fault_in_words(error)}. "
        f"{check}, or use {alternatives}.{other}"
    )


def _fault_in_words(error: Exception) -> str:
    unknown = f"does not answer as a hub ({in_a_line(error):.90}); this network may want a login in the browser"
    return fault_of(error) or unknown


def is_given_up(address: Address) -> bool:
    """Whether the hub gave no answer about this address a short while ago."""
    return time.monotonic() - given_up.get(address, -ASKED_AGAIN_S) < ASKED_AGAIN_S


def give_up(address: Address, owner: str, error: Exception) -> None:
    """Use the cache for a while without asking the hub. A line says so, unless the user works offline by order."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        given_up[address] = time.monotonic()
        fault = _fault_in_words(error)
        print(f"warning: {owner} {address}: the hub {fault}. The copy in the cache is used.", file=sys.stderr)


# ---- the cache of huggingface_hub ----


def commit_of(address: Address) -> str:
    """Return the commit of which the cache has files for the address, as the hub named it when it was last asked; empty
    if there is none."""
    from huggingface_hub import constants

    folder = repository_folder(address)
    revision = address.revision or constants.DEFAULT_REVISION
    if (folder / "snapshots" / revision).is_dir():
        return revision
    with suppress(OSError):
        return (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    return ""


def repository_folder(address: Address) -> Path:
    """Return the folder of a repository in the cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"{address.repo_type}s--{address.repository.replace('/', '--')}")


def prove(folder: Path, owner: str) -> None:
    """Compare every file of a snapshot with the hash that the hub stated for it: the cache keeps the hash as the name
    of the file that the snapshot links to, and where the system has no links, `fetch` has written it down.

    A file that was proved, and has not been written to since, is not read again: 10 GB take 5 to 20 s.

    Raises:
        ConfigurationError: a file is damaged. It is removed, so that it is fetched anew.
    """
    notes = folder.parent.parent / "proved"
    for path in sorted(folder.rglob("*")):
        blob = path
        if path.is_symlink() and path.is_file():
            # The link may lead to another link, into a store of several repositories: the first one has the hash.
            blob = path.parent / path.readlink()
            stated_hash = blob.name
        elif path.is_file() and hash_note_path(folder, path).is_file():
            stated_hash = hash_note_path(folder, path).read_text(encoding="utf-8")
        else:
            continue
        state = blob.stat()
        facts = f"{state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"
        note = notes / stated_hash
        if note.is_file() and note.read_text(encoding="utf-8") == facts:
            continue
        if not _has_hash(blob, stated_hash):
            for damaged in (path.resolve(), blob, path):
                damaged.unlink(missing_ok=True)
            raise ConfigurationError(
                f"{owner} {path.name} in {folder} is damaged: it is not what the hub stated. It "
                "has been removed; start again to fetch it. If that happens again, something on "
                "the way from the hub changes files."
            )
        with suppress(OSError):  # in a cache that cannot be written to, every file is read each time
            notes.mkdir(exist_ok=True)
            note.write_text(facts, encoding="utf-8")


def hash_note_path(snapshot: Path, path: Path) -> Path:
    """Return the path of the note with the hash that the hub stated for a file of a snapshot that is no link."""
    name = path.relative_to(snapshot).as_posix().replace("/", "--")
    return snapshot.parent.parent / "proved" / f"{snapshot.name}-{name}"


def _has_hash(blob: Path, stated_hash: str) -> bool:
    with blob.open("rb") as file:
        if SHA256.fullmatch(stated_hash):
            return hashlib.file_digest(file, "sha256").hexdigest() == stated_hash
        if not SHA1.fullmatch(stated_hash):
            return True  # a hash of an unknown kind cannot be compared
        content = file.read()
        # Git hashes a header with the content; a mirror may hash the content alone.
        return stated_hash in (_sha1(b"blob %d\0" % len(content) + content), _sha1(content))


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
