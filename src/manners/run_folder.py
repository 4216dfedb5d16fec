"""A run's folder: whose it is, who is at work in it, and what was done in it, for how many minutes.

``run.json`` is written first and makes the folder a run's. It says what was asked, and of every stage
whether it is ``begun`` or ``done``. A folder that holds anything else is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .conversations import dump_conversations
from .errors import RunError
from .files import write_json, write_text
from .spec import dump_probes, dump_spec, fingerprint

if TYPE_CHECKING:
    from .ladder import Order

RUN, LOCK = "run.json", ".lock"
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def identity(order: Order, parent_sha256: str) -> dict[str, str]:
    """What decides a run's results. Two orders that differ in it cannot share a folder; rungs may differ."""
    return {
        "spec_sha256": fingerprint(order.spec.model_copy(update={"probes": ()})),
        "probes_sha256": fingerprint(order.probes),
        "parent_sha256": parent_sha256,
        "conversations_sha256": hashlib.sha256(dump_conversations(order.conversations).encode()).hexdigest(),
        "seed": str(order.seed),
        "device": order.device,
        "manners": __version__,
    }


def read_state(folder: Path, wanted: Mapping[str, str]) -> dict[str, Any] | None:
    """``run.json`` of a folder that is taken up again; None if a run can begin there. Writes nothing.

    Raises:
        RunError: ``not-a-run`` if other files are there; ``run-syntax``; ``other-run`` with what differs.
    """
    path = folder / RUN
    if not path.is_file():
        strange = _strangers(folder)
        if strange:
            raise RunError(
                "not-a-run",
                where=str(folder),
                found=f"no {RUN}, but {', '.join(strange[:3])}",
                consequence="Files of the same names would be overwritten.",
                fix="give a new or empty folder as --output",
            )
        return None
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        before, stages = dict(state["identity"]), dict(state["stages"])
        complete = all(isinstance(s["state"], str) and s["minutes"] >= 0 for s in stages.values())
        complete = complete and isinstance(state["commands"], list) and isinstance(state["asked"], dict)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not complete:
        raise _damaged(path, "a stage without state or minutes, or no commands")
    if before != wanted:
        other = sorted(key for key in wanted.keys() | before.keys() if wanted.get(key) != before.get(key))
        names = ", ".join(key.removesuffix("_sha256") for key in other)
        raise RunError(
            "other-run",
            where=str(folder),
            found=f"this folder holds a run with another {names}",
            consequence="Its replies would be mixed with those of this run.",
            fix="give another --output, or remove the folder",
        )
    return state


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder (made if needed) while the block runs.

    The lock is the operating system's, on ``.lock``: it ends with the process, however that dies, so
    none is ever stale. The file stays, and names who holds it. File systems that know no locks go without.

    Raises:
        RunError: ``run-busy`` with the process that holds it; ``not-a-folder``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise RunError(
            "not-a-folder", where=str(folder), found="a file stands in its way", fix="give another --output"
        ) from error
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunError(
                "run-busy",
                where=str(folder),
                found=f"{file.read().strip() or 'another process'} is at work in it",
                consequence="Two would write the same files.",
                fix="wait until it is done, or give another --output",
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


class Stage:
    """One candidate's way through a run. ``facts`` is its entry in ``run.json``."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.worked = False
        """Set by whoever does any work; reading what is there is none, and costs no minutes."""

    @property
    def minutes(self) -> float:
        """Spent on it in all calls. What a killed process spent is not known."""
        return float(self.facts["minutes"])


class RunFolder:
    """``run.json``, kept up to date. Use it inside :func:`alone`."""

    def __init__(
        self, path: Path, order: Order, state: dict[str, Any] | None, wanted: dict[str, str]
    ) -> None:
        self.path = path
        self.state: dict[str, Any] = state or _new_state(order, wanted)
        self._written = json.dumps(state)
        self.state["asked"]["rungs"] = list(order.rungs)
        if order.command and order.command not in self.state["commands"]:
            self.state["commands"].append(order.command)
        self.save()
        (path / "conversations").mkdir(exist_ok=True)
        # Beside each other, so that `manners judge --spec RUN/spec.yaml` judges by what was asked.
        _write_if_other(path / "spec.yaml", dump_spec(order.spec, probes="probes.jsonl"))
        _write_if_other(path / "probes.jsonl", dump_probes(order.probes))
        _write_if_other(path / "conversations" / "calibration.jsonl", dump_conversations(order.conversations))

    def candidate(self, name: str) -> Path:
        return self.path / "candidates" / name

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Count the minutes of a stage, also of one that an error or Ctrl-C ends."""
        facts = self.state["stages"].setdefault(name, {"state": "begun", "minutes": 0.0})
        stage, began = Stage(facts), time.monotonic()
        try:
            yield stage
            facts["state"] = "done"
        except BaseException:
            facts["state"] = "begun" if stage.worked else facts["state"]
            raise
        finally:
            if stage.worked:
                facts["minutes"] = round(facts["minutes"] + (time.monotonic() - began) / 60, 4)
            self.save()

    def save(self) -> None:
        """Write ``run.json`` if it would change."""
        now = json.dumps(self.state)
        if now != self._written:
            write_json(self.path / RUN, self.state)
            self._written = now


def _strangers(folder: Path) -> list[str]:
    """What is in a folder besides the hidden files of a run that was killed before it began."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, f".{RUN}.part"))


def _damaged(path: Path, found: str) -> RunError:
    return RunError(
        "run-syntax", where=str(path), found=found, fix="remove the folder, or give another --output"
    )


def _new_state(order: Order, wanted: dict[str, str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "identity": wanted,
        "asked": {"spec": order.spec.name, "parent": order.parent.name, "device": order.device},
        "seeds": {"run": order.seed, "asking": order.spec.asking.seed},
        "versions": _versions(),
        "hardware": _hardware(order.device),
        "commands": [],
        "stages": {},
    }


def _write_if_other(path: Path, text: str) -> None:
    data = text.encode()
    if not path.is_file() or path.read_bytes() != data:
        write_text(path, text)


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "safetensors", "scipy")
    found = {name: version(name) for name in names}
    return {"python": platform.python_version(), "manners": __version__, **found}


def _hardware(device: str) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {"machine": platform.machine(), "cores": str(cores), "device": device}
    if device.startswith("cuda"):
        import torch

        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts
