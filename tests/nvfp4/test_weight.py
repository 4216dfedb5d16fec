"""Bytes and values of whole matrices equal compressed-tensors' own for the same scales, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manners.nvfp4 import (
    FormatError,
    NVFP4Weight,
    compiled,
    decode,
    dequantize,
    encode,
    fake_quant_weight,
    global_scale,
    quantize_weight,
    unpack,
    weight,
)
from tests.nvfp4 import authority
from tests.nvfp4.authority import same_bits
from tests.nvfp4.matrices import DTYPES, NAMES, matrices, matrix


def check_against_authority(w_OK: Tensor, g: Tensor, rule: str) -> None:
    ours = quantize_weight(w_OK, g, rule)
    scale_OG = ours.block_scale.float()
    theirs = authority.compress(w_OK, scale_OG, g)
    assert same_bits(ours.packed, theirs["weight_packed"])
    assert same_bits(ours.block_scale, theirs["weight_scale"])
    assert same_bits(dequantize(ours), authority.decompress(ours.packed, ours.block_scale, g))
    faked = fake_quant_weight(w_OK, g, rule)
    assert same_bits(faked, authority.fake_quant(w_OK, scale_OG, g))
    assert same_bits(faked, dequantize(ours, w_OK.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", ["max", "mse"])
@pytest.mark.parametrize("headroom", [0.01, 1.0, 3.0])
def test_every_bit_is_compressed_tensors(name: str, dtype: torch.dtype, rule: str, headroom: float) -> None:
    w_OK = matrix(name, dtype)
    g = global_scale((w_OK.abs().max().double() * headroom).clamp(max=3e38))
    check_against_authority(w_OK, g, rule)


@given(matrices(), st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from(["max", "mse"]))
def test_every_bit_anywhere_else(w_OK: Tensor, g: float, rule: str) -> None:
    check_against_authority(w_OK, torch.tensor([g]), rule)


@given(matrices())
def test_the_readable_reference_agrees(w_OK: Tensor) -> None:
    g = global_scale(w_OK.abs().max())
    ours = quantize_weight(w_OK, g)
    scale_OG = ours.block_scale.float() / g
    codes = encode(w_OK.float(), scale_OG)
    assert torch.equal(unpack(ours.packed), codes)
    assert same_bits(dequantize(ours, torch.float32), decode(codes, scale_OG))


def test_many_slices_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    w_OK = matrix("outlier", torch.bfloat16)  # 144 blocks: the last of the slices overlaps the one before
    g = global_scale(w_OK.abs().max())
    whole, faked = quantize_weight(w_OK, g, "mse"), fake_quant_weight(w_OK, g, "mse")
    monkeypatch.setattr(compiled, "EAGER", compiled.EAGER._replace(slice_blocks=40))
    monkeypatch.setattr(weight, "EAGER_SLICE", 40)
    assert list(compiled.slices(144, 40)) == [slice(0, 40), slice(40, 80), slice(80, 120), slice(104, 144)]
    sliced = quantize_weight(w_OK, g, "mse")
    assert same_bits(sliced.packed, whole.packed)
    assert same_bits(sliced.block_scale, whole.block_scale)
    assert same_bits(dequantize(sliced), dequantize(whole))
    assert same_bits(fake_quant_weight(w_OK, g, "mse"), faked)


def test_a_transposed_matrix_is_read_as_it_looks() -> None:
    w_OK = matrix("random", torch.float32, rows=32, columns=48).t()
    g = global_scale(w_OK.abs().max())
    assert same_bits(quantize_weight(w_OK, g).packed, quantize_weight(w_OK.contiguous(), g).packed)
    assert same_bits(fake_quant_weight(w_OK, g), fake_quant_weight(w_OK.contiguous(), g))


def test_a_matrix_without_rows_stays_one() -> None:
    quantized = quantize_weight(torch.empty(0, 32), torch.ones(1))
    assert quantized.shape == (0, 32)
    assert dequantize(quantized).shape == (0, 32)


def test_the_input_is_left_alone() -> None:
    w_OK, g = matrix("random", torch.float32), torch.ones(1)
    before = w_OK.clone()
    quantized = quantize_weight(w_OK, g, "mse")
    fake_quant_weight(w_OK, g)
    assert same_bits(w_OK, before)
    quantized.global_scale.mul_(2)
    assert g.item() == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("function", [quantize_weight, fake_quant_weight])
def test_nan_and_inf_are_refused(bad: float, function: object) -> None:
    w_OK = matrix("random", torch.bfloat16)
    w_OK[-1, -1] = bad
    with pytest.raises(FormatError, match=f"not-finite: 1 of .* {bad}"):
        function(w_OK, torch.ones(1))


@pytest.mark.parametrize("function", [quantize_weight, fake_quant_weight])
def test_refusals_say_what_was_found(function: object) -> None:
    with pytest.raises(FormatError, match=r"block-shape.*\[2, 24\]"):
        function(torch.ones(2, 24), torch.ones(1))
    with pytest.raises(FormatError, match=r"bad-scale.*0"):
        function(torch.ones(2, 16), torch.zeros(1))
    with pytest.raises(FormatError, match=r"bad-scale.*median"):
        function(torch.ones(2, 16), torch.ones(1), "median")


def test_dequantize_refuses_what_does_not_fit() -> None:
    good = quantize_weight(torch.ones(2, 32), torch.ones(1))
    with pytest.raises(FormatError, match=r"block-shape.*\[2, 32\].*\[1, 2\]"):
        dequantize(NVFP4Weight(good.packed, good.block_scale[:1], good.global_scale))
    with pytest.raises(FormatError, match=r"bad-scale.*-1"):
        dequantize(NVFP4Weight(good.packed, good.block_scale, -good.global_scale))
    with pytest.raises(FormatError, match=r"code-range.*int8"):
        dequantize(NVFP4Weight(good.packed.view(torch.int8), good.block_scale, good.global_scale))
    with pytest.raises(FormatError, match=r"bad-scale.*float32"):
        dequantize(NVFP4Weight(good.packed, good.block_scale.float(), good.global_scale))
