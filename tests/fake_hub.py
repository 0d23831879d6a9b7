"""A Hugging Face hub on this machine, as far as `huggingface_hub` and `datasets` ask one: repositories are folders.

It misbehaves as `server.fault` says: the kind, the part of the paths that it is asked for then, and, if it is not for
ever, how often. A kind after "GET " is not for questions about a file (HEAD).
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import datasets
import pytest
from huggingface_hub import constants

from workbench.base import hub
from workbench.texts import download

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"  # the commit of every revision but main
TOKEN = "hf_secret"
PAGE = b"<!DOCTYPE html><html><body>Please log in to this network.</body></html>"


def stated(data: bytes, name: str) -> str:
    """The hash that the hub states: SHA-256 of large files, and what git calls the others."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Answers(BaseHTTPRequestHandler):
    """Of the repositories named gated/… and private/… nothing is told without TOKEN."""

    def do_GET(self):  # noqa: N802
        kind, part, *times = self.server.fault
        of_method, _, named = kind.rpartition(" ")
        self.fault = named if part in self.path and of_method in ("", self.command) else ""
        if self.fault and times:
            self.server.fault = (kind, part, times[0] - 1) if times[0] > 1 else ("", "")
        if self.fault == "hang":
            return self.server.closing.wait(60)
        if self.fault == "drip":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # until nobody reads any more
                while not self.server.closing.wait(0.2):
                    self.wfile.write(b" ")
            return None
        if self.fault == "redirect":
            return self._send(302, {"Location": self.path})
        if self.fault == "nonsense":
            return self._send(200, {}, b"\x00\x01\x02")
        if self.fault == "revision":
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if self.fault == "login":
            return self._send(200, {"Content-Type": "text/html"}, PAGE)
        if self.fault.isdigit():
            return self._send(int(self.fault), {"Retry-After": "300"} if self.fault == "429" else {})
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and parts[2:] == ["old-name"]:
            return self._send(307, {"Location": "/api/datasets/user/plain"})
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if parts[:2] in (["api", "datasets"], ["api", "models"]):
            return self._about(parts[2:])
        return self._file(*self._repository(parts[1:] if parts[:1] == ["datasets"] else parts))

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _repository(self, parts):
        return self.server.folder.joinpath(*parts[:2]), parts[2:]

    def _refused(self, folder, open_to_look=False):
        kind = folder.relative_to(self.server.folder).parts[0]
        if not folder.is_dir():
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return False
        if kind == "private":
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        return kind == "gated" and not open_to_look and self._send(403, {"X-Error-Code": "GatedRepo"})

    def _about(self, parts):
        folder, asked = self._repository(parts)
        if self._refused(folder, open_to_look=not asked):
            return None
        if asked[:1] == ["tree"]:
            place = folder.joinpath(*asked[2:])
            return self._send(200, {}, [self._entry(folder, path) for path in sorted(place.glob("*"))])
        revision = asked[1] if asked[:1] == ["revision"] else "main"
        if revision not in ("main", "v1", self.server.commit, OTHER):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        about = {"id": "/".join(parts[:2]), "sha": self._commit(revision), "private": False, "tags": []}
        about["gated"] = "manual" if "gated" in folder.parts else False
        names = [{"rfilename": path.relative_to(folder).as_posix()} for path in files]
        return self._send(200, body={**about, "siblings": names})

    def _commit(self, revision):
        return self.server.commit if revision in ("main", self.server.commit) else OTHER

    def _entry(self, folder, path):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": COMMIT}
        data = path.read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": stated(data, name)}

    def _file(self, folder, asked):
        if self._refused(folder):
            return None
        path = folder.joinpath(*asked[2:])
        if not path.is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self._commit(asked[1])})
        data = path.read_bytes()
        etag = {"ETag": f'"{stated(data, path.name)}"', "X-Repo-Commit": self._commit(asked[1])}
        if self.fault == "damage":
            data = bytes([data[0] ^ 1]) + data[1:-1] + bytes([data[-1] ^ 1])
        return self._send(200, etag, data)

    def _send(self, status, headers=(), body=b""):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if self.fault == "cut" else data)
        self.close_connection = self.fault == "cut"
        return True

    def log_message(self, *_):
        pass


@contextmanager
def serving(folder: Path) -> Iterator[ThreadingHTTPServer]:
    """The hub with the repositories in a folder; `server.asked` has the paths and tokens that it was asked with."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    server.folder, server.asked, server.fault, server.commit = folder, [], ("", ""), COMMIT
    server.closing = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


@contextmanager
def hub_at(port, home, *, offline=False, token=None):
    """As a process has it that finds the hub's address, its own home and perhaps a token in the environment."""
    address = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HOME", str(home))
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setattr(datasets.config, "HF_ENDPOINT", address)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        patch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", home / "datasets" / "downloads")
        patch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", home / "datasets" / "downloads" / "extracted")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        patch.delenv("HF_DATASETS_CACHE", raising=False)
        patch.delenv("HF_TOKEN", raising=False)
        if token:
            patch.setenv("HF_TOKEN", token)
        forget()
        yield
        forget()


def forget():
    """As a new process would be."""
    download.data_set_files.cache_clear()
    hub.given_up.clear()
