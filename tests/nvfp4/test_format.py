"""encode() is held against exact arithmetic on the published grid, never against itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manners.nvfp4 import FormatError, decode, encode

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # from the standard, not from the module
ONE = torch.ones(1, 1)
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
EDGES = [(a + b) / 2 for a, b in pairwise(GRID)]
NEAR_EDGES = [
    torch.nextafter(torch.tensor(edge), torch.tensor(to)).item() for edge in EDGES for to in (0.0, edge, 9.0)
]


def slow_code(x: float) -> int:
    """The definition: nearest grid point, ties to the even code, the sign of a number below zero."""
    nearest = min(range(8), key=lambda c: (abs(Fraction(GRID[c]) - abs(Fraction(x))), c % 2))
    return nearest + 8 * (x < 0)


def code(x: float) -> int:
    return int(encode(torch.full((1, 16), x), ONE)[0, 0])


@pytest.mark.parametrize("x", [0.0, -0.0, -1e-45, 1e30, *NEAR_EDGES, *(-edge for edge in NEAR_EDGES)])
def test_every_edge_and_its_float_neighbours(x: float) -> None:
    assert code(x) == slow_code(x)


@given(st.floats(-7, 7, width=32))
def test_anywhere_else(x: float) -> None:
    assert code(x) == slow_code(x)


def test_all_15_values_survive_all_126_scales() -> None:  # few enough to enumerate
    codes = torch.arange(16, dtype=torch.uint8).repeat(126, 1)
    again = encode(decode(codes, E4M3), E4M3)
    codes[:, 8] = 0  # -0.0 decodes to -0.0, which encodes to +0.0 as in compressed-tensors
    assert torch.equal(again, codes)


def test_code_8_is_minus_zero() -> None:
    value = decode(torch.full((1, 16), 8, dtype=torch.uint8), ONE)[0, 0].item()
    assert value == 0
    assert math.copysign(1, value) == -1


def test_a_block_whose_scale_is_zero_becomes_zeros() -> None:
    assert encode(torch.full((1, 16), 3.0), torch.zeros(1, 1)).tolist() == [[0] * 16]


BAD = torch.ones(1, 16).index_fill_(1, torch.tensor(5), float("nan"))


@pytest.mark.parametrize(
    ("call", "message"),
    [  # one case per refusal
        (lambda: encode(torch.ones(1, 17), ONE), r"block-shape.*\[1, 17\]"),
        (lambda: encode(torch.ones(2, 16), ONE), r"block-shape.*\[1, 1\]"),
        (lambda: encode(torch.ones(16), ONE), r"block-shape.*\[16\]"),
        (lambda: encode(BAD, ONE), r"not-finite.*x\[0, 5\] is nan"),
        (lambda: encode(torch.ones(1, 16), -ONE), "bad-scale.*-1"),
        (lambda: encode(torch.ones(1, 16), ONE / 0), "bad-scale.*inf"),
        (lambda: decode(torch.full((1, 16), 16, dtype=torch.uint8), ONE), "code-range.*16"),
        (lambda: decode(torch.ones(1, 16), ONE), "code-range.*float32"),
        (lambda: decode(torch.ones(2, 16, dtype=torch.uint8), ONE), r"block-shape.*\[2, 16\]"),
    ],
)
def test_refusals_say_what_was_found(call: Callable[[], object], message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        call()
    assert str(caught.value).startswith(f"{caught.value.code}: ")
