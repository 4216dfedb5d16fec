"""A real browser, driven by the DevTools protocol: what it shows, what it complains about, what it fetches.

About as little of the protocol as the tests need. Errors are counted where the browser itself
reports them: console calls, uncaught exceptions and the log (refused resources, policy breaches).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = next(
    filter(
        None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
    ),
    None,
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
_START_S, _ANSWER_S = 60, 30


@dataclass
class Seen:
    """One page, loaded once."""

    errors: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    """Every address asked for, the page's own among them."""
    values: dict[str, Any] = field(default_factory=dict)
    """Results of the expressions that were evaluated in the page, by name."""


def look(
    page: Path, expressions: dict[str, str], profile: Path, *, width: int = 1280, dark: bool = False
) -> Seen:
    """Open ``page`` from disk at a width, evaluate JavaScript expressions, and say what was seen."""
    return asyncio.run(_look(page, expressions, profile, width, dark))


async def _look(page: Path, expressions: dict[str, str], profile: Path, width: int, dark: bool) -> Seen:
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        address = await asyncio.wait_for(_address(profile / "DevToolsActivePort"), _START_S)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{address}/json/list") as reply:
                target = next(entry for entry in await reply.json() if entry["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                return await _Tab(socket).open(page, expressions, width, dark)
    finally:
        process.terminate()
        await process.wait()


async def _address(port_file: Path) -> str:
    """The browser writes the port that it chose into its profile."""
    while not (port_file.is_file() and port_file.read_text().strip()):
        await asyncio.sleep(0.05)
    return f"http://127.0.0.1:{port_file.read_text().split()[0]}"


class _Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._loaded = False
        self.seen = Seen()

    async def open(self, page: Path, expressions: dict[str, str], width: int, dark: bool) -> Seen:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable")
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        await self._call("Page.navigate", url=page.as_uri())
        while not self._loaded:
            await self._note(await self._receive())
        for name, expression in expressions.items():
            answer = await self._call("Runtime.evaluate", expression=expression, returnByValue=True)
            assert "exceptionDetails" not in answer, f"{name}: {answer['exceptionDetails']}"
            self.seen.values[name] = answer["result"].get("value")
        return self.seen

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._receive()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            await self._note(message)

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await self._socket.receive_str(timeout=_ANSWER_S))
        return message

    async def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "assert"):
                self.seen.errors.append(f"console: {parameters['args']}")
            case "Runtime.exceptionThrown":
                self.seen.errors.append(f"exception: {parameters['exceptionDetails']['text']}")
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.seen.errors.append(f"log: {parameters['entry']['text']}")
            case "Page.javascriptDialogOpening":
                self.seen.errors.append(f"dialog: {parameters['message']}")
                # Left open, it would hold the page; the answer to this needs no waiting for.
                close = {"id": next(self._ids), "method": "Page.handleJavaScriptDialog"}
                await self._socket.send_json({**close, "params": {"accept": True}})
            case "Network.requestWillBeSent":
                self.seen.fetched.append(parameters["request"]["url"])
