"""Reading a Hugging Face model folder, one shard at a time. Safetensors and JSON only.

:func:`open_checkpoint` checks everything that can be told from file names and headers before any
tensor is read. A pickle (``*.bin``, ``*.pt``) is never opened: loading one runs its code.

What it cannot see: whether the weights are any good. :func:`check_finite` at least refuses NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import CheckpointError
from .header import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U8": torch.uint8,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One safetensors file with the names it holds, in file order."""

    path: Path
    names: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read the tensors one after the other; each may be dropped before the next is read."""
        with safe_open(self.path, framework="pt") as file:
            for name in self.names:
                yield name, file.get_tensor(name)


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder: config and headers are in memory, tensors are read when asked for."""

    path: Path
    config: Mapping[str, Any]
    infos: Mapping[str, TensorInfo]
    files: tuple[Path, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.infos)

    @property
    def bytes(self) -> int:
        """Size of all safetensors files on disk."""
        return sum(path.stat().st_size for path in self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._info(name).dtype]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.infos.items()}

    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises CheckpointError ``missing-tensor``."""
        with safe_open(self._info(name).file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def shards(self) -> Iterator[Shard]:
        """The files one by one, so that memory needs to hold no more than one."""
        for path in self.files:
            yield Shard(path, tuple(name for name, info in self.infos.items() if info.file == path))

    def _info(self, name: str) -> TensorInfo:
        if name not in self.infos:
            raise CheckpointError(
                "missing-tensor",
                where=str(self.path),
                found=f"no tensor {name}",
                fix="save the whole model into one folder",
            )
        return self.infos[name]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a model folder after checking everything that headers can tell.

    Raises:
        CheckpointError: ``folder-missing``; ``config-missing``; ``json-syntax`` if config or index
            is no JSON object; ``pickle-checkpoint`` if the only weights are pickles;
            ``no-safetensors``; ``truncated-shard`` and ``shard-header`` (see :mod:`.header`);
            ``index-mismatch`` if the index and the shards disagree, or a tensor is in two shards.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file, not a folder" if folder.exists() else "no such folder"
        raise CheckpointError(
            "folder-missing", where=str(folder), found=found, fix="give the folder that holds config.json"
        )
    files = _weight_files(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            "config-missing",
            where=str(folder),
            found="weights, but no config.json",
            consequence="Nothing says which architecture the weights are for.",
            fix="copy config.json from the model that was fine-tuned",
        )
    config = read_json(folder / "config.json")
    infos: dict[str, TensorInfo] = {}
    for path in files:
        for name, info in read_header(path).items():
            if name in infos:
                raise _index_mismatch(folder, f"{name} is in {infos[name].file.name} and in {path.name}")
            infos[name] = info
    _check_index(folder, infos)
    return Checkpoint(folder, config, infos, files)


def check_finite(name: str, tensor: Tensor, where: Path | str) -> None:
    """Refuse NaN and Inf. Raises CheckpointError ``not-finite`` with the tensor's name and place."""
    if not tensor.dtype.is_floating_point:
        return
    # float8 has no isfinite kernel; its values survive the cast.
    finite = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)
    if bool(finite.all()):
        return
    place = (~finite).nonzero()[0].tolist()
    count = int((~finite).sum())
    raise CheckpointError(
        "not-finite",
        where=f"{where}: {name}",
        found=f"{tensor[tuple(place)].item()} at {place}, {count} of {tensor.numel()} values are NaN or Inf",
        consequence="One such value makes every logit NaN.",
        fix="go back to the last good checkpoint of the fine-tune; look at its loss for a spike",
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError ``json-syntax``."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _bad_json(path, str(error)) from error
    if not isinstance(data, dict):
        raise _bad_json(path, f"{type(data).__name__}, not an object")
    return data


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files to read: those the index names, or all there are."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise _index_mismatch(folder, "the index has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise _index_mismatch(folder, f"the index leads out of the folder: {outside[0]}")
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise _index_mismatch(folder, f"the index names {', '.join(absent)}, which is not there")
        return tuple(folder / name for name in names)
    files = tuple(sorted(path for path in folder.glob("*.safetensors") if path.is_file()))
    if files:
        return files
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            "pickle-checkpoint",
            where=str(folder),
            found=f"{', '.join(pickles[:3])}, and no safetensors",
            consequence="Loading a pickle runs whatever code is inside it, so none is ever opened.",
            fix="convert it where you trust it: model.save_pretrained(folder) writes safetensors",
        )
    raise CheckpointError(
        "no-safetensors",
        where=str(folder),
        found="no *.safetensors file",
        fix="give the folder of a Hugging Face model, with config.json and model*.safetensors",
    )


def _check_index(folder: Path, infos: Mapping[str, TensorInfo]) -> None:
    if not (folder / INDEX).is_file():
        return
    weight_map = read_json(folder / INDEX)["weight_map"]
    for name, file in weight_map.items():
        if name not in infos:
            raise _index_mismatch(folder, f"the index puts {name} into {file}, which does not hold it")
        if infos[name].file.name != file:
            raise _index_mismatch(
                folder, f"the index puts {name} into {file}, it is in {infos[name].file.name}"
            )
    unlisted = sorted(set(infos) - set(weight_map))
    if unlisted:
        raise _index_mismatch(
            folder, f"{infos[unlisted[0]].file.name} holds {unlisted[0]}, the index does not"
        )


def _index_mismatch(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "index-mismatch",
        where=str(folder / INDEX),
        found=found,
        consequence="Engines trust the index, so weights would be missing or stale.",
        fix="copy all shards and the index from the same save, or save the model again",
    )


def _bad_json(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "json-syntax", where=str(path), found=found, fix="copy the file again, or mend the JSON"
    )
