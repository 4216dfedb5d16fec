"""Linears that read the same input, run as one: one rounding of the input, one matrix product.

Engines do the same with fused groups (q/k/v, gate/up, in_proj_qkv+z, in_proj_b+a), whose members
share their input global scale for that reason. The numbers do not change: every output still is its
own row of weights times the same rounded input.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...nvfp4.fake import fake_quant_activation
from ...nvfp4.linear import NVFP4Linear


class Merged:
    """Several Linears over one input. Their weights become views of one matrix: no memory is added.

    Args:
        linears: plain or NVFP4 Linears of one width. Members that do not fit together (biases, unequal
            input scales, mixed kinds) are simply called one after the other.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self._linears = list(linears)
        self._sizes = [int(linear.out_features) for linear in self._linears]
        self._weight: Tensor | None = None
        self._scale: Tensor | None = None
        if _fit(self._linears):
            weight = torch.cat([linear.weight.data for linear in self._linears])
            for linear, part in zip(self._linears, torch.split(weight, self._sizes), strict=True):
                linear.weight.data = part
            self._weight = weight
            first = self._linears[0]
            self._scale = first.input_global_scale if getattr(first, "quantize_input", False) else None

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if self._weight is None:
            return [linear(x) for linear in self._linears]
        if self._scale is not None:
            x = fake_quant_activation(x, self._scale)
        together: Sequence[Tensor] = torch.split(functional.linear(x, self._weight), self._sizes, dim=-1)
        return together


def merge_mlps(model: Any) -> int:
    """Run gate and up as one in every gated MLP of the Qwen/Llama form; returns how many there are."""
    found = 0
    for module in model.modules():
        names = {name for name, _ in module.named_children()}
        if names == {"gate_proj", "up_proj", "down_proj", "act_fn"} and type(module).__name__.endswith("MLP"):
            module.gate_and_up = Merged([module.gate_proj, module.up_proj])
            module.forward = MethodType(_mlp, module)
            found += 1
    return found


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_and_up(x)
    out: Tensor = mlp.down_proj(mlp.act_fn(gate) * up)
    return out


def _fit(linears: Sequence[Any]) -> bool:
    first = linears[0]
    if any(getattr(linear, "bias", None) is not None for linear in linears):
        return False
    if all(type(linear) is nn.Linear for linear in linears):
        return True
    if not all(isinstance(linear, NVFP4Linear) for linear in linears):
        return False
    if len({linear.quantize_input for linear in linears}) > 1:
        return False
    scales = [linear.input_global_scale for linear in linears]
    return not first.quantize_input or all(torch.equal(scale, scales[0]) for scale in scales)
