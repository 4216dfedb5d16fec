"""What stands on the wire for replies that a random model would never give: a runner that recites.

The app is the real one, with the real tokenizer and parser; only the numbers are scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from torch import Tensor

from manners.chat import Renderer
from manners.engines.embedded.sampling import Sampling
from manners.engines.embedded.server import Facts, build_app, make_web_runner
from manners.engines.embedded.service import Service
from tests.tiny import VOCABULARY, chat_template, make_tokenizer

CALL = (
    "<tool_call>\n<function=web_search>\n<parameter=query>\nrain in Köln\n"
    "</parameter>\n</function>\n</tool_call>"
)
TOOLS = [{"type": "function", "function": {"name": "web_search", "parameters": {"type": "object"}}}]
FACTS = Facts("0", "cpu", 0, independent_rows=True, prefix_cache=True, reasoning_split=True)
Json = dict[str, Any]


def renderer() -> Renderer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template()
    return Renderer(tokenizer)


class Reciter:
    """Answers every prompt with the script, then ends the turn. A None in the script is a failure."""

    def __init__(self, script: list[int | None], step_s: float = 0.0) -> None:
        self.script = script
        self.step_s = step_s
        self.slots = self
        self.at: list[int] = []

    def _say(self, place: int) -> Tensor:
        token = self.script[place] if place < len(self.script) else 2
        if token is None:
            raise RuntimeError("the model broke")
        return torch.nn.functional.one_hot(torch.tensor(token), VOCABULARY).float()

    def prefill(self, ids: Sequence[int]) -> tuple[Any, Tensor]:
        return None, self._say(0)

    def admit(self, cache: Any, length: int) -> int:
        self.at.append(0)
        return len(self.at) - 1

    def step(self, tokens: Sequence[int]) -> Tensor:
        time.sleep(self.step_s)
        self.at = [place + 1 for place in self.at]
        return torch.stack([self._say(place) for place in self.at])

    def remove(self, row: int) -> int:
        last = len(self.at) - 1
        self.at[row] = self.at[last]
        self.at.pop()
        return last

    def clear(self) -> None:
        self.at.clear()


def make_service(reciter: Reciter, split_reasoning: bool = True) -> Service:
    return Service(
        name="m",
        renderer=renderer(),
        runner=reciter,
        max_rows=8,
        max_context=2048,
        split_reasoning=split_reasoning,
        defaults=Sampling(),
    )


def recite(
    script: str | list[int | None],
    use: Callable[[TestClient[Any, Any]], Awaitable[Any]],
    *,
    split_reasoning: bool = True,
) -> Any:
    """Run ``use`` against a server that answers with the script."""
    reciter = Reciter(list(renderer().encode(script)) if isinstance(script, str) else script)

    async def session() -> Any:
        service = make_service(reciter, split_reasoning)
        service.scheduler.start()
        try:
            async with TestClient(TestServer(build_app(service, FACTS))) as client:
                return await use(client)
        finally:
            service.scheduler.stop()

    return asyncio.run(session())


def asking(**fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 500, **fields}


async def _whole(client: TestClient[Any, Any], **fields: Any) -> tuple[int, Json]:
    async with client.post("/v1/chat/completions", json=asking(**fields)) as response:
        return response.status, await response.json()


async def _stream(client: TestClient[Any, Any], **fields: Any) -> tuple[int, list[str]]:
    async with client.post("/v1/chat/completions", json=asking(stream=True, **fields)) as response:
        text = await response.text()
        return response.status, [block.removeprefix("data: ") for block in text.split("\n\n") if block]


def choice(script: str, *, split_reasoning: bool = True, **fields: Any) -> Json:
    status, answer = recite(script, lambda client: _whole(client, **fields), split_reasoning=split_reasoning)
    assert status == 200
    found: Json = answer["choices"][0]
    return found


def deltas(script: str, **fields: Any) -> list[Json]:
    status, events = recite(script, lambda client: _stream(client, **fields))
    assert status == 200
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def test_a_tool_call_whole() -> None:
    found = choice(CALL, tools=TOOLS, **OFF)
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["content"] is None
    (call,) = found["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "web_search")
    assert json.loads(call["function"]["arguments"]) == {"query": "rain in Köln"}
    assert call["id"].startswith("call_")


def test_two_tool_calls_streamed() -> None:
    role, text, *calls, last = deltas("Wait." + CALL + "\n" + CALL, tools=TOOLS, **OFF)
    assert role["delta"]["role"] == "assistant"
    said = [text, *(c for c in calls if "content" in c["delta"])]
    assert "".join(c["delta"]["content"] for c in said) == "Wait."
    parts = [c["delta"]["tool_calls"][0] for c in calls if "tool_calls" in c["delta"]]
    assert [part["index"] for part in parts] == [0, 1]
    assert len({part["id"] for part in parts}) == 2
    assert all(isinstance(part["function"]["arguments"], str) for part in parts)
    assert all(json.loads(part["function"]["arguments"]) == {"query": "rain in Köln"} for part in parts)
    assert last["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_markup_that_nobody_asked_for_stays_text(fields: Json) -> None:
    found = choice(CALL, **fields, **OFF)
    assert found["finish_reason"] == "stop"
    assert found["message"]["content"] == CALL
    assert "tool_calls" not in found["message"]


def test_reasoning_then_content() -> None:
    script = "The user greets.\n</think>\n\nHello Köln 🤝"
    found = choice(script)
    assert found["message"] == {
        "role": "assistant",
        "content": "Hello Köln 🤝",
        "reasoning_content": "The user greets.",
    }
    _, *steps, last = deltas(script)
    kinds = [next(iter(step["delta"])) for step in steps]
    assert kinds == sorted(kinds, reverse=True)  # reasoning_content first, then content
    assert "".join(step["delta"].get("content", "") for step in steps) == "Hello Köln 🤝"
    assert last["finish_reason"] == "stop"


def test_a_server_that_does_not_split() -> None:
    found = choice("Hmm.\n</think>\n\nHello", split_reasoning=False)
    assert found["message"] == {"role": "assistant", "content": "Hmm.\n</think>\n\nHello"}


def test_a_leak_with_thinking_off_stays_where_a_gate_sees_it() -> None:
    found = choice("<think>\nHmm.\n</think>\n\nHello", **OFF)
    assert found["message"]["content"] == "<think>\nHmm.\n</think>\n\nHello"


def test_usage_counts_the_end_of_turn_and_the_thoughts() -> None:
    script = "Hmm.\n</think>\n\nHello"
    tokens, thoughts = len(renderer().encode(script)), len(renderer().encode("Hmm.\n"))
    _, answer = recite(script, _whole)
    assert answer["usage"]["completion_tokens"] == tokens + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thoughts}


def test_a_reply_that_is_cut_short() -> None:
    found = choice("one two three four five", max_tokens=2, **OFF)
    assert found["finish_reason"] == "length"


@pytest.mark.parametrize("ask", [_whole, _stream])
def test_a_prompt_that_breaks_the_model_is_a_500_and_the_server_lives_on(ask: Any) -> None:
    async def use(client: TestClient[Any, Any]) -> tuple[Any, Any, Any]:
        broken = await ask(client)
        async with client.get("/health") as response:
            return *broken, await response.json()

    status, answer, health = recite([None], use)
    error = (json.loads(answer[0]) if isinstance(answer, list) else answer)["error"]
    assert status == 500
    assert error["type"] == "server_error"
    assert "the model broke" in error["message"]
    assert (health["status"], health["running"]) == ("ok", 0)


def test_a_stream_that_breaks_says_so_and_is_never_done() -> None:
    ids: list[int | None] = [*renderer().encode("Hello"), None]
    status, events = recite(ids, lambda client: _stream(client, **OFF))
    assert status == 200
    assert "the model broke" in json.loads(events[-1])["error"]["message"]
    assert len(events) > 1
    assert "[DONE]" not in events


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(stream: bool) -> None:
    """1500 tokens at 10 ms each would take 15 s; the row must be free long before."""
    reciter = Reciter([7] * 2000, step_s=0.01)

    async def leave() -> None:
        service = make_service(reciter)
        service.scheduler.start()
        runner = make_web_runner(build_app(service, FACTS))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
        try:
            async with aiohttp.ClientSession() as session:
                body = asking(stream=stream, max_tokens=1500)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.4), session.post(url, json=body) as response:
                        assert stream, "a whole answer cannot be there so soon"
                        await response.content.readany()
                        await asyncio.sleep(1)
                await wait_until(lambda: service.scheduler.load() == (0, 0), 3)
                assert not reciter.at
        finally:
            await runner.cleanup()
            service.scheduler.stop()

    asyncio.run(leave())


async def wait_until(true: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.01)


def test_one_bug_in_a_handler_is_one_500(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = Service.accept
    calls = 0

    def sometimes(self: Service, request: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyError("a bug")
        return accept(self, request)

    monkeypatch.setattr(Service, "accept", sometimes)

    async def use(client: TestClient[Any, Any]) -> tuple[int, Json, int]:
        status, answer = await _whole(client)
        return status, answer, (await _whole(client))[0]

    status, answer, later = recite("Hello", use)
    assert (status, answer["error"]["code"], later) == (500, "internal_error", 200)


def test_a_body_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manners.engines.embedded.server.MAX_BODY_BYTES", 1000)
    status, answer = recite("Hello", lambda client: _whole(client, user="x" * 2000))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
