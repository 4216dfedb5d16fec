"""Matrices that try the number format where it is weak: zeros, huge, tiny, ties, outliers."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = ("random", "zero", "negative-zero", "huge", "tiny", "subnormal", "ties", "outlier", "block-sizes")


def matrix(name: str, dtype: torch.dtype, rows: int = 24, columns: int = 96) -> Tensor:
    """A [rows, columns] matrix of a kind in NAMES, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    random = torch.randn(rows, columns, generator=generator)
    exponents = torch.randint(-40, 40, (rows, columns // 16), generator=generator)
    info = torch.finfo(dtype)
    w_OK = {
        "random": random * 0.02,
        "zero": torch.zeros(rows, columns),
        "negative-zero": torch.where(random > 0, random * 0.02, -0.0),
        "huge": (random / random.abs().max()).double() * info.max,
        "tiny": random * info.tiny * 64,
        "subnormal": random * info.tiny / 8,
        # Quarter steps up to 6 in every block of amax 6: a scale of 1 puts many of them on a midpoint.
        "ties": (random * 12).round().clamp(-24, 24).index_fill(1, torch.arange(0, columns, 16), 24.0) / 4,
        "outlier": random.index_fill(1, torch.tensor([5]), 300.0),
        # Blocks from 2**-40 to 2**39: most of their scales round to 0 in E4M3, where the zero rule acts.
        "block-sizes": random * torch.exp2(exponents).repeat_interleave(16, 1),
    }[name]
    return w_OK.clamp(-info.max, info.max).to(dtype)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """[2, 32] matrices of any float32 whatever that is finite, in any of the three dtypes."""
    dtype = draw(st.sampled_from(DTYPES))
    limit = torch.finfo(dtype).max
    number = st.floats(-limit, limit, width=32) | st.sampled_from([0.0, -0.0, 0.25, 2.5, 3.5, 5.0, 6.0])
    numbers = draw(st.lists(number, min_size=64, max_size=64))
    return torch.tensor(numbers, dtype=torch.float64).to(dtype).reshape(2, 32)
