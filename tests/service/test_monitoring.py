"""The dashboard and the alerts read metrics, labels and values that the server has; the alerts fire."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from fake_engine import serving
from prometheus_client.parser import text_string_to_metric_families
from promql import selectors_of

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docker/alerts.yml"
DASHBOARD = ROOT / "docker/grafana/dashboards/attncache.json"
# Prometheus adds these labels to every series that it scrapes, and this metric for every target.
SCRAPED = {"job": "attncache", "instance": "attncache:8080"}
ENTRANCE = {"job": "entrance", "instance": "entrance:9902"}
OF_ENVOY = {"envoy_cluster_name": "by_requests"} | ENTRANCE  # test_entrance.py reads this from a real one
OTHERS = {
    "up": [SCRAPED, ENTRANCE],
    "envoy_cluster_membership_healthy": [OF_ENVOY],
    "envoy_cluster_membership_total": [OF_ENVOY],
}
KEY = "key-of-the-operator-0123456789"  # some metrics exist only with keys
COLUMNS = 24  # of a dashboard


class Query(NamedTuple):
    place: str  # where it stands, for messages
    expression: str
    shown: str  # the text that shows labels of the result


def alerts():
    [group] = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def panels():
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def queries():
    return [
        *(Query(alert["alert"], alert["expr"], alert["annotations"]["summary"]) for alert in alerts()),
        *(
            Query(panel["title"], target["expr"], target.get("legendFormat", ""))
            for panel in panels()
            for target in panel.get("targets", ())
        ),
    ]


@pytest.fixture(scope="module")
async def series():
    """The labels of every series of the server, by the name of the metric, as Prometheus keeps them."""
    async with serving(api_key=f"operator {KEY} admin") as client:
        text = (await client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"})).text
    found = {name: list(labels) for name, labels in OTHERS.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels | SCRAPED)
    return found


async def test_queries_read_series_labels_and_values_that_the_server_has(series):
    for query in queries():
        # An operator keeps the labels of its left side.
        first, *_ = selectors = selectors_of(query.expression)
        for selector in selectors:
            assert selector.metric in series, (query.place, selector)
            found = series[selector.metric]
            assert any(map(selector.selects, found)), (query.place, selector)
            assert named_labels(selector) <= set(found[0]), (query.place, selector)
            for matcher in selector.matchers:
                for pattern in matcher.values:
                    named = (matcher.names(pattern, labels[matcher.label]) for labels in found)
                    assert any(named), (query.place, pattern)
        assert labels_shown(query.shown) <= labels_of_result(first, series), query


def named_labels(selector):
    return {matcher.label for matcher in selector.matchers} | (selector.grouped_by or set())


def labels_of_result(selector, series):
    return set(series[selector.metric][0] if selector.grouped_by is None else selector.grouped_by)


def labels_shown(text):
    """The labels in `{{label}}` of Grafana, or in `{{ $labels.label }}` of Prometheus."""
    return set(re.findall(r"\{\{(\w+)\}\}", text)) | set(re.findall(r"\$labels\.(\w+)", text))


async def test_every_metric_is_on_the_dashboard_or_in_an_alert(series):
    asked = {selector.metric for query in queries() for selector in selectors_of(query.expression)}
    of_histogram = re.compile(r"_(bucket|sum|count)$")
    assert {of_histogram.sub("", name) for name in series} == {of_histogram.sub("", name) for name in asked}


def test_rate_is_asked_only_of_counters():
    for query in queries():
        for metric in re.findall(r"(?:rate|increase)\((\w+)", query.expression):
            assert metric.endswith(("_total", "_bucket", "_sum", "_count")), query


def test_panels_have_distinct_numbers_fit_the_dashboard_and_do_not_overlap():
    assert len({panel["id"] for panel in panels()}) == len(panels())
    covered = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            )
        )
        assert not cells & covered, panel["title"]
        covered |= cells


def test_every_alert_is_explained_in_the_documentation_and_fires_in_a_test():
    names = [alert["alert"] for alert in alerts()]
    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == names
    cases = yaml.safe_load((ROOT / "tests/service/alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    tested = {case["alertname"] for group in cases for case in group["alert_rule_test"] if case["exp_alerts"]}
    assert tested == set(names)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "docker/prometheus.yml"),
        ("check", "rules", "docker/alerts.yml"),
        ("test", "rules", "tests/service/alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files_and_sees_each_alert_fire(arguments):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
