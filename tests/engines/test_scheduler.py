"""The scheduler with a model of three lines: who runs when, and what a failure takes with it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from manners.engines.embedded.sampling import Sampling
from manners.engines.embedded.scheduler import Batch, Event, Job, Scheduler

END, WORDS = 9, 10


def sure(token: int) -> Tensor:
    logits_V = torch.zeros(WORDS)
    logits_V[token] = 5
    return logits_V


class CountingRunner:
    """Each row counts on from its prompt's last token: 3 is followed by 4, 5, ... up to END."""

    def __init__(self) -> None:
        self.slots = self
        self.rows: list[int] = []
        self.widest = 0
        self.steps = 0
        self.fail_step = False
        self.may_step = threading.Event()
        self.may_step.set()

    def prefill(self, ids: Sequence[int]) -> tuple[Any, Tensor]:
        if ids[0] == 0:
            raise RuntimeError("this prompt is bad")
        return ids[-1], sure(ids[-1] + 1)

    def admit(self, cache: Any, length: int) -> int:
        self.rows.append(cache + 1)
        self.widest = max(self.widest, len(self.rows))
        return len(self.rows) - 1

    def step(self, tokens: Sequence[int]) -> Tensor:
        assert self.may_step.wait(5)
        self.steps += 1
        if self.fail_step:
            self.fail_step = False
            raise RuntimeError("the step is bad")
        assert list(tokens) == self.rows, "rows and requests went apart"
        self.rows = [token + 1 for token in tokens]
        return torch.stack([sure(token) for token in self.rows])

    def remove(self, row: int) -> int:
        last = len(self.rows) - 1
        self.rows[row] = self.rows[last]
        self.rows.pop()
        return last

    def clear(self) -> None:
        self.rows.clear()


class Desk:
    """Submits jobs and collects their events."""

    def __init__(self, max_rows: int = 4) -> None:
        self.runner = CountingRunner()
        self.scheduler = Scheduler(self.runner, stop_ids={END}, max_rows=max_rows, deliver=self.deliver)
        self.inboxes: dict[int, queue.Queue[Event]] = {}

    def deliver(self, batch: Batch) -> None:
        for job, event in batch:
            job.sink(event)

    def ask(
        self, *ids: int, max_tokens: int = 100, sampling: Sampling | None = None
    ) -> tuple[Job, queue.Queue[Event]]:
        inbox: queue.Queue[Event] = queue.Queue()
        job = Job(ids, sampling or Sampling(), max_tokens, inbox.put)
        self.scheduler.submit(job)
        return job, inbox


def read(inbox: queue.Queue[Event]) -> tuple[list[int], str]:
    tokens = []
    while True:
        event = inbox.get(timeout=5)
        if event.error is not None:
            return tokens, str(event.error)
        if event.token is not None:
            tokens.append(event.token)
        if event.finish is not None:
            return tokens, event.finish


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    made.scheduler.start()
    yield made
    made.runner.may_step.set()
    made.scheduler.stop()
    assert not made.scheduler.alive()


def test_replies_end_at_a_stop_token_or_at_the_limit(desk: Desk) -> None:
    assert read(desk.ask(5)[1]) == ([6, 7, 8], "stop")
    assert read(desk.ask(5, max_tokens=3)[1]) == ([6, 7, 8], "length")
    assert read(desk.ask(5, max_tokens=1)[1]) == ([6], "length")
    assert read(desk.ask(8)[1]) == ([], "stop")
    assert desk.runner.rows == []


def test_many_requests_share_the_steps_and_all_rows_are_used() -> None:
    desk = Desk()
    inboxes = [(1 + i % 7, desk.ask(1 + i % 7)[1]) for i in range(40)]
    desk.scheduler.start()
    for begin, inbox in inboxes:
        assert read(inbox) == (list(range(begin + 1, END)), "stop")
    desk.scheduler.stop()
    assert desk.runner.widest == 4
    assert desk.runner.steps < sum(END - begin for begin, _ in inboxes) / 2


def test_a_bad_prompt_fails_alone(desk: Desk) -> None:
    good, bad, later = desk.ask(2)[1], desk.ask(0, 3)[1], desk.ask(4)[1]
    assert read(bad) == ([], "this prompt is bad")
    assert read(good) == ([3, 4, 5, 6, 7, 8], "stop")
    assert read(later) == ([5, 6, 7, 8], "stop")


def test_a_request_whose_token_cannot_be_chosen_fails_alone(desk: Desk) -> None:
    bad = desk.ask(2, sampling=Sampling(temperature=1.0, top_k="three"))[1]  # type: ignore[arg-type]
    good = desk.ask(2)[1]
    assert "not supported between" in read(bad)[1]
    assert read(good)[1] == "stop"


def test_nan_logits_fail_the_row_that_has_them(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    step = desk.runner.step

    def spoiled(tokens: Sequence[int]) -> Tensor:
        logits_nV = step(tokens)
        for row, token in enumerate(tokens):
            if token == 7:
                logits_nV[row, 0] = float("nan")
        return logits_nV

    monkeypatch.setattr(desk.runner, "step", spoiled)
    bad, good = desk.ask(5)[1], desk.ask(7)[1]
    tokens, error = read(bad)
    assert tokens == [6, 7]
    assert "largest logit is nan" in error
    assert read(good) == ([8], "stop")


def test_a_bad_step_fails_who_was_running_and_the_thread_lives_on(desk: Desk) -> None:
    desk.runner.fail_step = True
    assert read(desk.ask(2)[1])[1] == "the step is bad"
    assert read(desk.ask(2)[1]) == ([3, 4, 5, 6, 7, 8], "stop")
    assert desk.scheduler.alive()


def test_a_cancelled_request_frees_its_row_while_the_others_go_on(desk: Desk) -> None:
    desk.runner.may_step.clear()
    jobs = [desk.ask(1) for _ in range(4)]
    waiting = desk.ask(6)
    for _, inbox in jobs:
        assert inbox.get(timeout=5).token == 2
    desk.scheduler.cancel(jobs[1][0])
    desk.runner.may_step.set()
    assert read(waiting[1]) == ([7, 8], "stop")
    for index in (0, 2, 3):
        assert read(jobs[index][1]) == ([3, 4, 5, 6, 7, 8], "stop")
    heard = [jobs[1][1].get_nowait().token for _ in range(jobs[1][1].qsize())]
    assert heard in ([], [3])  # the step that was under way, and nothing after it


def test_a_request_cancelled_while_waiting_never_runs(desk: Desk) -> None:
    desk.runner.may_step.clear()
    first = [desk.ask(1) for _ in range(4)]
    waiting_job, waiting = desk.ask(3)
    desk.scheduler.cancel(waiting_job)
    desk.runner.may_step.set()
    for _, inbox in first:
        read(inbox)
    assert read(desk.ask(7)[1]) == ([8], "stop")
    assert waiting.empty()
