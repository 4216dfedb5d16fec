"""Two codes to a byte: the low nibble holds the even column, as compressed-tensors and ModelOpt store it."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import FormatError


def pack(code_OK: Tensor) -> Tensor:
    """uint8 codes 0..15 [O, K] as uint8 bytes [O, K/2].

    Raises:
        FormatError: ``code-range`` unless the codes are uint8 0..15; ``block-shape`` if K is odd.
    """
    if code_OK.dtype != torch.uint8 or (code_OK > 15).any():
        raise FormatError("code-range", f"{code_OK.dtype} up to {code_OK.max().item()}, need uint8 0..15")
    if code_OK.shape[-1] % 2:
        raise FormatError("block-shape", f"{code_OK.shape[-1]} columns, need an even number")
    return join(code_OK)


def join(code_OK: Tensor) -> Tensor:
    """:func:`pack` for codes that are known to be good: looking at each would take longer than packing."""
    return code_OK[..., 0::2] | (code_OK[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 bytes [O, K/2] as uint8 codes 0..15 [O, K]; the inverse of :func:`pack`.

    Raises:
        FormatError: ``code-range`` unless the bytes are uint8.
    """
    if packed.dtype != torch.uint8:
        raise FormatError("code-range", f"{packed.dtype}, need uint8")
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)
