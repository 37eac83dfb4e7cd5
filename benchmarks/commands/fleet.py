"""`fleet`: simulate servers behind entrances, with a shared store or without."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.measuring.fleet import (
    ROUTES,
    FleetReport,
    Simulation,
    Traffic,
    draw_requests,
    requests_per_second,
    simulate,
)
from benchmarks.measuring.fleet_replay import Cluster, measured_fleet, replay
from benchmarks.measuring.fleet_servers import Event, EventKind, Fleet
from benchmarks.plots import FleetPlots
from service.commands.options import json_option
from service.commands.progress import shown_progress
from service.commands.report import show_table, write_json

_COLUMNS = [
    "route",
    "memory",
    "disk",
    "store",
    "busy",
    "greatest / mean",
    "p50, s",
    "p99, s",
    "read, GB/s",
    "written, GB/s",
    "repeated",
    "dollars per million",
]
_PLANNED_BUSY = 0.7
_TEXT_TOKENS = 50
F = TypeVar("F", bound=Callable[..., Any])


class EventType(click.ParamType[Event]):
    """SECONDS:lost|added|slow:COUNT."""

    name = "event"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Event:
        """Return the event that a text describes."""
        try:
            seconds, kind, count = str(value).split(":")
            event = Event(float(seconds), EventKind(kind), int(count))
        except ValueError:
            self.fail(f"{value!r} is not SECONDS:lost|added|slow:COUNT, such as 200:lost:1", param, ctx)
        if event.servers < 1 or not 0 <= event.seconds < math.inf:
            self.fail(f"{value!r} needs a time that is not negative, and a count of at least 1", param, ctx)
        return event


def _number(
    name: str, default: float, help_text: str, *, least: float | None = None, most: float | None = None
) -> Callable[[F], F]:
    """Return the option of a number. least: None: more than 0."""
    accepted = click.FloatRange(least or 0, most, min_open=least is None)
    return click.option(name, type=accepted, default=default, show_default=True, help=help_text)


@click.command("fleet")
@click.option(
    "--servers",
    "sizes",
    type=click.IntRange(1, 65536),
    multiple=True,
    default=(64,),
    show_default=True,
    help="Servers. May be repeated, for one table each.",
)
@click.option(
    "--entrances", type=click.IntRange(1, 1024), default=1, show_default=True, help="Entrances in front."
)
@_number("--seconds", 300, "Simulated time. The tables are of the second half.")
@_number("--load", 0.7, "Work that arrives if no prefix is computed twice, as a share of the servers.")
@_number(
    "--plain-share",
    0,
    "Share of plain texts. Half of the other requests are few-shot prompts, half are turns.",
    least=0,
    most=1,
)
@_number("--tokens-per-second", 800, "Tokens that a server computes.")
@_number("--memory-gb", 2, "Memory tier of a server.")
@_number("--disk-gb", 0, "Disk tier of a server.", least=0)
@_number("--token-kb", 36, "Keys and values of one token.")
@_number("--store-tokens-per-second", 22_000, "Tokens that a server reads from the shared store.")
@_number("--store-gb", 256, "Size of the shared store.")
@_number("--store-gb-per-second", 12.5, "Bandwidth of the shared store, for all servers.")
@click.option(
    "--event",
    "events",
    type=EventType(),
    multiple=True,
    metavar="SECONDS:KIND:COUNT",
    help="Servers that are lost, added or slow from a time on, such as 200:lost:1. May be repeated.",
)
@_number("--server-dollars", 0.1, "Price of a server for an hour.")
@click.option(
    "--context",
    type=click.IntRange(min=128),
    default=4096,
    show_default=True,
    help="Tokens of the longest prompt.",
)
@click.option(
    "--replay",
    "entrance",
    metavar="URL",
    help="Send the requests to this entrance too, and compare. Number and speeds are then those of "
    "--replay-server.",
)
@click.option(
    "--replay-server",
    "replay_servers",
    metavar="URL",
    multiple=True,
    help="A server behind the entrance of --replay. Needed for each of them.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of all random choices.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder for a plot (PNG) with its data (CSV)."
)
@json_option
def bench_fleet(
    sizes: tuple[int, ...],
    entrances: int,
    seconds: float,
    load: float,
    plain_share: float,
    tokens_per_second: float,
    memory_gb: float,
    disk_gb: float,
    token_kb: float,
    store_tokens_per_second: float,
    store_gb: float,
    store_gb_per_second: float,
    events: tuple[Event, ...],
    server_dollars: float,
    context: int,
    entrance: str | None,
    replay_servers: tuple[str, ...],
    seed: int,
    output: Path | None,
    json_file: Path | None,
) -> None:
    """Simulate servers behind entrances: hit rate by tier, work, time to answer, traffic of the shared store.

    Half of the requests are few-shot prompts, whose prefixes are drawn by Zipf's law; half are turns of
    conversations. Routes are compared on the same requests. Speeds are options, and nothing is measured.
    """
    if sum(event.servers for event in events if event.kind is EventKind.LOST) >= min(sizes):
        raise click.BadParameter("not all servers can be lost", param_hint="--event")
    token_gb = token_kb / 1e6
    shares = (1 - plain_share) / 2
    longest = min(1000, context - _TEXT_TOKENS)
    traffic = Traffic(
        seconds,
        load,
        few_shot=shares,
        conversations=shares,
        prefix_tokens=(min(200, longest // 2), longest),
        text_tokens=_TEXT_TOKENS,
        context=context,
        seed=seed,
    )
    if entrance is not None:
        ignored = {"--event": events, "--entrances": entrances != 1, "--output": output}
        for option in (name for name, value in ignored.items() if value):
            raise click.BadParameter("not possible with --replay", param_hint=option)
        _compare(Cluster(entrance, replay_servers), traffic, json_file)
        return
    fleet = Fleet(
        servers=sizes[0],
        entrances=entrances,
        tokens_per_second=tokens_per_second,
        memory_tokens=round(memory_gb / token_gb),
        disk_tokens=round(disk_gb / token_gb),
        store_tokens_per_second=store_tokens_per_second,
        store_tokens=round(store_gb / token_gb),
        store_bandwidth=store_gb_per_second / token_gb,
        events=events,
    )
    found: dict[tuple[int, bool], list[FleetReport]] = {}
    with shown_progress() as progress:
        total = len(sizes) * 2 * len(ROUTES)
        for servers in sizes:
            for has_store in (False, True):
                sized = replace(fleet, servers=servers, has_store=has_store)
                reports = found[servers, has_store] = []
                for report in simulate(ROUTES, traffic, sized):
                    reports.append(report)
                    progress("simulations", sum(map(len, found.values())), total)
    for (servers, has_store), reports in found.items():
        sized = replace(fleet, servers=servers)
        price = server_dollars / 3600 * servers / requests_per_second(traffic, sized) / _PLANNED_BUSY * 1e6
        show_table(
            f"servers: {servers}; entrances: {entrances}; {'a' if has_store else 'no'} shared store",
            _COLUMNS,
            [_cells(report, token_gb, price) for report in reports],
        )
    click.echo(
        "memory, disk, store: shares of the tokens of prefixes. read, written: of the store. dollars "
        f"per million: of requests, with as many servers as are busy for {_PLANNED_BUSY:.0%} of the time. "
        "-: a server does not keep up.\n"
        "bounded ring hash: at most 125 % of the mean load. oracle: knows what all servers have to do."
    )
    tables = [
        {"servers": servers, "store": has_store, "routes": [asdict(report) for report in reports]}
        for (servers, has_store), reports in found.items()
    ]
    if output is not None:
        FleetPlots(output, "").fleet(found, token_gb)
    write_json(json_file, {"traffic": asdict(traffic), "fleet": asdict(fleet), "tables": tables})


def _compare(cluster: Cluster, traffic: Traffic, json_file: Path | None) -> None:
    """Compare the simulation with real servers."""
    if not cluster.servers:
        raise click.BadParameter("needed with --replay", param_hint="--replay-server")
    fleet = asyncio.run(measured_fleet(cluster))
    # The servers begin empty, and so does the simulation.
    requests = [request for request in draw_requests(traffic, fleet) if request.arrival >= 0]
    simulated = Simulation(fleet, traffic.seed).run("bounded ring hash", requests)
    measured = asyncio.run(replay(cluster, requests))
    names = (
        "memory_hit_rate",
        "disk_hit_rate",
        "store_hit_rate",
        "computed_tokens",
        "p50_seconds",
        "p99_seconds",
    )
    show_table(
        f"{len(requests)} requests; servers compute {fleet.tokens_per_second:.0f} tokens/s and "
        f"{fleet.request_seconds * 1e3:.1f} ms per request, and read "
        f"{fleet.store_tokens_per_second:.0f} tokens/s",
        ["", "simulated", "measured"],
        [[name, *(f"{getattr(report, name):.3f}" for report in (simulated, measured))] for name in names],
    )
    click.echo(f"statuses: {measured.statuses}")
    report = {"fleet": asdict(fleet), "simulated": asdict(simulated), "measured": asdict(measured)}
    write_json(json_file, {"traffic": asdict(traffic), **report})


def _cells(report: FleetReport, token_gb: float, price: float) -> list[str]:
    times = report.p50_seconds, report.p99_seconds
    rates = report.memory_hit_rate, report.disk_hit_rate, report.store_hit_rate
    return [
        report.route,
        *(f"{rate:.2f}" for rate in rates),
        f"{report.busy:.2f}",
        f"{report.greatest:.2f}",
        *(f"{seconds:.2f}" if report.is_steady else "-" for seconds in times),
        f"{report.read_tokens_per_second * token_gb:.2f}",
        f"{report.written_tokens_per_second * token_gb:.2f}",
        str(report.repeated),
        f"{price * report.busy:.2f}" if report.is_steady else "-",
    ]
