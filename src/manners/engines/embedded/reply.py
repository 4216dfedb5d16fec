"""From tokens to what a client sees: text, stop strings, deltas, and the count of thinking tokens.

Text comes out as early as it is certain: a character whose bytes are spread over several tokens
waits for its last one, and text that could be the beginning of a stop string waits until it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ...replies import THINK_CLOSE, Delta, ReplyParser

FinishReason = Literal["stop", "length", "tool_calls"]
_UNFINISHED = "\ufffd"


class Detokenizer:
    """Incremental decoding; the pieces add up to the decoding of all tokens at once.

    Args:
        decode: token ids to text, as the tokenizer does it for a whole reply.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # Text before ``_read`` is out; decoding starts at ``_prefix``, because how a token reads may
        # depend on the one before it (a leading space).
        self._prefix = 0
        self._read = 0
        self._before = ""

    def feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids[self._prefix :])
        if text.endswith(_UNFINISHED):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What is left; bytes that never became a character come out as replacement characters."""
        return self._take(self._decode(self._ids[self._prefix :])) if self._read < len(self._ids) else ""

    def _take(self, text: str) -> str:
        new = text[len(self._before) :]
        self._prefix, self._read = self._read, len(self._ids)
        self._before = self._decode(self._ids[self._prefix : self._read])
        return new


class StopScanner:
    """Cuts text at the first stop string; the stop string itself is dropped."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        if not self._stops or self.stopped:
            return "" if self.stopped else piece
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest


class ReplyStream:
    """Tokens in, deltas out, for one reply.

    Args:
        detokenizer: fresh.
        stops: stop strings; they act on the text as the model writes it, tags included.
        parser: fresh; splits the text into reasoning, content and tool calls.
        thinking: the prompt opened the thinking, so tokens count as reasoning up to ``</think>``.
    """

    def __init__(
        self, detokenizer: Detokenizer, *, stops: Sequence[str], parser: ReplyParser, thinking: bool
    ) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)
        self._parser = parser
        self._thinking = thinking
        self._tail = ""
        self._called = False
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was met: no further token is wanted."""
        return self._scanner.stopped

    def feed(self, token: int) -> list[Delta]:
        self.completion_tokens += 1
        piece = self._detokenizer.feed(token)
        if self._thinking:
            self._tail = (self._tail + piece)[-64:]
            self._thinking = THINK_CLOSE not in self._tail
            # The token that closes the tag is not a thought.
            self.reasoning_tokens += self._thinking
        return self._seen(self._parser.feed(self._scanner.feed(piece)))

    def finish(self) -> list[Delta]:
        """Flush all that was held back."""
        text = "" if self.stopped else self._scanner.feed(self._detokenizer.finish())
        text += self._scanner.finish()
        return self._seen([*self._parser.feed(text), *self._parser.finish()])

    def finish_reason(self, finish: Literal["stop", "length"]) -> FinishReason:
        """A reply that was cut short says so, even if it had called a tool before."""
        return "tool_calls" if self._called and finish == "stop" else finish

    def _seen(self, deltas: list[Delta]) -> list[Delta]:
        self._called = self._called or any(delta.tool_call for delta in deltas)
        return deltas


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without being all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
