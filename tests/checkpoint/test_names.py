"""Names are checked against a list written by hand from the engines' sources."""

from pathlib import Path

import pytest

from manners.checkpoint import (
    canonical_name,
    default_ignore,
    expected_linears,
    fused_groups,
    open_checkpoint,
    parent_linears,
)

DELTA = "model.layers.0.linear_attn"
ATTENTION = "model.layers.3.self_attn"


def test_fused_groups_are_those_that_engines_merge() -> None:
    linears = [
        f"{DELTA}.in_proj_a",
        f"{DELTA}.in_proj_b",
        f"{DELTA}.in_proj_qkv",
        f"{DELTA}.in_proj_z",
        f"{DELTA}.out_proj",
        f"{ATTENTION}.k_proj",
        f"{ATTENTION}.o_proj",
        f"{ATTENTION}.q_proj",
        f"{ATTENTION}.v_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
        "lm_head",
    ]
    groups = {frozenset(group) for group in fused_groups(linears)}
    assert groups == {
        frozenset({f"{DELTA}.in_proj_a", f"{DELTA}.in_proj_b"}),
        frozenset({f"{DELTA}.in_proj_qkv", f"{DELTA}.in_proj_z"}),
        frozenset({f"{DELTA}.out_proj"}),
        frozenset({f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", f"{ATTENTION}.v_proj"}),
        frozenset({f"{ATTENTION}.o_proj"}),
        frozenset({"model.layers.0.mlp.down_proj"}),
        frozenset({"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}),
        frozenset({"model.layers.1.mlp.up_proj"}),
        frozenset({"lm_head"}),
    }


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_canonical_names(stored: str, canonical: str | None) -> None:
    assert canonical_name(stored) == canonical


def test_what_stays_bf16() -> None:
    linears = [
        "lm_head",
        f"{DELTA}.in_proj_a",
        f"{DELTA}.in_proj_b",
        f"{DELTA}.in_proj_z",
        "mtp.fc",
        f"{ATTENTION}.q_proj",
    ]
    assert default_ignore(linears) == ["lm_head", f"{DELTA}.in_proj_a", f"{DELTA}.in_proj_b", "mtp.fc"]


def test_expected_linears_are_what_transformers_saves(tiny_parent: Path) -> None:
    checkpoint = open_checkpoint(tiny_parent)
    assert sorted(expected_linears(checkpoint.config)) == sorted(parent_linears(checkpoint))
    assert "model.embed_tokens" not in parent_linears(checkpoint)
