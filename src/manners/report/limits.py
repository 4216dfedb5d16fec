"""What so many probes can and cannot show, in numbers of this run.

No failure in n probes leaves room for a true failure rate of 1 - 0.05^(1/n) at 95 % confidence
(Clopper-Pearson, one-sided); one-sided McNemar with h harms and no gain has p = 0.5^h, so five
harms are the fewest that can be significant at 5 %. The bound on the true loss is the judge's.

Blind spot: all of it takes the probes as drawn at random from what users will say. They are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..judge.statistics import worse_by_at_most
from .summary import CandidateSummary, GateRow, Summary
from .text import percent

FEWEST_HARMS = 5  # 0.5^5 = 0.031 is the first below 0.05


def room_after_no_failure(n: int) -> float:
    """Largest true failure rate that n probes without a failure leave possible, at 95 %."""
    return 1 - float(0.05 ** (1 / n)) if n else 1.0


def largest_true_loss(gate: GateRow) -> float | None:
    """Upper 95 % bound, as a share, on how much worse than its parent the candidate truly is.

    None if the file neither says so nor counts harms and gains.
    """
    if gate.worse_by_at_most is not None:
        return gate.worse_by_at_most
    if gate.harms is None or gate.gains is None or not gate.n:
        return None
    return worse_by_at_most(gate.harms, gate.gains, gate.n if gate.pairs is None else gate.pairs)


def statements(summary: Summary, judged: Sequence[str] = ()) -> list[str]:
    """Sentences for the reader.

    Args:
        judged: what the judge says of its own numbers; without it, this module says the same of
            the numbers in the summary.
    """
    said = _about_counts(summary)
    said += judged or summary.limits or _about_chance(summary)
    said += [
        "Gates compare text and calls. They cannot tell whether an answer was warm, or whether it helped.",
        "Scores are of one engine, with this system prompt and these tools. Another engine, "
        "or sampling, can give others. Speed was not judged.",
    ]
    return list(dict.fromkeys(said))


def _about_counts(summary: Summary) -> list[str]:
    counts = sorted({gate.n for candidate in summary.rounded for gate in candidate.gates if gate.n})
    if not counts:
        return []
    least, most = counts[0], counts[-1]
    spread = f"{most} probes" if least == most else f"{least} to {most} probes"
    return [
        f"A gate's score rests on {spread}, as many as it applies to. To call a candidate significantly "
        f"worse than its parent takes at least {FEWEST_HARMS} probes lost and none won, which is "
        f"{100 * FEWEST_HARMS / most:.1f} points of {most}: a smaller loss cannot be told from chance.",
    ]


def _about_chance(summary: Summary) -> list[str]:
    counts = [gate.n for candidate in summary.rounded for gate in candidate.gates if gate.n]
    said = []
    if counts:
        least = min(counts)
        said.append(
            f"A gate without a single failure in {least} probes shows, at 95 % confidence, only that fewer "
            f"than {percent(room_after_no_failure(least))} of such probes fail."
        )
    shipped = summary.candidate(summary.shipped) if summary.shipped else None
    if shipped:
        said += _about_shipped(shipped)
    if len(counts) > 1:
        said.append(
            f"{len(counts)} gates were tested at 5 % each, without correction: about one in twenty may call "
            "a harmless difference worse. A candidate ships only if it passes all of its gates."
        )
    return said


def _about_shipped(candidate: CandidateSummary) -> list[str]:
    bounds = [
        (bound, gate.name) for gate in candidate.gates if (bound := largest_true_loss(gate)) is not None
    ]
    if not bounds:
        return []
    bound, name = max(bounds)
    return [
        f"That {candidate.name} passes means that its observed loss is within the margin, not that there is "
        f"none: on {name}, the least certain gate, the true loss may be up to {100 * bound:.1f} points "
        "(95 %, one-sided)."
    ]
