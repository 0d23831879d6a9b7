"""A Hugging Face hub on this machine, as far as `huggingface_hub` and `datasets` ask one: repositories are folders."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


class Answers(BaseHTTPRequestHandler):
    """Of the repositories named gated/… and private/… nothing is told without TOKEN."""

    def do_GET(self):  # noqa: N802
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and parts[2:] == ["old-name"]:
            return self._send(307, {"Location": "/api/datasets/user/plain"})
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if parts[:2] in (["api", "datasets"], ["api", "models"]):
            return self._about(parts[2:])
        return self._file(*self._repository(parts[1:])) if parts[:1] == ["datasets"] else self._send(404)

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
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        about = {"id": "/".join(parts[:2]), "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
        about["gated"] = "manual" if "gated" in folder.parts else False
        names = [{"rfilename": path.relative_to(folder).as_posix()} for path in files]
        return self._send(200, body={**about, "siblings": names})

    def _entry(self, folder, path):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": COMMIT}
        data = path.read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _file(self, folder, asked):
        if self._refused(folder):
            return None
        path = folder.joinpath(*asked[2:])
        if not path.is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound"})
        data = path.read_bytes()
        etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(200, etag, data)

    def _send(self, status, headers=(), body=b""):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        return True

    def log_message(self, *_):
        pass


@contextmanager
def serving(folder: Path) -> Iterator[ThreadingHTTPServer]:
    """The hub with the repositories in a folder; `server.asked` has the paths and tokens that it was asked with."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.folder, server.asked = folder, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
