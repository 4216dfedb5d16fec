"""What replies mean: a table, every type of parameter, and any way to cut a reply into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from manners.replies import Delta, Reply, ReplyParser, ToolCall, parse_reply, parse_tool_call
from tests.offered import TOOLS


def xml(*parameters: tuple[str, str], name: str = "book") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def hermes(data: Any) -> str:
    return f"<tool_call>\n{data if isinstance(data, str) else json.dumps(data)}\n</tool_call>"


BERN = xml(("place", "Bern"))


def means(
    text: str,
    content: str = "",
    *called: dict[str, Any],
    reasoning: str | None = None,
    thinking: bool = False,
    name: str = "book",
) -> tuple[str, bool, Reply]:
    """A reply, whether the model was to think, and what it means; ``called``: the arguments of each call."""
    return text, thinking, Reply(reasoning, content, tuple(ToolCall(name, given, "") for given in called))


def unchanged(text: str) -> tuple[str, bool, Reply]:
    return means(text, text)


def thinks(text: str, reasoning: str | None, content: str = "", *called: Any) -> tuple[str, bool, Reply]:
    return means(text, content, *called, reasoning=reasoning, thinking=True)


AT_BERN = {"place": "Bern"}
ONE_LINE = "<tool_call><function=book><parameter=place>Bern</parameter></function></tool_call>"
MARKUP = "a < b </b> <i> <param> </think> {x}"
ON = {"name": "book", "arguments": {"seats": 4, "place": "<Bern>"}}
REPLIES = {
    "text": unchanged("For two."),
    "nothing": unchanged(""),
    "space around": means("\n For two. \n", "For two."),
    "call": means(BERN, "", AT_BERN),
    "call after text": means(f"Sure.\n\n{BERN}\n", "Sure.", AT_BERN),
    "text after call": means(f"{BERN}\n\nDone.", "Done.", AT_BERN),
    "text around call": means(f"Sure.\n\n{BERN}\nDone.", "Sure.\nDone.", AT_BERN),
    "call in one line": means(ONE_LINE, "", AT_BERN),
    "several parameters": means(xml(("place", "Bern"), ("seats", "4")), "", {"place": "Bern", "seats": 4}),
    "no parameters": means(xml(), "", {}),
    "several calls": means(f"{BERN}\n{xml(('seats', '2'))}", "", AT_BERN, {"seats": 2}),
    "lines of a value are its own": means(xml(("place", "  A\n\n  B\n")), "", {"place": "  A\n\n  B\n"}),
    "markup in a value": means(xml(("place", MARKUP)), "", {"place": MARKUP}),
    "a tool nobody offered": means(xml(("seats", "4"), name="fly"), "", {"seats": "4"}, name="fly"),
    "hermes": means(hermes(ON), "", ON["arguments"]),
    "hermes without arguments": means(hermes({"name": "book"}), "", {}),
    "broken markup": unchanged("<tool_call>\n<function=book\n</tool_call>"),
    "words beside a parameter": unchanged(BERN.replace("</function>", "oops</function>")),
    "an unclosed parameter": unchanged(BERN.replace("</parameter>", "")),
    "broken, then sound": means(f"<tool_call>?</tool_call> {BERN}", "<tool_call>?</tool_call>", AT_BERN),
    "broken json": unchanged(hermes('{"name": "book", ')),
    "json too deep": unchanged(hermes('{"a":' * 9000)),
    "a number too long": unchanged(hermes('{"name":' + "1" * 5000)),
    "json with a constant": unchanged(hermes('{"name": "book", "arguments": {"seats": NaN}}')),
    "json without a name": unchanged(hermes({"arguments": {}})),
    "json arguments no object": unchanged(hermes({"name": "book", "arguments": [1]})),
    "unfinished call": unchanged(f"Sure. {BERN.removesuffix('</tool_call>').strip()}"),
    "a tag cut short": unchanged("I mean <tool_ca"),
    "a tag that is another": unchanged("I mean <tool>x</tool>"),
    "thinking": thinks("Two.\n</think>\n\nFor two.", "Two.", "For two."),
    "thinking, then a call": thinks(f"Two.\n</think>\n\n{BERN}", "Two.", "", AT_BERN),
    "thinking of calls": thinks(f"So {BERN}?</think>No.", f"So {BERN}?", "No."),
    "thinking without an end": thinks("Two, or", "Two, or"),
    "thinking cut in its end": thinks("Two.</thi", "Two.</thi"),
    "thought of nothing": thinks("\n</think>\n\nFor two.", None, "For two."),
    "the model opens its thinking": thinks("<think>\nTwo.\n</think>\n\nHm.", "Two.", "Hm."),
    "the model opens it after space": thinks("\n <think>Two.</think>Hm.", "Two.", "Hm."),
    "only the first opening goes": thinks("<think><think>Two.</think>Hm.", "<think>Two.", "Hm."),
    "an opening in the middle": thinks("So <think> Two.</think>Hm.", "So <think> Two.", "Hm."),
    "an opening cut short": thinks("<thi", "<thi"),
    "a second closing stays": thinks("Two.</think>Hm.</think>", "Two.", "Hm.</think>"),
    "leak": unchanged("<think>\nTwo.\n</think>\n\nHm."),
    "half a leak": unchanged("Two.\n</think>\n\nHm."),
}


@pytest.mark.parametrize("case", REPLIES)
def test_what_a_reply_means(case):
    text, thinking, expected = REPLIES[case]
    reply = parse_reply(text, thinking=thinking, tools=TOOLS)
    assert (reply.reasoning, reply.content) == (expected.reasoning, expected.content)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [
        (call.name, call.arguments) for call in expected.tool_calls
    ]
    for call in reply.tool_calls:
        assert call.raw in text
        assert json.loads(call.arguments_json()) == call.arguments


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("seats", "4", 4),
        ("seats", "-4", -4),
        ("seats", "four", "four"),  # stays text, and fails the tool's schema
        ("seats", "1" * 5000, "1" * 5000),
        ("seats", "null", None),
        ("price", "4.5", 4.5),
        ("price", "NaN", "NaN"),  # no JSON
        ("window", "true", True),
        ("window", "False", False),  # Python's words, as Qwen's own template writes them
        ("window", "maybe", "maybe"),  # vLLM makes it false; a wrong word must not look like an answer
        ("guests", '["Ann", "Jo"]', ["Ann", "Jo"]),
        ("guests", "Ann", "Ann"),
        ("guests", "[" * 9000, "[" * 9000),
        ("extra", '{"a": [1]}', {"a": [1]}),
        ("place", "4", "4"),
        ("place", "null", "null"),
        ("place", "true", "true"),
        ("note", "null", None),
        ("note", "None", None),
        ("note", "4", "4"),
        ("table", "4", 4),
        ("table", "null", None),
        ("unknown", "4", "4"),
    ],
)
def test_a_parameter_takes_the_type_that_its_schema_names(key, value, expected):
    call = parse_tool_call(xml((key, value)), TOOLS)
    assert call is not None
    assert call.arguments == {key: expected}
    assert type(call.arguments[key]) is type(expected)


@pytest.mark.parametrize(
    "tools",
    [
        [],
        [{"type": "function", "function": {"name": "book"}}],
        [{"name": "book", "parameters": {"properties": ["seats"]}}],
        [{"name": "book", "parameters": {"properties": {"seats": True}}}],
        [{"name": "book", "parameters": {"properties": {"seats": {"anyOf": 3}}}}],
        [{"name": "other", "parameters": {"properties": {"seats": {"type": "integer"}}}}],
    ],
)
def test_without_a_schema_a_parameter_stays_text(tools):
    assert parse_tool_call(xml(("seats", "4")), tools) == ToolCall(
        "book", {"seats": "4"}, xml(("seats", "4"))
    )


def test_without_tools_markup_is_ordinary_content():
    for tools in (None, []):
        assert parse_reply(BERN, thinking=False, tools=tools).content == BERN


def test_without_a_split_reasoning_stays_in_the_content():
    text = f"<think>\nTwo.\n</think>\n\nHm. {BERN}"
    reply = parse_reply(text, thinking=True, split_reasoning=False, tools=TOOLS)
    assert (reply.reasoning, reply.content) == (None, "<think>\nTwo.\n</think>\n\nHm.")
    assert len(reply.tool_calls) == 1


# --- in pieces -----------------------------------------------------------------------------

MORSELS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "<tool_", "</thi", "<th", "\n", " ",
    "\n\n", "word", "é", "{", BERN, hermes({"name": "book", "arguments": {}}), "<function=book>",
    "</function>", "<parameter=place>", "</parameter>",
]  # fmt: skip
made_replies = st.lists(st.sampled_from(MORSELS), max_size=12).map("".join) | st.sampled_from(
    [text for text, *_ in REPLIES.values() if len(text) < 1000]
)


def feed(pieces: list[str], **options: Any) -> list[Delta]:
    parser = ReplyParser(**options)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def total(deltas: list[Delta]) -> tuple[str, str, list[ToolCall]]:
    reasoning, content = (
        "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content")
    )
    return reasoning.strip(), content, [d.tool_call for d in deltas if d.tool_call]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("thinking", [True, False])
@example(text=f"a</think>b {BERN} c", places=list(range(400)))  # letter by letter
@given(text=made_replies, places=st.lists(st.integers(0, 10_000), max_size=8))
def test_pieces_mean_what_the_whole_means(thinking, tools, split, text, places):
    options = {"thinking": thinking, "split_reasoning": split, "tools": tools}
    deltas = feed(cut(text, places), **options)
    whole = parse_reply(text, **options)
    assert total(deltas) == (whole.reasoning or "", whole.content, list(whole.tool_calls))
    assert all(
        bool(d.tool_call) == (d.kind == "tool_call") and bool(d.tool_call) != bool(d.text) for d in deltas
    )
    # Nothing is lost or moved: in their order the deltas are the text, but for white space and the tags
    # that open and close the thinking.
    seen = "".join(d.tool_call.raw if d.tool_call else d.text for d in deltas)
    expected = text
    if thinking and split:
        expected = expected.lstrip().removeprefix("<think>").replace("</think>", "", 1)
    assert "".join(seen.split()) == "".join(expected.split())


def test_text_comes_out_as_soon_as_it_is_certain():
    parser = ReplyParser(thinking=True, tools=TOOLS)
    seen = [
        [(d.kind, d.text) for d in parser.feed(piece)]
        for piece in ["Two ", "or</", "b", "</think>", "\n", "Hm", " ", "<to", "o!"]
    ]
    assert seen == [
        [("reasoning", "Two ")],
        [("reasoning", "or")],
        [("reasoning", "</b")],
        [],
        [],
        [("content", "Hm")],
        [],
        [],
        [("content", " <too!")],
    ]
    assert parser.finish() == []
