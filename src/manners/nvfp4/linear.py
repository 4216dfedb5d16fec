"""A Linear whose weight was rounded to NVFP4 and whose input may be rounded on the way in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import FormatError
from .fake import fake_quant_activation
from .scales import check_global_scale
from .weight import NVFP4Weight, dequantize


class NVFP4Linear(nn.Module):
    """``linear(round(x), weight, bias)``, in plain PyTorch on any device: what an NVFP4 engine computes.

    weight: [O, K] parameter, frozen, already rounded, in the compute dtype.
    bias: [O] parameter, frozen, or None.
    input_global_scale: float32 [1] buffer, or None for a layer that keeps its activations (W4A16).
    quantize_input: whether forward rounds its input. Switching it off is the rung `w4a16` as a diagnosis.
    """

    input_global_scale: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, input_global_scale: Tensor | None = None
    ) -> None:
        """Raises FormatError ``bad-scale`` for a global scale that is not float32 [1], finite and > 0."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        if input_global_scale is not None:
            check_global_scale(input_global_scale)
            input_global_scale = input_global_scale.detach().clone()
        self.register_buffer("input_global_scale", input_global_scale)
        self.quantize_input = input_global_scale is not None

    @classmethod
    def from_quantized(
        cls,
        quantized: NVFP4Weight,
        bias: Tensor | None = None,
        input_global_scale: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> NVFP4Linear:
        """Decode a checkpoint's tensors into a layer that computes in ``dtype``."""
        return cls(dequantize(quantized, dtype), None if bias is None else bias.to(dtype), input_global_scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.quantize_input:
            if self.input_global_scale is None:
                raise FormatError("bad-scale", "quantize_input is on, but there is no input_global_scale")
            x = fake_quant_activation(x, self.input_global_scale)
        return functional.linear(x, self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NVFP4Linear:
        # `.to(torch.bfloat16)` must not round the scale: follow the device, keep the float32 value.
        scale = self.input_global_scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.input_global_scale
        if scale is not None and moved is not None and moved.dtype != scale.dtype:
            self.input_global_scale = scale.to(moved.device)
        return self

    def extra_repr(self) -> str:
        inputs = "w4a4" if self.quantize_input else "w4a16"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {inputs}"
