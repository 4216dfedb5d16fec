"""The chart puts things where the numbers say, and leaves nothing outside its axis."""

from __future__ import annotations

from itertools import pairwise

import pytest

from manners.report.chart import LEFT, RIGHT, axis_values, build_chart

from .test_decision import MAX, MSE, PARENT, candidate, row, summary

END = 100 - RIGHT


@pytest.mark.parametrize("thousandths", range(0, 1001, 7))
def test_the_axis_holds_every_value(thousandths: int) -> None:
    values = axis_values(thousandths / 1000)
    assert 0 <= values[0] <= min(thousandths / 1000, 0.9)
    assert values[-1] == 1
    assert 3 <= len(values) <= 6
    steps = {round(b - a, 9) for a, b in pairwise(values)}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("lowest", "ticks"),
    [
        (0.998, (0.9, 0.92, 0.94, 0.96, 0.98, 1.0)),
        (0.45, (0.4, 0.6, 0.8, 1.0)),
        (0.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    ],
)
def test_axis_values(lowest: float, ticks: tuple[float, ...]) -> None:
    assert axis_values(lowest) == pytest.approx(ticks)


def test_positions() -> None:
    chart = build_chart(summary(PARENT, MAX, MSE))
    assert chart is not None
    assert not chart.starts_at_zero
    panel = chart.panels[0]
    parent, worst, _ = panel.marks
    assert chart.ticks[0] == (LEFT, "40")
    assert parent.x == END
    assert parent.verdict == "parent"
    # 200 of 400 is 0.5, a sixth of the way from 0.4 to 1.
    assert worst.x == pytest.approx(LEFT + (END - LEFT) / 6, abs=0.01)
    assert LEFT < worst.low < worst.x < worst.high < END
    assert worst.score == "50.0\u202f%"
    assert panel.says.startswith("parent 400 of 400; max 200 of 400, fail; mse 395 of 400, pass.")
    assert all(mark.y < panel.height for mark in panel.marks)


def test_knowledge_comes_last_and_gaps_stay_gaps() -> None:
    run = summary(candidate("parent", row("factual", 400, "pass"), row("concise", 390, "pass")), MAX)
    chart = build_chart(run)
    assert chart is not None
    assert [panel.gate for panel in chart.panels] == ["concise", "right_tool", "factual"]
    assert [len(panel.marks) for panel in chart.panels] == [1, 1, 2]


def test_margin_and_threshold() -> None:
    gates = row("concise", 399, "pass", margin=0.02, threshold=0.95)
    low = row("factual", 400, "pass", margin=0.02, threshold=0.1)
    chart = build_chart(summary(candidate("parent", gates), candidate("mse", gates, low)))
    assert chart is not None
    concise, factual = chart.panels
    width = END - LEFT
    assert concise.allowed == pytest.approx((LEFT + width * 0.8, width * 0.2), abs=0.02)
    assert concise.threshold == pytest.approx(LEFT + width / 2, abs=0.01)
    # The axis ends above this threshold: a line at its edge would claim a wrong value.
    assert factual.threshold is None


def test_nothing_to_draw() -> None:
    assert build_chart(summary(candidate("parent"))) is None
