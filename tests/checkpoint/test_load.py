"""load_model against an outside authority: transformers with compressed-tensors, on the same folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from manners.checkpoint import compare_logits, load_model
from manners.errors import CheckpointError
from manners.nvfp4 import NVFP4Linear
from manners.quantize import quantize
from tests.checkpoint.folders import copy_of, edit_json, edit_tensors
from tests.tiny import make_tiny_parent, sample_ids

UP = "model.layers.0.mlp.up_proj"


def load_with_compressed_tensors(folder: Path, dtype: torch.dtype) -> Any:
    """As a user would, but decoded at once: left alone, it decodes at the first forward, to bfloat16, and a
    float32 model then stops with a dtype mismatch."""
    from compressed_tensors.compressors.base import decompress_module

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    packed = [module for module in model.modules() if hasattr(module, "weight_packed")]
    assert len(packed) == 25
    for module in packed:
        decompress_module(module)
        module.weight.data = module.weight.data.to(dtype)
    model.ct_decompress_hook.remove()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["tiny_candidate", "tiny_w4a16"])
def test_logits_equal_transformers_with_compressed_tensors(
    kind: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    theirs, ours = load_with_compressed_tensors(folder, dtype), load_model(folder, dtype=dtype)
    assert ours.dtype == dtype
    result = compare_logits(theirs, ours, sample_ids(seed=3, rows=3))
    assert (result.max_abs_diff, result.max_kl) == (0.0, 0.0)
    linear = ours.get_submodule(UP)
    assert isinstance(linear, NVFP4Linear)
    assert linear.quantize_input == (kind == "tiny_candidate")


def test_plain_transformers_without_any_help(tiny_candidate: Path) -> None:
    """The exact way in the model card: from_pretrained, then a forward."""
    theirs = AutoModelForCausalLM.from_pretrained(tiny_candidate, dtype=torch.bfloat16)
    ours = load_model(tiny_candidate, dtype=torch.bfloat16)
    assert compare_logits(theirs, ours, sample_ids(seed=4)).max_abs_diff == 0.0


@pytest.mark.parametrize("rung", ["mse", "w4a16"])
def test_tied_and_sharded(rung: Any, tmp_path: Path) -> None:
    parent = make_tiny_parent(tmp_path / "parent", seed=5, tie_word_embeddings=True, max_shard_size="100KB")
    folder = quantize(parent, tmp_path / rung, rung=rung, calibration=sample_ids(seed=1)).checkpoint
    ours = load_model(folder)
    assert ours.lm_head.weight.data_ptr() == ours.get_input_embeddings().weight.data_ptr()
    result = compare_logits(load_with_compressed_tensors(folder, torch.float32), ours, sample_ids(seed=3))
    assert result.max_abs_diff == 0.0


def test_rounding_is_really_there(tiny_parent: Path, tiny_candidate: Path, tiny_w4a16: Path) -> None:
    """Parent, W4A16 and W4A4 must be three different models, or the equalities above mean nothing."""
    models = [load_model(folder) for folder in (tiny_parent, tiny_w4a16, tiny_candidate)]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert compare_logits(models[first], models[second], sample_ids()).max_kl > 1e-3


def test_switching_inputs_off_gives_the_diagnosis(tiny_candidate: Path, tiny_w4a16: Path) -> None:
    model = load_model(tiny_candidate)
    for module in model.modules():
        if isinstance(module, NVFP4Linear):
            module.quantize_input = False
    assert compare_logits(model, load_model(tiny_w4a16), sample_ids()).max_abs_diff == 0.0


def test_a_parent_is_loaded_as_it_is(tiny_parent: Path) -> None:
    ours = load_model(str(tiny_parent))
    theirs = AutoModelForCausalLM.from_pretrained(tiny_parent, dtype=torch.float32)
    assert not ours.training
    assert ours.dtype == torch.float32
    assert compare_logits(theirs, ours, sample_ids()).max_abs_diff == 0.0


@pytest.mark.parametrize("kind", ["tiny_parent", "tiny_candidate"])
def test_generates_and_stops_as_the_folder_says(kind: str, request: pytest.FixtureRequest) -> None:
    model = load_model(request.getfixturevalue(kind))
    assert model.generation_config.eos_token_id == [2, 0]
    ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert ids.shape[1] <= 7


def test_loading_needs_no_compressed_tensors(tiny_candidate: Path) -> None:
    """In a fresh interpreter where importing it fails."""
    code = (
        "import sys; sys.modules['compressed_tensors'] = None\n"
        "from manners.checkpoint import load_model\n"
        f"print(type(load_model({str(tiny_candidate)!r}).get_submodule({UP!r})).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "NVFP4Linear", done.stderr


def narrower(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()


def another_layer(config: dict[str, Any]) -> None:
    config["num_hidden_layers"] = 5
    config["layer_types"] = [*config["layer_types"], "linear_attention"]


@pytest.mark.parametrize("kind", ["tiny_parent", "tiny_candidate"])
@pytest.mark.parametrize(
    ("code", "says", "spoil"),
    [
        (
            "missing-tensor",
            "model.norm.weight",
            lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")),
        ),
        ("missing-tensor", "layers.4.*more", lambda f: edit_json(f / "config.json", another_layer)),
        ("load-failed", "transformers says", lambda f: edit_tensors(f, narrower)),
        (
            "load-failed",
            "nonsense",
            lambda f: edit_json(f / "config.json", lambda c: c.update(model_type="nonsense")),
        ),
        ("truncated-shard", "", lambda f: (f / "model.safetensors").write_bytes(b"x")),
    ],
)
def test_refusals(
    code: str, says: str, spoil: Any, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = copy_of(request.getfixturevalue(kind), tmp_path / "bad")
    spoil(folder)
    with pytest.raises(CheckpointError, match=rf"(?s)error\[{code}\].*{says}"):
        load_model(folder)


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        ("missing-scale", lambda f: edit_tensors(f, lambda t: t.pop(f"{UP}.weight_scale"))),
        ("missing-scale", lambda f: edit_tensors(f, lambda t: t.pop(f"{UP}.input_global_scale"))),
        ("bad-scale", lambda f: edit_tensors(f, lambda t: t[f"{UP}.weight_global_scale"].fill_(0))),
        ("config-class", lambda f: edit_json(f / "config.json", lambda c: c.update(architectures=["os"]))),
        (
            "unknown-quantization",
            lambda f: edit_json(
                f / "config.json", lambda c: c.update(quantization_config={"quant_method": "awq"})
            ),
        ),
    ],
)
def test_refusals_of_candidates(code: str, spoil: Any, tiny_candidate: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_candidate, tmp_path / "bad")
    spoil(folder)
    with pytest.raises(CheckpointError, match=rf"error\[{code}\]"):
        load_model(folder)
