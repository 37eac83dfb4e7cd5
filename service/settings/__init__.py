"""The settings of `serve` in one typed object, read from options, environment variables and a file.

    attncache.toml: threads = 2
    ATTNCACHE_PORT=8081 attncache serve --config attncache.toml   ->   Settings(port=8081, threads=2, ...)

Each field is an option `--kebab-case`, a variable `ATTNCACHE_<NAME>` and a key of the file. A name or value
that is not accepted is refused at the start, with its name. To add a setting, add a field to its group;
settings.py lists the groups.
"""

from service.settings.names import CONFIG_VARIABLE, environment_name, option_name
from service.settings.reading import REMOVED_FIELDS, gather_settings, read_settings, refuse_unknown_variables
from service.settings.settings import GROUPS, Settings

__all__ = [
    "CONFIG_VARIABLE",
    "GROUPS",
    "REMOVED_FIELDS",
    "Settings",
    "environment_name",
    "gather_settings",
    "option_name",
    "read_settings",
    "refuse_unknown_variables",
]
