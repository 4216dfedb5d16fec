"""Scales equal compressed-tensors' own; the search is held against all 126 E4M3 codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manners.nvfp4 import FormatError, block_scales, decode, encode, global_scale
from tests.nvfp4 import authority
from tests.nvfp4.authority import same_bits
from tests.nvfp4.matrices import DTYPES, NAMES, matrices, matrix


@pytest.mark.parametrize("amax", [0.0, 1e-45, 7.8e-36, 7.9e-36, 1e-20, 0.3, 1.0, 2688.0, 65504.0, 3.4e38])
def test_global_scale_is_compressed_tensors(amax: float) -> None:
    scale = global_scale(torch.tensor(amax))
    assert same_bits(scale, authority.global_scale(torch.tensor(amax)))
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


@given(st.floats(0, torch.finfo(torch.float32).max, width=32))
def test_global_scale_is_finite_and_positive(amax: float) -> None:
    scale = global_scale(torch.tensor([amax]))
    assert 0 < scale.item() < float("inf")


def test_global_scale_of_a_bfloat16_amax_is_float32() -> None:
    assert global_scale(torch.tensor(3.0, dtype=torch.bfloat16)).tolist() == [896.0]
    amax = torch.tensor(1.1, dtype=torch.bfloat16)  # 1.1015625, whose scale needs more than bfloat16's 8 bits
    assert global_scale(amax).item() == torch.tensor(2688 / 1.1015625).item()


@pytest.mark.parametrize(
    ("amax", "message"),
    [
        (torch.tensor(float("nan")), "not-finite.*nan"),
        (torch.tensor(float("inf")), "not-finite.*inf"),
        (torch.tensor(-2.0), "bad-scale.*-2"),
        (torch.ones(2), r"bad-scale.*\[2\]"),
    ],
)
def test_global_scale_refuses(amax: Tensor, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        global_scale(amax)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("headroom", [0.01, 1.0, 3.0])  # below 1 the scales saturate, above is a fused group
def test_max_rule_is_compressed_tensors(name: str, dtype: torch.dtype, headroom: float) -> None:
    w_OK = matrix(name, dtype)
    g = global_scale((w_OK.abs().max().double() * headroom).clamp(max=3e38))
    scale = block_scales(w_OK, g)
    assert scale.dtype == torch.float8_e4m3fn
    assert torch.equal(scale.float(), authority.block_scales(w_OK, g).float())
    assert (scale.float() > 0).all()


@given(matrices(), st.floats(2.0**-100, 2.0**100, width=32))
def test_max_rule_anywhere_else(w_OK: Tensor, g: float) -> None:
    scale = block_scales(w_OK, torch.tensor([g]))
    assert torch.equal(scale.float(), authority.block_scales(w_OK, torch.tensor([g])).float())


def test_a_block_of_zeros_has_the_scale_that_compressed_tensors_gives_it() -> None:
    assert block_scales(torch.zeros(1, 16), torch.ones(1)).float().tolist() == [[0.125]]


def slow_errors(w_OK: Tensor, block_scale_OG: Tensor, g: Tensor) -> Tensor:
    """Squared error of each block by the readable reference, summed in float64."""
    scale_OG = block_scale_OG.float() / g
    error_OK = decode(encode(w_OK.float(), scale_OG), scale_OG).double() - w_OK.double()
    return error_OK.square().unflatten(1, (-1, 16)).sum(-1)


def least_errors(w_OK: Tensor, g: Tensor) -> Tensor:
    """The least error of each block over all 126 codes."""
    shape = (w_OK.shape[0], w_OK.shape[1] // 16)
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return torch.stack([slow_errors(w_OK, scale.expand(shape), g) for scale in every]).amin(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_mse_is_never_worse_than_max(name: str, dtype: torch.dtype) -> None:
    w_OK = matrix(name, dtype)
    g = global_scale(w_OK.abs().max())
    searched = slow_errors(w_OK, block_scales(w_OK, g, "mse"), g)
    # Sums of 16 squares in float32 are good to about 1e-6; errors of subnormals square to 0 there.
    assert (searched <= slow_errors(w_OK, block_scales(w_OK, g, "max"), g) * (1 + 2e-6) + 1e-37).all()


def test_mse_finds_the_best_of_all_126_codes() -> None:
    w_OK = matrix("random", torch.bfloat16, rows=64)
    g = global_scale(w_OK.abs().max())
    searched, least = slow_errors(w_OK, block_scales(w_OK, g, "mse"), g), least_errors(w_OK, g)
    assert (searched <= least * (1 + 2e-6)).all()
    assert least.sum() < 0.8 * slow_errors(w_OK, block_scales(w_OK, g, "max"), g).sum()


def test_mse_rescues_a_block_that_max_rounds_away() -> None:
    # Its wanted scale lies below E4M3's smallest number; the max rule then writes 0.125 and loses the block.
    w_OK = torch.full((1, 32), 1e-4).index_fill(1, torch.arange(16), 448 * 6.0)
    g = global_scale(w_OK.max()) * 8
    w_OK[:, :16] /= 8
    lost, kept = (slow_errors(w_OK, block_scales(w_OK, g, rule), g)[0, 1] for rule in ("max", "mse"))
    assert lost == pytest.approx(16e-8, rel=1e-3)
    assert kept < 0.1 * lost


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rule", ["max", "mse"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_are_refused(bad: float, rule: str, dtype: torch.dtype) -> None:
    w_OK = matrix("random", dtype)
    w_OK[3, 17] = bad
    with pytest.raises(FormatError, match=f"not-finite: 1 of .* {bad}"):
        block_scales(w_OK, torch.ones(1), rule)


@pytest.mark.parametrize(
    ("w_OK", "g", "rule", "message"),
    [
        (torch.ones(2, 24), torch.ones(1), "max", r"block-shape.*\[2, 24\]"),
        (torch.ones(16), torch.ones(1), "max", r"block-shape.*\[16\]"),
        (torch.ones(2, 16, dtype=torch.float64), torch.ones(1), "max", "block-shape.*float64"),
        (torch.ones(2, 16, dtype=torch.int32), torch.ones(1), "max", "block-shape.*int32"),
        (torch.ones(2, 16), torch.zeros(1), "max", "bad-scale.*0"),
        (torch.ones(2, 16), -torch.ones(1), "max", "bad-scale.*-1"),
        (torch.ones(2, 16), torch.ones(1) / 0, "max", "bad-scale.*inf"),
        (torch.ones(2, 16), torch.ones(()), "max", r"bad-scale.*\[\]"),
        (torch.ones(2, 16), torch.ones(1).bfloat16(), "max", "bad-scale.*bfloat16"),
        (torch.ones(2, 16), torch.ones(1), "median", "bad-scale.*median.*max, mse"),
    ],
)
def test_refusals_say_what_was_found(w_OK: Tensor, g: Tensor, rule: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        block_scales(w_OK, g, rule)
