"""What a reply means: reasoning, content and tool calls (Qwen3-coder XML, Hermes JSON).

With thinking off nothing counts as reasoning: a leaked ``<think>`` stays in the content, where the
gate can see it.

Blind spots: parsing follows vLLM's ``qwen3`` and ``qwen3_coder`` parsers in outcome, not in every
malformed case. Markup that is no well-formed call is left in the content, where vLLM may repair it
or drop it; a call inside thinking that was never closed counts as reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    raw: str
    """The markup as the model wrote it."""

    def arguments_json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Reply:
    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Delta:
    """One step of a streamed reply. ``tool_call`` is set only for kind ``tool_call``."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str
    tool_call: ToolCall | None = None


class ReplyParser:
    """Incremental parser: pieces of text in, deltas out; nothing is held longer than a tag needs.

    Args:
        thinking: text up to ``</think>`` is reasoning. Where the template left it to the model to open
            its thinking (Qwen3), the ``<think>`` at the start of the reply is dropped.
        split_reasoning: if false, reasoning stays in the content with its tags (a server without
            a reasoning parser).
        tools: the tools that were offered; their schemas turn XML parameter text into JSON types.
            None or empty: tool markup is ordinary content.
    """

    def __init__(
        self,
        *,
        thinking: bool,
        split_reasoning: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._tools = list(tools or ())
        self._state: Literal["opening", "reasoning", "content", "call"] = (
            "opening" if thinking and split_reasoning else "content"
        )
        self._buffer = ""
        # Whitespace before a call or at a turn's end is formatting, not content.
        self._space = ""
        self._said = False

    def feed(self, piece: str) -> list[Delta]:
        self._buffer += piece
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """Flush what was held back; an unfinished call is content, for it called nothing."""
        deltas = self.feed("")
        rest, self._buffer = self._buffer, ""
        if self._state in ("opening", "reasoning"):
            return deltas + ([Delta("reasoning", rest)] if rest else [])
        return deltas + self._content(rest)

    def _step(self, deltas: list[Delta]) -> bool:
        """Consume one stretch of the buffer; True if another may follow."""
        if self._state == "opening":
            start = self._buffer.lstrip()
            if len(start) < len(THINK_OPEN) and THINK_OPEN.startswith(start):
                return False
            self._buffer = start.removeprefix(THINK_OPEN)
            self._state = "reasoning"
            return True
        if self._state == "call":
            at = self._buffer.find(CALL_CLOSE)
            if at < 0:
                return False
            end = at + len(CALL_CLOSE)
            markup, self._buffer = self._buffer[:end], self._buffer[end:]
            call = parse_tool_call(markup, self._tools)
            deltas += [Delta("tool_call", "", call)] if call else self._content(markup)
            self._space = "" if call else self._space
            self._state = "content"
            return True
        tag = THINK_CLOSE if self._state == "reasoning" else CALL_OPEN
        if self._state == "content" and not self._tools:
            text, self._buffer = self._buffer, ""
            deltas += self._content(text)
            return False
        at = self._buffer.find(tag)
        # A tag may be cut by the edge of a piece: keep back what could be its beginning.
        ready = at if at >= 0 else len(self._buffer) - _overlap(self._buffer, tag)
        text, self._buffer = self._buffer[:ready], self._buffer[ready:]
        if self._state == "reasoning":
            if text:
                deltas.append(Delta("reasoning", text))
            if at >= 0:
                self._buffer = self._buffer[len(tag) :]
                self._state = "content"
        else:
            deltas += self._content(text)
            if at >= 0:
                self._state = "call"
        return at >= 0

    def _content(self, text: str) -> list[Delta]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not self._said:
            kept = kept.lstrip()
        if not kept:
            return []
        self._said = True
        return [Delta("content", kept)]


def parse_reply(
    text: str,
    *,
    thinking: bool,
    split_reasoning: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Reply:
    """Parse a whole reply; arguments as for :class:`ReplyParser`."""
    parser = ReplyParser(thinking=thinking, split_reasoning=split_reasoning, tools=tools)
    deltas = [*parser.feed(text), *parser.finish()]
    reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning").strip()
    return Reply(
        reasoning=reasoning or None,
        content="".join(delta.text for delta in deltas if delta.kind == "content"),
        tool_calls=tuple(delta.tool_call for delta in deltas if delta.tool_call is not None),
    )


_FUNCTION = re.compile(r"\A\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def parse_tool_call(markup: str, tools: Iterable[Mapping[str, Any]] = ()) -> ToolCall | None:
    """Parse ``<tool_call>…</tool_call>`` in either form; None if it is not well formed.

    Qwen3-coder XML: ``<function=NAME><parameter=KEY>value</parameter></function>``; a value becomes
    the JSON type that the tool's schema names, else stays text (as in vLLM, but what is no boolean
    does not become false). Hermes: a JSON object with ``name`` and ``arguments``.
    """
    inner = markup.strip().removeprefix(CALL_OPEN).removesuffix(CALL_CLOSE).strip()
    if inner.startswith("{"):
        return _parse_hermes(inner, markup)
    found = _FUNCTION.match(inner)
    if not found or _PARAMETER.sub("", found[2]).strip():
        return None
    schema = _parameter_schemas(found[1].strip(), tools)
    arguments = {
        key.strip(): _typed(value, schema.get(key.strip(), {})) for key, value in _PARAMETER.findall(found[2])
    }
    return ToolCall(found[1].strip(), arguments, markup)


def _parse_hermes(inner: str, markup: str) -> ToolCall | None:
    try:
        data = strict_json(inner)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", {})
    return ToolCall(data["name"], arguments, markup) if isinstance(arguments, dict) else None


def _parameter_schemas(name: str, tools: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function") or tool
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _typed(value: str, schema: Any) -> Any:
    """XML carries text only: what the schema calls no string is read as JSON where it can be."""
    kinds = _types(schema)
    word = value.strip().lower()
    if "null" in kinds and word in ("null", "none"):
        return None
    kind = next((kind for kind in kinds if kind != "null"), "string")
    if kind == "string":
        return value
    if kind == "boolean" and word in ("true", "false"):  # Qwen's template writes Python's True
        return word == "true"
    try:
        return strict_json(value)
    except ValueError:
        return value


def _types(schema: Any) -> list[Any]:
    """The types that a JSON Schema allows, in its order; one level of ``anyOf`` is looked into."""
    if not isinstance(schema, Mapping):
        return []
    if "type" in schema:
        kind = schema["type"]
        return list(kind) if isinstance(kind, list | tuple) else [kind]
    options = schema.get("anyOf")
    return [kind for option in options for kind in _types(option)] if isinstance(options, list) else []


def strict_json(text: str) -> Any:
    """Raises ValueError for all that is no JSON, also NaN, numbers too long and nesting too deep."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that begins ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
