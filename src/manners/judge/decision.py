"""The rule of a gate's verdict, as a pure function of counts. ``verdicts`` says what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..spec import Gate
from .statistics import clopper_pearson, p_worse, pairs_needed, passes_needed, worse_by_at_most

ALPHA = 0.05
FEWEST_PROBES = 30
MOST_ERRORS = 0.05

Verdict = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True)
class Counts:
    """Of the probes to which one gate applies."""

    n: int
    passed: int
    heard: int
    """Probes that the candidate answered without an error."""
    errors: int
    harms: int
    gains: int
    against: int
    """Pairs with an error that would be harms at worst."""
    alone: bool = False
    """The parent itself: there are no pairs, only a threshold."""

    @property
    def pairs(self) -> int:
        return self.n - self.errors


def decide(counts: Counts, gate: Gate) -> tuple[Verdict, str]:
    """The verdict and its reason in plain words."""
    if counts.n == 0:
        return "inconclusive", "no probe asks for this"
    if counts.errors > MOST_ERRORS * counts.n:
        return (
            "inconclusive",
            f"errors on {counts.errors} of {counts.n} probes: mend the server and ask again",
        )
    wrong = _wrong(counts.passed, counts.heard, counts.harms, counts.gains, counts.pairs, gate)
    if counts.n < FEWEST_PROBES:
        certain = clopper_pearson(counts.passed, counts.heard)[1] < gate.threshold
        if wrong and (certain or p_worse(counts.harms, counts.gains) < ALPHA):
            return "fail", "; ".join(wrong) + f" (beyond doubt on only {counts.n} probes)"
        return "inconclusive", f"only {counts.n} probes, at least {FEWEST_PROBES} are needed to pass"
    if wrong:
        return "fail", "; ".join(wrong)
    at_worst = _wrong(counts.passed, counts.n, counts.harms + counts.against, counts.gains, counts.n, gate)
    if at_worst:
        return "inconclusive", f"passes only if {counts.errors} errors are left out; with them {at_worst[0]}"
    versus = "" if counts.alone else f", {_points(counts.gains - counts.harms, counts.pairs)}"
    return "pass", _share(counts.passed, counts.n) + versus


def _wrong(passed: int, n: int, harms: int, gains: int, pairs: int, gate: Gate) -> list[str]:
    """Every rule that these counts break, in words."""
    found = []
    # The small allowance is for the rounding of, say, 0.98 * 400; counts themselves are whole numbers.
    if passed < gate.threshold * n - 1e-9:
        found.append(f"{_share(passed, n)}, below the threshold of {gate.threshold:.1%}")
    if harms - gains > gate.margin * pairs + 1e-9:
        found.append(f"{_points(gains - harms, pairs)}, more than the margin of {100 * gate.margin:.1f}")
    p = p_worse(harms, gains)
    if p < ALPHA:
        found.append(f"significantly worse: {harms} harms, {gains} gains, p = {p:.2g}")
    return found


def needs_paired(counts: Counts, gate: Gate) -> str:
    """What it would take to show, not only observe, that the candidate is within the margin."""
    if not counts.pairs:
        return "probes that ask for this, answered without errors on both sides"
    bound = worse_by_at_most(counts.harms, counts.gains, counts.pairs)
    if bound < gate.margin:
        return f"nothing: shown to be less than {100 * gate.margin:.1f} points worse (95 %, one-sided)"
    # Without a flip seen, the rate is taken as one in all pairs, not as zero.
    flips = max(counts.harms + counts.gains, 1)
    n = pairs_needed(flips / counts.pairs, gate.margin)
    return (
        f"about {n} pairs to show less than {100 * gate.margin:.1f} points worse "
        f"(95 %, one-sided, power 80 %), if truly equal and flipping as seen ({flips} in {counts.pairs})"
    )


def needs_alone(gate: Gate) -> str:
    """What it would take to show that the threshold is met, without a parent to compare with."""
    n = passes_needed(gate.threshold)
    if n is None:
        return "no number of probes shows a share of exactly 100 %"
    return f"{n} probes, all passing, to show a share of {gate.threshold:.1%} (95 %, one-sided)"


def _share(passed: int, n: int) -> str:
    return f"{passed} of {n} ({passed / n:.1%})"


def _points(difference: int, pairs: int) -> str:
    if difference == 0:
        return "as often as the parent"
    return f"{abs(100 * difference / pairs):.1f} points {'above' if difference > 0 else 'below'} the parent"
