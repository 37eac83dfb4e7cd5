"""Reads settings: options before environment variables before the file before defaults.

    options of the command line  ─┐
    variables ATTNCACHE_*        ─┼─>  one mapping, field -> value  ─>  Settings, or InvalidSettings
    --config FILE (TOML)         ─┘

Only Settings checks values. A name that no field has is refused here, because it would be ignored silently.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from service.errors import InvalidSettings
from service.settings.names import CONFIG_VARIABLE, ENVIRONMENT_PREFIX, all_names, environment_name
from service.settings.settings import Settings

# Former field -> what to use instead. The option, its variable and its key are refused.
REMOVED_FIELDS = {
    "policy": "use --threshold 0.995 (conservative), 0.99 (moderate) or 0.95 (aggressive)",
}
_SECRETS = frozenset({"api_key"})


class _Sources(Settings, BaseSettings):
    """What pydantic-settings looks for. An empty variable counts as absent, as Compose files leave them."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True, enable_decoding=False
    )


def gather_settings(options: Mapping[str, object], config: Path | None = None) -> Settings:
    """Return the settings from options by field name, the environment and a TOML file.

    options: only those that were given. Raises InvalidSettings, which names the option, variable or key.
    """
    refuse_unknown_variables(os.environ)
    in_file = _read_file(config) if config else {}
    return read_settings({**in_file, **EnvSettingsSource(_Sources)(), **options})


def read_settings(values: Mapping[str, object]) -> Settings:
    """Return the settings from values by field name.

    Raises InvalidSettings, which names the option, the variable and the key of the file.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:
            raise InvalidSettings(first["msg"]) from error
        field = str(first["loc"][0])
        accepted = first["msg"].replace("Input should be", "accepted is", 1)
        # Nothing shows a key, whatever is wrong with it.
        value = "this value" if field in _SECRETS else repr(first["input"])
        message = f"{all_names(field)} cannot be {value}: {accepted}"
        raise InvalidSettings(message, field=field) from error


def refuse_unknown_variables(environment: Iterable[str]) -> None:
    """Raise InvalidSettings for an unknown variable with the prefix of this program.

    Without this check, a misspelt variable would be ignored silently.
    """
    known = {CONFIG_VARIABLE, *map(environment_name, Settings.model_fields)}
    removed = {environment_name(field): remedy for field, remedy in REMOVED_FIELDS.items()}
    for name in sorted(environment):
        if name.upper().startswith(ENVIRONMENT_PREFIX):
            _refuse_unknown("environment variable", name, known, removed)


def _read_file(path: Path) -> dict[str, object]:
    """Return the values of a TOML file by field name. Raises InvalidSettings, and OSError."""
    # The source would take a missing file for an empty one.
    path.open("rb").close()
    try:
        values = TomlConfigSettingsSource(_Sources, path).toml_data
    except ValueError as error:
        raise InvalidSettings(f"--config {path} is not a TOML file: {error}", field="config") from error
    for key, value in values.items():
        if isinstance(value, dict):
            raise InvalidSettings(
                f"--config {path} has a table [{key}]; write every setting as a key without a table",
                field="config",
            )
        _refuse_unknown(f"--config {path}: key", key, set(Settings.model_fields), REMOVED_FIELDS)
    return values


def _refuse_unknown(kind: str, name: str, known: set[str], removed: Mapping[str, str]) -> None:
    if name in removed:
        raise InvalidSettings(f"{kind} {name} was removed; {removed[name]}")
    if name not in known:
        closest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
        raise InvalidSettings(f"{kind} {name} is not known; did you mean {closest}?")
