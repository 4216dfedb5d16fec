"""Choosing scales: one global scale per tensor (or fused group), one E4M3 block scale per 16 columns.

Rules for block scales:

* ``max``: the block's largest magnitude becomes 6, as compressed-tensors and vLLM do it.
* ``mse``: of the E4M3 codes near the `max` rule's, the one with the least squared error in the block.
  Needs no data, and is never worse than `max` in any block.

What neither sees: which columns matter. That takes activations, and belongs to quantize/.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from . import kernels
from .compiled import Kernels, kernels_for, slices
from .errors import FormatError
from .format import BLOCK

ScaleRule = Literal["max", "mse"]
E2M1_MAX = 6.0
# Codes searched to either side of the max rule's; eight codes are a factor of two. Over nine kinds of random
# matrices this missed the best of all 126 codes in at most 0.02 % of blocks.
SEARCH_REACH = 8
_LARGEST_CODE = 126  # E4M3 448; 127 is NaN


def global_scale(amax: Tensor) -> Tensor:
    """The global scale of a tensor (or fused group) whose largest magnitude is ``amax``.

    Args:
        amax: one number, any float dtype, >= 0.

    Returns:
        float32 [1], finite and > 0: 2688 / amax, so that the largest block scale becomes 448. Where that
        overflows (amax below 8e-36, a tensor of zeros) it is 1, as in compressed-tensors.

    Raises:
        FormatError: ``not-finite`` if amax is NaN or Inf; ``bad-scale`` if it is negative or not one number.
    """
    if amax.numel() != 1:
        raise FormatError("bad-scale", f"amax of shape {list(amax.shape)}, need one number")
    amax = amax.detach().float().reshape(1)
    if not torch.isfinite(amax).all():
        raise FormatError("not-finite", f"amax is {amax.item()}")
    if (amax < 0).any():
        raise FormatError("bad-scale", f"amax is {amax.item():g}, need a magnitude")
    scale = kernels.E4M3_MAX * E2M1_MAX / amax
    return torch.where(torch.isinf(scale), 1.0, scale)


def block_scales(w_OK: Tensor, global_scale: Tensor, rule: ScaleRule = "max") -> Tensor:
    """The block scales of a matrix under a given global scale.

    Args:
        w_OK: bfloat16, float16 or float32, finite, K a multiple of 16. The dtype matters: see
            :func:`kernels.wanted_scales`.
        global_scale: float32 [1], finite, > 0.
        rule: ``max`` or ``mse``.

    Returns:
        float8_e4m3fn [O, K/16], finite and > 0.

    Raises:
        FormatError: ``block-shape``, ``not-finite`` or ``bad-scale``.
    """
    check_matrix(w_OK)
    check_global_scale(global_scale)
    check_rule(rule)
    x_N16 = w_OK.detach().reshape(-1, BLOCK)
    scale = torch.empty(x_N16.shape[0], 1, dtype=torch.float8_e4m3fn, device=w_OK.device)
    fast = kernels_for(w_OK)
    with torch.no_grad():
        for part in slices(x_N16.shape[0], fast.slice_blocks):
            scale[part] = scales_of_blocks(x_N16[part], global_scale, rule, fast).to(scale.dtype)
    return scale.view(w_OK.shape[0], w_OK.shape[1] // BLOCK)


def scales_of_blocks(x_N16: Tensor, global_scale: Tensor, rule: ScaleRule, fast: Kernels) -> Tensor:
    """float32 [N, 1] block scales (E4M3 numbers) of some blocks; refuses NaN and Inf, checks nothing else."""
    amax_N1 = fast.block_amax(x_N16)
    if not torch.isfinite(amax_N1.max()):  # NaN and Inf survive a maximum
        bad = x_N16[~torch.isfinite(x_N16)]
        raise FormatError(
            "not-finite", f"{len(bad)} of {x_N16.numel()} numbers, the first is {bad[0].item()}"
        )
    if rule == "max":
        return kernels.max_scales(amax_N1, global_scale)
    return _least_error(x_N16, amax_N1, global_scale, fast)


def _least_error(x_N16: Tensor, amax_N1: Tensor, global_scale: Tensor, fast: Kernels) -> Tensor:
    """The `mse` rule. The max rule's scale is tried first and kept on a tie."""
    x_16N = x_N16.float().t().contiguous()
    wanted = kernels.wanted_scales(amax_N1, global_scale).to(torch.float8_e4m3fn)
    base_N = wanted.view(torch.uint8).squeeze(1).to(torch.int16)
    best_N = kernels.max_scales(amax_N1, global_scale).squeeze(1)
    least_N = fast.block_error(x_16N, best_N / global_scale)
    for offset in range(-SEARCH_REACH, SEARCH_REACH + 1):
        code_N = (base_N + offset).clamp_(1, _LARGEST_CODE).to(torch.uint8)
        scale_N = code_N.view(torch.float8_e4m3fn).float()
        error_N = fast.block_error(x_16N, scale_N / global_scale)
        better_N = error_N < least_N
        best_N = torch.where(better_N, scale_N, best_N)
        least_N = torch.where(better_N, error_N, least_N)
    return best_N.unsqueeze(1)


def check_matrix(w_OK: Tensor) -> None:
    if w_OK.ndim != 2 or w_OK.shape[1] % BLOCK:
        raise FormatError("block-shape", f"matrix {list(w_OK.shape)}, need a width divisible by {BLOCK}")
    if not w_OK.is_floating_point() or w_OK.element_size() not in (2, 4):
        raise FormatError("block-shape", f"matrix of {w_OK.dtype}, need bfloat16, float16 or float32")


def check_global_scale(scale: Tensor) -> None:
    if scale.shape != (1,) or scale.dtype != torch.float32:
        raise FormatError("bad-scale", f"global scale {scale.dtype} {list(scale.shape)}, need float32 [1]")
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise FormatError("bad-scale", f"global scale is {scale.item():g}, need finite and > 0")


def check_rule(rule: str) -> None:
    if rule not in get_args(ScaleRule):
        raise FormatError("bad-scale", f"rule {rule!r}, need one of {', '.join(get_args(ScaleRule))}")
