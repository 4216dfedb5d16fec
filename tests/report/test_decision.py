"""The first line says what the file says: which candidate ships, or why none does."""

from __future__ import annotations

from typing import Any

import pytest

from manners.judge.statistics import clopper_pearson
from manners.report import Summary
from manners.report.decision import decide
from manners.report.limits import largest_true_loss, room_after_no_failure, statements


def row(
    name: str, passed: int, verdict: str, n: int = 400, parent_passed: int = 400, **more: Any
) -> dict[str, Any]:
    counts = {
        "n": n,
        "passed": passed,
        "parent_passed": parent_passed,
        "interval": clopper_pearson(passed, n),
    }
    return {"name": name, "verdict": verdict, **counts, **more}


def candidate(name: str, *gates: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "strategy": "any", "gates": list(gates)}


PARENT = candidate("parent", row("right_tool", 400, "pass"), row("factual", 400, "pass"))
MAX = candidate("max", row("right_tool", 200, "fail"), row("factual", 399, "pass"))
MSE = candidate("mse", row("right_tool", 395, "pass"), row("factual", 400, "pass"))
OPEN = candidate("w4a16", row("right_tool", 399, "inconclusive"), row("factual", 400, "pass"))


def summary(*candidates: dict[str, Any], **more: Any) -> Summary:
    base = {"schema": 1, "spec": "annie", "parent": "p", "comparability": "comparable", "shipped": None}
    return Summary.model_validate({**base, "candidates": list(candidates), **more})


@pytest.mark.parametrize(
    ("run", "outcome", "sentence"),
    [
        (
            summary(PARENT, MAX, MSE, shipped="mse"),
            "ships",
            "Comparable, and mse ships: all 2 gates pass on 400 paired probes, "
            "none more than 1.3 points under the parent.",
        ),
        (
            summary(PARENT, candidate("mse", row("right_tool", 400, "pass")), shipped="mse"),
            "ships",
            "Comparable, and mse ships: its one gate passes on 400 paired probes, none under the parent.",
        ),
        (
            summary(PARENT, MAX, OPEN, candidate("awq")),
            "none",
            "Comparable, but no candidate ships: max fails right_tool; w4a16 is inconclusive on right_tool; "
            "awq was not measured.",
        ),
        (
            summary(candidate("parent", row("factual", 300, "fail"))),
            "none",
            "Comparable, but no candidate ships: the parent itself fails factual.",
        ),
        (
            summary(PARENT, MAX, candidate("awq"), OPEN, {**MAX, "name": "mlp"}),
            "none",
            "Comparable, but no candidate ships: of 4 tried, w4a16 is inconclusive on right_tool "
            "and comes nearest.",
        ),
        (summary(PARENT), "none", "Comparable, but no candidate ships: none was made."),
        (
            summary(PARENT, MSE, shipped="mse", comparability="stack-comparison"),
            "ships",
            "Stack comparison only, since more than the rounding differs: mse ships: all 2 gates pass on 400 "
            "paired probes, none more than 1.3 points under the parent.",
        ),
        (
            summary(PARENT, MSE, comparability="void", differences=["prompt tokens differ on 12 probes"]),
            "void",
            "Void: the comparison with the parent does not hold (prompt tokens differ on 12 probes), "
            "so no candidate ships.",
        ),
    ],
)
def test_first_line(run: Summary, outcome: str, sentence: str) -> None:
    decision = decide(run)
    assert decision.sentence == sentence
    assert decision.outcome == outcome


def test_room_after_no_failure_against_the_textbook() -> None:
    """Zero failures in 149, 299 and 598 show at most 2, 1 and 0.5 %, and one probe fewer does not."""
    for n, most in ((149, 0.02), (299, 0.01), (598, 0.005)):
        assert room_after_no_failure(n) <= most < room_after_no_failure(n - 1)
    assert room_after_no_failure(0) == 1


def test_the_true_loss_is_the_judges_where_it_gives_one() -> None:
    plain = summary(PARENT, MSE).rounded[0].gates[0]
    assert largest_true_loss(plain) is None
    counted = summary(candidate("mse", row("right_tool", 395, "pass", harms=6, gains=1))).rounded[0].gates[0]
    assert largest_true_loss(counted) == pytest.approx(0.026, abs=0.003)
    told = counted.model_copy(update={"worse_by_at_most": 0.5})
    assert largest_true_loss(told) == 0.5


def test_limits_carry_this_runs_numbers() -> None:
    gates = (
        row("right_tool", 398, "pass", harms=2, gains=0),
        row("factual", 70, "pass", n=70, parent_passed=70, harms=0, gains=0),
    )
    said = "\n".join(statements(summary(PARENT, candidate("mse", *gates), shipped="mse")))
    assert "rests on 70 to 400 probes" in said
    assert "1.2 points of 400" in said
    assert "failure in 70 probes shows, at 95 % confidence, only that fewer than 4.2" in said
    # 70 pairs without a flip bound the loss by z^2 / (n + z^2) = 3.7 points, 400 with two harms by less.
    assert "on factual, the least certain gate, the true loss may be up to 3.7 points" in said


def test_the_judges_words_replace_our_own() -> None:
    run = summary(PARENT, MSE, shipped="mse", limits=["from the summary"])
    assert "from the summary" in statements(run)
    assert "from the judge" in statements(run, ["from the judge"])
    assert "from the summary" not in statements(run, ["from the judge"])
