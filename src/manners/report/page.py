"""Everything the two templates show, gathered from a run folder. Reads files, writes none."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ask.transcripts import Transcript, load_transcripts
from ..errors import MannersError
from ..judge.verdicts import load_verdicts
from .chart import Chart, build_chart
from .decision import Decision, decide, what_decided
from .limits import statements
from .pairs import NOTHING_JUDGED, Differences, Outcome, differences
from .summary import PARENT, CandidateSummary, GateRow, Summary
from .text import visible


@dataclass(frozen=True)
class GateLine:
    """One row of the gate table: a gate and each candidate's result, None where it was not measured."""

    name: str
    results: tuple[GateRow | None, ...]

    @property
    def threshold(self) -> float | None:
        return next((row.threshold for row in self.results if row and row.threshold is not None), None)

    @property
    def margin(self) -> float | None:
        return next((row.margin for row in self.results if row and row.margin is not None), None)


@dataclass(frozen=True)
class GateGroup:
    title: str
    about: str
    lines: tuple[GateLine, ...]


@dataclass(frozen=True)
class Page:
    summary: Summary
    decision: Decision
    groups: tuple[GateGroup, ...]
    chart: Chart | None
    undecided: list[tuple[str, GateRow]]
    """(candidate, gate) for every gate that does not pass."""
    differences: tuple[Differences, ...]
    missing: tuple[str, ...]
    """Why transcripts of a candidate are not shown."""
    limits: list[str]
    made: list[tuple[str, list[tuple[str, str]]]]
    """How the run was made: (heading, [(name, value)])."""
    commands: tuple[str, ...]


def gather(run_dir: Path, summary: Summary) -> Page:
    """Raises nothing for files that are missing: what is not there is said in the report."""
    run = _read_object(run_dir / "run.json")
    pairs, missing = _all_differences(run_dir, summary)
    return Page(
        summary=summary,
        decision=decide(summary),
        groups=gate_groups(summary),
        chart=build_chart(summary),
        undecided=what_decided(summary),
        differences=pairs,
        missing=missing,
        limits=statements(summary, _judged_limits(run_dir, summary)),
        made=how_made(summary, run),
        commands=_commands(summary, run),
    )


def gate_groups(summary: Summary) -> tuple[GateGroup, ...]:
    """Manners and knowledge apart; a group without gates is left out."""
    rows: dict[str, bool] = {
        gate.name: gate.is_knowledge for candidate in summary.candidates for gate in candidate.gates
    }
    titles = {
        False: ("Manners", "how the model behaves; what rounding tends to break"),
        True: ("Knowledge", "what the model knows; what rounding tends to keep"),
    }
    groups = []
    for is_knowledge, (title, about) in titles.items():
        lines = tuple(
            GateLine(name, tuple(candidate.gate(name) for candidate in summary.candidates))
            for name, knowledge in rows.items()
            if knowledge == is_knowledge
        )
        if lines:
            groups.append(GateGroup(title, about, lines))
    return tuple(groups)


def _all_differences(run_dir: Path, summary: Summary) -> tuple[tuple[Differences, ...], tuple[str, ...]]:
    found: list[Differences] = []
    missing: list[str] = []
    parent = _transcripts(run_dir, PARENT, missing)
    for candidate in summary.rounded if parent is not None else ():
        # A candidate that was refused before it was asked has nothing to show.
        if not candidate.gates:
            continue
        replies = _transcripts(run_dir, candidate.name, missing)
        if parent is None or replies is None:
            continue
        found.append(differences(candidate.name, parent, replies, _judged(run_dir, candidate.name, missing)))
    return tuple(found), tuple(missing)


def _folder(run_dir: Path, name: str) -> Path:
    return run_dir / "candidates" / name


def _transcripts(run_dir: Path, name: str, missing: list[str]) -> dict[str, list[Transcript]] | None:
    try:
        return load_transcripts(_folder(run_dir, name) / "transcripts.jsonl")
    except MannersError as error:
        missing.append(f"{name}: its transcripts cannot be read ({visible(error.code)})")
        return None


def _judged(run_dir: Path, name: str, missing: list[str]) -> Outcome:
    try:
        verdicts = load_verdicts(_folder(run_dir, name) / "verdicts.json")
    except MannersError as error:
        missing.append(f"{name}: which probes lost a gate is not known ({visible(error.code)})")
        return NOTHING_JUDGED
    lost: dict[str, list[str]] = defaultdict(list)
    won: dict[str, list[str]] = defaultdict(list)
    reasons: dict[str, dict[tuple[int, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for gate in verdicts.gates:
        for probe in gate.harm_ids:
            lost[probe].append(gate.name)
        for probe in gate.gain_ids:
            won[probe].append(gate.name)
        harmed = set(gate.harm_ids)
        for failure in gate.failures:
            if failure.probe in harmed:
                reasons[failure.probe][failure.turn, failure.why].append(gate.name)
    # One slip often costs several gates: it is told once.
    told = {
        probe: [f"{', '.join(gates)}, turn {turn + 1}: {why}" for (turn, why), gates in found.items()]
        for probe, found in reasons.items()
    }
    return Outcome(lost, won, told)


def _judged_limits(run_dir: Path, summary: Summary) -> tuple[str, ...]:
    """The judge's own words about the candidate that is decided about: the shipped one, else the last."""
    names = [summary.shipped] if summary.shipped else [candidate.name for candidate in summary.rounded[-1:]]
    for name in names:
        try:
            return load_verdicts(_folder(run_dir, name) / "verdicts.json").limits
        except MannersError:
            break
    return ()


def how_made(summary: Summary, run: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of (name, value); the summary's word counts, run.json fills what it leaves out."""
    inputs = {"spec": summary.spec, "parent": summary.parent, "paired probes": summary.probes}
    groups = [("Inputs", _lines(inputs))]
    for heading, recorded in (
        ("Engine", summary.engine),
        ("Hardware", summary.hardware),
        ("Versions", summary.versions or None),
        ("Seeds", summary.seeds),
    ):
        value = run.get(heading.lower()) if recorded is None else recorded
        if lines := _lines(value):
            groups.append((heading, lines))
    return groups


def _lines(value: Any) -> list[tuple[str, str]]:
    if value is None or value == {}:
        return []
    if isinstance(value, Mapping):
        return [(visible(str(key)), visible(_plain(item))) for key, item in value.items()]
    return [("", visible(_plain(value)))]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _commands(summary: Summary, run: Mapping[str, Any]) -> tuple[str, ...]:
    if summary.commands:
        return tuple(visible(command) for command in summary.commands)
    recorded = run.get("commands") or ([run["command"]] if run.get("command") else [])
    if not isinstance(recorded, list):
        return ()
    return tuple(
        visible(shlex.join(map(str, command)) if isinstance(command, list) else str(command))
        for command in recorded
    )


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if the file is missing or unreadable: it is only illustration."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def candidate_heading(summary: Summary, candidate: CandidateSummary) -> str:
    """The word over a candidate's column: ``reference``, ``ships``, its verdict, or ``not measured``."""
    if candidate.name == PARENT:
        return "reference"
    if summary.comparability == "void":
        return "void"
    if candidate.name == summary.shipped:
        return "ships"
    return {"fail": "fails", "pass": "passes", "inconclusive": "inconclusive", None: "not measured"}[
        candidate.verdict
    ]
