"""The end of a run on a terminal: one sentence and one table.

Cells are ``Text``, never markup: a name such as ``[red]`` stays a name.
"""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .decision import decide
from .page import candidate_heading, gate_groups
from .summary import PARENT, CandidateSummary, GateRow, Summary
from .text import minutes, percent_number, points, size, visible

_STYLE = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}
_OUTCOME = {"ships": "bold green", "none": "bold yellow", "void": "bold red"}


def render_terminal(summary: Summary) -> RenderableType:
    """The decision and a table of gates by candidate, manners apart from knowledge.

    Fits 80 columns with a parent and three candidates, and wraps where it must; colour only repeats
    what words say.
    """
    decision = decide(summary)
    return Group(Text(visible(decision.sentence), style=_OUTCOME[decision.outcome]), Text(), _table(summary))


def _table(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("% of probes\npassed", no_wrap=True)
    for candidate in summary.candidates:
        table.add_column(_heading(summary, candidate), justify="right", overflow="fold")
    for group in gate_groups(summary):
        table.add_row(Text(group.title.upper(), style="dim"))
        for line in group.lines:
            cells = [
                _cell(result, candidate.name == PARENT)
                for candidate, result in zip(summary.candidates, line.results, strict=True)
            ]
            table.add_row(Text(visible(line.name)), *cells)
        table.add_section()
    table.add_row(Text("COST", style="dim"))
    for name, cells in _costs(summary):
        table.add_row(name, *cells)
    return table


def _heading(summary: Summary, candidate: CandidateSummary) -> Text:
    return Text(f"{visible(candidate.name)}\n{candidate_heading(summary, candidate)}")


def _cell(gate: GateRow | None, is_parent: bool) -> Text:
    if gate is None:
        return Text("–", style="dim")
    if is_parent:
        return Text(percent_number(gate.share))
    return Text.assemble(
        percent_number(gate.share),
        (f" {points(gate.points):>5} ", "dim"),
        ("FAIL" if gate.verdict == "fail" else gate.verdict, _STYLE[gate.verdict]),
    )


def _costs(summary: Summary) -> list[tuple[str, list[Text]]]:
    def row(values: list[str | None]) -> list[Text]:
        return [Text(value or "–", style="" if value else "dim") for value in values]

    candidates = summary.candidates
    bits = [None if c.bits_per_weight is None else f"{c.bits_per_weight:.2f}" for c in candidates]
    return [
        ("size", row([None if c.bytes is None else size(c.bytes) for c in candidates])),
        ("bits per weight", row(bits)),
        ("time", row([None if c.minutes is None else minutes(c.minutes) for c in candidates])),
    ]
