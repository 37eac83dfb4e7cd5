"""A written file of settings is read by `serve --config` as it was meant."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidSettings
from service.settings import Settings, gather_settings
from service.settings.reading import write_settings


def test_values_are_read_again_and_stand_below_the_comment(tmp_path):
    path = tmp_path / "a.toml"
    values = {"quantize": "int8", "threads": 2, "maps": False, "min_gain": 0.0, "cache_dir": Path("/a b")}
    written = write_settings(path, {**values, "min_gain": 0.05}, ["one\ntwo", "", 'a "b" = 1'])
    assert gather_settings({}, path) == written
    assert written == Settings.model_validate(values | {"min_gain": 0.05})
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[:3] == ["# one two", "#", '# a "b" = 1']
    assert len(lines) == 3 + len(values)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_every_text_is_read_as_it_was_written(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("settings") / "a.toml"
    write_settings(path, {"model": text}, [text])
    assert gather_settings({}, path).model == text


def test_setting_that_serve_refuses_is_not_written(tmp_path):
    with pytest.raises(InvalidSettings, match="--threads"):
        write_settings(tmp_path / "a.toml", {"threads": 0}, [])
    assert list(tmp_path.iterdir()) == []
