"""The NVFP4 number format: codes, scales, packing, fake quantization. Knows tensors, nothing else.

    value = E2M1[code] * block_scale / global_scale

``format`` is the readable reference; everything else is held against it and against compressed-tensors.
"""

from .compiled import Backend, backend
from .errors import FormatError
from .fake import fake_quant_activation, fake_quant_weight
from .format import BLOCK, E2M1, decode, encode
from .linear import NVFP4Linear
from .packing import pack, unpack
from .scales import ScaleRule, block_scales, global_scale
from .weight import NVFP4Weight, dequantize, quantize_weight

__all__ = [
    "BLOCK",
    "E2M1",
    "Backend",
    "FormatError",
    "NVFP4Linear",
    "NVFP4Weight",
    "ScaleRule",
    "backend",
    "block_scales",
    "decode",
    "dequantize",
    "encode",
    "fake_quant_activation",
    "fake_quant_weight",
    "global_scale",
    "pack",
    "quantize_weight",
    "unpack",
]
