from pathlib import Path

import pytest

from service.commands.settings_options import settings_options
from service.errors import InvalidSettings
from service.settings import (
    GROUPS,
    Settings,
    environment_name,
    gather_settings,
    option_name,
    read_settings,
    refuse_unknown_variables,
)


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
        ("verify_rate", "1.5", "it must be at most 1"),
        ("verify_rate", "nan", "it must be at most 1"),
        ("max_batch_tokens", "0", "it must be at least 1"),
        ("cors_origin", "app.example", "https://HOST"),
        ("cors_origin", "https://app.example, app.example", "https://HOST"),
        ("cors_origin", "https://app.example/", "without a path"),
        ("max_tokens", "1", "it must be at least 2"),
        ("reuse", "perhaps", "it must be true or false"),
        ("model", "", "it must not be empty"),
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


def test_values_are_read_from_text():
    settings = read_settings({"port": "81", "truncate": "off", "threshold": "0.975", "cache_dir": "here"})
    assert settings == Settings(port=81, truncate=False, threshold=0.975, cache_dir=Path("here"))


def test_request_that_could_never_be_queued_is_refused_at_start():
    with pytest.raises(InvalidSettings, match="--max-request-inputs must be at most --max-queue-sequences"):
        read_settings({"max_request_inputs": 10, "max_queue_sequences": 9})


@pytest.mark.parametrize(
    ("field", "value"), [("database", "/d"), ("threshold", 0.9), ("min_gain", 0.1), ("verify_rate", 0.1)]
)
def test_option_without_effect_is_refused(field, value):
    option = option_name(field)
    with pytest.raises(InvalidSettings, match=f"{option} has no effect with --no-reuse"):
        read_settings({"reuse": False, field: value})


def test_labels_beside_a_classifier_are_refused():
    with pytest.raises(InvalidSettings, match="--classifier and --labels both set the labels"):
        read_settings({"classifier": "folder", "labels": "a,b"})


@pytest.mark.parametrize(
    ("unknown", "closest"),
    [
        ("ATTNCACHE_PROT", "ATTNCACHE_PORT"),
        ("ATTNCACHE_MAX_BATCH_TOKEN", "ATTNCACHE_MAX_BATCH_TOKENS"),
        ("ATTNCACHE_TREADS", "ATTNCACHE_THREADS"),
    ],
)
def test_unknown_variable_is_refused_with_the_closest_known_one(unknown, closest):
    with pytest.raises(InvalidSettings, match=f"{unknown} is not known; did you mean {closest}"):
        refuse_unknown_variables(["HOME", "ATTNCACHE_HOST", unknown])


def test_name_that_resembles_no_known_one_gets_no_guess():
    with pytest.raises(
        InvalidSettings, match="ATTNCACHE_ZZQX is not known; attncache serve --help lists all"
    ):
        refuse_unknown_variables(["ATTNCACHE_ZZQX"])


def test_bad_value_of_a_file_names_the_file(tmp_path):
    config = tmp_path / "attncache.toml"
    config.write_text('port = "abc"', encoding="utf-8")
    with pytest.raises(InvalidSettings) as refused:
        gather_settings({}, config)
    assert str(refused.value) == f"--config {config}: port cannot be 'abc': it must be a whole number"
    with pytest.raises(InvalidSettings, match="--port"):
        gather_settings({"port": "abc"}, config)


def test_known_variables_and_foreign_variables_are_accepted():
    refuse_unknown_variables(["PATH", "ATTN", *map(environment_name, Settings.model_fields)])


def test_variable_of_a_removed_option_is_refused_with_what_to_use_instead():
    with pytest.raises(InvalidSettings, match="ATTNCACHE_POLICY was removed; use --threshold"):
        refuse_unknown_variables(["ATTNCACHE_HOST", "ATTNCACHE_POLICY"])


def test_every_field_belongs_to_one_group():
    grouped = [name for group in GROUPS for name in group.model_fields]
    assert sorted(grouped) == sorted(Settings.model_fields)
    assert set(Settings.__bases__) == set(GROUPS)
    assert len({group.title for group in GROUPS}) == len(GROUPS)


def test_every_field_is_an_option_with_variable_help_and_default():
    options = {option.name: option for option in settings_options()}
    assert list(options) == [name for group in GROUPS for name in group.model_fields]
    for name, field in Settings.model_fields.items():
        assert options[name].envvar == f"ATTNCACHE_{name.upper()}"
        assert options[name].opts == [f"--{name.replace('_', '-')}"]
        assert options[name].default == field.default
        assert options[name].help == field.description
        assert not options[name].hidden
        assert field.description


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a configuration file and returns its path."""

    def write(text):
        path = tmp_path / "attncache.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_options_come_before_variables_before_the_file_before_defaults(written, monkeypatch):
    config = written('port = 1\nthreads = 2\nmodel = "in-file"\nkv = false\nmin_gain = 0.5\n')
    monkeypatch.setenv("ATTNCACHE_PORT", "3")
    monkeypatch.setenv("ATTNCACHE_THREADS", "4")
    monkeypatch.setenv("ATTNCACHE_MODEL", "")  # as absent
    settings = gather_settings({"port": "5"}, config)
    assert settings == Settings(port=5, threads=4, model="in-file", kv=False, min_gain=0.5)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("prot = 1", "key prot is not known; did you mean port?"),
        ("max-tokens = 8", "key max-tokens is not known; did you mean max_tokens?"),
        ('policy = "moderate"', "key policy was removed; use --threshold"),
        ("[network]\nport = 1", r"has a table \[network\]; write every setting as a key without a table"),
        ("port: 1", "is not a TOML file: .*line 1"),
        ("port = 1.5", "--config .*: port cannot be 1.5"),
        ('port = "many"', "--config .*: port cannot be 'many': it must be a whole number"),
    ],
)
def test_bad_file_is_refused_with_the_key(written, text, refusal):
    with pytest.raises(InvalidSettings, match=refusal) as refused:
        gather_settings({}, written(text))
    assert "\n" not in str(refused.value)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        gather_settings({}, tmp_path / "absent.toml")
