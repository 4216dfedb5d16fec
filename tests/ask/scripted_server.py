"""A chat server that does exactly what a test tells it to, in this process, on a free port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from manners.spec import Spec

Script = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]
DONE = b"data: [DONE]\n\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "web_search",
        "description": "Search the web",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}
NOTES = {
    "type": "function",
    "function": {"name": "read_notes", "description": "Read notes", "parameters": {"type": "object"}},
}


def make_spec(**changes: Any) -> Spec:
    persona = {"name": "Annie", "system_prompt": "You are Annie.", "tools": [TOOL, NOTES], "thinking": False}
    data: dict[str, Any] = {
        "schema": 1,
        "name": "test",
        "persona": persona | changes.pop("persona", {}),
        "gates": [{"name": "no_thinking_leak", "threshold": 0.9}],
        "asking": {"temperature": 0.0, "max_tokens": 32, "seed": 7},
    }
    return Spec.model_validate(data | changes)


def event(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text_events(text: str) -> list[bytes]:
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    return [event({"content": text[:3]}), event({"content": text[3:]}), event({}, "stop"), last, DONE]


def call_events(name: str, arguments: str, identity: str = "c1") -> list[bytes]:
    first = {
        "tool_calls": [{"index": 0, "id": identity, "function": {"name": name, "arguments": arguments[:4]}}]
    }
    second = {"tool_calls": [{"index": 0, "function": {"arguments": arguments[4:]}}]}
    return [event(first), event(second), event({}, "tool_calls"), DONE]


async def stream(request: web.Request, *actions: bytes | float | str) -> web.StreamResponse:
    """Send bytes, sleep for numbers, and at "cut" drop the connection in the middle of the answer."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for action in actions:
        if isinstance(action, bytes):
            await response.write(action)
        elif action == "cut":
            assert request.transport is not None
            request.transport.close()
            return response
        else:
            await asyncio.sleep(float(action))
    await response.write_eof()
    return response


def says(text: str) -> Script:
    async def script(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return await stream(request, *text_events(text))

    return script


@asynccontextmanager
async def scripted_server(
    script: Script, *, models: int = 200
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the address and the list of request bodies, which grows."""
    bodies: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        return await script(body, request)

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]}, status=models)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", list_models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield f"http://127.0.0.1:{port}", bodies
    finally:
        await runner.cleanup()
