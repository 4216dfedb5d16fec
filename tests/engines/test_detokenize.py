"""Text comes out early, and the pieces always add up to the text of the whole reply."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from manners.engines.embedded.reply import Detokenizer, ReplyStream, StopScanner
from manners.replies import ReplyParser


def bytes_decode(ids: Sequence[int]) -> str:
    """Every token is one byte: the hardest case for characters of several bytes."""
    return bytes(ids).decode("utf-8", errors="replace")


def stream(text: str, **options: object) -> tuple[list[str], ReplyStream]:
    settings = {"stops": (), "parser": ReplyParser(thinking=False), "thinking": False, **options}
    reply = ReplyStream(Detokenizer(bytes_decode), **settings)  # type: ignore[arg-type]
    pieces = []
    for byte in text.encode():
        pieces += [delta.text for delta in reply.feed(byte)]
        if reply.stopped:
            break
    pieces += [delta.text for delta in reply.finish()]
    return pieces, reply


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語のテキスト", "🤝 and 👩‍👩‍👧", "a\u0301 combining", ""]
)
def test_no_piece_holds_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(bytes_decode)
    pieces = [detokenizer.feed(byte) for byte in text.encode()]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == text


def test_ascii_comes_out_at_once() -> None:
    detokenizer = Detokenizer(bytes_decode)
    assert [detokenizer.feed(byte) for byte in b"now"] == ["n", "o", "w"]


def test_bytes_that_are_no_text_lose_nothing() -> None:
    chance = random.Random(0)
    for _ in range(300):
        ids = [
            chance.choice([0x41, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 0xFF])
            for _ in range(chance.randrange(12))
        ]
        detokenizer = Detokenizer(bytes_decode)
        text = "".join(detokenizer.feed(token) for token in ids) + detokenizer.finish()
        assert text == bytes_decode(ids), ids


def test_a_real_tokenizer_streams_what_it_decodes() -> None:
    from tests.tiny import VOCABULARY, make_tokenizer

    tokenizer = make_tokenizer()
    chance = random.Random(1)

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    for case in range(40):
        ids = [chance.randrange(VOCABULARY) for _ in range(60)]
        if case % 2:
            ids = tokenizer.encode("Grüße, 日本 🤝 <think>x</think> done", add_special_tokens=False)
        detokenizer = Detokenizer(decode)
        assert "".join(map(detokenizer.feed, ids)) + detokenizer.finish() == decode(ids)


@pytest.mark.parametrize(
    ("text", "stops", "seen"),
    [
        ("one. two", (".",), "one"),
        ("aaSTOPbb", ("STOP",), "aa"),
        ("aaSTbb", ("STOP",), "aaSTbb"),  # the beginning of a stop string that was none
        ("aaST", ("STOP",), "aaST"),  # held back to the end, then let go
        ("xxaab", ("aab",), "xx"),  # overlapping beginnings
        ("abcd", ("cd", "bc"), "a"),  # the earlier match wins, whatever the order
        ("日本語", ("本",), "日"),
        ("none", (), "none"),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], seen: str) -> None:
    pieces, reply = stream(text, stops=stops)
    assert "".join(pieces) == seen
    assert reply.stopped == (seen != text)
    whole = StopScanner(stops)
    assert whole.feed(text) + whole.finish() == seen


def test_tokens_before_the_closing_tag_count_as_reasoning() -> None:
    pieces, reply = stream("hmm</think>\n\nYes", parser=ReplyParser(thinking=True), thinking=True)
    assert reply.reasoning_tokens == len("hmm</think>") - 1  # the token that closes the tag does not count
    assert reply.completion_tokens == len("hmm</think>\n\nYes")
    assert "".join(pieces) == "hmmYes"


def test_without_thinking_no_token_is_reasoning() -> None:
    pieces, reply = stream("<think>leak</think>Yes")
    assert reply.reasoning_tokens == 0
    assert "".join(pieces) == "<think>leak</think>Yes"


CALL = "<tool_call>\n<function=web_search>\n<parameter=query>\nrain\n</parameter>\n</function>\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "web_search", "parameters": {}}}]


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        (CALL, "stop", "tool_calls"),
        (CALL + " and then", "length", "length"),  # cut short is cut short
        (CALL[:-5], "length", "length"),
        ("no call", "stop", "stop"),
    ],
)
def test_finish_reason(text: str, finish: str, reason: str) -> None:
    _, reply = stream(text, parser=ReplyParser(thinking=False, tools=TOOLS))
    assert reply.finish_reason(finish) == reason  # type: ignore[arg-type]
