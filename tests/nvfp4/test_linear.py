"""NVFP4Linear computes what a compressed-tensors Linear computes, alone and inside transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from manners.nvfp4 import (
    FormatError,
    NVFP4Linear,
    NVFP4Weight,
    dequantize,
    fake_quant_activation,
    global_scale,
    quantize_weight,
)
from tests.nvfp4.authority import same_bits
from tests.nvfp4.matrices import DTYPES, matrix

W_OK = matrix("random", torch.bfloat16, rows=32)
QUANTIZED = quantize_weight(W_OK, global_scale(W_OK.abs().max()))
INPUT_SCALE = torch.tensor([700.0])
X = matrix("outlier", torch.bfloat16).reshape(2, 12, 96)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_is_the_product_of_rounded_numbers(dtype: torch.dtype) -> None:
    bias = torch.arange(32.0)
    layer = NVFP4Linear.from_quantized(QUANTIZED, bias, INPUT_SCALE, dtype)
    x = X.to(dtype)
    rounded = fake_quant_activation(x, INPUT_SCALE)
    expected = functional.linear(rounded, dequantize(QUANTIZED, dtype), bias.to(dtype))
    assert same_bits(layer(x), expected)
    assert not same_bits(rounded, x)


def test_without_an_input_scale_activations_are_kept() -> None:
    layer = NVFP4Linear.from_quantized(QUANTIZED)
    assert not layer.quantize_input
    assert same_bits(layer(X), functional.linear(X, dequantize(QUANTIZED)))


def test_input_rounding_can_be_switched_off_but_not_on_without_a_scale() -> None:
    layer = NVFP4Linear.from_quantized(QUANTIZED, None, INPUT_SCALE)
    layer.quantize_input = False
    assert same_bits(layer(X), NVFP4Linear.from_quantized(QUANTIZED)(X))
    weight_only = NVFP4Linear.from_quantized(QUANTIZED)
    weight_only.quantize_input = True
    with pytest.raises(FormatError, match=r"bad-scale.*input_global_scale"):
        weight_only(X)


def test_a_bad_input_scale_is_refused() -> None:
    with pytest.raises(FormatError, match=r"bad-scale.*nan"):
        NVFP4Linear.from_quantized(QUANTIZED, None, torch.tensor([float("nan")]))


def test_nothing_is_trainable_but_the_gradient_reaches_the_input() -> None:
    layer = NVFP4Linear.from_quantized(QUANTIZED, torch.zeros(32), INPUT_SCALE, torch.float32)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    x = X.float().requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand_as(x))


def test_changing_the_models_dtype_leaves_the_scale_in_float32() -> None:
    scale = torch.tensor([700.123])
    model = nn.Sequential(NVFP4Linear.from_quantized(QUANTIZED, None, scale, torch.float32)).to(
        torch.bfloat16
    )
    assert model[0].weight.dtype == torch.bfloat16
    assert same_bits(model[0].input_global_scale, scale)
    assert model.to("meta")[0].input_global_scale.device.type == "meta"
    assert model.to_empty(device="cpu")[0].input_global_scale.dtype == torch.float32


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def write_checkpoint(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """A W4A4 checkpoint as compressed-tensors names it. Its scale_dtype makes activation scales E4M3."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stem = name.removesuffix("weight")
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        quantized = quantize_weight(value, global_scale(value.abs().max()), "mse")
        tensors[stem + "weight_packed"] = quantized.packed
        tensors[stem + "weight_scale"] = quantized.block_scale
        tensors[stem + "weight_global_scale"] = quantized.global_scale
        tensors[stem + "input_global_scale"] = global_scale(torch.tensor(3.0))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    format_ = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
    }
    format_["scale_dtype"] = "torch.float8_e4m3fn"
    group = {
        "targets": ["Linear"],
        "weights": {**format_, "dynamic": False},
        "input_activations": {**format_, "dynamic": "local"},
    }
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_logits_equal_those_of_transformers_running_a_w4a4_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tensors = write_checkpoint(tiny_llama(), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(ids).logits
        for name in [name for name, part in model.named_modules() if name.endswith("_proj")]:
            parts = (tensors[f"{name}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
            layer = NVFP4Linear.from_quantized(
                NVFP4Weight(*parts), None, tensors[f"{name}.input_global_scale"]
            )
            model.set_submodule(name, layer)
        ours = model(ids).logits
        for part in model.modules():
            if isinstance(part, NVFP4Linear):
                part.quantize_input = False
        weight_only = model(ids).logits
    assert same_bits(ours, theirs)
    assert not same_bits(weight_only, theirs)
