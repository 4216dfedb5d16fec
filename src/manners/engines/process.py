"""A server as a subprocess: started, watched, stopped, and never left behind.

    with embedded_server(folder, log_path=log) as server:
        ...  # ask server.url for server.model
        server.check()

The server lives as long as its standard input: if this process dies, however it dies, the pipe
closes and the server stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import EngineError

LOG_LINES = 12


class ServerProcess:
    """A running server. ``url`` and ``model`` are what its ready line said."""

    def __init__(self, process: subprocess.Popen[str], log_path: Path, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self.log_path = log_path
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raise EngineError ``engine-died`` if the server is gone."""
        status = self._process.poll()
        if status is not None:
            raise EngineError(
                "engine-died",
                where=self.url,
                found=f"the server ended with status {status}; its log ends:\n{_tail(self.log_path)}",
                consequence="Requests since then failed, whatever the model would have said.",
                fix=f"read {self.log_path}; if the machine ran out of memory, lower --max-rows",
            )

    def stop(self, wait_s: float = 10.0) -> None:
        """Ask it to stop; after ``wait_s`` seconds, end it."""
        _stop(self._process, wait_s)


@contextlib.contextmanager
def embedded_server(
    folder: str | Path,
    *,
    device: str = "cpu",
    log_path: str | Path,
    start_timeout_s: float = 300.0,
    port: int = 0,
    name: str | None = None,
    reasoning_split: bool = True,
    prefix_cache: bool = True,
    max_rows: int = 64,
    max_context: int | None = None,
    threads: int | None = None,
) -> Iterator[ServerProcess]:
    """Serve ``folder`` in a subprocess while the block runs.

    Args:
        log_path: the server's stderr, appended.
        start_timeout_s: seconds until it must be ready.
        port, name, ...: as in :class:`manners.engines.embedded.server.Options`.

    Raises:
        EngineError: ``engine-start`` with the log's last lines if it ended or was not ready in time.
    """
    arguments = [str(folder), "--device", device, "--port", str(port), "--max-rows", str(max_rows)]
    arguments += ["--until-stdin-closes"]
    for flag, value in (("--name", name), ("--max-context", max_context), ("--threads", threads)):
        arguments += [] if value is None else [flag, str(value)]
    arguments += [] if reasoning_split else ["--no-reasoning-split"]
    arguments += [] if prefix_cache else ["--no-prefix-cache"]
    command = [sys.executable, "-m", "manners.engines.embedded", *arguments]
    log = Path(log_path)
    log.parent.mkdir(parents=True, exist_ok=True)
    with start(command, log_path=log, timeout_s=start_timeout_s) as server:
        yield server


@contextlib.contextmanager
def start(command: list[str], *, log_path: Path, timeout_s: float) -> Iterator[ServerProcess]:
    """Run a command that prints a ready line; see :func:`embedded_server`."""
    with log_path.open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment()
        )
    try:
        ready = _wait_ready(process, log_path, timeout_s, command)
        yield ServerProcess(process, log_path, ready["url"], ready["model"])
    finally:
        _stop(process, 10.0)


def _wait_ready(
    process: subprocess.Popen[str], log_path: Path, timeout_s: float, command: list[str]
) -> dict[str, Any]:
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    # A thread, because a pipe cannot be read with a time limit; it goes on reading so that the
    # server never blocks on a full pipe.
    threading.Thread(target=_pass_lines, args=(process.stdout, lines), daemon=True).start()
    try:
        line = lines.get(timeout=timeout_s)
    except queue.Empty:
        raise _not_started(f"not ready after {timeout_s:g} s", log_path, command) from None
    try:
        ready = json.loads(line)
        if ready["ready"] is True and ready["url"] and ready["model"]:
            return dict(ready)
    except (ValueError, TypeError, KeyError):
        pass
    if not line:
        status = process.wait()
        raise _not_started(f"it ended with status {status} before it was ready", log_path, command)
    raise _not_started(f"its first line was {line.strip()!r}", log_path, command)


def _pass_lines(stream: IO[str], lines: queue.Queue[str]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            lines.put(line)
    lines.put("")


def _not_started(found: str, log_path: Path, command: list[str]) -> EngineError:
    return EngineError(
        "engine-start",
        where=" ".join(command[1:4]),
        found=f"{found}; its log ends:\n{_tail(log_path)}",
        fix=f"mend what the log says (all of it: {log_path})",
    )


def _stop(process: subprocess.Popen[str], wait_s: float) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"    (unreadable: {error})"
    return "\n".join(f"    {line}" for line in lines[-LOG_LINES:]) or "    (empty)"


def _environment() -> dict[str, str]:
    """This process's environment; the package that runs here is the one that is served."""
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
