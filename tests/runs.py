"""Small orders for the tests of the ladder and the command line, and an engine that is only played."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from aiohttp import web

from manners.conversations import Conversation, dump_conversations
from manners.ladder import Order
from manners.spec import Spec
from tests.ask.scripted_server import DONE, event, stream

TOOL = {
    "type": "function",
    "function": {
        "name": "web_search",
        "description": "Search the web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
# What a random model passes (it hardly ever says <think>), and what it cannot.
EASY: dict[str, Any] = {"name": "no_thinking_leak", "threshold": 0.0, "margin": 0.9}
HARD: dict[str, Any] = {"name": "right_tool", "threshold": 1.0, "margin": 0.02}
ENOUGH = 33  # probes; below 30 nothing can pass


def probe_data(count: int) -> list[dict[str, Any]]:
    """One conversation of three turns, a tool's among them, and greetings."""
    expect = {"tool": "web_search", "arguments": {"query": "weather"}}
    turns = [
        {"content": "How is the weather?", "expect": expect},
        {"role": "tool", "content": '{"weather": "rain"}'},
        {"content": "Thank you."},
    ]
    greetings = [
        {"id": f"hello-{n}", "category": "greeting", "turns": [{"content": f"Hello, number {n}!"}]}
        for n in range(count - 1)
    ]
    return [{"id": "weather", "category": "multi_turn", "turns": turns}, *greetings]


def spec_data(*gates: dict[str, Any], count: int = ENOUGH, max_tokens: int = 4) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": "tiny",
        "persona": {"name": "Annie", "system_prompt": "You are Annie.", "tools": [TOOL]},
        "gates": list(gates or (EASY,)),
        "asking": {"max_tokens": max_tokens},
        "probes": probe_data(count),
    }


def conversations(count: int = 3) -> tuple[Conversation, ...]:
    return tuple(
        Conversation(
            id=f"c{n}",
            messages=(
                {"role": "system", "content": "You are Annie."},
                {"role": "user", "content": f"Hello, number {n}!"},
                {"role": "assistant", "content": "Good morning! I am glad that you are back home."},
            ),
        )
        for n in range(count)
    )


def make_order(parent: Path, *gates: dict[str, Any], **changes: Any) -> Order:
    spec = Spec.model_validate(spec_data(*gates, count=changes.pop("count", ENOUGH)))
    fields: dict[str, Any] = {
        "spec": spec,
        "probes": spec.probes,
        "parent": parent,
        "conversations": conversations(),
    }
    return Order(**fields | changes)


def write_inputs(folder: Path, spec: dict[str, Any]) -> list[str]:
    """spec.yaml and data.jsonl, and the options that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")
    (folder / "data.jsonl").write_text(dump_conversations(conversations()), encoding="utf-8")
    return ["--spec", str(folder / "spec.yaml"), "--data", str(folder / "data.jsonl")]


def tree(folder: Path) -> dict[str, str]:
    """Every path below a folder, hidden ones too, with the sha256 of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


# --- an engine that is only played -----------------------------------------------------------

Answer = Callable[[str, str], str | int]
"""(model, the user's last words) -> what it says, or the HTTP status that it fails with."""


class PlayedEngine:
    """In the place of ``embedded_server``: real HTTP, but the replies come from a function."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.started: list[str] = []
        self.requests: list[tuple[str, str]] = []
        """(model, the user's last words), one for every reply that was asked for."""
        self.prompt_tokens: dict[str, int] = {}
        self.held: set[str] = set()
        """Words to which no answer comes."""

    @contextmanager
    def __call__(self, folder: Path, *, name: str, **options: Any) -> Iterator[Any]:
        assert (folder / "config.json").is_file()
        self.started.append(name)
        loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
        address: list[str] = []

        async def serve() -> None:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self._chat)
            app.router.add_get("/v1/models", self._models)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
            ready.set()
            await stop.wait()
            await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        ready.wait(10)
        try:
            yield SimpleNamespace(url=address[0], check=lambda: None)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        words = next(m["content"] for m in reversed(body["messages"]) if m["role"] == "user")
        self.requests.append((body["model"], words))
        if words in self.held:
            await asyncio.sleep(60)
        said = self.answer(body["model"], words)
        if isinstance(said, int):
            return web.json_response({"error": {"message": "played"}}, status=said)
        usage = {"prompt_tokens": self.prompt_tokens.get(body["model"], 11), "completion_tokens": 3}
        last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        return await stream(request, event({"content": said}), event({}, "stop"), last, DONE)
