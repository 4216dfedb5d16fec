"""The report's first line: is the comparison valid, which candidate ships, or why none does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .summary import CandidateSummary, GateRow, Summary
from .text import MINUS, listed, p_value

# Beyond so many candidates the sentence names only the nearest.
_TOLD_IN_FULL = 3

Outcome = Literal["ships", "none", "void"]


@dataclass(frozen=True)
class Decision:
    sentence: str
    outcome: Outcome


def decide(summary: Summary) -> Decision:
    """One plain sentence. It states what ``summary.json`` says and decides nothing of its own."""
    outcome: Outcome = "void" if summary.comparability == "void" else "ships" if summary.shipped else "none"
    if summary.comparability == "void":
        because = f" ({listed(list(summary.differences))})" if summary.differences else ""
        return Decision(
            f"Void: the comparison with the parent does not hold{because}, so no candidate ships.", outcome
        )
    shipped = summary.candidate(summary.shipped) if summary.shipped else None
    verdict = _shipped(shipped, summary) if shipped else f"no candidate ships: {_why_none(summary)}"
    if summary.comparability == "comparable":
        return Decision(f"Comparable, {'and' if shipped else 'but'} {verdict}.", outcome)
    return Decision(
        f"Stack comparison only, since more than the rounding differs: {verdict}.",
        outcome,
    )


def largest_loss(candidate: CandidateSummary) -> GateRow | None:
    """The gate that lost most against the parent; None if no gate lost anything."""
    losses = [gate for gate in candidate.gates if gate.points < 0]
    return min(losses, key=lambda gate: gate.points) if losses else None


def _shipped(candidate: CandidateSummary, summary: Summary) -> str:
    worst = largest_loss(candidate)
    count = len(candidate.gates)
    gates = "its one gate passes" if count == 1 else f"all {count} gates pass"
    close = f"none more than {_up(-worst.points)} under the parent" if worst else "none under the parent"
    return f"{candidate.name} ships: {gates} on {summary.probes} paired probes, {close}"


def _up(points: float) -> str:
    """Rounded up to a tenth, because "none more than" must stay true: ``0.5 points``, ``1 point``."""
    tenths = math.ceil(round(points * 10, 6))
    value = f"{tenths / 10:g}"
    return f"{value} point{'' if value == '1' else 's'}"


def _why_none(summary: Summary) -> str:
    parent = summary.parent_row
    if not summary.rounded:
        failing = parent.gates_with("fail") if parent else ()
        return f"the parent itself fails {listed(failing)}" if failing else "none was made"
    if len(summary.rounded) <= _TOLD_IN_FULL:
        return "; ".join(_shortfall(candidate) for candidate in summary.rounded)
    measured = [candidate for candidate in summary.rounded if candidate.gates]
    if not measured:
        return f"none of {len(summary.rounded)} was measured"
    nearest = min(measured, key=_distance)
    return f"of {len(summary.rounded)} tried, {_shortfall(nearest)} and comes nearest"


def _distance(candidate: CandidateSummary) -> tuple[int, int]:
    return len(candidate.gates_with("fail")), len(candidate.gates_with("inconclusive"))


def _shortfall(candidate: CandidateSummary) -> str:
    if fails := candidate.gates_with("fail"):
        return f"{candidate.name} fails {listed(fails, 3)}"
    if open_gates := candidate.gates_with("inconclusive"):
        return f"{candidate.name} is inconclusive on {listed(open_gates, 3)}"
    return f"{candidate.name} passes" if candidate.gates else f"{candidate.name} was not measured"


def what_decided(summary: Summary) -> list[tuple[str, GateRow]]:
    """(candidate, gate) for every gate that does not pass, in the order of the table."""
    return [
        (candidate.name, gate)
        for candidate in summary.candidates
        for gate in candidate.gates
        if gate.verdict != "pass"
    ]


def facts(gate: GateRow) -> str:
    """The counts behind a verdict: ``226 harms, 0 gains, p < 0.0001, 2 without a whole reply``."""
    said = [f"{gate.points:+.1f} points".replace("-", MINUS)] if gate.passed != gate.parent_passed else []
    if gate.harms is not None and gate.gains is not None:
        said.append(f"{gate.harms} harmed, {gate.gains} gained")
    if gate.p_worse is not None:
        said.append(p_value(gate.p_worse))
    if gate.errors:
        said.append(f"{gate.errors} without a whole reply")
    return ", ".join(said)
