"""What a person sees on stderr: a bar a stage on a terminal, a line a stage in a log.

parent  checking   ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  164/164 0:00:01
parent  asking     ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  420/420 0:00:31
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .judge.verdicts import Verdicts

_COLOUR = {"pass": "green", "fail": "bold red", "inconclusive": "yellow"}


class Bars:
    """Draws while the block runs. Also a :class:`ladder.Watcher`.

    Names come from files and the command line, so nothing here reads them as markup.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._draws = self.console.is_terminal and not self.console.is_dumb_terminal
        self._progress = self._new_bars()
        self._task: TaskID | None = None
        self._stage = ("", "")
        self._began = time.monotonic()

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, candidate: str, stage: str, total: int) -> None:
        """A stage begins; telling of the same one again changes nothing."""
        if (candidate, stage) == self._stage:
            return
        self._stop_clock()
        self._stage = (candidate, stage)
        if not self._draws:
            self.say(f"[{time.monotonic() - self._began:6.1f} s] {candidate:>8} {stage} ({total})")
        self._task = self._progress.add_task(stage, total=total, candidate=candidate)

    def advance(self, done: int, total: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def judged(self, candidate: str, verdicts: Verdicts) -> None:
        """One line under the candidate's bars: its verdict, and the gates that decided it."""
        self._stop_clock()
        verdict, why = verdicts.verdict, verdicts.why
        # Bars that go on being drawn stay below everything that is printed; so these end here.
        self._progress.stop()
        said = why if why.startswith(verdict) else f"{verdict}: {why}"
        self.say(f"{candidate:>8} {said}", _COLOUR[verdict])
        self._progress = self._new_bars()
        self._progress.start()

    def say(self, text: str, style: str | None = None) -> None:
        """A line as it is: not read as markup, not cut into the terminal's width (paths can be copied)."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _stop_clock(self) -> None:
        """A stage that ends short of its total must not go on counting time."""
        if self._task is not None:
            self._progress.stop_task(self._task)
            self._task = None

    def _new_bars(self) -> Progress:
        return Progress(
            TextColumn("{task.fields[candidate]:>8}", style="bold", markup=False),
            TextColumn("{task.description:10}", markup=False),
            BarColumn(32),
            TextColumn("{task.completed:>5.0f}/{task.total:<5.0f}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self._draws,
        )
