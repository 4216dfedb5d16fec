"""From the transcripts of a candidate and its parent to a verdict on every gate.

The unit is the probe: it passes a gate if all its turns do. Parent and candidate are paired on the
same probes. A gate

    fails         if the candidate's share is below the gate's threshold, or it harms significantly
                  more than it gains (exact one-sided McNemar test, p < 0.05), or its share is more
                  than the margin below its parent's;
    passes        if none of this holds, even with every error counted against the candidate;
    inconclusive  otherwise, and always with errors on more than 5 % of the probes. Fewer than 30
                  probes can fail a gate (when the whole interval is below the threshold, or the harm
                  is significant) but not pass it.

A request that failed is an error on every gate of its probe: never a pass, and no evidence of bad
manners either. Shares that fail a gate are therefore taken over probes without errors, shares that
pass it over all.

What a pass shows, and what not. It says what was observed, not that the candidate is as good: a gate
that passes on 400 probes may still be some points worse. ``worse_by_at_most`` is the one-sided 95 %
bound for that, ``needs`` what it would take to bring it under the margin. No correction is made for
several gates: all must pass, which makes passing harder, but each has its own 5 % chance at most of
failing an equal candidate by the McNemar test. And a large run can fail a gate on a difference within
the margin, because it is then known to be real; the margin is no licence to be worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..ask.transcripts import Asked, Transcript, load_transcripts
from ..errors import EXIT_GATE_FAILS, EXIT_INCONCLUSIVE, EXIT_PASS, JudgeError
from ..files import write_json
from ..spec import Gate, GateName, Probe, Spec, fingerprint
from .comparability import Comparability, Replies, checked, compare
from .decision import ALPHA, Counts, Verdict, decide, needs_alone, needs_paired
from .gates import Check, House, applies, check_probe, house_of
from .statistics import clopper_pearson, p_worse, worse_by_at_most


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Failure(_Record):
    """Why the candidate did not pass a gate on one probe; the first turn that failed."""

    probe: str
    turn: int
    why: str


class GateVerdict(_Record):
    """One gate of one candidate. Shares are 0 to 1."""

    name: GateName
    n: int
    """Probes to which the gate applies, errors included."""
    passed: int
    interval: tuple[float, float]
    """Clopper-Pearson, 95 %, two-sided, of ``passed`` among ``n``."""
    parent_passed: int
    pairs: int
    """Probes without an error on either side: the ground of everything paired."""
    harms: int
    gains: int
    errors: int
    """Probes with an error on either side."""
    p_worse: float
    delta: float | None
    """(gains - harms) / pairs, below zero if the candidate is worse; None without pairs."""
    worse_by_at_most: float | None
    """One-sided 95 % bound on how much lower the candidate's true share is (Tango); None for the parent."""
    margin: float
    threshold: float
    verdict: Verdict
    why: str
    needs: str
    """What it would take to show more than was shown."""
    harm_ids: tuple[str, ...]
    gain_ids: tuple[str, ...]
    error_ids: tuple[str, ...]
    failures: tuple[Failure, ...]


class Verdicts(_Record):
    """All gates of one candidate: the content of ``verdicts.json``."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    spec: str
    verdict: Verdict
    why: str
    comparability: Comparability
    comparability_why: str
    is_parent: bool
    """The parent was judged alone: thresholds count, and nothing is paired."""
    probes: int
    asked: Asked
    parent_asked: Asked
    probes_sha256: str
    gates: tuple[GateVerdict, ...]
    limits: tuple[str, ...]
    """What so many probes can and cannot show, in sentences for the report."""

    @property
    def exit_code(self) -> int:
        return {"pass": EXIT_PASS, "fail": EXIT_GATE_FAILS, "inconclusive": EXIT_INCONCLUSIVE}[self.verdict]


def judge(spec: Spec, probes: Sequence[Probe], candidate: Replies, parent: Replies | None = None) -> Verdicts:
    """Hold a candidate's replies against its parent's; without ``parent``, judge the parent itself.

    Raises:
        JudgeError: ``no-probes``; ``transcripts-incomplete`` if a probe was not asked to its end;
            ``transcripts-other-spec`` if persona or asking were others; ``transcripts-other-probes``
            if a probe had another wording or is not among ``probes``; ``transcripts-mixed`` if one
            side holds replies of two models; ``bad-tool-schema``.
    """
    if not probes:
        raise JudgeError("no-probes", where=spec.name, found="no probe to judge", fix="give probes")
    is_parent = parent is None or parent == candidate
    reference = candidate if parent is None else parent
    asked = checked(spec, probes, candidate, "candidate")
    parent_asked = checked(spec, probes, reference, "parent")
    comparability, comparability_why = compare(asked, parent_asked, probes, candidate, reference)
    house = house_of(spec.persona)
    rows = tuple(_judge_gate(gate, probes, candidate, reference, house, is_parent) for gate in spec.gates)
    verdict, why = _overall(rows, comparability, comparability_why)
    return Verdicts(
        spec=spec.name,
        verdict=verdict,
        why=why,
        comparability=comparability,
        comparability_why=comparability_why,
        is_parent=is_parent,
        probes=len(probes),
        asked=asked,
        parent_asked=parent_asked,
        probes_sha256=fingerprint(probes),
        gates=rows,
        limits=_limits(rows, is_parent),
    )


def judge_files(spec: Spec, probes: Sequence[Probe], candidate: Path, parent: Path | None = None) -> Verdicts:
    """:func:`judge` on files that ``ask`` wrote. Raises AskError too, if a file cannot be read."""
    return judge(spec, probes, load_transcripts(candidate), load_transcripts(parent) if parent else None)


def write_verdicts(path: Path, verdicts: Verdicts) -> None:
    """As indented JSON, replacing the file as a whole."""
    write_json(path, verdicts.model_dump(mode="json", by_alias=True))


def load_verdicts(path: Path) -> Verdicts:
    """Raises JudgeError ``verdicts-missing`` or ``verdicts-syntax``."""
    if not path.is_file():
        raise JudgeError("verdicts-missing", where=str(path), found="no such file", fix="run `manners judge`")
    try:
        return Verdicts.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise JudgeError(
            "verdicts-syntax",
            where=f"{path}: {'.'.join(map(str, first['loc']))}",
            found=first["msg"],
            fix="delete it and run `manners judge`",
        ) from None


# --- one gate --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pair:
    """One probe to which a gate applies, on both sides."""

    probe: str
    ours: Check
    theirs: Check
    our_error: bool
    their_error: bool

    @property
    def error(self) -> bool:
        return self.our_error or self.their_error


def _judge_gate(
    gate: Gate, probes: Sequence[Probe], candidate: Replies, parent: Replies, house: House, is_parent: bool
) -> GateVerdict:
    pairs = [
        _pair(probe, candidate[probe.id], parent[probe.id], gate, house) for probe in _relevant(probes, gate)
    ]
    harm_ids = tuple(p.probe for p in pairs if not p.error and p.theirs.passed and not p.ours.passed)
    gain_ids = tuple(p.probe for p in pairs if not p.error and p.ours.passed and not p.theirs.passed)
    error_ids = tuple(p.probe for p in pairs if p.error)
    counts = Counts(
        n=len(pairs),
        passed=sum(p.ours.passed for p in pairs),
        heard=sum(not p.our_error for p in pairs),
        errors=len(error_ids),
        harms=len(harm_ids),
        gains=len(gain_ids),
        against=0 if is_parent else sum(p.error and not p.ours.passed for p in pairs),
        alone=is_parent,
    )
    verdict, why = decide(counts, gate)
    return GateVerdict(
        name=gate.name,
        n=counts.n,
        passed=counts.passed,
        interval=clopper_pearson(counts.passed, counts.n),
        parent_passed=sum(p.theirs.passed for p in pairs),
        pairs=counts.pairs,
        harms=counts.harms,
        gains=counts.gains,
        errors=counts.errors,
        p_worse=p_worse(counts.harms, counts.gains),
        delta=(counts.gains - counts.harms) / counts.pairs if counts.pairs else None,
        worse_by_at_most=None if is_parent else worse_by_at_most(counts.harms, counts.gains, counts.pairs),
        margin=gate.margin,
        threshold=gate.threshold,
        verdict=verdict,
        why=why,
        needs=needs_alone(gate) if is_parent else needs_paired(counts, gate),
        harm_ids=harm_ids,
        gain_ids=gain_ids,
        error_ids=error_ids,
        failures=tuple(
            Failure(probe=p.probe, turn=p.ours.turn, why=p.ours.why[:300]) for p in pairs if not p.ours.passed
        ),
    )


def _relevant(probes: Sequence[Probe], gate: Gate) -> list[Probe]:
    return [probe for probe in probes if any(applies(gate, turn) for turn in probe.turns)]


def _pair(
    probe: Probe, ours: Sequence[Transcript], theirs: Sequence[Transcript], gate: Gate, house: House
) -> _Pair:
    our_error, their_error = _error(ours), _error(theirs)
    return _Pair(
        probe.id,
        our_error or check_probe(ours, probe, gate, house) or _UNREACHABLE,
        their_error or check_probe(theirs, probe, gate, house) or _UNREACHABLE,
        our_error is not None,
        their_error is not None,
    )


# check_probe returns None only for probes that _relevant() has left out.
_UNREACHABLE = Check(0, "the gate does not apply")


def _error(replies: Sequence[Transcript]) -> Check | None:
    return next((Check(r.turn, f"error {r.error.kind}: {r.error.message}") for r in replies if r.error), None)


# --- all gates -------------------------------------------------------------------------------


def _overall(rows: Sequence[GateVerdict], comparability: str, comparability_why: str) -> tuple[Verdict, str]:
    if comparability == "void":
        return "inconclusive", comparability_why
    for verdict in ("fail", "inconclusive"):
        names = [row.name for row in rows if row.verdict == verdict]
        if names:
            return verdict, f"{verdict}: {', '.join(names)}"
    return "pass", f"all {len(rows)} gates pass"


def _limits(rows: Sequence[GateVerdict], is_parent: bool) -> tuple[str, ...]:
    counted = [row for row in rows if row.n]
    limits = []
    if counted:
        fewest = min(counted, key=lambda row: row.n)
        most = 1 - ALPHA ** (1 / fewest.n)
        limits.append(
            f"Even without a single failure, {fewest.n} probes ({fewest.name}) leave room for a true "
            f"failure rate of up to {most:.1%} (95 %, one-sided)."
        )
    bounds = [(row.worse_by_at_most, row) for row in counted if row.worse_by_at_most is not None]
    if bounds and not is_parent:
        bound, row = max(bounds, key=lambda pair: pair[0])
        limits.append(
            f"A pass is what was observed, not proof of equality: {row.name} may in truth be up to "
            f"{100 * bound:.1f} points below the parent (95 %, one-sided, from {row.pairs} pairs)."
        )
    limits += [
        "Each gate is tested by itself, with no correction for their number: an equal candidate has up to "
        "a 5 % chance on each of being called significantly worse.",
        "Probes made from few templates are less than independent, and all intervals are then too narrow.",
        "Each probe was asked once: how much replies vary from one asking to the next was not measured.",
    ]
    return tuple(limits)
