"""Writing beside and then renaming: a reader finds the whole file or folder, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file at once. A leftover ``.….part`` of a killed run is overwritten by the next one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:  # after an error; a rename has left nothing to remove
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` in UTF-8; line ends stay as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON at once: indented, keys in the order given, one newline at the end."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def folder_at_once(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``folder`` when the block ends without an error.

    An older ``folder`` stays until the new one is complete. After an error nothing is left behind;
    after a kill a hidden ``.….part`` folder may be, and the next run removes it. A folder cannot be
    replaced in one step: killed between the two renames, the old one is hidden, and the next run
    puts it back first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    _remove(part)
    part.mkdir()
    try:
        yield part
    except BaseException:
        _remove(part)
        raise
    _remove(old)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    _remove(old)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
