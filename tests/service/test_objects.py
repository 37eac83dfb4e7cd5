"""Objects below a URL: what a slow, broken or unusual store sends, and what errors say about a wrong URL."""

import sys
from base64 import b64encode

import pytest
from store_server import object_store

from attncache_core import AttnCacheError, InvalidInput
from service import objects
from service.objects import Changed, ObjectFolder, has_secrets, joined, without_secrets
from service.settings import Settings, read_settings

pytest.importorskip("obstore")

SECRET = "hidden-from-all"


@pytest.fixture
def stored():
    """A store with an object of ten bytes."""
    with object_store() as store:
        store.objects["/bucket/db/a"] = b"0123456789"
        yield store


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    """Let no store find credentials on this machine, and ask each store once."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    monkeypatch.setattr(objects, "_RETRIES", {"max_retries": 0})


def test_urls_are_shown_without_secrets_and_refused_with_the_remedy(monkeypatch, tmp_path):
    url = f"https://user:{SECRET}@host:8/a/b?sig={SECRET}#x"
    assert without_secrets(url) == "https://host:8/a/b"
    assert joined(url, "c") == f"https://user:{SECRET}@host:8/a/b/c?sig={SECRET}#x"
    with pytest.raises(AttnCacheError, match="folder") as raised:
        read_settings({"database": url, "sample": True})
    assert SECRET not in str(raised.value)
    with pytest.raises(InvalidInput, match="s3://") as raised:
        ObjectFolder(f"ftp://user:{SECRET}@host/a", "database")
    assert SECRET not in str(raised.value)
    with pytest.raises(InvalidInput, match="file:///FOLDER"):
        ObjectFolder("file://relative/x", "url", writes=True)
    with pytest.raises(InvalidInput, match="https://a/b can only be read"):
        ObjectFolder("https://a/b", "url", writes=True)
    with pytest.raises(InvalidInput, match="s3://a/b cannot be opened: its query has bogus") as refused:
        ObjectFolder("s3://a/b?bogus=hidden", "database")
    assert "hidden" not in str(refused.value)
    assert Settings(database=tmp_path).database == Settings(database=str(tmp_path)).database == tmp_path
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidInput, match=r"attncache\[cluster\]"):
        ObjectFolder("s3://a/b", "database")


@pytest.mark.parametrize(
    ("url", "environment", "reason"),
    [
        (
            f"s3://bucket/x?region=here&session_token={SECRET}",
            {},
            "there are no credentials: the variables of the store are not set",
        ),
        ("s3://bucket/x", {"AWS_ACCESS_KEY_ID": "a"}, "SecretAccessKey is missing among the variables"),
        ("az://container/x", {}, r"the account is missing \(AZURE_STORAGE_ACCOUNT_NAME\)"),
        ("gs://bucket/x", {}, "the file of GOOGLE_APPLICATION_CREDENTIALS cannot be read"),
        ("file:///nowhere/x", {}, "there is no such folder"),
        ("http://[::1/x", {}, "a URL is malformed: Invalid IPv6 URL"),
        ("http://127.0.0.1:1/x", {}, "the connection is refused"),
    ],
)
def test_reason_of_a_wrong_url_or_of_missing_credentials_is_named(monkeypatch, url, environment, reason):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((AttnCacheError, OSError), match=reason) as raised:
        ObjectFolder(url, "database").read("a")
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("what", ["walk dir: IO error for operation on", "open file"])
def test_path_without_permission_is_named(what):
    told = (
        f"Generic LocalFileSystem error: Unable to {what} /in/a b: Permission denied (os error 13)\n\nDebug"
    )
    assert objects._reason(Exception(told)) == "permission is denied for /in/a b"


@pytest.mark.parametrize("function", [without_secrets, has_secrets, lambda url: joined(url, "a")])
def test_malformed_url_is_refused_wherever_it_is_read(function):
    with pytest.raises(InvalidInput, match="a URL is malformed") as refused:
        function(f"s3://user:{SECRET}@[b/x")
    assert SECRET not in str(refused.value)


def test_slow_line_gets_every_byte_and_a_store_that_stops_ends_the_request(monkeypatch, stored):
    monkeypatch.setattr(objects, "_READ_SECONDS", 0.6)
    stored.objects["/bucket/db/a"] = content = bytes(range(256)) * 20
    folder = ObjectFolder(stored.http % "db", "database")
    stored.pause = 0.2
    assert folder.read_range("a", 0, len(content)) == content  # takes longer than each part may
    stored.pause = 3.0
    with pytest.raises(OSError, match="the store does not answer in time"):
        folder.read_range("a", 0, len(content))


def test_store_that_cuts_connections_sends_nothing_or_knows_no_ranges_is_named(stored):
    folder = ObjectFolder(stored.http % "db", "database")
    stored.is_cut = True
    with pytest.raises(OSError, match="the connection is cut"):
        folder.read_range("a", 0, 4)
    stored.is_cut = stored.has_ranges = False
    with pytest.raises(OSError, match="the store answers no requests for ranges of an object"):
        folder.read_range("a", 0, 4)
    stored.has_ranges = stored.is_empty = True
    with pytest.raises(OSError, match="the store sends nothing"):
        folder.read_range("a", 0, 4)


@pytest.mark.parametrize("weak", ["W/", ""])
def test_etag_is_compared_also_if_it_is_weak_or_the_server_ignores_conditions(weak, stored):
    stored.weak, stored.has_conditions = weak, bool(weak)
    folder = ObjectFolder(stored.http % "db", "database")
    about = folder.about("a")
    assert about.etag.startswith(weak)
    assert folder.open("a", about).read() == b"0123456789"
    stored.objects["/bucket/db/a"] = b"9876543210"
    with pytest.raises(Changed):
        folder.open("a", about).read()


def test_etag_without_quotes_in_a_list_is_the_one_with_quotes_of_the_object(stored):
    stored.quote = ""
    folder = ObjectFolder(stored.s3 % "db", "database")
    (about,) = folder.list()
    assert '"' not in about.etag
    assert folder.open("a", about).read() == b"0123456789"


def test_user_of_an_http_url_is_sent(stored):
    ObjectFolder((stored.http % "db").replace("//", "//us%40er:pass@"), "database").read("a")
    assert stored.authorizations == [f"Basic {b64encode(b'us@er:pass').decode()}"]
