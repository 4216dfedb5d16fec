"""Statistics against the slow way: one row at a time, one recorded input after the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manners.checkpoint import fused_groups, load_model, open_checkpoint
from manners.errors import CheckpointError, QuantizeError
from manners.quantize import Plan, activation_amax, make_plan, weight_amax
from manners.quantize import statistics as statistics_module
from tests.checkpoint.folders import copy_of
from tests.tiny import sample_ids

OUT = "model.layers.1.linear_attn.out_proj"


@pytest.fixture(scope="module")
def plan(tiny_parent: Path) -> Plan:
    return make_plan(open_checkpoint(tiny_parent), "max")


@pytest.fixture
def model(tiny_parent: Path) -> Any:
    return load_model(tiny_parent)


def slow_amax(model: Any, rows: list[list[int]], name: str) -> float:
    inputs: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
    hook.remove()
    return max(float(x.abs().max()) for x in inputs)


def test_activations_equal_the_slow_way_and_padding_does_not_count(model: Any, plan: Plan) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[0] *= 100  # the id that padding uses
    rows = [
        row[:length] for row, length in zip(sample_ids(rows=5, length=40), (3, 40, 1, 17, 40), strict=True)
    ]
    amax = activation_amax(model, [*rows, []], plan)
    assert list(amax) == plan.nvfp4()
    for name in (
        "model.layers.0.mlp.up_proj",
        "model.layers.2.mlp.down_proj",
        OUT,
        "model.layers.3.self_attn.o_proj",
    ):
        assert amax[name] == pytest.approx(slow_amax(model, rows, name), rel=1e-4), name
    for group in fused_groups(amax):
        assert len({amax[name] for name in group}) == 1


def test_batches_do_not_matter(model: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sample_ids(rows=6, length=20)
    at_once = activation_amax(model, rows, plan)
    monkeypatch.setattr(statistics_module, "BATCH_TOKENS", 40)
    seen: list[tuple[int, int]] = []
    in_pairs = activation_amax(model, rows, plan, lambda *args: seen.append(args))
    assert seen == [(2, 6), (4, 6), (6, 6)]
    assert in_pairs == pytest.approx(at_once, rel=1e-4)


def test_the_first_layer_that_nan_reaches_is_named_and_hooks_come_off(model: Any, plan: Plan) -> None:
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[0] = float("nan")
    says = r"activations-not-finite\] model.layers.1.mlp.gate_proj: .*nan"
    with pytest.raises(QuantizeError, match=says):
        activation_amax(model, sample_ids(), plan)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("rows", "code"),
    [([], "no-calibration"), ([[]], "no-calibration"), ([[1, 512]], "token-range"), ([[-1]], "token-range")],
)
def test_refused_calibration(rows: list[list[int]], code: str, model: Any, plan: Plan) -> None:
    with pytest.raises(QuantizeError, match=rf"error\[{code}\]"):
        activation_amax(model, rows, plan)


def test_weights_take_the_joint_maximum_of_their_group(tiny_parent: Path, plan: Plan) -> None:
    truth = load_file(tiny_parent / "model.safetensors")
    amax = weight_amax(open_checkpoint(tiny_parent), plan)
    attention = "model.layers.3.self_attn"
    qkv = max(float(truth[f"{attention}.{x}_proj.weight"].abs().max()) for x in "qkv")
    assert {float(amax[f"{attention}.{x}_proj"]) for x in "qkv"} == {qkv}
    assert float(amax[OUT]) == float(truth[f"{OUT}.weight"].abs().max())
    assert set(amax) == set(plan.nvfp4())


@pytest.mark.parametrize("name", [f"{OUT}.weight", "model.layers.0.linear_attn.A_log"])
def test_nan_weights(name: str, tiny_parent: Path, plan: Plan, tmp_path: Path) -> None:
    folder = copy_of(tiny_parent, tmp_path / "parent")
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"not-finite\].*{name}: nan"):
        weight_amax(open_checkpoint(folder), plan)
