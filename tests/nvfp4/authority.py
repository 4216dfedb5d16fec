"""compressed-tensors as the outside authority: its own scales, bytes and values to hold ours against."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize
from compressed_tensors.quantization.quant_scheme import NVFP4
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

SCHEME = QuantizationScheme(targets=["Linear"], **NVFP4)


def global_scale(amax: Tensor) -> Tensor:
    return generate_gparam(-amax, amax)


def block_scales(w_OK: Tensor, g: Tensor) -> Tensor:
    blocks = w_OK.unflatten(-1, (-1, 16))
    return calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, global_scale=g)[0]


def fake_quant(w_OK: Tensor, scale_OG: Tensor, g: Tensor) -> Tensor:
    return fake_quantize(w_OK, scale_OG, None, SCHEME.weights, g)


def compress(w_OK: Tensor, scale_OG: Tensor, g: Tensor) -> dict[str, Tensor]:
    state = {"weight": w_OK, "weight_scale": scale_OG, "weight_global_scale": g}
    return NVFP4PackedCompressor.compress(state, SCHEME)


def decompress(packed: Tensor, block_scale: Tensor, g: Tensor) -> Tensor:
    state = {"weight_packed": packed, "weight_scale": block_scale, "weight_global_scale": g}
    return NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]


def activation(x: Tensor, g: Tensor) -> Tensor:
    """What a compressed-tensors Linear makes of its input before it multiplies."""
    module = SimpleNamespace(quantization_status=QuantizationStatus.COMPRESSED, input_global_scale=g)
    return forward_quantize(module, x, "input", SCHEME.input_activations)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and every bit, so that -0.0 differs from 0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
