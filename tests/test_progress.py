"""What is drawn: bars in order with verdicts between them on a terminal, plain lines in a log."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from manners.progress import Bars


def verdict(verdict: str, why: str) -> Any:
    return SimpleNamespace(verdict=verdict, why=why)


def play(bars: Bars) -> None:
    with bars:
        bars.stage("parent", "asking", 3)
        bars.advance(3, 3)
        bars.judged("parent", verdict("pass", "all 2 gates pass"))
        for done in (1, 2):
            bars.stage("max", "[red]write", 2)
            bars.advance(done, 2)
        bars.judged("max", verdict("fail", "fail: concise"))
        bars.say("report: /a/" + "very/" * 30 + "[b]deep")


def drawn(**options: Any) -> str:
    file = io.StringIO()
    play(Bars(Console(file=file, width=80, **options)))
    return file.getvalue()


def test_a_log_has_a_line_a_stage_and_nothing_is_cut_or_read_as_markup() -> None:
    lines = [re.sub(r"\d+\.\d", "T", line) for line in drawn().splitlines()]
    assert [line.rstrip() for line in lines] == [
        "[   T s]   parent asking (3)",
        "  parent pass: all 2 gates pass",
        "[   T s]      max [red]write (2)",
        "     max fail: concise",
        "report: /a/" + "very/" * 30 + "[b]deep",
    ]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_gets_bars_unless_it_cannot_draw(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    text = drawn(force_terminal=True, color_system=None)
    assert ("━" * 32 in text) == (term == "xterm")
    assert ("[   " in text) == (term == "dumb")
    # What was judged stays below its own bars and above the next candidate's.
    order = [text.rindex(part) for part in ("asking", "all 2 gates pass", "[red]write", "fail: concise")]
    assert order == sorted(order)
    if term == "xterm":
        assert re.search(r"parent asking +━+ +3/3 +0:00:00", text)
        assert re.search(r"max \[red\]write ━+ +2/2 +0:00:00", text)
