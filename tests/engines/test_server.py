"""The server as a client meets it: a subprocess, HTTP, and a tiny model that says nothing sensible."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from manners.chat import Renderer
from manners.engines.process import ServerProcess, embedded_server
from manners.quantize import quantize
from tests.tiny import sample_ids

SYSTEM = "You are Annie, a warm voice companion. Be concise. Never use markdown. " * 3
TOOLS = [{"type": "function", "function": {"name": "web_search", "description": "Search.", "parameters": {}}}]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def server(tiny_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with embedded_server(
        tiny_parent, log_path=log, name="tiny", max_context=1024, max_rows=16, threads=1
    ) as running:
        yield running
        running.check()
    assert "Traceback" not in log.read_text(), "a request left a crash in the log"


def body(question: str = "Hello", **fields: Any) -> Json:
    return {
        "model": "tiny",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 16,
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }


def post(server: ServerProcess, data: Json | bytes, path: str = "/v1/chat/completions") -> tuple[int, Json]:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return fetch(urllib.request.Request(server.url + path, raw, {"Content-Type": "application/json"}))


def fetch(request: urllib.request.Request | str) -> tuple[int, Json]:
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def stream(server: ServerProcess, data: Json) -> list[str]:
    """The payloads of all events, in order."""
    raw = json.dumps({**data, "stream": True}).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", raw)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        blocks = response.read().decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def test_a_whole_answer(server: ServerProcess, tiny_parent: Path) -> None:
    status, answer = post(server, body())
    assert status == 200
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    prompt = Renderer.from_folder(tiny_parent).prompt_ids(body()["messages"])
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    if choice["finish_reason"] == "length":
        assert usage["completion_tokens"] == 16


def test_a_stream_says_the_same_in_the_right_order(server: ServerProcess) -> None:
    *events, done = stream(server, body(stream_options={"include_usage": True}))
    assert done == "[DONE]"
    first, *middle, last, usage = [json.loads(event) for event in events]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert all(chunk["usage"] is None for chunk in [first, *middle, last])
    assert usage["choices"] == []
    assert {chunk["id"] for chunk in [first, *middle, last, usage]} == {first["id"]}
    _, whole = post(server, body())
    assert (
        "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
        == whole["choices"][0]["message"]["content"]
    )
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert usage["usage"] == whole["usage"]


def test_usage_comes_only_when_asked_for(server: ServerProcess) -> None:
    events = stream(server, body())
    assert events[-1] == "[DONE]"
    assert not any("usage" in json.loads(event) for event in events[:-1])


def test_thinking_goes_to_its_own_field(server: ServerProcess) -> None:
    _, whole = post(server, body(chat_template_kwargs={"enable_thinking": True}))
    message, usage = whole["choices"][0]["message"], whole["usage"]
    # Random weights never close the tag, so all 16 tokens are thoughts.
    assert message["reasoning_content"]
    assert message["content"] == ""
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 16
    chunks = [json.loads(event) for event in stream(server, body(chat_template_kwargs={}))[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]]
    assert deltas
    assert all(set(delta) == {"reasoning_content"} for delta in deltas)
    assert "".join(delta["reasoning_content"] for delta in deltas).strip() == message["reasoning_content"]


def test_stop_strings_end_the_reply(server: ServerProcess) -> None:
    _, whole = post(server, body())
    text = whole["choices"][0]["message"]["content"]
    stop = text[3:6]
    _, cut = post(server, body(stop=[stop]))
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["message"]["content"] == text[: text.index(stop)].rstrip()
    assert cut["usage"]["completion_tokens"] < 16


def test_seeds_repeat_sampled_replies(server: ServerProcess) -> None:
    texts = [
        post(server, body(temperature=1.0, top_p=0.9, seed=seed))[1]["choices"][0]["message"]["content"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_tools_change_the_prompt_and_none_only_the_parsing(server: ServerProcess) -> None:
    tokens = [
        post(server, body(**fields))[1]["usage"]["prompt_tokens"]
        for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []})
    ]
    assert tokens[0] == tokens[3] < tokens[1] == tokens[2]


def test_a_conversation_with_a_tool_call_in_it(server: ServerProcess) -> None:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "web_search", "arguments": '{"query": "rain"}'},
    }
    messages = [
        *body()["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "It rains."},
    ]
    assert post(server, body(messages=messages, tools=TOOLS))[0] == 200
    call["function"] = {"name": "web_search", "arguments": '{"query": '}
    status, answer = post(server, body(messages=messages, tools=TOOLS))
    assert (status, answer["error"]["code"]) == (400, "bad-arguments")


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"{no json", "malformed_json", "no JSON"),
        (b"\xff\xfe", "malformed_json", "no JSON"),
        (b"[" * 100_000, "malformed_json", "no JSON"),
        ({"model": "tiny"}, "missing_required_parameter", "messages is missing"),
        (body(model="gpt"), "model_not_found", "'tiny'"),
        (body(n=2), "unsupported_value", "n = 2"),
        (body(tools=TOOLS, tool_choice="required"), "unsupported_value", "required"),
        (body("word " * 2000), "context_length_exceeded", "1024"),
        (body(messages=[{"role": "system", "content": "x"}]), "template-refused", "No user query"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "surrogate"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_requests(server: ServerProcess, data: Any, code: str | None, words: str) -> None:
    status, answer = post(server, data)
    assert status == 400
    assert answer["error"]["code"] == code
    assert answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"]


def test_the_context_ends_a_reply(server: ServerProcess) -> None:
    def prompt_tokens(question: str) -> int:
        tokens: int = post(server, body(question, max_tokens=1))[1]["usage"]["prompt_tokens"]
        return tokens

    words = 300
    while prompt_tokens("day " * words) < 1010:
        words += 4
    for max_tokens in (None, 500):
        _, answer = post(server, body("day " * words, max_tokens=max_tokens))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 1024


def test_routes(server: ServerProcess) -> None:
    status, models = fetch(server.url + "/v1/models")
    assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "tiny", 1024)
    status, health = fetch(server.url + "/health")
    assert (status, health["status"]) == (200, "ok")
    assert health["independent_rows"]
    status, answer = fetch(server.url + "/v1/embeddings")
    assert (status, answer["error"]["code"]) == (404, "unknown_route")
    status, answer = fetch(server.url + "/v1/chat/completions")
    assert (status, answer["error"]["code"]) == (405, "wrong_method")


def crowd(server: ServerProcess, asked: list[Json]) -> list[Json]:
    """All requests at once; their choices."""

    async def all_at_once() -> list[Json]:
        async with aiohttp.ClientSession() as session:

            async def one(data: Json) -> Json:
                async with session.post(server.url + "/v1/chat/completions", json=data) as response:
                    assert response.status == 200
                    answer: Json = await response.json()
                    return answer

            return await asyncio.gather(*map(one, asked))

    return [answer["choices"][0] for answer in asyncio.run(all_at_once())]


QUESTIONS = [
    f"{word} " * length for length, word in enumerate(["rain", "garden", "two", "Paris"] * 8, start=1)
]


def test_a_crowd_gets_the_same_texts_as_one_by_one(server: ServerProcess) -> None:
    sampled = {"temperature": 1.2, "seed": 4}
    asked = [body(question, **(sampled if i % 3 == 0 else {})) for i, question in enumerate(QUESTIONS)]
    together = crowd(server, asked)
    alone = [post(server, data)[1]["choices"][0] for data in asked]
    assert together == alone
    assert len({choice["message"]["content"] for choice in alone}) >= 5


def test_a_rounded_checkpoint_is_served_the_same_way(tiny_parent: Path, tmp_path: Path) -> None:
    """W4A4: here a last bit that depends on the neighbours would grow into another text."""
    made = quantize(tiny_parent, tmp_path / "max", rung="max", calibration=sample_ids(rows=4))
    with embedded_server(made.checkpoint, log_path=tmp_path / "log", max_rows=16, threads=1) as rounded:
        assert rounded.model == "max"
        asked = [body(question, model="max", max_tokens=40) for question in QUESTIONS]
        together = crowd(rounded, asked)
        alone = [post(rounded, data)[1]["choices"][0] for data in asked]
    assert together == alone


def test_without_the_prefix_cache_and_the_split_texts_are_the_same(
    server: ServerProcess, tiny_parent: Path, tmp_path: Path
) -> None:
    questions = [body("Hello"), body("What is two plus three?"), body(chat_template_kwargs={})]
    with embedded_server(
        tiny_parent, log_path=tmp_path / "log", prefix_cache=False, reasoning_split=False, threads=1
    ) as plain:
        assert plain.model == tiny_parent.name
        others = [
            post(plain, {**data, "model": plain.model})[1]["choices"][0]["message"] for data in questions
        ]
    ours = [post(server, data)[1]["choices"][0]["message"] for data in questions]
    assert others[:2] == ours[:2]
    # Without the split the thoughts stand in the content.
    assert "reasoning_content" not in others[2]
    assert others[2]["content"] == ours[2]["reasoning_content"]
