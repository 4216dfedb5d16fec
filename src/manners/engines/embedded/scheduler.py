"""Which request runs when: one worker thread owns the model, and every step serves all running requests.

Between two steps at most PREFILLS_PER_STEP waiting requests are let in, so that a burst of new
prompts does not stall those that are being answered. A finished or aborted request leaves its row
at once. A failure in one request's prompt or choice of token fails that request; a failure in the
common step fails those that were running (nothing tells whose it is); the thread lives on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .sampling import Sampling, make_generator, pick

PREFILLS_PER_STEP = 4
Finish = Literal["stop", "length"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """One token, or the end. ``token`` is None for an end-of-turn token, which is not part of the reply."""

    token: int | None = None
    finish: Finish | None = None
    error: BaseException | None = None


@dataclass(eq=False)
class Job:
    """One request on its way. ``max_tokens`` >= 1 must fit the model's context after the prompt."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    sink: Callable[[Event], None]
    """Called where ``Scheduler.deliver`` runs it."""
    cancelled: bool = False
    produced: int = 0
    last_token: int = 0
    generator: torch.Generator | None = field(default=None, repr=False)


Batch = list[tuple[Job, Event]]


class Scheduler:
    """Runs jobs on a :class:`~manners.engines.embedded.runner.Runner`.

    Args:
        runner: the model; from :meth:`start` on only the worker thread touches it.
        stop_ids: tokens that end a reply.
        max_rows: how many requests run at once.
        deliver: called from the worker thread with the events of one step; must not block.
    """

    def __init__(
        self, runner: Any, *, stop_ids: Collection[int], max_rows: int, deliver: Callable[[Batch], None]
    ) -> None:
        self._runner = runner
        self._stop_ids = frozenset(stop_ids)
        self._max_rows = max_rows
        self._deliver = deliver
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return len(self._running), len(self._waiting)

    def submit(self, job: Job) -> None:
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody wants the rest; the row is freed before the next step."""
        job.cancelled = True
        with self._changed:
            self._changed.notify()

    def stop(self, wait_s: float = 5.0) -> None:
        """Let the current step end, drop all requests and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._stopping or self._waiting or self._running):
                    self._changed.wait()
                if self._stopping:
                    return
            try:
                self._turn()
            except Exception as error:
                # Beyond this point no row can be trusted; the requests that had one are told.
                _log.exception(
                    "the step failed; its %d requests are answered with an error", len(self._running)
                )
                failed, self._running = self._running, []
                self._runner.slots.clear()
                self._send([(job, Event(error=error)) for job in failed])

    def _turn(self) -> None:
        self._drop_cancelled()
        self._send(self._let_in())
        if self._running:
            logits_nV = self._runner.step([job.last_token for job in self._running])
            self._send(self._after_step(logits_nV))

    def _drop_cancelled(self) -> None:
        with self._changed:
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
        for row in reversed(range(len(self._running))):
            if self._running[row].cancelled:
                self._leave(row)

    def _let_in(self) -> Batch:
        events: Batch = []
        for _ in range(PREFILLS_PER_STEP):
            if len(self._running) >= self._max_rows or not self._waiting:
                break
            with self._changed:
                job = self._waiting.popleft()
            try:
                cache, logits_V = self._runner.prefill(job.prompt_ids)
                job.generator = make_generator(job.sampling, logits_V.device)
                event = self._choose(job, logits_V)
                if event.finish is None:
                    self._runner.admit(cache, len(job.prompt_ids))
                    self._running.append(job)
            except Exception as error:
                _log.exception("a prompt of %d tokens failed", len(job.prompt_ids))
                event = Event(error=error)
            events.append((job, event))
        return events

    def _after_step(self, logits_nV: torch.Tensor) -> Batch:
        events: Batch = []
        greedy = logits_nV.max(dim=-1)
        best, values = greedy.indices.tolist(), greedy.values.tolist()
        # Backwards, because a row that leaves is replaced by the last one, which has been served then.
        for row in reversed(range(len(self._running))):
            job = self._running[row]
            try:
                plain = job.generator is None and abs(values[row]) < float("inf")
                event = self._accept(job, best[row]) if plain else self._choose(job, logits_nV[row])
            except Exception as error:
                _log.exception("choosing a token failed")
                event = Event(error=error)
            if event.finish is not None or event.error is not None:
                self._leave(row)
            events.append((job, event))
        return events

    def _choose(self, job: Job, logits_V: torch.Tensor) -> Event:
        return self._accept(job, pick(logits_V, job.sampling, job.generator))

    def _accept(self, job: Job, token: int) -> Event:
        job.produced += 1
        job.last_token = token
        if token in self._stop_ids:
            return Event(finish="stop")
        return Event(token=token, finish="length" if job.produced >= job.max_tokens else None)

    def _leave(self, row: int) -> None:
        self._runner.remove(row)
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last

    def _send(self, events: Batch) -> None:
        if events:
            self._deliver(events)
