"""Largest magnitudes: of weights, read shard by shard, and of activations, seen on calibration tokens.

An amax is all that the static scales of NVFP4 need. What it does not tell: how often such a
magnitude comes up. One outlier token sets the scale for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint, canonical_name, check_finite, fused_groups
from ..errors import QuantizeError
from .plan import Plan

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""

BATCH_TOKENS = 1024


def weight_amax(parent: Checkpoint, plan: Plan, progress: Progress | None = None) -> dict[str, Tensor]:
    """float32 [] per rounded Linear: the largest |weight| of its whole fused group.

    Raises:
        CheckpointError: ``not-finite`` with the first tensor (of any kind) that holds NaN or Inf.
    """
    wanted = set(plan.nvfp4())
    amax: dict[str, Tensor] = {}
    done = 0
    for shard in parent.shards():
        for stored, tensor in shard.tensors():
            check_finite(stored, tensor, shard.path)
            linear = (canonical_name(stored) or "").removesuffix(".weight")
            if linear in wanted:
                amax[linear] = tensor.abs().max().float()
            done += 1
            if progress:
                progress(done, len(parent.names))
    return _shared(amax)


@torch.no_grad()
def activation_amax(
    model: Any, batches: Sequence[Sequence[int]], plan: Plan, progress: Progress | None = None
) -> dict[str, float]:
    """The largest |x| that reaches each rounded Linear, over all calibration tokens; equal in a fused group.

    Rows are run several at a time, padded on the right. The models are causal, so padding changes
    nothing before it, and padded positions are not counted.

    Args:
        model: the parent, as :func:`manners.checkpoint.load_model` gives it.
        batches: token ids, one row per conversation.
        plan: which Linears to watch.
        progress: called with (rows done, rows in all).

    Raises:
        QuantizeError: ``no-calibration`` without any token; ``activations-not-finite`` with the
            first layer that NaN or Inf reaches; ``token-range`` for an id outside the vocabulary.
    """
    rows = sorted((list(row) for row in batches if len(row)), key=len)
    if not rows:
        raise QuantizeError(
            "no-calibration",
            where="calibration",
            found="no tokens",
            consequence="W4A4 needs to know how large activations get.",
            fix="give some of the conversations that the model was taught with",
        )
    _check_ids(model, rows)
    device = next(model.parameters()).device
    with _watching(model, plan.nvfp4()) as watch:
        done = 0
        for part in _batches(rows):
            ids = torch.zeros(len(part), len(part[-1]), dtype=torch.long)
            real = torch.zeros_like(ids, dtype=torch.bool)
            for i, row in enumerate(part):
                ids[i, : len(row)] = torch.tensor(row)
                real[i, : len(row)] = True
            watch.real = real.flatten().to(device)
            model(input_ids=ids.to(device), use_cache=False)
            done += len(part)
            if progress:
                progress(done, len(rows))
    silent = [name for name in plan.nvfp4() if name not in watch.amax]
    if silent:
        raise QuantizeError(
            "unseen-linear",
            where=silent[0],
            found="no token reached this Linear during calibration",
            fix="keep it in BF16; its scale cannot be known",
        )
    _check_finite(watch.amax)
    shared = _shared(watch.amax)
    return {name: float(shared[name]) for name in plan.nvfp4()}


class _Watch:
    """The running maxima, [] float32 per Linear, and which positions of the current batch are real."""

    def __init__(self) -> None:
        self.amax: dict[str, Tensor] = {}
        self.real = torch.ones(0, dtype=torch.bool)

    def see(self, name: str, x: Tensor) -> None:
        seen = x.reshape(-1, x.shape[-1])[self.real].abs().max().float()
        # torch.maximum keeps NaN, so that the check after the run finds it.
        self.amax[name] = torch.maximum(self.amax[name], seen) if name in self.amax else seen


@contextmanager
def _watching(model: nn.Module, names: Sequence[str]) -> Iterator[_Watch]:
    """Hooks on the inputs of some Linears, taken off again whatever happens."""
    watch = _Watch()
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, args, name=name: watch.see(name, args[0])
        )
        for name in names
    ]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def _batches(rows: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Rows of rising length, in groups of at most BATCH_TOKENS padded tokens (or one row)."""
    part: list[list[int]] = []
    for row in rows:
        if part and (len(part) + 1) * len(row) > BATCH_TOKENS:
            yield part
            part = []
        part.append(row)
    yield part


def _shared(amax: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every member of a fused group gets the group's maximum."""
    shared: dict[str, Tensor] = {}
    for group in fused_groups(amax):
        largest = torch.stack([amax[name] for name in group]).max()
        shared |= dict.fromkeys(group, largest)
    return {name: shared[name] for name in amax}


def _check_finite(amax: Mapping[str, Tensor]) -> None:
    for name, value in amax.items():
        if not math.isfinite(float(value)):
            raise QuantizeError(
                "activations-not-finite",
                where=name,
                found=f"its input holds {float(value)} on the calibration tokens",
                consequence="No scale fits, and the parent's own answers would be noise.",
                fix="check the parent: it gives NaN on ordinary prompts",
            )


def _check_ids(model: Any, rows: Sequence[Sequence[int]]) -> None:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    for row in rows:
        if min(row) < 0 or max(row) >= vocabulary:
            raise QuantizeError(
                "token-range",
                where="calibration",
                found=f"token ids {min(row)} to {max(row)}, the vocabulary has {vocabulary}",
                fix="tokenize the calibration conversations with this parent's tokenizer",
            )
