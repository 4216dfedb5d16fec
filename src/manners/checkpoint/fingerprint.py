"""One hash for a model folder: everything that decides what it answers."""

from __future__ import annotations

import hashlib

from .reader import Checkpoint

_WHOLE_FILE = 64 << 20  # bytes; of larger shards only both ends are hashed
_END = 1 << 20
_TEXTS = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
)  # fmt: skip


def fingerprint_weights(parent: Checkpoint) -> str:
    """sha256 (hex) of config, tokenizer, template and weights.

    Of shards above 64 MB only size, time of change and both ends count.
    """
    digest = hashlib.sha256()
    for path in (*(parent.path / name for name in _TEXTS), *parent.files):
        if not path.is_file():
            continue
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size}\n".encode())
        with path.open("rb") as file:
            if stat.st_size <= _WHOLE_FILE:
                digest.update(file.read())
                continue
            digest.update(f"{stat.st_mtime_ns}\n".encode() + file.read(_END))
            file.seek(-_END, 2)
            digest.update(file.read())
    return digest.hexdigest()
