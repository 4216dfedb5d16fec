"""Requests are read as OpenAI's clients mean them; each refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manners.engines.embedded.protocol import BadRequestError, parse_request
from manners.engines.embedded.sampling import Sampling

DEFAULTS = Sampling(temperature=0.7, top_p=0.9, top_k=20)
TOOL = {"type": "function", "function": {"name": "web_search", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "Hello"}]


def parse(**body: Any) -> Any:
    return parse_request({"messages": HELLO, **body}, model="m", defaults=DEFAULTS)


def test_a_bare_request() -> None:
    request = parse()
    assert request.messages == HELLO
    assert request.sampling == DEFAULTS
    assert request.thinking
    assert request.max_tokens is None
    said = (request.stream, request.tools, request.parse_tools, request.include_usage, request.stops)
    assert not any(said)


def test_everything_said_is_read() -> None:
    request = parse(
        model="m",
        stream=True,
        stream_options={"include_usage": True},
        tools=[TOOL],
        tool_choice="auto",
        chat_template_kwargs={"enable_thinking": False},
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=-1,
        max_tokens=5,
        max_completion_tokens=7,
        stop=["a", "b"],
        user="someone",
        unknown_field=1,
        n=1,
        response_format={"type": "text"},
    )
    assert request.sampling == Sampling(0.0, 0.5, 3, (1 << 63) - 1)
    assert (request.max_tokens, request.stops, request.thinking) == (7, ("a", "b"), False)
    assert request.stream
    assert request.include_usage
    assert request.parse_tools
    assert request.tools == [TOOL]


def test_tool_choice_none_keeps_the_prompt_and_parses_nothing() -> None:
    request = parse(tools=[TOOL], tool_choice="none")
    assert request.tools == [TOOL]
    assert not request.parse_tools


def test_history_of_a_tool_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "web_search", "arguments": '{"q": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look "}, {"type": "text", "text": "it up"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    read = parse(messages=messages).messages
    assert [message["role"] for message in read] == ["system", "user", "assistant", "tool"]
    assert read[1]["content"] == "Look it up"
    assert read[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "web_search", "arguments": '{"q": 1}'}}],
    }


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


REFUSED: list[tuple[Any, str, str]] = [
    ([], "body", "a JSON object"),
    ({"model": "m"}, "messages", "missing"),
    ({"messages": []}, "messages", "empty list"),
    ({"messages": "hi"}, "messages", "a string"),
    ({"messages": ["hi"]}, "messages[0]", "a string"),
    (message(role="wizard"), "messages[0].role", "wizard"),
    (message(role=["user"]), "messages[0].role", "user"),
    (message(role=None), "messages[0].role", "None"),
    (message(content=None), "messages[0].content", "missing"),
    (message(content=5), "messages[0].content", "an integer"),
    (message(content=[{"type": "image_url"}]), "messages[0].content[0]", "image_url"),
    (message(tool_calls=[{}]), "messages[0].tool_calls", "assistant"),
    (message(role="assistant", tool_calls="x"), "messages[0].tool_calls", "a string"),
    (message(role="assistant", tool_calls=[{"function": {}}]), "messages[0].tool_calls[0]", "name"),
    (
        message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": 3}}]),
        "arguments",
        "an integer",
    ),
    (message(name=5), "messages[0].name", "an integer"),
    ({"model": "other"}, "model", "'other'"),
    ({"model": 5}, "model", "an integer"),
    ({"n": 2}, "n", "2"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ({"presence_penalty": 0.5}, "presence_penalty", "0.5"),
    ({"stream": "yes"}, "stream", "a string"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
    ({"stream": True, "stream_options": []}, "stream_options", "an empty list"),
    ({"tools": {}}, "tools", "an object"),
    ({"tools": ["web_search"]}, "tools[0]", "function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name", "string"),
    ({"tools": [{"type": "function", "function": {"name": " "}}]}, "tools[0].function.name", "not empty"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "parameters",
        "an empty list",
    ),
    ({"tools": [TOOL, TOOL]}, "tools[1]", "twice"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "not supported"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "not supported"),
    ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice", "perhaps"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"chat_template_kwargs": True}, "chat_template_kwargs", "a boolean"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "enable_thinking", "a string"),
    ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood", "not supported"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": float("nan")}, "temperature", "nan"),
    ({"temperature": "hot"}, "temperature", "a string"),
    ({"temperature": True}, "temperature", "a boolean"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.1}, "top_p", "1.1"),
    ({"top_k": 1.5}, "top_k", "a number"),
    ({"seed": True}, "seed", "a boolean"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": "5"}, "max_tokens", "a string"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
    ({"stop": ""}, "stop", "not empty"),
    ({"stop": ["a", 1]}, "stop", "list of such strings"),
]


@pytest.mark.parametrize(("body", "field", "found"), REFUSED, ids=[f"{f}-{w}" for _, f, w in REFUSED])
def test_refusals_name_the_field_and_what_was_found(body: Any, field: str, found: str) -> None:
    if isinstance(body, dict) and "messages" not in body and body != {"model": "m"}:
        body = {"messages": HELLO, **body}
    with pytest.raises(BadRequestError) as caught:
        parse_request(body, model="m", defaults=DEFAULTS)
    error = caught.value.body["error"]
    assert field in error["message"]
    assert found in error["message"]
    assert caught.value.status == 400
    assert set(error) == {"message", "type", "param", "code"}
    json.dumps(caught.value.body)
