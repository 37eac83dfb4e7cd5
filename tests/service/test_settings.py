import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.commands.settings_options import settings_options
from service.errors import InvalidSettings
from service.settings import (
    GROUPS,
    Settings,
    environment_name,
    gather_settings,
    read_settings,
    refuse_unknown_variables,
)
from service.settings.reading import write_settings


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("port", "eighty", "it must be a whole number"),
        ("port", "70000", "it must be at most 65535"),
        ("pooling", "median", "'mean'"),
        ("task", "classify", "'label-logits'"),
        ("dtype", "int8", "'auto', 'bfloat16' or 'float32'"),
        ("quantize", "int3", "'int8', 'int8-weight-only' or 'int4'"),
        ("threads", "0", "it must be at least 1"),
        ("threshold", "nan", "finite"),
        ("threshold", "95", "it must be at most 1"),
        ("verify_rate", "1.5", "it must be at most 1"),
        ("verify_rate", "nan", "it must be at most 1"),
        ("max_batch_tokens", "0", "it must be at least 1"),
        ("cors_origin", "app.example", "https://HOST"),
        ("cors_origin", "https://app.example, app.example", "https://HOST"),
        ("cors_origin", "https://app.example/", "without a path"),
        *(
            (field, "1e10", "it must be at most 1000000000")
            for field in Settings.model_fields
            if field.endswith("_seconds") and field != "max_queue_seconds"
        ),
        ("max_tokens", "1", "it must be at least 2"),
        ("reuse", "perhaps", "it must be true or false"),
        ("model", "", "it must not be empty"),
        ("kv_dir", "", "give the name of a file or folder"),
        ("cache_dir", "", "give the name of a file or folder"),
        ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_bad_value_is_refused_with_the_option_and_what_is_accepted(field, value, accepted):
    with pytest.raises(InvalidSettings) as refused:
        read_settings({field: value})
    message = str(refused.value)
    names = f"--{field.replace('_', '-')} (ATTNCACHE_{field.upper()}, or {field} in the file)"
    assert message.startswith(f"{names} cannot be {value!r}: ")
    assert accepted in message
    assert "\n" not in message


def test_home_folder_is_found_where_no_shell_has_replaced_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/kim")
    files = {"kv_dir": "~/kv", "classifier": Path("~/intents"), "database": "~/tickets.db"}
    read = read_settings({**files, "api_key": "~" + "k" * 40, "template": "~nobody-of-this-name/t"})
    assert (read.kv_dir, read.classifier) == (Path("/home/kim/kv"), Path("/home/kim/intents"))
    assert read.database == Path("/home/kim/tickets.db")
    assert read.template == Path("~nobody-of-this-name/t")
    assert read.api_key.get_secret_value().startswith("~k")
    url = read_settings({"database": "s3://bucket/~/tickets.db"}).database
    assert url.get_secret_value() == "s3://bucket/~/tickets.db"


def test_values_are_read_from_text():
    settings = read_settings({"port": "81", "truncate": "off", "threshold": "0.975", "cache_dir": "here"})
    assert settings == Settings(port=81, truncate=False, threshold=0.975, cache_dir=Path("here"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"max_request_inputs": 10, "max_queue_sequences": 9},
            "--max-request-inputs must be at most --max-queue-sequences",
        ),
        ({"reuse": False, "database": "/d"}, "--database has no effect with --no-reuse"),
        ({"reuse": False, "threshold": 0.9}, "--threshold has no effect with --no-reuse"),
        ({"reuse": False, "min_gain": 0.1}, "--min-gain has no effect with --no-reuse"),
        ({"reuse": False, "verify_rate": 0.1}, "--verify-rate has no effect with --no-reuse"),
        ({"classifier": "folder", "labels": "a,b"}, "--classifier and --labels both set the labels"),
        ({"tls_cert": "cert.pem"}, "--tls-cert and --tls-key belong together"),
        ({"tls_key": "key.pem"}, "--tls-cert and --tls-key belong together"),
        ({"unix_socket": "a.sock", "port": 9000}, "--port has no effect with --unix-socket"),
        (
            {"trusted_proxies": "10.0.0.0/8, unix"},
            "unix in --trusted-proxies has no effect without --unix-socket; give both or none",
        ),
        ({"admin_host": "0.0.0.0"}, "--admin-host has no effect without --admin-port"),
        ({"unix_socket": "a.sock", "tls_cert": "a", "tls_key": "b"}, "--tls-cert has no effect"),
        ({"blend": "a", "kv": False}, "--blend has no effect with --no-kv"),
        ({"blend": "a", "database": "b"}, "--blend has no effect with --database"),
        ({"divide_texts": True}, "--divide-texts has no effect without --blend"),
        ({"segment_tokens": 5}, "--segment-tokens has no effect without --blend"),
        ({"blend": "a", "divide_texts": True, "segment_separator": ""}, "needs a --segment-separator"),
        ({"sample": True, "maps": False}, "--sample has no effect with --no-maps"),
        ({"sample": True, "reuse": False}, "--sample has no effect with --no-reuse"),
        ({"renew_hours": 24}, "--renew-hours has no effect without --sample"),
        ({"sample_texts": 5}, "--sample-texts has no effect without --sample"),
        ({"sample": True, "renew_hours": 0}, "it must be greater than 0"),
        ({"sample": True, "sample_texts": 0}, "it must be at least 1"),
        ({"shared_uses": "kv"}, "has no effect without --shared"),
        (
            {"shared": "valkey://a", "shared_uses": "kv,sessions", "kv": False},
            "--shared-uses kv has no effect with --no-kv; leave one of them out",
        ),
        (
            {"shared": "valkey://a", "shared_uses": "findings", "maps": False},
            "--shared-uses findings has no effect with --no-maps",
        ),
        (
            {"shared": "valkey://a", "shared_uses": "quotas,kv", "reuse": False},
            "--shared-uses kv has no effect with --no-reuse",
        ),
        ({"shared": "valkey://a", "shared_uses": "kv,maps"}, "give one or several of kv, sessions, quotas"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, says):
    with pytest.raises(InvalidSettings, match=says):
        read_settings(settings)


def test_all_uses_of_a_shared_store_and_proxies_of_a_unix_socket_are_accepted():
    uses = Settings.model_fields["shared_uses"].default
    for switch in ("kv", "maps", "reuse"):
        read_settings({"shared": "valkey://a", "shared_uses": uses, switch: False})
    read_settings({"shared": "valkey://a", "shared_uses": "sessions,quotas", "reuse": False})
    read_settings({"trusted_proxies": "10.0.0.0/8, unix", "unix_socket": "a.sock"})


def test_host_beside_a_unix_socket_is_refused_unless_it_is_a_variable_which_the_image_sets(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ATTNCACHE_HOST", "0.0.0.0")
    assert gather_settings({"unix_socket": "a.sock"}).host == "0.0.0.0"
    config = written(tmp_path, 'host = "0.0.0.0"')
    for options, file in (({"host": "127.0.0.1"}, None), ({}, config)):
        with pytest.raises(InvalidSettings, match="--host has no effect with --unix-socket") as refused:
            gather_settings({"unix_socket": "a.sock", **options}, file)
        assert refused.value.field == "host"


@pytest.mark.parametrize(
    ("unknown", "advice"),
    [
        ("ATTNCACHE_PROT", "did you mean ATTNCACHE_PORT"),
        ("ATTNCACHE_ZZQX", "attncache serve --help lists all"),  # resembles no known one
    ],
)
def test_unknown_variable_is_refused_with_the_closest_known_one(unknown, advice):
    refuse_unknown_variables(["PATH", "ATTN", *map(environment_name, Settings.model_fields)])
    with pytest.raises(InvalidSettings, match=f"{unknown} is not known; {advice}"):
        refuse_unknown_variables(["HOME", "ATTNCACHE_HOST", unknown])


def test_bad_value_of_a_file_names_the_file(tmp_path):
    config = written(tmp_path, 'port = "abc"')
    with pytest.raises(InvalidSettings) as refused:
        gather_settings({}, config)
    assert str(refused.value) == f"--config {config}: port cannot be 'abc': it must be a whole number"
    with pytest.raises(InvalidSettings, match="--port"):
        gather_settings({"port": "abc"}, config)


def test_every_field_is_an_option_of_one_group_with_variable_help_and_default():
    assert len({group.title for group in GROUPS}) == len(GROUPS)
    options = {option.name: option for option in settings_options()}
    assert list(options) == [name for group in GROUPS for name in group.model_fields]
    for name, field in Settings.model_fields.items():
        assert options[name].envvar == f"ATTNCACHE_{name.upper()}"
        assert options[name].opts == [f"--{name.replace('_', '-')}"]
        assert options[name].default == field.default
        assert options[name].help == field.description
        assert not options[name].hidden
        assert field.description


def written(folder, text):
    path = folder / "attncache.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_options_come_before_variables_before_the_file_before_defaults(tmp_path, monkeypatch):
    config = written(tmp_path, 'port = 1\nthreads = 2\nmodel = "in-file"\nkv = false\nmin_gain = 0.5\n')
    monkeypatch.setenv("ATTNCACHE_PORT", "3")
    monkeypatch.setenv("ATTNCACHE_THREADS", "4")
    monkeypatch.setenv("ATTNCACHE_MODEL", "")  # as absent
    settings = gather_settings({"port": "5"}, config)
    assert settings == Settings(port=5, threads=4, model="in-file", kv=False, min_gain=0.5)
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert gather_settings({"port": "5"}, config) == settings


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("prot = 1", "key prot is not known; did you mean port?"),
        ("max-tokens = 8", "key max-tokens is not known; did you mean max_tokens?"),
        ('policy = "moderate"', "key policy was removed; use --threshold"),
        ("[network]\nport = 1", r"has a table \[network\]; write every setting as a key without a table"),
        ("port: 1", "is not a TOML file: .*line 1"),
        ("port = 1.5", "--config .*: port cannot be 1.5"),
        ("port = true", "--config .*: port cannot be True: it must be a number"),
        ("threads = false", "--config .*: threads cannot be False: it must be a number"),
        ("max_queue_seconds = true", "max_queue_seconds cannot be True: it must be a number"),
        ("workers = true", "workers cannot be True: "),
        ("model = true", "model cannot be True: it must be a string"),
        (f"port = {'[' * 100_000}", "--config .*attncache.toml is nested too deeply"),
    ],
)
def test_bad_file_is_refused_with_the_key(tmp_path, text, refusal):
    with pytest.raises(InvalidSettings, match=refusal) as refused:
        gather_settings({}, written(tmp_path, text))
    assert "\n" not in str(refused.value)


# A written file.


def test_values_are_read_again_and_stand_below_the_comment(tmp_path):
    path = tmp_path / "a.toml"
    values = {"quantize": "int8", "threads": 2, "maps": False, "min_gain": 0.0, "cache_dir": Path("/a b")}
    written = write_settings(path, {**values, "min_gain": 0.05}, ["one\ntwo", "", 'a "b" = 1'])
    assert gather_settings({}, path) == written
    assert written == Settings.model_validate(values | {"min_gain": 0.05})
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[:3] == ["# one two", "#", '# a "b" = 1']
    assert len(lines) == 3 + len(values)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("settings") / "a.toml"


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_every_text_is_read_as_it_was_written(path, text):
    write_settings(path, {"model": text}, [text])
    assert gather_settings({}, path).model == text


def test_setting_that_serve_refuses_is_not_written(tmp_path):
    with pytest.raises(InvalidSettings, match="--threads"):
        write_settings(tmp_path / "a.toml", {"threads": 0}, [])
    assert list(tmp_path.iterdir()) == []


def test_settings_are_the_same_for_the_process_that_builds():
    settings = read_settings({"max_queue_seconds": "inf", "threads": 2})
    assert settings.max_queue_seconds == math.inf
    assert read_settings(json.loads(settings.model_dump_json())) == settings
