"""`python -m benchmarks NAME`: run a measurement from a checkout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from service.cli import LazyCommands, OneLineErrors

# The measurements that are a module by themselves. Such a module reads its own arguments.
_MODULES = {
    "attention-kernel": "attention_kernel",
    "budget-transfer": "budget_transfer",
    "busy-neighbour": "busy_neighbour",
    "cold-records": "cold_records",
    "combined": "combined",
    "experts": "experts",
    "familiarity": "familiarity",
    "first-starts": "first_starts",
    "first-visits": "first_visits",
    "hit-limit": "hit_limit",
    "hostile-clients": "hostile_clients",
    "kv-truncation": "kv_truncation",
    "model-sizes": "model_sizes",
    "overload": "overload",
    "plain-executor": "plain_executor",
    "products": "products",
    "quantization": "quantization",
    "request-cost": "request_cost",
    "soak": "soak.run",
    "two-engines": "two_engines",
}


class Module(click.Command):
    """A command that leaves its arguments to the `main` of a module."""

    def __init__(self, name: str, main: Callable[[], None], **options: Any) -> None:
        super().__init__(name, help=sys.modules[main.__module__].__doc__, **options)
        self.main_of = main

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments as they are."""
        ctx.args = args
        return args

    def invoke(self, ctx: click.Context) -> None:
        """Run the module with the arguments as its own."""
        sys.argv = [ctx.command_path, *ctx.args]
        self.main_of()


class _Missing(Module):
    """A command whose packages are not installed."""

    def __init__(self, name: str, package: str) -> None:
        click.Command.__init__(self, name, help=f"Needs {package}: pip install -e '.[bench,cluster]'.")

    def invoke(self, ctx: click.Context) -> None:
        """Refuse to run."""
        raise click.UsageError(f"{ctx.info_name}: {self.help}")


class _Commands(LazyCommands):
    def __getitem__(self, name: str) -> click.Command:
        try:
            found: Any = super().__getitem__(name)
        except ModuleNotFoundError as error:
            return _Missing(name, str(error.name))
        return found if isinstance(found, click.Command) else Module(name, found)


@click.group(
    "benchmarks",
    cls=OneLineErrors,
    commands=_Commands(
        {
            "blend": "benchmarks.commands.blend:bench_blend",
            "drift": "benchmarks.commands.drift:drift",
            "engine": "benchmarks.commands.engine:engine",
            "evaluate": "benchmarks.commands.evaluate:evaluate",
            "fleet": "benchmarks.commands.fleet:bench_fleet",
            "figures": "benchmarks.commands.figures:figures",
            "http": "benchmarks.commands.http:bench_http",
            "importance": "benchmarks.commands.importance:importance",
            "index": "benchmarks.commands.index:bench_index",
            "prefix": "benchmarks.commands.prefix:bench_prefix",
            "sessions": "benchmarks.commands.sessions:bench_sessions",
            **{name: f"benchmarks.{module}:main" for name, module in _MODULES.items()},
        }
    ),
)
def main() -> None:
    """Measure speed, memory and quality, beside other engines, servers and the papers' baselines."""


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
