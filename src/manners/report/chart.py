"""Geometry of the chart: one panel a gate, one row a candidate, all panels on one axis.

Positions are percentages of a panel's width, so that the picture keeps its type size on a phone
and at a desk. The template draws; this module only says where. It knows no text but names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .summary import PARENT, Summary
from .text import percent

# Gutters in percent of the width: names to the left, scores to the right.
LEFT, RIGHT = 21.0, 17.0
ROW, TOP, AXIS = 20, 6, 20  # pixels
_LONGEST_NAME = 11


@dataclass(frozen=True)
class Mark:
    """One candidate on one gate: a point and its whisker, x in percent, y in pixels."""

    name: str
    score: str
    verdict: str
    """``parent``, ``pass``, ``fail`` or ``inconclusive``: colour and shape follow it."""
    x: float
    low: float
    high: float
    y: int


@dataclass(frozen=True)
class Panel:
    gate: str
    is_knowledge: bool
    marks: tuple[Mark, ...]
    allowed: tuple[float, float] | None
    """x and width of the band from the parent's score down to the margin."""
    threshold: float | None
    """x of the least share that passes; None where the axis does not reach so low."""
    height: int
    says: str
    """The picture in words, for those who cannot see it."""


@dataclass(frozen=True)
class Chart:
    ticks: tuple[tuple[float, str], ...]
    """(x, label)"""
    panels: tuple[Panel, ...]
    starts_at_zero: bool


def build_chart(summary: Summary) -> Chart | None:
    """None if nothing was measured."""
    rows = [gate for candidate in summary.candidates for gate in candidate.gates if gate.n]
    if not rows:
        return None
    values = axis_values(min(min(gate.interval[0], gate.share) for gate in rows))
    names = list(dict.fromkeys(gate.name for gate in rows))
    panels = tuple(_panel(summary, name, values[0]) for name in names)
    ticks = tuple((_x(value, values[0]), f"{value * 100:.0f}") for value in values)
    return Chart(ticks, tuple(sorted(panels, key=lambda panel: panel.is_knowledge)), values[0] == 0)


def axis_values(lowest: float) -> tuple[float, ...]:
    """Tick values in shares, ending at 1: at most six, on round numbers, and all data within.

    An axis shorter than ten points would blow noise up, so 90 to 100 % is the narrowest.
    """
    room = max(1 - lowest, 0.1)
    step = next(step for step in (2, 5, 10, 20, 25) if math.ceil(round(100 * room / step, 6)) <= 5)
    count = math.ceil(round(100 * room / step, 6))
    return tuple((100 - step * (count - i)) / 100 for i in range(count + 1))


def _x(value: float, low: float) -> float:
    inside = min(max((value - low) / (1 - low), 0.0), 1.0)
    return round(LEFT + inside * (100 - LEFT - RIGHT), 2)


def _panel(summary: Summary, gate_name: str, low: float) -> Panel:
    marks: list[Mark] = []
    said: list[str] = []
    allowed = threshold = None
    is_knowledge = False
    for candidate in summary.candidates:
        gate = candidate.gate(gate_name)
        if gate is None or not gate.n:
            continue
        verdict = PARENT if candidate.name == PARENT else gate.verdict
        y = TOP + ROW * len(marks) + ROW // 2
        xs = [_x(value, low) for value in (gate.share, *gate.interval)]
        marks.append(Mark(_short(candidate.name), percent(gate.share), verdict, xs[0], xs[1], xs[2], y))
        judged = "" if verdict == PARENT else f", {verdict}"
        said.append(f"{candidate.name} {gate.passed} of {gate.n}{judged}")
        is_knowledge = gate.is_knowledge
        if gate.margin is not None and candidate.name != PARENT and allowed is None:
            parent_share = gate.parent_passed / gate.n
            left, right = _x(parent_share - gate.margin, low), _x(parent_share, low)
            allowed = (left, round(right - left, 2))
        if gate.threshold is not None and gate.threshold >= low:
            threshold = _x(gate.threshold, low)
    height = TOP + ROW * len(marks) + AXIS
    return Panel(gate_name, is_knowledge, tuple(marks), allowed, threshold, height, "; ".join(said) + ".")


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
