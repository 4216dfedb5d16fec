"""What the server computes against transformers' own forward, and alone against in a crowd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manners.engines.embedded.prefix import MAX_PIECE, MIN_PIECE, PrefixCache, cuts
from manners.engines.embedded.runner import Runner
from manners.nvfp4.linear import NVFP4Linear
from tests.tiny import VOCABULARY, tiny_model

END = 2
SYSTEM = [5 + (37 * i) % 400 for i in range(90)] + [END]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [*SYSTEM, *torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()]


PROMPTS = [
    prompt(length, seed)
    for seed, length in enumerate([1, 3, 9, 17, 40, 63, 64, 70, 12, 5, 30, 2, 28, 90, 7, 11, 6, 20])
]


def model(rounding: bool = False) -> Any:
    """A fresh model: the runner changes its layers' forwards."""
    made = tiny_model(seed=3, hidden=64, layers=4)
    if rounding:
        for name, module in list(made.named_modules()):
            if type(module) is nn.Linear and not name.endswith(("lm_head", "in_proj_a", "in_proj_b")):
                parent, _, own = name.rpartition(".")
                scale = torch.tensor([2688 / 40.0])
                setattr(made.get_submodule(parent), own, NVFP4Linear(module.weight, None, scale))
    return made


def run(runner: Runner, prompts: list[list[int]], steps: int = 6) -> tuple[list[list[int]], list[Tensor]]:
    """Greedy replies, and each request's logits [steps, V], all requests together."""
    replies, logits = [], []
    for ids in prompts:
        cache, first_V = runner.prefill(ids)
        runner.admit(cache, len(ids))
        replies.append([int(first_V.argmax())])
        logits.append([first_V])
    for _ in range(steps - 1):
        for row, row_V in enumerate(runner.step([reply[-1] for reply in replies])):
            replies[row].append(int(row_V.argmax()))
            logits[row].append(row_V)
    runner.slots.clear()
    return replies, [torch.stack(rows) for rows in logits]


@torch.inference_mode()
def reference(ids: list[int], reply: list[int]) -> Tensor:
    """transformers' own logits [len(reply), V] over the whole text at once, without any cache."""
    text = torch.tensor([[*ids, *reply[:-1]]])
    rows: Tensor = model()(text, use_cache=False).logits[0, len(ids) - 1 :]
    return rows


def test_logits_equal_transformers_own() -> None:
    replies, logits = run(Runner(model(), end_ids={END}), PROMPTS)
    for ids, reply, rows in zip(PROMPTS, replies, logits, strict=True):
        assert (rows - reference(ids, reply)).abs().max() < 1e-4 * rows.abs().max()


@pytest.mark.parametrize("rounding", [False, True], ids=["bf16", "w4a4"])
def test_a_crowd_changes_no_bit(rounding: bool) -> None:
    """Rounding makes this matter: a difference in the last bit can become a step of the grid."""
    runner = Runner(model(rounding), end_ids={END})
    together = run(runner, PROMPTS)
    for place in (0, 5, 8, 17):
        alone = run(runner, [PROMPTS[place]])
        assert alone[0][0] == together[0][place]
        assert torch.equal(alone[1][0], together[1][place])


@pytest.mark.parametrize("rounding", [False, True], ids=["bf16", "w4a4"])
def test_the_prefix_cache_changes_no_bit(rounding: bool) -> None:
    with_cache = Runner(model(rounding), end_ids={END})
    without = Runner(model(rounding), end_ids={END}, prefix_bytes=0)
    _, kept = run(with_cache, PROMPTS)
    _, computed = run(without, PROMPTS)
    assert with_cache.prefix.hits == len(PROMPTS) - 1
    assert len(without.prefix) == 0
    assert all(torch.equal(a, b) for a, b in zip(kept, computed, strict=True))


def test_a_reply_does_not_spoil_the_kept_prefix() -> None:
    runner = Runner(model(), end_ids={END})
    first = run(runner, PROMPTS[:3])
    assert all(torch.equal(a, b) for a, b in zip(first[1], run(runner, PROMPTS[:3])[1], strict=True))


def test_rows_that_leave_do_not_disturb_the_others() -> None:
    runner = Runner(model(), end_ids={END})
    _, want = run(runner, [PROMPTS[7]], steps=8)
    ids = PROMPTS[:8]
    last = []
    for i in ids:
        cache, logits_V = runner.prefill(i)
        runner.admit(cache, len(i))
        last.append(int(logits_V.argmax()))
    got = [logits_V]
    row = 7
    for leaves in (0, 2, 1, None, 3, 1, None):
        if leaves is not None:
            moved = runner.remove(leaves)
            last[leaves] = last[moved]
            last.pop()
            row = leaves if row == moved else row
        logits_nV = runner.step(last)
        got.append(logits_nV[row])
        last = logits_nV.argmax(-1).tolist()
    assert torch.equal(torch.stack(got), want[0])


@torch.inference_mode()
def test_a_nan_in_one_row_stays_in_its_row() -> None:
    """Also after it has left: its keys are still in memory, behind the mask of who comes next."""
    runner = Runner(model(), end_ids={END})
    want = run(runner, [PROMPTS[0]])[1][0]
    cache, _ = runner.prefill(PROMPTS[13])
    for layer in cache.layers:
        for states in (getattr(layer, "recurrent_states", {}), getattr(layer, "conv_states", {})):
            for state in states.values():
                state.fill_(float("nan"))
        if hasattr(layer, "values"):
            layer.values.fill_(float("nan"))
    runner.admit(cache, len(PROMPTS[13]))
    beside, first_V = runner.prefill(PROMPTS[0])
    runner.admit(beside, len(PROMPTS[0]))
    logits_nV = runner.step([9, int(first_V.argmax())])
    assert logits_nV[0].isnan().any()
    assert torch.equal(logits_nV[1], want[1])
    runner.slots.lengths.clear()
    again, first_V = runner.prefill(PROMPTS[0])
    assert runner.admit(again, len(PROMPTS[0])) == 0, "the row that held the NaN"
    assert torch.equal(runner.step([int(first_V.argmax())])[0], want[1])


def test_long_replies_outgrow_the_first_memory() -> None:
    runner = Runner(model(), end_ids={END})
    replies, logits = run(runner, [PROMPTS[0], PROMPTS[4]], steps=150)
    for ids, reply, rows in zip([PROMPTS[0], PROMPTS[4]], replies, logits, strict=True):
        assert (rows - reference(ids, reply)).abs().max() < 1e-3 * rows.abs().max()


def test_the_check_at_the_start_finds_rows_independent_and_leaves_none() -> None:
    runner = Runner(model(rounding=True), end_ids={END})
    assert runner.check_independence(VOCABULARY)
    assert len(runner.slots) == 0


def test_the_check_at_the_start_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(model(), end_ids={END})
    step = runner.step
    monkeypatch.setattr(runner, "step", lambda tokens: step(tokens) + 1e-7 * len(tokens))
    assert not runner.check_independence(VOCABULARY)


class TestCuts:
    """Where prompts are cut depends on their tokens alone."""

    def test_after_the_system_prompt_and_at_the_end(self) -> None:
        assert cuts(prompt(20), {END}) == [len(SYSTEM), len(SYSTEM) + 20]

    def test_short_turns_are_not_worth_a_pass(self) -> None:
        turn = [7] * 20 + [END]
        assert cuts(SYSTEM + turn * 2 + [7] * 5, {END}) == [91, 91 + 47]
        assert cuts(SYSTEM + turn * 4 + [7] * 5, {END}) == [91, 91 + 84, 91 + 89]
        assert 84 >= MIN_PIECE > 63

    def test_long_pieces_are_split(self) -> None:
        assert cuts([7] * (2 * MAX_PIECE + 1), {END}) == [MAX_PIECE, 2 * MAX_PIECE, 2 * MAX_PIECE + 1]

    def test_one_token(self) -> None:
        assert cuts([7], {END}) == [1]
        assert cuts([END], {END}) == [1]

    def test_a_longer_conversation_keeps_the_cuts_of_its_beginning(self) -> None:
        shorter, longer = prompt(100) + [END] + [7] * 9, prompt(100) + [END] + [8] * 80 + [END] + [9] * 4
        assert cuts(longer, {END})[:2] == cuts(shorter, {END})[:2]


def test_the_prefix_cache_stays_within_its_bytes_and_drops_the_oldest() -> None:
    runner = Runner(model(), end_ids={END})
    systems = [[*prompt(0, 0)[:-1], i, END] for i in range(10, 14)]
    runner.prefill([*systems[0], 5])
    size = runner.prefix.bytes
    assert size > 0
    runner.prefix = PrefixCache(int(2.5 * size))
    for system in systems:
        runner.prefill([*system, 5])
        assert runner.prefix.bytes <= 2.5 * size
    kept = [runner.prefix.longest([*system, 5], [len(system)])[0] > 0 for system in systems]
    assert kept == [False, False, True, True]
