"""The chunks of one streamed chat completion, put together into one reply. Knows no network.

What counts as a fault is decided here, strictly: a chunk that is no JSON object of the expected
shape, an error object inside the stream, a stream that ends without a finish reason. Guessing what
such a server meant would turn a broken server into a model with good or bad manners.
"""

from __future__ import annotations

import json
from typing import Any

from .transcripts import Call, FaultKind

DONE = "[DONE]"
# vLLM says "abort", others "error" or "content_filter": the model did not come to its own end.
GOOD_FINISH = frozenset({"stop", "length", "tool_calls", "function_call"})


class StreamError(Exception):
    """Why a stream is no reply. Kept inside ``ask``: it ends up as the transcript's error."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        self.kind = kind
        self.message = message
        super().__init__(message)


class ReplyBuilder:
    """Adds up deltas; its fields hold what has come so far."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _CallPieces] = {}
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.done = False

    @property
    def content(self) -> str:
        return _whole_text(self._content)

    @property
    def reasoning(self) -> str:
        return _whole_text(self._reasoning)

    @property
    def tool_calls(self) -> list[Call]:
        return [
            Call(
                name=_whole_text([c.name]),
                arguments=_whole_text(c.arguments),
                id=c.id and _whole_text([c.id]),
            )
            for _, c in sorted(self._calls.items())
        ]

    @property
    def has_content(self) -> bool:
        """Something that the user gets: visible text or a call."""
        return bool(self._content or self._calls)

    @property
    def has_token(self) -> bool:
        """Anything that the model wrote, reasoning included."""
        return bool(self.has_content or self._reasoning)

    def add(self, data: str) -> None:
        """Take the data of one event.

        Raises:
            StreamError: ``bad-json`` for data that is no JSON or has another shape than a chunk;
                ``broken-stream`` for an error object that the server sent in the stream.
        """
        if data.strip() == DONE:
            self.done = True
            return
        chunk = _parse(data)
        if chunk.get("error"):
            raise StreamError(
                "broken-stream", f"the server sent an error in the stream: {short(chunk['error'])}"
            )
        if isinstance(chunk.get("usage"), dict):
            self.usage = _writable(chunk["usage"])
        choices = chunk.get("choices") or []  # the last chunk carries usage and no choice
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise StreamError("bad-json", f"choices is no list of objects: {short(choices)}")
        for choice in choices:
            if choice.get("index", 0) == 0:
                self._add_choice(choice)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise StreamError("bad-json", f"delta is no object: {short(delta)}")
        self._add_text(self._content, delta.get("content"), "content")
        # vLLM says `reasoning`, SGLang and llama-server `reasoning_content`, some send the same
        # text under both names: one of the two is enough.
        self._add_text(self._reasoning, delta.get("reasoning") or delta.get("reasoning_content"), "reasoning")
        calls = delta.get("tool_calls") or []
        if not isinstance(calls, list):
            raise StreamError("bad-json", f"tool_calls is no list: {short(calls)}")
        for call in calls:
            self._add_call(call)
        finish = choice.get("finish_reason")
        if finish is not None:
            self.finish_reason = _whole_text([str(finish)])

    @staticmethod
    def _add_text(pieces: list[str], text: object, field: str) -> None:
        if text is None or text == "":
            return
        if not isinstance(text, str):
            raise StreamError("bad-json", f"{field} is no string: {short(text)}")
        pieces.append(text)

    def _add_call(self, delta: object) -> None:
        function = delta.get("function") or {} if isinstance(delta, dict) else None
        if not isinstance(delta, dict) or not isinstance(function, dict):
            raise StreamError("bad-json", f"a tool call is no object: {short(delta)}")
        call = self._calls.setdefault(self._call_index(delta), _CallPieces())
        if isinstance(delta.get("id"), str):
            call.id = delta["id"]
        name, arguments = function.get("name"), function.get("arguments")
        # A name comes whole; a server that repeats it in every delta must not double it.
        if isinstance(name, str) and name and not call.name:
            call.name = name
        self._add_text(call.arguments, arguments, "function.arguments")

    def _call_index(self, delta: dict[str, Any]) -> int:
        index = delta.get("index")
        if isinstance(index, int):
            return index
        # Without an index a new id starts a new call, and anything else continues the last one.
        last = max(self._calls, default=-1)
        starts_new = last < 0 or (delta.get("id") is not None and delta["id"] != self._calls[last].id)
        return last + 1 if starts_new else last

    def finish(self) -> None:
        """To be called when the stream has ended.

        Raises:
            StreamError: ``no-done`` if ``[DONE]`` never came; ``broken-stream`` if no finish
                reason came, or one that says that the server gave up.
        """
        if not self.done:
            raise StreamError(
                "no-done", f"the stream ended without {DONE}; finish_reason {self.finish_reason!r}"
            )
        if self.finish_reason not in GOOD_FINISH:
            raise StreamError("broken-stream", f"finish_reason is {self.finish_reason!r}")


class _CallPieces:
    def __init__(self) -> None:
        self.id: str | None = None
        self.name = ""
        self.arguments: list[str] = []


def _parse(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of open brackets
        raise StreamError("bad-json", f"{error}: {short(data)}") from None
    if not isinstance(chunk, dict):
        raise StreamError("bad-json", f"a chunk is no object: {short(chunk)}")
    return chunk


def _whole_text(pieces: list[str]) -> str:
    """Joined, with halves of a surrogate pair that came in two chunks made one character again.

    A lone half becomes U+FFFD: it can be written to no UTF-8 file.
    """
    return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    """The same object without lone surrogates, which a strange server might send even here."""
    written: dict[str, Any] = json.loads(_whole_text([json.dumps(value, ensure_ascii=False)]))
    return written


def short(value: object, limit: int = 300) -> str:
    """For a message: as it is if a string, else its repr, cut to ``limit`` characters."""
    text = _whole_text([value if isinstance(value, str) else repr(value)])
    return text if len(text) <= limit else text[:limit] + "…"
