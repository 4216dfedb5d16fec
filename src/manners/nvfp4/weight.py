"""Whole matrices into NVFP4 and back, a slice of blocks at a time so that little memory is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .compiled import EAGER_SLICE, kernels_for, slices
from .errors import FormatError
from .format import BLOCK, E2M1
from .packing import join, unpack
from .scales import ScaleRule, check_global_scale, check_matrix, check_rule, scales_of_blocks


@dataclass(frozen=True)
class NVFP4Weight:
    """One matrix, as its checkpoint tensors.

    packed: uint8 [O, K/2]. block_scale: float8_e4m3fn [O, K/16], > 0. global_scale: float32 [1], divides.
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(O, K) of the matrix that this stands for."""
        return self.packed.shape[0], 2 * self.packed.shape[1]


def quantize_weight(w_OK: Tensor, global_scale: Tensor, rule: ScaleRule = "max") -> NVFP4Weight:
    """Round a matrix to NVFP4.

    Args:
        w_OK: bfloat16, float16 or float32 on any device, finite, K a multiple of 16.
        global_scale: float32 [1], finite, > 0; equal for all members of a fused group.
        rule: how block scales are chosen, see ``scales``.

    Raises:
        FormatError: ``block-shape``, ``not-finite`` or ``bad-scale``.
    """
    check_matrix(w_OK)
    check_global_scale(global_scale)
    check_rule(rule)
    fast = kernels_for(w_OK)
    rows, columns = w_OK.shape
    x_N16 = w_OK.detach().reshape(-1, BLOCK)
    packed = torch.empty(x_N16.shape[0], BLOCK // 2, dtype=torch.uint8, device=w_OK.device)
    block_scale = torch.empty(x_N16.shape[0], 1, dtype=torch.float8_e4m3fn, device=w_OK.device)
    with torch.no_grad():
        for part in slices(x_N16.shape[0], fast.slice_blocks):
            scale_N1 = scales_of_blocks(x_N16[part], global_scale, rule, fast)
            block_scale[part] = scale_N1.to(torch.float8_e4m3fn)
            packed[part] = join(fast.codes(x_N16[part], scale_N1 / global_scale))
    return NVFP4Weight(
        packed.view(rows, columns // 2),
        block_scale.view(rows, columns // BLOCK),
        global_scale.detach().clone(),
    )


def dequantize(weight: NVFP4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The values of a rounded matrix, [O, K].

    compressed-tensors always decodes to bfloat16, whatever the model's dtype: for its exact numbers in a
    float32 model, decode to bfloat16 and convert.

    Raises:
        FormatError: ``block-shape`` if the block scales do not fit; ``bad-scale`` if they are not
            float8_e4m3fn, or for a bad global scale; ``code-range`` if the bytes are not uint8.
    """
    rows, columns = weight.shape
    if weight.block_scale.shape != (rows, columns // BLOCK) or columns % BLOCK:
        raise FormatError("block-shape", f"x {[rows, columns]}, scales {list(weight.block_scale.shape)}")
    if weight.block_scale.dtype != torch.float8_e4m3fn:
        raise FormatError("bad-scale", f"block scales of {weight.block_scale.dtype}, need float8_e4m3fn")
    check_global_scale(weight.global_scale)
    packed = weight.packed.reshape(-1, BLOCK // 2)
    scale_N1 = weight.block_scale.reshape(-1, 1).float() / weight.global_scale
    grid = torch.tensor((*E2M1, *(-value for value in E2M1)), device=packed.device)
    out = torch.empty(packed.shape[0], BLOCK, dtype=dtype, device=packed.device)
    for part in slices(packed.shape[0], EAGER_SLICE):
        out[part] = (grid[unpack(packed[part]).int()] * scale_N1[part]).to(dtype)
    return out.view(rows, columns)
