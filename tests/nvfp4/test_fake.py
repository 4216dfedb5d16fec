"""Activations equal what compressed-tensors' forward makes of them; gradients pass straight through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manners.nvfp4 import FormatError, fake, fake_quant_activation, fake_quant_weight, global_scale
from tests.nvfp4 import authority
from tests.nvfp4.authority import same_bits
from tests.nvfp4.matrices import DTYPES, NAMES, matrices, matrix


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("headroom", [0.01, 1.0, 3.0])
def test_every_bit_is_compressed_tensors(name: str, dtype: torch.dtype, headroom: float) -> None:
    x = matrix(name, dtype).reshape(2, 12, 96)  # batch, tokens, K
    g = global_scale((x.abs().max().double() * headroom).clamp(max=3e38))
    assert same_bits(fake_quant_activation(x, g), authority.activation(x, g))


@given(matrices(), st.floats(2.0**-100, 2.0**100, width=32))
def test_every_bit_anywhere_else(x: Tensor, g: float) -> None:
    assert same_bits(fake_quant_activation(x, torch.tensor([g])), authority.activation(x, torch.tensor([g])))


def test_blocks_of_zeros_stay_zeros_among_others() -> None:
    x = matrix("random", torch.bfloat16)
    x[:, 32:64] = 0
    g = global_scale(x.abs().max())
    rounded = fake_quant_activation(x, g)
    assert same_bits(rounded, authority.activation(x, g))
    assert (rounded[:, 32:64] == 0).all()
    assert (rounded[:, :32] != 0).any()


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    x, g = matrix("outlier", torch.float32), torch.ones(1)
    alone = torch.cat([fake_quant_activation(row[None], g) for row in x])
    assert same_bits(fake_quant_activation(x, g), alone)


def test_many_slices_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = matrix("outlier", torch.bfloat16), torch.ones(1)
    whole = fake_quant_activation(x, g)
    monkeypatch.setattr(fake, "EAGER_SLICE", 40)
    assert same_bits(fake_quant_activation(x, g), whole)


def test_any_number_of_leading_dimensions() -> None:
    x, g = matrix("random", torch.float32), torch.tensor([1000.0])
    flat = fake_quant_activation(x, g)
    assert same_bits(fake_quant_activation(x.reshape(2, 3, 4, 96), g), flat.reshape(2, 3, 4, 96))
    assert same_bits(fake_quant_activation(x[0], g), flat[0])
    assert same_bits(fake_quant_activation(x.t().contiguous().t(), g), flat)
    assert fake_quant_activation(x[:0], g).shape == (0, 96)


def test_nan_stays_in_its_block_and_is_seen() -> None:
    x = matrix("random", torch.float32)
    x[3, 20] = float("nan")
    rounded = fake_quant_activation(x, torch.tensor([1000.0]))
    assert torch.isnan(rounded[3, 20])
    assert torch.isfinite(rounded[:, :16]).all()
    assert torch.isfinite(rounded[:, 32:]).all()


def test_inf_saturates_as_in_compressed_tensors() -> None:
    x = matrix("random", torch.float32)
    x[3, 20] = float("inf")
    g = torch.tensor([1000.0])
    assert same_bits(fake_quant_activation(x, g), authority.activation(x, g))
    assert fake_quant_activation(x, g)[3, 20].item() == pytest.approx(2.688)  # 6 * 448 / 1000


def test_the_input_is_left_alone() -> None:
    x, g = matrix("random", torch.float32), torch.tensor([1000.0])
    before = x.clone()
    fake_quant_activation(x, g)
    assert same_bits(x, before)
    assert g.item() == 1000


def test_a_width_of_no_whole_blocks_is_refused() -> None:
    with pytest.raises(FormatError, match=r"block-shape.*\[2, 24\]"):
        fake_quant_activation(torch.ones(2, 24), torch.ones(1))


@pytest.mark.parametrize("function", [fake_quant_weight, fake_quant_activation])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_passes_straight_through(function: object, dtype: torch.dtype) -> None:
    w_OK = matrix("outlier", dtype).requires_grad_()
    g = global_scale(w_OK.abs().max() / 50)  # the outlier saturates; its gradient passes all the same
    rounded = function(w_OK, g)
    assert rounded.requires_grad
    assert same_bits(rounded.detach(), function(w_OK.detach(), g))
    weights = torch.arange(w_OK.numel(), dtype=dtype).view_as(w_OK)
    (rounded * weights).sum().backward()
    assert same_bits(w_OK.grad, weights)
    with torch.no_grad():
        assert not function(w_OK, g).requires_grad
