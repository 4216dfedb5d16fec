"""What was written is what was measured: read the folder back and compare logits.

KL is from the in-memory model to the one read back, in nats, per token; its largest value counts,
because one bad layer can hide in a mean. It says nothing about the distance to the parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .load import load_model

MAX_KL = 1e-6


@dataclass(frozen=True)
class RoundTrip:
    """How far two models are apart on the same tokens."""

    max_abs_diff: float
    """Largest difference of two logits."""
    max_kl: float
    """Largest KL divergence of one token's distribution, in nats."""
    n_tokens: int

    @property
    def passed(self) -> bool:
        return self.max_kl <= MAX_KL


def round_trip(folder: str | Path, in_memory_model: Any, input_ids: Sequence[Sequence[int]]) -> RoundTrip:
    """Compare a written checkpoint with the model that it was written from.

    The folder is loaded with the in-memory model's dtype and device.

    Raises:
        CheckpointError: ``round-trip`` if any token's KL exceeds 1e-6; ``logits-not-finite``; those
            of :func:`load_model`.
    """
    weight = next(in_memory_model.parameters())
    read_back = load_model(folder, device=weight.device, dtype=weight.dtype)
    result = compare_logits(in_memory_model, read_back, input_ids, where=str(folder))
    if not result.passed:
        raise CheckpointError(
            "round-trip",
            where=str(folder),
            found=f"KL {result.max_kl:.3g} nats over {result.n_tokens} tokens, allowed {MAX_KL:g}",
            consequence="The files do not hold the model that was measured.",
            fix="write the checkpoint again; if it stays, report it with the plan",
        )
    return result


@torch.no_grad()
def compare_logits(
    reference: Any, other: Any, input_ids: Sequence[Sequence[int]], *, where: str = "the models"
) -> RoundTrip:
    """Run both models over each row of token ids alone (no padding) and compare logits.

    Raises:
        CheckpointError: ``logits-not-finite`` if either gives NaN or Inf; ``no-tokens`` if there
            is nothing to compare, which would always look passed.
    """
    diff, divergence, tokens = 0.0, 0.0, 0
    for row in input_ids:
        if not row:
            continue
        a_TV, b_TV = (_logits(model, row, where) for model in (reference, other))
        diff = max(diff, float((a_TV - b_TV).abs().max()))
        divergence = max(divergence, float(kl_nats(a_TV, b_TV).max()))
        tokens += len(row)
    if not tokens:
        raise CheckpointError(
            "no-tokens", where=where, found="no token ids to compare on", fix="give some prompts"
        )
    return RoundTrip(diff, divergence, tokens)


def kl_nats(a_TV: Tensor, b_TV: Tensor) -> Tensor:
    """KL(softmax a || softmax b) per row, in nats; never below 0 by more than rounding."""
    log_a, log_b = a_TV.double().log_softmax(-1), b_TV.double().log_softmax(-1)
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def _logits(model: Any, row: Sequence[int], where: str) -> Tensor:
    """float32 [tokens, vocabulary], on the CPU."""
    device = next(model.parameters()).device
    logits: Tensor = model(input_ids=torch.tensor([list(row)], device=device), use_cache=False).logits[0]
    logits = logits.float().cpu()
    if not torch.isfinite(logits).all():
        raise CheckpointError(
            "logits-not-finite",
            where=where,
            found="NaN or Inf in the logits",
            fix="look for the layer with the largest activations; keep it in BF16",
        )
    return logits
