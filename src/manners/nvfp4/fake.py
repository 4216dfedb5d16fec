"""Rounding to NVFP4 and back in one step, with a gradient that passes straight through.

Training and the embedded engine use these; what they give is bit for bit what the written checkpoint gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .compiled import EAGER_SLICE, kernels_for, slices
from .errors import FormatError
from .format import BLOCK
from .scales import ScaleRule, check_global_scale, check_matrix, check_rule, scales_of_blocks


def fake_quant_weight(w_OK: Tensor, global_scale: Tensor, rule: ScaleRule = "max") -> Tensor:
    """The values that ``quantize_weight`` would store, in w's own dtype; the gradient is the identity.

    Raises:
        FormatError: ``block-shape``, ``not-finite`` or ``bad-scale``.
    """
    check_matrix(w_OK)
    check_global_scale(global_scale)
    check_rule(rule)
    if torch.is_grad_enabled() and w_OK.requires_grad:
        return _straight_through(w_OK, partial(_round_weight, global_scale=global_scale, rule=rule))
    return _round_weight(w_OK, global_scale, rule)


def fake_quant_activation(x: Tensor, input_global_scale: Tensor) -> Tensor:
    """Round activations as compressed-tensors' forward does: static global scale, block scales from x itself.

    Args:
        x: [..., K], any float dtype, K a multiple of 16. Not checked for NaN or Inf, since this runs for
            every token: NaN stays NaN and shows in the output, Inf saturates as in compressed-tensors.
        input_global_scale: float32 [1], from the calibrated amax; larger activations saturate.

    Returns:
        [..., K] in x's dtype; the gradient is the identity.

    Raises:
        FormatError: ``block-shape`` if K is no multiple of 16.
    """
    if x.shape[-1] % BLOCK:
        raise FormatError("block-shape", f"activations {list(x.shape)}, need a width divisible by {BLOCK}")
    if torch.is_grad_enabled() and x.requires_grad:
        return _straight_through(x, partial(_round_activation, input_global_scale=input_global_scale))
    return _round_activation(x, input_global_scale)


class _StraightThrough(torch.autograd.Function):
    """``function(x)`` forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _straight_through(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _StraightThrough.apply(x, function)  # type: ignore[no-untyped-call]
    return result


def _round_weight(w_OK: Tensor, global_scale: Tensor, rule: ScaleRule) -> Tensor:
    x_N16 = w_OK.detach().reshape(-1, BLOCK)
    out = torch.empty_like(x_N16)
    fast = kernels_for(w_OK)
    with torch.no_grad():
        for part in slices(x_N16.shape[0], fast.slice_blocks):
            scale_N1 = scales_of_blocks(x_N16[part], global_scale, rule, fast)
            out[part] = fast.fake_quant(x_N16[part], scale_N1 / global_scale)
    return out.view(w_OK.shape)


def _round_activation(x: Tensor, input_global_scale: Tensor) -> Tensor:
    x_N16 = x.detach().reshape(-1, BLOCK)
    if x_N16.shape[0] <= EAGER_SLICE:  # a decoding step: as few operations as there are
        return _round_tokens(x_N16, input_global_scale).view(x.shape)
    out = torch.empty_like(x_N16)
    for part in slices(x_N16.shape[0], EAGER_SLICE):
        out[part] = _round_tokens(x_N16[part], input_global_scale)
    return out.view(x.shape)


def _round_tokens(x_N16: Tensor, input_global_scale: Tensor) -> Tensor:
    scale_N1 = kernels.max_scales(kernels.block_amax(x_N16), input_global_scale)
    return kernels.fake_quant(x_N16, scale_N1.div_(input_global_scale))
