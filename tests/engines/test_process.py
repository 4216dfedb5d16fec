"""Starting, watching and stopping: with scripts in the place of servers, so that each end can be arranged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manners.engines.process import embedded_server, start
from manners.errors import EngineError

READY = 'import sys, time; print(\'{"ready": true, "url": "http://x", "model": "m"}\', flush=True); '


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
        ).stdout.strip()[:1] in ("", "Z"):
            return True
        time.sleep(0.05)
    return False


def test_a_server_is_told_to_stop_at_the_end(tmp_path: Path) -> None:
    with start(python(READY + "time.sleep(60)"), log_path=tmp_path / "log", timeout_s=10) as server:
        assert (server.url, server.model) == ("http://x", "m")
        assert server.alive()
        server.check()
    assert not server.alive()


def test_a_server_that_will_not_stop_is_ended(tmp_path: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "time.sleep(60)"
    with start(python(stubborn), log_path=tmp_path / "log", timeout_s=10) as server:
        server.stop(wait_s=0.3)
        assert not server.alive()


def test_the_server_is_stopped_when_the_block_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        start(python(READY + "time.sleep(60)"), log_path=tmp_path / "log", timeout_s=10) as server,
    ):
        raise ZeroDivisionError
    assert not server.alive()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import sys; print('no weights here', file=sys.stderr); sys.exit(3)", "status 3"),
        ("import sys; print('no weights here', file=sys.stderr); print('hello')", "'hello'"),
        ("import sys; print('no weights here', file=sys.stderr); print('{}')", "'{}'"),
        (
            "import sys, time; print('no weights here', file=sys.stderr, flush=True); time.sleep(60)",
            "not ready after 0.5 s",
        ),
    ],
)
def test_a_server_that_does_not_start(tmp_path: Path, code: str, found: str) -> None:
    begun = time.monotonic()
    with (
        pytest.raises(EngineError) as caught,
        start(python(code), log_path=tmp_path / "log", timeout_s=0.5 if "sleep" in code else 20),
    ):
        raise AssertionError("the block must not run")
    assert caught.value.code == "engine-start"
    assert found in caught.value.found
    assert "no weights here" in caught.value.found
    assert time.monotonic() - begun < 15


def test_a_server_that_dies_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    code = READY + "print('out of memory', file=sys.stderr, flush=True); sys.exit(9)"
    with start(python(code), log_path=tmp_path / "log", timeout_s=10) as server:
        while server.alive():
            time.sleep(0.02)
        with pytest.raises(EngineError, match=r"engine-died(.|\n)*status 9(.|\n)*out of memory"):
            server.check()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError) as caught,
        embedded_server(tmp_path / "nowhere", log_path=tmp_path / "log"),
    ):
        raise AssertionError("the block must not run")
    assert caught.value.code == "engine-start"
    assert "nowhere" in caught.value.found
    assert "status 3" in caught.value.found
    assert "Traceback" not in caught.value.found


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGKILL of the starter"])
def test_the_real_server_goes_down_cleanly(tiny_parent: Path, tmp_path: Path, how: str) -> None:
    if how.startswith("SIGKILL"):
        code = (
            "import sys, time\nfrom manners.engines.process import embedded_server\n"
            f"with embedded_server({str(tiny_parent)!r}, log_path={str(tmp_path / 'log')!r}) as server:\n"
            "    print(server.pid, flush=True); time.sleep(60)"
        )
        starter = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
        assert starter.stdout is not None
        server_pid = int(starter.stdout.readline())
        starter.kill()
        starter.wait()
        starter.stdout.close()
        assert gone(server_pid)
    else:
        with embedded_server(tiny_parent, log_path=tmp_path / "log", threads=1) as server:
            os.kill(server.pid, getattr(signal, how))
            server._process.wait(10)
            assert server._process.returncode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert "stopping" in (tmp_path / "log").read_text()


def test_a_port_that_is_taken(tiny_parent: Path, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(EngineError, match=r"engine-start(.|\n)*port-in-use"),
            embedded_server(tiny_parent, log_path=tmp_path / "log", port=port),
        ):
            raise AssertionError("the block must not run")
