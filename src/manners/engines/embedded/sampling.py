"""From logits to a token: greedy, or sampled with the request's own generator.

A row's choice depends on its own logits and its own seed, never on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


def make_generator(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """The request's source of chance; None for greedy. Without a seed, a fresh one each time."""
    if sampling.temperature == 0:
        return None
    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def pick(logits_V: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Choose one token.

    Args:
        logits_V: float [V].
        sampling: how to choose.
        generator: from :func:`make_generator`, on the same device.

    Raises:
        ArithmeticError: the largest logit is NaN or Inf; no choice would mean anything.
    """
    best = logits_V.max(dim=-1)
    if not bool(torch.isfinite(best.values)):
        raise ArithmeticError(f"the model's largest logit is {float(best.values)}")
    if generator is None:
        return int(best.indices)
    return int(torch.multinomial(_probabilities(logits_V, sampling), 1, generator=generator))


def _probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    scaled_V = logits_V.float() / sampling.temperature
    if 0 < sampling.top_k < scaled_V.numel():
        least = scaled_V.topk(sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < least, float("-inf"))
    p_V = scaled_V.softmax(dim=-1)
    if sampling.top_p < 1:
        sorted_V, order_V = p_V.sort(descending=True)
        # The token that crosses top_p stays: what stands before it must still be below.
        outside_V = sorted_V.cumsum(0) - sorted_V >= sampling.top_p
        p_V = p_V.index_fill(0, order_V[outside_V], 0.0)
    return p_V
