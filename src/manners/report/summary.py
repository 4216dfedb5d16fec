"""``summary.json``: the contract that tools and the report read, as types.

The ladder writes it, everything else only reads it. A field that this module does not know is kept
and ignored, so that a newer run still opens; a field that contradicts another is refused, because
a report that says "ships" over a failing gate would be believed.

Shares are between 0 and 1, sizes in bytes, times in minutes, divergences in nats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import RunError
from ..files import write_text
from ..judge.verdicts import GateVerdict
from ..spec import KNOWLEDGE_GATES

Verdict = Literal["pass", "fail", "inconclusive"]
Comparability = Literal["comparable", "stack-comparison", "void"]

SUMMARY = "summary.json"
PARENT = "parent"
# Intervals may have been rounded on their way into the file.
_ROUNDING = 1e-3


class _Open(BaseModel):
    """Unknown fields are kept; NaN is refused, because no reader of JSON agrees on it."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class GateRow(_Open):
    """One gate of one candidate, held against the parent on the same probes."""

    name: str = Field(min_length=1)
    n: int = Field(ge=0)
    """Probes to which the gate applies, failed replies included."""
    passed: int = Field(ge=0)
    interval: tuple[float, float]
    """95 % Clopper-Pearson interval of passed / n."""
    parent_passed: int = Field(ge=0)
    verdict: Verdict
    harms: int | None = Field(default=None, ge=0)
    """Probes that the parent passes and the candidate does not."""
    gains: int | None = Field(default=None, ge=0)
    errors: int = Field(default=0, ge=0)
    """Probes without a whole reply on either side; never counted as passed on that side."""
    pairs: int | None = Field(default=None, ge=0)
    """Probes without an error on either side; ``delta``, harms and gains are counted on these."""
    p_worse: float | None = Field(default=None, ge=0, le=1)
    """Exact one-sided McNemar p-value for "worse than the parent"."""
    worse_by_at_most: float | None = Field(default=None, ge=-1, le=1)
    """One-sided 95 % bound on how much lower the candidate's true share is."""
    delta: float | None = Field(default=None, ge=-1, le=1)
    """(gains - harms) / pairs."""
    margin: float | None = Field(default=None, ge=0, le=1)
    threshold: float | None = Field(default=None, ge=0, le=1)
    why: str = ""
    """What decided the verdict, in words."""
    needs: str = ""
    """What it would take to show more than was shown."""

    @classmethod
    def of(cls, verdict: GateVerdict) -> GateRow:
        """The judge's row without the lists of probes, which stay in ``verdicts.json``."""
        lists = {"harm_ids", "gain_ids", "error_ids", "failures"}
        return cls.model_validate(verdict.model_dump(exclude=lists))

    @model_validator(mode="after")
    def _counts_agree(self) -> GateRow:
        for field in ("passed", "parent_passed", "harms", "gains", "errors", "pairs"):
            value = getattr(self, field)
            if value is not None and value > self.n:
                raise ValueError(f"{field} is {value}, of only n = {self.n} probes")
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise ValueError(f"interval is [{low}, {high}], must rise within 0 and 1")
        if self.n and not low - _ROUNDING <= self.share <= high + _ROUNDING:
            raise ValueError(f"interval [{low}, {high}] does not hold {self.passed}/{self.n}")
        # With errors the two need not agree: a failed reply counts in one and not in the other.
        if self.harms is not None and self.gains is not None and not self.errors:
            counted, paired = self.passed - self.parent_passed, self.gains - self.harms
            if counted != paired:
                raise ValueError(
                    f"passed differs from the parent's by {counted}, gains minus harms by {paired}"
                )
        return self

    @property
    def share(self) -> float:
        """passed / n; 0 for a gate without probes."""
        return self.passed / self.n if self.n else 0.0

    @property
    def points(self) -> float:
        """Difference to the parent in percentage points, negative where the candidate is worse.

        Paired where the file says so; else the plain difference of the two counts.
        """
        if self.delta is not None:
            return 100 * self.delta
        return 100 * (self.passed - self.parent_passed) / self.n if self.n else 0.0

    @property
    def is_knowledge(self) -> bool:
        return self.name in KNOWLEDGE_GATES


class RoundTrip(_Open):
    """What was exported against what was evaluated: logits of the file read back, same tokens."""

    max_abs_diff: float = Field(ge=0)
    max_kl: float = Field(ge=0)
    """Largest KL divergence of any token, in nats."""
    tokens: int = Field(ge=0)


class CandidateSummary(_Open):
    name: str = Field(min_length=1)
    strategy: str
    bits_per_weight: float | None = Field(default=None, gt=0)
    bytes: int | None = Field(default=None, ge=0)
    minutes: float | None = Field(default=None, ge=0)
    gates: tuple[GateRow, ...] = ()
    """Empty for a candidate that was refused before it was asked; ``note`` says why."""
    round_trip: RoundTrip | None = None
    note: str | None = None

    def gate(self, name: str) -> GateRow | None:
        return next((gate for gate in self.gates if gate.name == name), None)

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of all gates; None if nothing was measured."""
        verdicts = {gate.verdict for gate in self.gates}
        order: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")
        return next((verdict for verdict in order if verdict in verdicts), None)

    def gates_with(self, verdict: Verdict) -> tuple[str, ...]:
        return tuple(gate.name for gate in self.gates if gate.verdict == verdict)


class Summary(_Open):
    """A whole run. ``shipped`` is the name of the candidate to serve, or None."""

    schema_version: Literal[1] = Field(alias="schema")
    spec: str
    parent: str
    comparability: Comparability
    shipped: str | None = None
    candidates: tuple[CandidateSummary, ...]
    differences: tuple[str, ...] = ()
    """What differs between parent and candidate besides the rounding, if anything does."""
    engine: str | dict[str, Any] | None = None
    versions: dict[str, Any] = {}
    hardware: str | dict[str, Any] | None = None
    seeds: dict[str, Any] | int | None = None
    n_probes: int | None = Field(default=None, ge=0)
    limits: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    """Commands that repeat the run."""

    @model_validator(mode="after")
    def _decision_stands(self) -> Summary:
        names = [candidate.name for candidate in self.candidates]
        if len(set(names)) < len(names):
            raise ValueError(f"two candidates of one name: {names}")
        if self.shipped is None:
            return self
        if self.shipped == PARENT or self.shipped not in names:
            raise ValueError(f"shipped is {self.shipped!r}, candidates are {names}")
        if self.comparability == "void":
            raise ValueError(f"the comparison is void, so {self.shipped!r} cannot ship")
        shipped = self.candidate(self.shipped)
        if shipped is None or shipped.verdict != "pass":
            verdict = shipped.verdict if shipped else None
            raise ValueError(f"{self.shipped!r} cannot ship, its gates say {verdict or 'nothing'}")
        return self

    def candidate(self, name: str) -> CandidateSummary | None:
        return next((candidate for candidate in self.candidates if candidate.name == name), None)

    @property
    def parent_row(self) -> CandidateSummary | None:
        return self.candidate(PARENT)

    @property
    def rounded(self) -> tuple[CandidateSummary, ...]:
        """Every candidate but the parent, in the order in which they were tried."""
        return tuple(candidate for candidate in self.candidates if candidate.name != PARENT)

    @property
    def probes(self) -> int:
        """Paired probes: as recorded, else the most that any gate counts."""
        counted = max((gate.n for candidate in self.candidates for gate in candidate.gates), default=0)
        return counted if self.n_probes is None else self.n_probes


def load_summary(run_dir: str | Path) -> Summary:
    """Read ``summary.json`` of a run folder.

    Raises:
        RunError: ``summary-missing``; ``summary-syntax`` if it is no JSON; ``summary-field`` for a
            field that is missing, out of range or in contradiction to another.
    """
    path = Path(run_dir) / SUMMARY
    again = "let the run finish: the same command takes up where it stopped"
    if not path.is_file():
        raise RunError("summary-missing", where=str(path), found="no such file", fix=again)
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise RunError("summary-syntax", where=str(path), found=str(error), fix=again) from error
    try:
        return Summary.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise RunError(
            "summary-field",
            where=f"{path}: {field}",
            found=f"{first['msg'].removeprefix('Value error, ')}{more}",
            consequence="A report of it could not be believed.",
            fix="judge the run again; if the file was edited by hand, undo that",
        ) from error


def save_summary(summary: Summary, run_dir: str | Path) -> Path:
    """Write ``summary.json``; a reader sees the old file or the new one, never half of one."""
    path = Path(run_dir) / SUMMARY
    data = summary.model_dump(mode="json", by_alias=True, exclude_none=True)
    # The contract names ``shipped`` even where nothing ships.
    data["shipped"] = summary.shipped
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
