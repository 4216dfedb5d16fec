"""Progress bars on stderr, for people; a log line a stage where stderr is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .judge.verdicts import Verdicts


class Bars:
    """One bar a stage. Also a :class:`ladder.Watcher`."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.fields[candidate]:>8}"), TextColumn("{task.description:10}"), BarColumn(32),
            MofNCompleteColumn(), TimeElapsedColumn(), console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
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
        if (candidate, stage) == self._stage:
            return
        self._stage = (candidate, stage)
        if not self.console.is_terminal:
            self.console.print(
                f"[{time.monotonic() - self._began:6.1f} s] {candidate}: {stage}",
                markup=False,
                highlight=False,
            )
        self._task = self._progress.add_task(stage, total=total, candidate=candidate)

    def advance(self, done: int, total: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def judged(self, candidate: str, verdicts: Verdicts) -> None:
        self.console.print(
            f"{candidate:>8} {verdicts.verdict}: {verdicts.why}", markup=False, highlight=False
        )
