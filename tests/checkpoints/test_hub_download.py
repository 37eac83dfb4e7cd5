"""All needed files of a model are downloaded at the requested revision, from a local server as the Hub."""

import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from attncache_core.checkpoints.description import find_checkpoint, read_checkpoint

COMMIT = "c" * 40
API = "/api/models/acme/encoder"
FILES = f"/acme/encoder/resolve/{COMMIT}/"


@pytest.fixture
def repository(tiny_checkpoint, tmp_path):
    """The tiny model with chat templates and with weights in a format that is never read."""
    folder = shutil.copytree(tiny_checkpoint.folder, tmp_path / "repository")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ tools }}", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return folder


@pytest.fixture
def revisions(repository, tmp_path, monkeypatch):
    """The revisions requested from a local Hub that has the repository as acme/encoder."""
    requested = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = self.path.split("?")[0]
            if path.startswith(f"{API}/revision/"):
                requested.append(path.rsplit("/", 1)[-1])
                self.answer(json.dumps({"id": "acme/encoder", "sha": COMMIT}).encode())
            elif path == f"{API}/tree/{COMMIT}":
                self.answer(json.dumps(listing()).encode())
            elif path.startswith(FILES):
                self.answer((repository / path.removeprefix(FILES)).read_bytes())
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def answer(self, content):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{digest(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_):
            """Suppress the log."""

    def listing():
        paths = [path for path in repository.rglob("*") if path.is_file()]
        names = {path.relative_to(repository).as_posix(): path.read_bytes() for path in paths}
        return [
            {"type": "file", "path": name, "size": len(content), "oid": digest(content)}
            for name, content in names.items()
        ]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield requested
    server.shutdown()
    server.server_close()


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def test_revision_is_downloaded_once_and_its_commit_is_known_offline_afterwards(revisions, monkeypatch):
    downloaded = find_checkpoint("acme/encoder", "v1")
    assert (downloaded.source, downloaded.revision, downloaded.commit) == ("Hugging Face Hub", "v1", COMMIT)
    assert revisions == ["v1"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = find_checkpoint("acme/encoder", "v1")
    assert (cached.source, cached.commit) == ("Hugging Face cache", COMMIT)


def test_downloaded_model_has_the_fingerprint_of_its_repository(revisions, repository):
    """All files of the fingerprint are downloaded, including chat templates, and no pickled weights."""
    downloaded = find_checkpoint("acme/encoder")
    assert downloaded.fingerprint() == read_checkpoint(repository).fingerprint()
    assert not (downloaded.folder / "pytorch_model.bin").exists()
    assert revisions == ["main"]
