"""The header of a safetensors file, read without loading a tensor.

A file is: 8 bytes little-endian header length N, N bytes of JSON, then the data. The JSON maps a
name to dtype, shape and the two offsets of its bytes within the data (safetensors README, Format).
Reading it here, and not through the library, lets a refusal say how many bytes are missing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

# Bits per element, by safetensors' names.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
_LIMIT = 100_000_000  # bytes; safetensors itself refuses longer headers


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header tells it. ``dtype`` is safetensors' name, e.g. ``BF16``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one file, in file order.

    Raises:
        CheckpointError: ``truncated-shard`` if the file ends before its header or its data do;
            ``shard-header`` if the header is no safetensors header, or a tensor's bytes do not
            fit its shape.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or (length <= _LIMIT and size < 8 + length):
            raise _truncated(path, size, 8 + length if size >= 8 else 8)
        if length > _LIMIT:
            raise _bad_header(path, f"a header of {length} bytes, more than any real file has")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in entries.values()]
            infos = {name: _info(path, entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise _bad_header(path, f"{type(error).__name__}: {error}") from error
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise _truncated(path, size, needed)
    return dict(sorted(infos.items(), key=lambda item: entries[item[0]]["data_offsets"][0]))


def _info(path: Path, entry: dict[str, object]) -> TensorInfo:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
        raise ValueError("an entry without dtype, shape or data_offsets")
    length = int(offsets[1]) - int(offsets[0])
    if dtype not in BITS:
        raise ValueError(f"dtype {dtype!r}")
    if length * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"{length} bytes for {dtype} {shape}")
    return TensorInfo(path, dtype, tuple(int(n) for n in shape), length)


def _truncated(path: Path, size: int, needed: int) -> CheckpointError:
    return CheckpointError(
        "truncated-shard",
        where=str(path),
        found=f"{size} bytes, its header promises {needed}",
        consequence="The last tensors of the file would be missing.",
        fix="copy or download the file again",
    )


def _bad_header(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "shard-header",
        where=str(path),
        found=f"not a safetensors file ({found})",
        fix="copy the file again, or save the model with save_pretrained",
    )
