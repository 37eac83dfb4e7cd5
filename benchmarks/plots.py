"""Plot what reuse costs and saves. Each plot is a PNG file with its data in a CSV file of the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from attncache_core.evaluation.comparison import MethodReport
from benchmarks.measuring.drift import Arm, ArmDay, saved_share
from benchmarks.measuring.fleet import FleetReport
from benchmarks.measuring.hit_costs import HitCosts
from benchmarks.papers.blending import MethodReport as BlendingReport
from benchmarks.papers.curves import Curves, pareto_front
from service.plots import Plots


class PaperPlots(Plots):
    """Writes the plots of the papers' experiments, and their data, into one folder."""

    def quality_against_time(self, curves: Curves) -> None:
        """Plot quality against saved time for the best policies of each family."""
        rows = [(p.family, p.heads, p.hit_rate, p.saved, p.quality) for p in curves.points]
        self._write("quality_against_time", ("family", "heads", "hit_rate", "saved", "quality"), rows)
        figure, axes = self._axes(
            "share of the full model's time saved, without the search", f"mean {self._measure} of the hits"
        )
        for family in dict.fromkeys(point.family for point in curves.points):
            best = pareto_front([point for point in curves.points if point.family == family])
            axes.plot([p.saved for p in best], [p.quality for p in best], marker=".", label=family)
        axes.legend()
        self._save(figure, "quality_against_time")

    def damage(self, damage: np.ndarray) -> None:
        """Plot the damage of each head, [layers, heads], as a heat map."""
        rows = [(layer, head, value) for (layer, head), value in np.ndenumerate(damage)]
        self._write("damage", ("layer", "head", "damage"), rows)
        from matplotlib.colors import LogNorm

        figure, axes = self._axes("head", "layer")
        shown = axes.imshow(np.maximum(damage, 1e-7), norm=LogNorm(), cmap="viridis", aspect="auto")
        axes.set_xticks(range(damage.shape[1]))
        axes.set_yticks(range(damage.shape[0]))
        figure.colorbar(shown, label="damage: 1 - cosine when this head alone is reused")
        self._save(figure, "damage")

    def similarities(self, curves: Curves) -> None:
        """Plot the similarity predicted by the projector against the true similarity, by kind of record."""
        rows = [
            (kind.name.lower(), *pair)
            for kind, (predicted, true) in curves.similarities.items()
            for pair in zip(predicted.tolist(), true.tolist(), strict=True)
        ]
        self._write("similarity", ("kind", "predicted", "true"), rows)
        figure, axes = self._axes("predicted similarity", "true similarity of the maps")
        for kind, (predicted, true) in curves.similarities.items():
            axes.scatter(predicted, true, s=4, alpha=0.5, label=kind.name.lower())
        ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), 1.0]
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.legend()
        self._save(figure, "similarity")

    def thresholds(self, curves: Curves) -> None:
        """Plot hit rate and loss against θ, for stored records only, as in Figure 6 of the papers."""
        rows = [
            (p.mask, p.heads, p.threshold, p.hit_rate, p.quality, p.quality_of_all) for p in curves.thresholds
        ]
        columns = ("mask", "heads", "threshold", "hit_rate", "quality_of_hits", "quality_of_all")
        self._write("thresholds", columns, rows)
        figure, axes = self._axes("θ", "hit rate")
        loss = axes.twinx()
        loss.set_ylabel(f"1 - mean {self._measure} of all texts (dashed)")
        for mask in dict.fromkeys(point.mask for point in curves.thresholds):
            points = [point for point in curves.thresholds if point.mask == mask]
            x = [point.threshold for point in points]
            axes.plot(x, [point.hit_rate for point in points], color="black")
            loss.plot(
                x,
                [1 - point.quality_of_all for point in points],
                linestyle="--",
                label=f"{mask} ({points[0].heads})",
            )
        loss.legend()
        self._save(figure, "thresholds")

    def presets(self, reports: Sequence[MethodReport]) -> None:
        """Plot speed and loss of the policy and of the three presets, as in Table 7 of the papers."""
        rows = [(r.method, r.hit_rate, r.score, r.speedup, r.attention_speedup) for r in reports]
        self._write("presets", ("method", "hit_rate", "score", "speedup", "attention_speedup"), rows)
        figure, axes = self._axes(
            "speed-up over all traffic, search included", f"mean {self._measure} of all texts"
        )
        for report in reports:
            label = f"{report.method} ({report.hit_rate:.0%} hits)"
            axes.scatter(report.speedup, report.score, label=label)
        axes.margins(0.1)
        axes.legend()
        self._save(figure, "presets")

    def blending(self, reports: Sequence[BlendingReport]) -> None:
        """Plot the quality of blended chunks against the recompute ratio, and against the time to answer."""
        columns = ("method", "ratio", "random", "cosine", "cosine_5th_percentile", "agreement", "time_ratio")
        rows = map(attrgetter(*columns, "computed_tokens"), reports)
        self._write("blend", (*columns, "tokens"), rows)
        chosen = [report for report in reports if report.ratio is not None and not report.random]
        random = [report for report in reports if report.random]
        figure, axes = self._axes(
            "share of the reused tokens that is computed again", "quality beside full recomputation"
        )
        for measure, label, style in (
            ("cosine", "mean cosine", "o-"),
            ("cosine_5th_percentile", "5th percentile of the cosine", "o--"),
            ("agreement", "share of equal decisions", "s-"),
        ):
            values = [getattr(report, measure) for report in chosen]
            if not np.isnan(values).all():
                (line,) = axes.plot([report.ratio for report in chosen], values, style, label=label)
                at_random = [getattr(report, measure) for report in random]
                axes.plot([report.ratio for report in random], at_random, "x", color=line.get_color())
        axes.plot([], [], "x", color="grey", label="random tokens instead")
        axes.legend()
        self._save(figure, "blend_quality")
        self._blending_times(reports)

    def _blending_times(self, reports: Sequence[BlendingReport]) -> None:
        figure, axes = self._axes(
            "time to answer, relative to full recomputation",
            "1 - mean cosine; what is below is drawn at 1e-4",
        )
        axes.set_yscale("log")
        for report in reports:
            is_chosen = report.ratio is not None and not report.random
            point = (report.time_ratio, max(1e-4, 1 - report.cosine))
            axes.scatter(*point, marker="o" if is_chosen else "x", color="black")
            label = f"{report.ratio:g}" if is_chosen else report.method
            axes.annotate(label, point, xytext=(5, 3), textcoords="offset points", fontsize=7)
        axes.scatter([], [], marker="o", color="black", label="share that is computed again")
        axes.scatter([], [], marker="x", color="black", label="other methods")
        axes.margins(0.15)
        axes.legend()
        self._save(figure, "blend_time")


class DriftPlots(Plots):
    """Writes the plot of a month of databases, and its data."""

    def drift(self, days: Sequence[ArmDay], costs: HitCosts) -> None:
        """Plot hits, cosine of the hits, kept windows and saved time by day and arm, with verification."""
        columns = ("day", "database", "hit_rate", "mean_cosine", "kept_windows", "saved")
        rows = []
        for day in days:
            served = day.tightened
            kept = served.kept / served.windows if served.windows else float("nan")
            mean = float("nan") if served.mean is None else served.mean
            saved = saved_share([day], lambda day: day.tightened, costs)
            rows.append((day.day, day.arm, served.hits / served.texts, mean, kept, saved))
        self._write("drift", columns, rows)
        figure = self._figure(figsize=(9.0, 6.0), layout="constrained")
        labels = (
            "share of hits",
            f"mean {self._measure} of the hits",
            "share of windows that keep the budget",
            "share of the time saved in full batches",
        )
        for column, (axes, label) in enumerate(zip(figure.subplots(2, 2).flat, labels, strict=True), 2):
            axes.set_xlabel("day")
            axes.set_ylabel(label)
            for arm in Arm:
                points = [(row[0], row[column]) for row in rows if row[1] == arm]
                axes.plot(*zip(*points, strict=True), marker=".", label=arm)
        figure.axes[0].legend()
        self._save(figure, "drift")


class FleetPlots(Plots):
    """Writes the plot of simulated fleets, and its data."""

    def fleet(self, found: Mapping[tuple[int, bool], Sequence[FleetReport]], token_gb: float) -> None:
        """Plot work and traffic of the store against the number of servers, by route.

        found: reports by number of servers and whether they share a store. token_gb: of one token's keys and
        values.
        """
        rows = [
            (servers, has_store, report.route, report.busy, report.read_tokens_per_second * token_gb)
            for (servers, has_store), reports in found.items()
            for report in reports
        ]
        self._write("fleet", ("servers", "store", "route", "busy", "store_gb_per_second"), rows)
        figure = self._figure(figsize=(10.0, 4.5), layout="constrained")
        busy, traffic = figure.subplots(1, 2)
        busy.set_ylabel("work, as a share of the servers")
        busy.set_title("dashed: no shared store")
        traffic.set_ylabel("read from the shared store, GB/s")
        for axes, column, stores in ((busy, 3, (True, False)), (traffic, 4, (True,))):
            axes.set_xlabel("servers")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for number, route in enumerate(dict.fromkeys(row[2] for row in rows)):
                for has_store in stores:
                    points = [(row[0], row[column]) for row in rows if row[1:3] == (has_store, route)]
                    style = {"label": route} if has_store else {"linestyle": "--"}
                    axes.plot(*zip(*points, strict=True), marker=".", color=f"C{number}", **style)
        busy.legend()
        self._save(figure, "fleet")
