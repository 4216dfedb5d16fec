"""Plans are made from names and shapes; widths decide, and the refusals name the Linear."""

import json
from pathlib import Path
from typing import Any

import pytest

from manners.checkpoint import open_checkpoint, parent_linears
from manners.errors import CheckpointError, QuantizeError
from manners.quantize import Plan, bits_per_weight, load_plan, make_plan
from tests.tiny import make_tiny_parent


@pytest.mark.parametrize(
    ("rung", "scale_rule", "activations"),
    [("max", "max", "w4a4"), ("mse", "mse", "w4a4"), ("w4a16", "max", "w4a16")],
)
def test_rungs(rung: Any, scale_rule: str, activations: str, tiny_parent: Path) -> None:
    plan = make_plan(open_checkpoint(tiny_parent), rung)
    up = plan.linears["model.layers.0.mlp.up_proj"]
    assert (up.format, up.scale_rule, up.activations) == ("nvfp4", scale_rule, activations)
    assert plan.quantize_inputs == (activations == "w4a4")
    kept = [name for name, linear in plan.linears.items() if linear.format == "bf16"]
    delta = [f"model.layers.{i}.linear_attn.in_proj_{x}" for i in range(3) for x in "ab"]
    assert sorted(kept) == sorted([*delta, "lm_head"])
    assert len(plan.nvfp4()) == 25


def test_bits_per_weight_by_hand() -> None:
    linear = {"scale_rule": None, "activations": None, "why": ""}
    plan = Plan.model_validate(
        {
            "strategy": "max",
            "linears": {"a": {"format": "nvfp4", **linear}, "b": {"format": "bf16", **linear}},
        }
    )
    # 64 weights of 4 bits and 4 scales of 8 bits; 32 weights of 16 bits
    assert bits_per_weight(plan, {"a": (1, 64), "b": (2, 16)}) == (64 * 4 + 4 * 8 + 32 * 16) / 96


def test_kept_linears_take_their_partners_along(tiny_parent: Path) -> None:
    attention = "model.layers.3.self_attn"
    plan = make_plan(open_checkpoint(tiny_parent), "max", keep_bf16=[f"{attention}.k_proj"])
    formats = {
        name: plan.linears[f"{attention}.{name}"].format for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    assert formats == {"q_proj": "bf16", "k_proj": "bf16", "v_proj": "bf16", "o_proj": "nvfp4"}


@pytest.mark.parametrize(("intermediate_size", "code"), [(72, "width-16"), (96, "width-64")])
def test_widths_are_refused_by_name_and_can_be_kept(
    intermediate_size: int, code: str, tmp_path: Path
) -> None:
    parent = open_checkpoint(make_tiny_parent(tmp_path / "parent", intermediate_size=intermediate_size))
    says = rf"error\[{code}\].*model.layers.0.mlp.down_proj: {intermediate_size} input columns"
    with pytest.raises(CheckpointError, match=says):
        make_plan(parent, "max")
    downs = [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    assert len(make_plan(parent, "max", keep_bf16=downs).nvfp4()) == 21


def test_refusals(tiny_parent: Path, tiny_candidate: Path) -> None:
    parent = open_checkpoint(tiny_parent)
    rung: Any = "nvfp3"
    with pytest.raises(QuantizeError, match=r"unknown-rung\].*'nvfp3'"):
        make_plan(parent, rung)
    with pytest.raises(QuantizeError, match=r"unknown-linear\].*model.layers.8"):
        make_plan(parent, "max", keep_bf16=["model.layers.8"])
    with pytest.raises(QuantizeError, match="nothing-to-quantize"):
        make_plan(parent, "max", keep_bf16=list(parent_linears(parent)))
    with pytest.raises(CheckpointError, match=r"already-quantized\].*compressed-tensors"):
        make_plan(open_checkpoint(tiny_candidate), "max")


def test_plan_json_round_trip(tiny_parent: Path, tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(tiny_parent), "mse", seed=3)
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json(by_alias=True))
    assert load_plan(path) == plan
    data = json.loads(path.read_text())
    assert (data["schema"], data["strategy"], data["seed"]) == (1, "mse", 3)
    path.write_text(json.dumps({**data, "schema": 2}))
    with pytest.raises(QuantizeError, match="plan-syntax"):
        load_plan(path)
