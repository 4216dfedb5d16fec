"""NVFP4 as numbers: the readable reference that every fast path is tested against.

Legend: O output rows, K input columns, G = K/16 blocks.

    value_OK = E2M1[code_OK] * scale_OG        scale_OG = block_scale_OG / global_scale

A block scale spans 16 columns of one row and is an E4M3 number. global_scale divides, as
compressed-tensors stores it. ModelOpt stores its reciprocal; checkpoint/ converts once, from the
source value, because 1/(1/x) is often not x in float32.

Sources: FP4 E2M1, OCP Microscaling v1.0; FP8 E4M3, OCP OFP8 v1.0; two scales, arXiv 2509.25149.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import FormatError

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of codes 0..7; bit 3 is the sign
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode(x_OK: Tensor, scale_OG: Tensor) -> Tensor:
    """Round ``x / scale`` to the nearest E2M1 code.

    Args:
        x_OK: float32, finite.
        scale_OG: float32, >= 0: decoded block scale over global scale.

    Returns:
        uint8 [O, K], 0..15. Ties go to the even code, magnitudes beyond 6 saturate, and a block whose
        scale is 0 becomes zeros. The sign is that of the quotient: -0.01 becomes code 8 (-0.0), while
        -0.0 itself becomes code 0, because compressed-tensors takes ``sign(x)``, which is +0 there.

    Raises:
        FormatError: ``block-shape`` if K % 16 or the scales are not [O, K/16]; ``not-finite`` if
            x holds NaN or Inf; ``bad-scale`` if a scale is negative, NaN or Inf.
    """
    _check_shapes(x_OK, scale_OG)
    if not (finite_OK := torch.isfinite(x_OK)).all():
        row, column = (~finite_OK).nonzero()[0].tolist()
        raise FormatError("not-finite", f"x[{row}, {column}] is {x_OK[row, column].item()}")
    if not (torch.isfinite(scale_OG) & (scale_OG >= 0)).all():
        smallest, largest = scale_OG.aminmax()
        raise FormatError("bad-scale", f"smallest {smallest.item():g}, largest {largest.item():g}")
    scale_OK = scale_OG.repeat_interleave(BLOCK, dim=1)
    quotient_OK = torch.where(scale_OK > 0, x_OK / scale_OK, 0.0)
    mids = torch.tensor(MIDPOINTS, device=x_OK.device)
    magnitude_OK = quotient_OK.abs()
    lower, upper = torch.bucketize(magnitude_OK, mids), torch.bucketize(magnitude_OK, mids, right=True)
    # lower == upper except exactly on a midpoint, where precisely one of the two is even.
    code_OK = torch.where(lower % 2 == 0, lower, upper)
    return (code_OK + 8 * (quotient_OK < 0)).to(torch.uint8)


def decode(code_OK: Tensor, scale_OG: Tensor) -> Tensor:
    """The float32 [O, K] values of codes.

    Raises:
        FormatError: ``code-range`` unless the codes are uint8 0..15 (nothing is cut off silently);
            ``block-shape`` if the scales are not [O, K/16].
    """
    if code_OK.dtype != torch.uint8 or (code_OK > 15).any():
        found = f"{code_OK.dtype} up to {code_OK.max().item()}"
        raise FormatError("code-range", f"{found}, need uint8 0..15")
    _check_shapes(code_OK, scale_OG)
    grid = torch.tensor((*E2M1, *(-value for value in E2M1)), device=code_OK.device)
    return grid[code_OK.long()] * scale_OG.float().repeat_interleave(BLOCK, dim=1)


def _check_shapes(x_OK: Tensor, scale_OG: Tensor) -> None:
    if x_OK.ndim != 2 or x_OK.shape[1] % BLOCK or scale_OG.shape != (x_OK.shape[0], x_OK.shape[1] // BLOCK):
        raise FormatError("block-shape", f"x {list(x_OK.shape)}, scales {list(scale_OG.shape)}")
