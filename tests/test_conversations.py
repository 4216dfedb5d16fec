"""Conversations on disk and as tokens: nothing is lost on the way, and nothing is cut in silence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manners.chat import Renderer
from manners.conversations import Conversation, dump_conversations, load_conversations, render_all
from manners.errors import ChatError, SpecError
from tests.tiny import chat_template, make_tokenizer

ASKS, SAYS = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi there."}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "search", "arguments": '{"q": "é"}'}}],
}
PLAIN = Conversation(id="plain", messages=(ASKS, SAYS))
FULL = Conversation(
    id="full",
    category="memory",
    messages=(ASKS, CALLS, {"role": "tool", "content": "…"}, {**SAYS, "reasoning_content": "Easy."}),
    tools=(TOOL,),
    thinking=True,
    split="held-out",
)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template()
    return Renderer(tokenizer)


def test_conversations_survive_a_round_trip(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(dump_conversations([PLAIN, FULL]) + "\n \n", encoding="utf-8")
    assert load_conversations(path) == (PLAIN, FULL)
    assert json.loads(path.read_text().splitlines()[0]) == {"id": "plain", "messages": [ASKS, SAYS]}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_round_trip(tmp_path_factory, text):
    made = Conversation(id="x", messages=(ASKS, {"role": "assistant", "content": text}))
    path = tmp_path_factory.mktemp("c") / "c.jsonl"
    path.write_text(dump_conversations([made, PLAIN]), encoding="utf-8")
    assert load_conversations(path) == (made, PLAIN)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_a_line_ends_only_at_a_line_feed(tmp_path, separator):
    """str.splitlines() would cut a conversation at each of these."""
    made = Conversation(id=f"a{separator}b", messages=(ASKS, SAYS))
    (tmp_path / "c.jsonl").write_text(dump_conversations([made]), encoding="utf-8")
    assert load_conversations(tmp_path / "c.jsonl") == (made,)


LINE = dump_conversations([PLAIN])


@pytest.mark.parametrize(
    ("data", "where", "found"),
    [
        (LINE + "{oops", "c.jsonl:2: (line)", "Invalid JSON"),
        (LINE + "\n[]", "c.jsonl:3: (line)", "should be an object"),
        ('{"id": "x"}', "c.jsonl:1: messages", "required"),
        (LINE.replace('"id": "plain"', '"id": ""'), "c.jsonl:1: id", "at least 1"),
        (json.dumps({"id": "x", "messages": [ASKS]}), "c.jsonl:1: messages", "at least 2"),
        (json.dumps({"id": "x", "messages": [ASKS, "hi"]}), "c.jsonl:1: messages.1", "an object"),
        (LINE.replace('"id"', '"speaker": "me", "id"'), "c.jsonl:1: speaker", "not permitted"),
        (LINE.replace('"id"', '"split": "test", "id"'), "c.jsonl:1: split", "'held-out'"),
        ('{"id": "\udcff"}', "c.jsonl:1: (line)", "invalid unicode"),
    ],
)
def test_a_bad_line_is_named(tmp_path, data, where, found):
    (tmp_path / "c.jsonl").write_bytes(data.encode(errors="surrogateescape"))
    with pytest.raises(SpecError) as caught:
        load_conversations(tmp_path / "c.jsonl")
    assert (caught.value.code, caught.value.where) == ("conversations-syntax", str(tmp_path / where))
    assert found in caught.value.found


def test_no_file_and_no_conversation_are_two_things(tmp_path):
    with pytest.raises(SpecError, match="conversations-missing"):
        load_conversations(tmp_path / "c.jsonl")
    (tmp_path / "c.jsonl").write_text("\n \n")
    with pytest.raises(SpecError, match="conversations-empty"):
        load_conversations(tmp_path / "c.jsonl")


def test_rows_are_the_conversations_as_they_were_asked_and_answered(renderer):
    rows = render_all(renderer, [PLAIN, FULL], max_tokens=1000)
    assert [renderer.tokenizer.decode(row) for row in rows] == [
        renderer.prompt_text(made.messages[:-1], made.tools, made.thinking)
        + renderer.answer_text(made.messages, made.tools, made.thinking)
        for made in (PLAIN, FULL)
    ]
    assert "Easy.\n</think>" in renderer.tokenizer.decode(rows[1])  # thinking was on
    assert '"search"' in renderer.tokenizer.decode(rows[1])  # and the tools were offered


def test_a_conversation_that_is_too_long_is_refused_not_cut(renderer):
    (row,) = render_all(renderer, [PLAIN], max_tokens=1000)
    assert render_all(renderer, [PLAIN], max_tokens=len(row)) == [row]
    with pytest.raises(ChatError) as caught:
        render_all(renderer, [PLAIN], max_tokens=len(row) - 1)
    assert (caught.value.code, caught.value.where) == ("too-long", "conversation plain")
    assert caught.value.found == f"{len(row)} tokens, the model takes {len(row) - 1}"


def test_a_conversation_without_an_answer_is_refused(renderer):
    with pytest.raises(ChatError, match="no-answer"):
        render_all(renderer, [Conversation(id="x", messages=(ASKS, ASKS))], max_tokens=1000)
