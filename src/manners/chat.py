"""THE renderer: how a conversation becomes tokens, which tokens are the answer, what a reply means.

Teaching, calibration, training and asking all go through this module, so that a model is never
trained on one rendering and asked with another.

- A prompt is what a server would feed the model: chat template, tools, thinking switch, and the
  opening of the assistant's turn.
- An answer is what the model must produce after it, up to and including the end-of-turn token.
  It is tokenized apart from the prompt, because that is how generation sees it.
- A reply is parsed into reasoning, content and tool calls (Qwen3-coder XML, Hermes JSON). With
  thinking off nothing counts as reasoning: a leaked ``<think>`` stays in the content, where the
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
from pathlib import Path
from typing import Any, Literal

from .errors import ChatError

Message = Mapping[str, Any]

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Rendered:
    """Token ids [T] and, for each, whether it belongs to the answer that is learned."""

    ids: tuple[int, ...]
    answer_mask: tuple[bool, ...]


class Renderer:
    """Renders conversations with one model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ChatError(
                "no-chat-template",
                where=str(getattr(tokenizer, "name_or_path", "tokenizer")),
                found="the tokenizer has no chat template",
                consequence="Every prompt would be guessed, and no two servers would guess the same.",
                fix="put the parent's chat_template.jinja into the folder",
            )
        self.tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: str | Path) -> Renderer:
        """Read tokenizer and template from a model folder. Runs no code from the folder."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ChatError(
                "no-tokenizer",
                where=str(folder),
                found=str(error).splitlines()[0],
                fix="the folder needs tokenizer.json and tokenizer_config.json",
            ) from error
        return cls(tokenizer)

    def prompt_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> str:
        """The prompt up to the opening of the assistant's next turn.

        Raises:
            ChatError: ``template-refused`` with the template's own words, ``bad-arguments`` for a
                tool call in the history whose arguments are no JSON object.
        """
        return self._render(messages, tools, add_generation_prompt=True, enable_thinking=thinking)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> list[int]:
        """:meth:`prompt_text` as token ids."""
        return self.encode(self.prompt_text(messages, tools, thinking))

    def answer_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> str:
        """What the model must produce for the last message, end of turn included.

        Raises:
            ChatError: ``no-answer`` if the last message is not the assistant's, ``mask-mismatch``
                if the template renders the same turn differently as a prompt and as history, so
                that no split of the text is what the model was asked.
        """
        if not messages or messages[-1].get("role") != "assistant":
            raise ChatError(
                "no-answer",
                where="conversation",
                found=f"last message is {messages[-1].get('role') if messages else 'absent'}",
                fix="end the conversation with the assistant's message",
            )
        prompt = self.prompt_text(messages[:-1], tools, thinking)
        whole = self._render(messages, tools, add_generation_prompt=False, enable_thinking=thinking)
        if not whole.startswith(prompt):
            raise ChatError(
                "mask-mismatch",
                where="chat template",
                found="the rendered conversation does not begin with the prompt of its last turn",
                consequence="Training on it would teach tokens that the model is never asked for.",
                fix="use a template that renders the last assistant turn as it was asked (Qwen3.5's does)",
            )
        answer = whole[len(prompt) :]
        # What follows the end-of-turn token (a newline in ChatML) is never generated. A base model's
        # tokenizer may name another token its eos than the one that its template writes.
        ends = [answer.rindex(stop) + len(stop) for stop in self._stops() if stop in answer]
        return answer[: max(ends)] if ends else answer + self.tokenizer.eos_token

    def teach(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> Rendered:
        """One training sample: the conversation as it was asked, the last assistant message as answer."""
        answer = self.encode(self.answer_text(messages, tools, thinking))
        prompt = self.prompt_ids(messages[:-1], tools, thinking)
        return Rendered((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))

    def every_answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> list[Rendered]:
        """One sample per assistant message, each in the context in which it was asked."""
        ends = [i + 1 for i, message in enumerate(messages) if message.get("role") == "assistant"]
        return [self.teach(messages[:end], tools, thinking) for end in ends]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated tokens; think and tool tags stay, an end-of-turn token at the end goes."""
        kept = list(ids)
        while kept and kept[-1] in self.stop_ids:
            kept.pop()
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False)
        return text

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn: the tokenizer's eos, ``<|im_end|>`` and ``<|endoftext|>`` where known."""
        return frozenset(self._stops().values())

    def _stops(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        names = (self.tokenizer.eos_token, "<|im_end|>", "<|endoftext|>")
        return {name: vocabulary[name] for name in names if name in vocabulary}

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, **switches: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                [_with_mapping_arguments(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                **switches,
            )
        # ValueError: no messages at all; TypeError: a template for text, and content in parts.
        except (TemplateError, ValueError, TypeError) as error:
            raise ChatError(
                "template-refused",
                where="chat template",
                found=str(error),
                fix="correct the messages, or the template in chat_template.jinja",
            ) from error
        return text


def _with_mapping_arguments(message: Message) -> dict[str, Any]:
    """OpenAI sends tool arguments as a JSON string; templates iterate over a mapping."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = _json(arguments or "{}")
            except ValueError:
                arguments = None
        if not isinstance(arguments, Mapping):
            raise ChatError(
                "bad-arguments",
                where=f"tool call {function.get('name')!r} in the history",
                found=f"arguments {function.get('arguments')!r} are no JSON object",
                consequence="An empty call in its place would teach the model to call with nothing.",
                fix='send arguments as a JSON object, e.g. "{\\"query\\": \\"robot\\"}"',
            )
        calls.append({"type": "function", "function": {**function, "arguments": dict(arguments)}})
    return {**message, "tool_calls": calls}


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
        data = _json(inner)
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
        return _json(value)
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


def _json(text: str) -> Any:
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
