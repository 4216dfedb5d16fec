"""The check must notice what it is there for: one changed scale, one changed code."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manners.checkpoint import MAX_KL, compare_logits, kl_nats, load_model, round_trip
from manners.errors import CheckpointError
from tests.checkpoint.folders import copy_of, edit_tensors
from tests.tiny import sample_ids

DOWN = "model.layers.3.mlp.down_proj"


def test_kl_against_hand_arithmetic() -> None:
    a, b = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    expected = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert kl_nats(a.log(), b.log()).tolist() == pytest.approx([expected, 0.0], abs=1e-7)


def test_the_same_folder_twice(tiny_candidate: Path) -> None:
    result = round_trip(tiny_candidate, load_model(tiny_candidate), [[5, 6, 7], [], [8, 9]])
    assert result.passed
    assert (result.max_abs_diff, result.max_kl, result.n_tokens) == (0.0, 0.0, 5)


def flip_a_code(tensors: dict[str, Tensor]) -> None:
    """Sign bits of the low nibbles of one row: the smallest damage that a wrong packer would do."""
    tensors[f"{DOWN}.weight_packed"][0] ^= 0x08


@pytest.mark.parametrize(
    "spoil",
    [
        flip_a_code,
        lambda tensors: tensors[f"{DOWN}.weight_global_scale"].mul_(1.01),
        lambda tensors: tensors[f"{DOWN}.input_global_scale"].mul_(1.5),
        lambda tensors: tensors["model.norm.weight"][:1].add_(0.1),
    ],
)
def test_a_changed_file_is_noticed(spoil: object, tiny_candidate: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_candidate, tmp_path / "bad")
    edit_tensors(folder, spoil)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"round-trip\].*KL .* over 48 tokens, allowed 1e-06"):
        round_trip(folder, load_model(tiny_candidate), sample_ids())


def test_nothing_to_compare_is_no_pass(tiny_candidate: Path) -> None:
    with pytest.raises(CheckpointError, match="no-tokens"):
        round_trip(tiny_candidate, load_model(tiny_candidate), [[]])


def test_nan_logits_are_refused(tiny_candidate: Path) -> None:
    model = load_model(tiny_candidate)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match="logits-not-finite"):
        compare_logits(load_model(tiny_candidate), model, sample_ids())


def test_the_limit_is_not_loosened_by_accident() -> None:
    assert MAX_KL == 1e-6
