"""Spoiling copies of a good model folder, one thing at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the folder's one shard after ``change`` was at its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
