"""What a PromQL expression reads: its selectors, and the labels that each of them is grouped by."""

from __future__ import annotations

import re
from dataclasses import dataclass

import promql_parser as promql

# Grafana replaces this variable before it sends a query.
VARIABLES = {"$__rate_interval": "1m"}
LEAVES = (promql.NumberLiteral, promql.StringLiteral)


@dataclass(frozen=True)
class Matcher:
    """One condition of a selector, such as `status=~"429|503"`."""

    label: str
    values: tuple[str, ...]  # regular expressions, or one value
    is_pattern: bool
    is_negative: bool

    def accepts(self, value):
        return any(self.names(pattern, value) for pattern in self.values) != self.is_negative

    def names(self, pattern, value):
        return bool(re.fullmatch(pattern, value)) if self.is_pattern else pattern == value


@dataclass(frozen=True)
class Selector:
    """One selector of an expression, such as `requests_total{status="429"}`."""

    metric: str
    matchers: tuple[Matcher, ...]
    grouped_by: frozenset[str] | None  # None: no aggregation round it

    def selects(self, labels):
        return all(matcher.accepts(labels.get(matcher.label, "")) for matcher in self.matchers)


def selectors_of(expression):
    """Return the selectors of an expression. Raises ValueError if it is no PromQL."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return list(_selectors(promql.parse(expression), None))


def _selectors(node, grouped_by):
    if isinstance(node, promql.VectorSelector):
        yield Selector(node.name, tuple(map(_matcher, node.matchers.matchers)), grouped_by)
        return
    if isinstance(node, promql.AggregateExpr):
        grouped_by = frozenset(node.modifier.labels if node.modifier else ()) | (grouped_by or frozenset())
    for child in _children(node):
        yield from _selectors(child, grouped_by)


def _children(node):
    match node:
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr():
            return [node.expr]
        case promql.BinaryExpr():
            return [node.lhs, node.rhs]
        case promql.Call():
            return list(node.args)
        case promql.MatrixSelector():
            return [node.vector_selector]
        case _:
            assert isinstance(node, LEAVES), f"{type(node).__name__} is not known here"
            return []


def _matcher(matcher):
    operator = str(matcher.op).removeprefix("MatchOp.")  # Equal, NotEqual, Re or NotRe
    is_pattern = operator in ("Re", "NotRe")
    values = tuple(matcher.value.split("|")) if is_pattern else (matcher.value,)
    return Matcher(matcher.name, values, is_pattern, operator.startswith("Not"))
