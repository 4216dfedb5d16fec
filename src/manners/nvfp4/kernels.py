"""The arithmetic of NVFP4 on blocks, in few passes over memory: the fast twin of ``format``.

Legend: N blocks of 16 columns. Everything here is elementwise or within one block, so any matrix whose
width is a multiple of 16 is seen as [N, 16], and any slice of blocks can be done alone.

Two ways of rounding give the same bits. ``round_to_grid`` is written for a compiler, which keeps its
intermediate values in registers. Without one each operation is a pass over memory, and comparisons are
slow ones: ``round_to_grid_`` needs neither many nor those. The kernels take the one to use.

Nothing here checks its input; callers do. NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

E4M3_MAX = 448.0
# compressed-tensors writes this scale where the wanted one rounds to 0 (`_get_dtype_eps`).
ZERO_SCALE = 0.125
# 1.5 * 2**22: in float32 the numbers around it lie 0.5 apart, which is E2M1's step below 2.
_HALF_STEPS = 6291456.0
_EXPONENT_BITS = 0x7F800000
_ONE_AS_BITS = 0x3F800000

Rounding = Callable[[Tensor], Tensor]


def block_amax(x_N16: Tensor) -> Tensor:
    """Largest magnitude of each block, [N, 1] in x's dtype; NaN if the block holds a NaN."""
    return x_N16.abs().amax(dim=-1, keepdim=True)


def wanted_scales(amax: Tensor, global_scale: Tensor) -> Tensor:
    """float32 block scales before their rounding to E4M3, clamped to its range.

    ``amax / 6`` is rounded to amax's own dtype (bfloat16 for a bfloat16 tensor) before it meets the
    float32 global scale: compressed-tensors does so, and its scales are met only that way. The clamp
    matters where a cast to E4M3 makes NaN of what is too large, as older versions of torch did.
    """
    return ((amax / 6).float() * global_scale).clamp_(max=E4M3_MAX)


def max_scales(amax: Tensor, global_scale: Tensor) -> Tensor:
    """float32 block scales of the `max` rule, each exactly an E4M3 number; never 0."""
    rounded = wanted_scales(amax, global_scale).to(torch.float8_e4m3fn).float()
    return torch.nn.functional.threshold(rounded, 0.0, ZERO_SCALE)  # where(s <= 0, 0.125, s) in one pass


def round_to_grid(quotient: Tensor) -> Tensor:
    """Round float32 to the nearest E2M1 value, ties to even codes. Steps: 0.5; from 2 on 1, from 4 on 2."""
    quotient = (quotient + 0.0).clamp(-6.0, 6.0)  # -0.0 + 0.0 is +0.0: see format.encode
    magnitude = quotient.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    per_step = torch.where(magnitude < 2.0, 2.0, torch.where(magnitude < 4.0, 1.0, 0.5))
    return torch.round(quotient * per_step) * step


def round_to_grid_(quotient: Tensor) -> Tensor:
    """The same without a comparison; overwrites its argument.

    Adding and taking away 1.5 * 2**22 * 2**e leaves the rounding to steps of 2**(e-1) to the processor.
    e is the quotient's exponent, at least 0: E2M1 has one bit of mantissa, and steps of 0.5 below 2.
    """
    quotient.add_(0.0).clamp_(-6.0, 6.0)
    exponent = quotient.view(torch.int32).bitwise_and(_EXPONENT_BITS).clamp_(min=_ONE_AS_BITS)
    steps = exponent.view(torch.float32).mul_(_HALF_STEPS)
    return (quotient + steps).sub_(steps).copysign_(quotient)


def fake_quant(x_N16: Tensor, scale_N1: Tensor, rounding: Rounding = round_to_grid_) -> Tensor:
    """The values that x becomes, in x's dtype. scale_N1: float32, block scale over global scale."""
    return rounding((x_N16 / scale_N1).float()).mul(scale_N1).to(x_N16.dtype)


def codes(x_N16: Tensor, scale_N1: Tensor) -> Tensor:
    """The uint8 codes that x becomes.

    The code of a magnitude a on the grid is min(2a, a + 2, a/2 + 4). Rounding each of the three to an
    integer first rounds a to the grid: rounding is monotonic, and adding 2 or 4 keeps ties to even.
    """
    quotient = (x_N16 / scale_N1).float()
    a = quotient.abs().clamp_(max=6.0)
    code = (a + a).round_()
    code = torch.minimum(code, a.round().add_(2.0))
    code = torch.minimum(code, a.mul_(0.5).round_().add_(4.0))
    return code.add_(quotient < 0, alpha=8).to(torch.uint8)


def block_error(x_16N: Tensor, scale_N: Tensor, rounding: Rounding = round_to_grid_) -> Tensor:
    """Sum of squared rounding errors of each block, float32 [N]. x is float32 and transposed.

    The sum runs in a fixed order, so that the same scales are chosen with and without a compiler.
    """
    error = (rounding(x_16N / scale_N) * scale_N - x_16N).square()
    total = error[0]
    for row in error[1:]:
        total = total + row
    return total
