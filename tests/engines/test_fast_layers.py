"""The quick layers compute what transformers' own do, and step aside where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from manners.engines.embedded import deltanet
from manners.engines.embedded.deltanet import FastDeltaNet, speed_up
from manners.engines.embedded.merge import Merged, merge_mlps
from manners.nvfp4.linear import NVFP4Linear
from tests.tiny import tiny_model

LENGTHS = [(1, 1, 1), (2, 1, 3), (64, 1), (65, 64, 1, 1), (150, 1, 7)]


@pytest.mark.parametrize("pieces", LENGTHS, ids=str)
@pytest.mark.parametrize("key_heads", [2, 1])
@torch.inference_mode()
def test_deltanet_equals_the_reference(pieces: tuple[int, ...], key_heads: int) -> None:
    model = tiny_model(seed=1, linear_num_key_heads=key_heads, linear_num_value_heads=2)
    layer: Any = model.model.layers[1].linear_attn
    fast = FastDeltaNet(layer)
    theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for length in pieces:
        x = torch.randn(3, length, 64)
        want = layer(x, cache_params=theirs)
        torch.testing.assert_close(fast.forward(x, ours), want, rtol=1e-4, atol=1e-5)
    for name in ("conv_states", "recurrent_states"):
        mine, other = getattr(ours.layers[1], name)[0], getattr(theirs.layers[1], name)[0]
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_padding_and_missing_caches_go_to_the_own_forward() -> None:
    model = tiny_model(seed=1)
    ids = torch.randint(3, 500, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    want_plain, want_padded = model(ids, use_cache=False).logits, model(ids, attention_mask=mask).logits
    assert speed_up(model)
    assert torch.equal(model(ids, use_cache=False).logits, want_plain)
    assert torch.equal(model(ids, attention_mask=mask).logits, want_padded)


def test_another_deltanet_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(seed=1)
    monkeypatch.setattr(deltanet, "_unit", lambda x: x)
    assert not speed_up(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_model_without_deltanet_is_left_alone() -> None:
    assert not speed_up(nn.Sequential(nn.Linear(2, 2)))


def nvfp4(rows: int, scale: float | None) -> NVFP4Linear:
    return NVFP4Linear(torch.randn(rows, 64), None, None if scale is None else torch.tensor([scale]))


@pytest.mark.parametrize(
    ("linears", "one"),
    [
        (lambda: [nn.Linear(64, 8, bias=False), nn.Linear(64, 24, bias=False)], True),
        (lambda: [nvfp4(16, 500.0), nvfp4(8, 500.0)], True),
        (lambda: [nvfp4(16, None), nvfp4(8, None)], True),
        (lambda: [nvfp4(16, 500.0), nvfp4(8, 501.0)], False),
        (lambda: [nvfp4(16, 500.0), nvfp4(8, None)], False),
        (lambda: [nvfp4(16, 500.0), nn.Linear(64, 8, bias=False)], False),
        (lambda: [nn.Linear(64, 8), nn.Linear(64, 8)], False),
    ],
)
@torch.inference_mode()
def test_merging_changes_no_output(linears: Any, one: bool) -> None:
    torch.manual_seed(0)
    members = linears()
    x = torch.randn(20, 64)
    want = [member(x) for member in members]
    merged = Merged(members)
    assert (merged._weight is not None) == one
    for got, expected, member in zip(merged(x), want, members, strict=True):
        assert torch.equal(got, expected)
        assert torch.equal(member(x), expected)  # the member itself still works


@torch.inference_mode()
def test_mlps_are_merged_and_equal() -> None:
    model = tiny_model(seed=1)
    ids = torch.randint(3, 500, (1, 20))
    want = model(ids).logits
    assert merge_mlps(model) == 4
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)
