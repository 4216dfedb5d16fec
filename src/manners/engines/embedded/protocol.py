"""What a chat request may say, and what a refusal looks like. Pure functions over decoded JSON.

Fields that change nothing here (``user``, ``metadata``, ``store``, unknown ones) are let through,
as other servers do. Fields that would change the answer and are not supported are refused, because
a field that is silently ignored is a wrong measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .sampling import Sampling

Json = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
# Value that means "off", for fields that are accepted only if they ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "functions": (None, []),
    "function_call": (None, "none"),
    "audio": (None,),
    "prediction": (None,),
}


class BadRequestError(ValueError):
    """A request that is answered with an error of status ``status`` in OpenAI's form."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind="invalid_request_error", param=param, code=code)


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class ChatRequest:
    messages: list[Json]
    tools: list[Json]
    """Offered in the prompt."""
    parse_tools: bool
    """False for tool_choice "none": a call that the model writes all the same stays text."""
    thinking: bool
    sampling: Sampling
    max_tokens: int | None
    """None: up to the end of the context."""
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


def parse_request(body: Any, *, model: str, defaults: Sampling) -> ChatRequest:
    """Check a request and read it.

    Args:
        body: decoded JSON.
        model: the name served; another one is refused, a missing one is not.
        defaults: sampling for requests that say nothing about it.

    Raises:
        BadRequestError: names the field and what was found.
    """
    if not isinstance(body, dict):
        raise BadRequestError(f"the body must be a JSON object, found {_kind(body)}")
    asked = _field(body, "model", str, None)
    if asked is not None and asked != model:
        raise BadRequestError(
            f"model {asked!r} is not served here; it is {model!r}", param="model", code="model_not_found"
        )
    for name, off in _UNSUPPORTED.items():
        if body.get(name) not in off:
            raise BadRequestError(
                f"{name} = {body[name]!r} is not supported", param=name, code="unsupported_value"
            )
    stream = _field(body, "stream", bool, False)
    tools = _tools(body.get("tools"))
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=tools,
        parse_tools=_tool_choice(body.get("tool_choice"), tools),
        thinking=_thinking(body.get("chat_template_kwargs")),
        sampling=_sampling(body, defaults),
        max_tokens=_max_tokens(body),
        stops=_stops(body.get("stop")),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream),
    )


def _messages(value: Any) -> list[Json]:
    if value is None:
        raise BadRequestError("messages is missing", param="messages", code="missing_required_parameter")
    if not isinstance(value, list) or not value:
        raise BadRequestError(
            f"messages must be a list of at least one message, found {_kind(value)}", param="messages"
        )
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(message: Any, where: str) -> Json:
    if not isinstance(message, dict):
        raise BadRequestError(f"{where} must be an object, found {_kind(message)}", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise BadRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, found {role!r}", param=f"{where}.role"
        )
    read: Json = {"role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise BadRequestError(
            f"{where}.tool_calls belongs to an assistant message", param=f"{where}.tool_calls"
        )
    if calls:
        read["tool_calls"] = _history_calls(calls, f"{where}.tool_calls")
    content = message.get("content")
    if content is None and role != "assistant":
        raise BadRequestError(f"{where}.content is missing", param=f"{where}.content")
    read["content"] = "" if content is None else _text(content, f"{where}.content")
    for name in ("reasoning_content", "tool_call_id", "name"):
        if message.get(name) is not None:
            read[name] = _field(message, name, str, None, where=f"{where}.{name}")
    return read


def _text(content: Any, where: str) -> str:
    """A string, or OpenAI's list of parts, of which only text can be read here."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(
            f"{where} must be a string or a list of parts, found {_kind(content)}", param=where
        )
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = part.get("type") if isinstance(part, dict) else _kind(part)
            raise BadRequestError(f"{where}[{i}] must be a text part, found {found!r}", param=f"{where}[{i}]")
        texts.append(part["text"])
    return "".join(texts)


def _history_calls(calls: Any, where: str) -> list[Json]:
    if not isinstance(calls, list):
        raise BadRequestError(f"{where} must be a list, found {_kind(calls)}", param=where)
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise BadRequestError(
                f"{where}[{i}].function.name must be a string that is not empty", param=f"{where}[{i}]"
            )
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str | dict):
            place = f"{where}[{i}].function.arguments"
            raise BadRequestError(
                f"{place} must be a JSON object in a string, found {_kind(arguments)}", param=place
            )
        read.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return read


def _tools(value: Any) -> list[Json]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequestError(f"tools must be a list, found {_kind(value)}", param="tools")
    names: set[str] = set()
    for i, tool in enumerate(value):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise BadRequestError(f'{where} must be an object of type "function"', param=where)
        function = tool.get("function")
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise BadRequestError(
                f"{where}.function.name must be a string that is not empty", param=f"{where}.function.name"
            )
        for name, kind in (("description", str), ("parameters", dict)):
            _field(function, name, kind, None, where=f"{where}.function.{name}")
        if function["name"] in names:
            raise BadRequestError(f"{where}: tool {function['name']!r} is offered twice", param=where)
        names.add(function["name"])
    return value


def _tool_choice(value: Any, tools: list[Json]) -> bool:
    if value is None or value == "auto":
        if value and not tools:
            raise BadRequestError('tool_choice "auto" needs tools', param="tool_choice")
        return bool(tools)
    if value == "none":
        return False
    if value == "required" or isinstance(value, dict):
        named = "a named tool" if isinstance(value, dict) else '"required"'
        raise BadRequestError(
            f'tool_choice {named} is not supported: nothing here constrains the model; use "auto" or "none"',
            param="tool_choice",
            code="unsupported_value",
        )
    raise BadRequestError(f'tool_choice must be "auto" or "none", found {value!r}', param="tool_choice")


def _thinking(value: Any) -> bool:
    """On unless switched off, as in the Qwen3.5 template."""
    if value is None:
        return True
    if not isinstance(value, dict):
        raise BadRequestError(
            f"chat_template_kwargs must be an object, found {_kind(value)}", param="chat_template_kwargs"
        )
    if unknown := sorted(set(value) - {"enable_thinking"}):
        raise BadRequestError(
            f"chat_template_kwargs.{unknown[0]} is not supported; only enable_thinking is",
            param=f"chat_template_kwargs.{unknown[0]}",
            code="unsupported_value",
        )
    return bool(_field(value, "enable_thinking", bool, True, where="chat_template_kwargs.enable_thinking"))


def _sampling(body: Mapping[str, Any], defaults: Sampling) -> Sampling:
    top_k = _number(body, "top_k", int, -1, None, defaults.top_k)
    top_p = _number(body, "top_p", float, 0, 1, defaults.top_p)
    if top_p == 0:
        raise BadRequestError("top_p must be above 0 and at most 1, found 0", param="top_p")
    seed = _field(body, "seed", int, None)
    return Sampling(
        temperature=float(_number(body, "temperature", float, 0, 2, defaults.temperature)),
        top_p=float(top_p),
        top_k=max(int(top_k), 0),
        seed=None if seed is None else seed % (1 << 63),
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    """The newer name wins where both are given."""
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = _number(body, name, int, 1, None, None)
        if value is not None:
            return value
    return None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequestError(
            "stop must be a string that is not empty, or a list of such strings", param="stop"
        )
    return tuple(stops)


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise BadRequestError("stream_options is allowed only with stream = true", param="stream_options")
    if not isinstance(value, dict):
        raise BadRequestError(
            f"stream_options must be an object, found {_kind(value)}", param="stream_options"
        )
    return bool(_field(value, "include_usage", bool, False, where="stream_options.include_usage"))


def _field(body: Mapping[str, Any], name: str, kind: type, default: Any, where: str | None = None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    # In Python a bool is an int; in JSON it is not.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        where = where or name
        raise BadRequestError(f"{where} must be {_NAMES[kind]}, found {_kind(value)}", param=where)
    return value


def _number(
    body: Mapping[str, Any], name: str, kind: type, low: float, high: float | None, default: Any
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    right_kind = isinstance(value, int | float) if kind is float else isinstance(value, int)
    if isinstance(value, bool) or not right_kind:
        raise BadRequestError(f"{name} must be {_NAMES[kind]}, found {_kind(value)}", param=name)
    # Written so that NaN, which Python's JSON reader lets in, is refused as well.
    if not (value >= low and (high is None or value <= high)):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise BadRequestError(f"{name} must be {limits}, found {value!r}", param=name)
    return value


_NAMES = {str: "a string", bool: "true or false", int: "an integer", float: "a number", dict: "an object"}


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return names.get(type(value), "an object")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
