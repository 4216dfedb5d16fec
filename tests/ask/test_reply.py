"""Chunks as real servers send them, and the ones that no server should send."""

import json

import pytest

from manners.ask.reply import ReplyBuilder, StreamError


def chunk(delta=None, finish=None, **more):
    return json.dumps({"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more})


def build(*events):
    builder = ReplyBuilder()
    for event in events:
        builder.add(event)
    return builder


def call_delta(index=None, id=None, name=None, arguments=None):
    delta = {"function": {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}}
    delta |= {k: v for k, v in (("index", index), ("id", id)) if v is not None}
    return {"tool_calls": [delta]}


def test_content_usage_and_finish():
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    reply = build(
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hello "}),
        chunk({"content": "there"}),
        chunk({}, "stop"),
        json.dumps({"choices": [], "usage": usage}),
        "[DONE]",
    )
    reply.finish()
    assert (reply.content, reply.usage, reply.finish_reason) == ("Hello there", usage, "stop")
    assert not reply.tool_calls
    assert not reply.reasoning


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},  # some servers send both: it must not double
        {"reasoning": None, "reasoning_content": "hm", "content": None},
    ],
)
def test_reasoning_under_either_name(delta):
    reply = build(chunk(delta), chunk(delta))
    assert (reply.reasoning, reply.content) == ("hmhm", "")
    assert reply.has_token
    assert not reply.has_content


def test_a_thinking_tag_in_content_stays_there():
    assert build(chunk({"content": "<think>a</think>b"})).content == "<think>a</think>b"


def test_two_calls_in_interleaved_pieces():
    reply = build(
        chunk(call_delta(0, "a", "first", "")),
        chunk(call_delta(1, "b", "second", '{"q"')),
        chunk(call_delta(0, arguments='{"x": ')),
        chunk(call_delta(1, arguments=": 2}")),
        chunk(call_delta(0, arguments="1}")),
    )
    assert [(c.id, c.name, c.arguments) for c in reply.tool_calls] == [
        ("a", "first", '{"x": 1}'),
        ("b", "second", '{"q": 2}'),
    ]


def test_a_repeated_name_is_not_doubled():
    pieces = [chunk(call_delta(0, "a", "look", part)) for part in ('{"x"', ": 1}")]
    assert [(c.name, c.arguments) for c in build(*pieces).tool_calls] == [("look", '{"x": 1}')]


def test_calls_without_an_index_are_told_apart_by_id():
    reply = build(
        chunk(call_delta(id="a", name="one", arguments="{")),
        chunk(call_delta(arguments="}")),
        chunk(call_delta(id="b", name="two", arguments="{}")),
    )
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("one", "{}"), ("two", "{}")]


def test_an_emoji_split_into_surrogates_is_one_character_and_a_lone_half_is_replaced():
    reply = build(
        '{"choices": [{"delta": {"content": "\\ud83d"}}]}', '{"choices": [{"delta": {"content": "\\ude42"}}]}'
    )
    assert reply.content == "🙂"
    assert build('{"choices": [{"delta": {"content": "a\\ud83db"}}]}').content == "a\ufffdb"
    assert build('{"usage": {"note": "\\ud83d"}}').usage == {"note": "\ufffd"}


def test_other_choices_are_ignored():
    event = {"choices": [{"index": 1, "delta": {"content": "no"}}, {"index": 0, "delta": {"content": "yes"}}]}
    assert build(json.dumps(event)).content == "yes"


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ('{"choices": [', "bad-json"),
        ("", "bad-json"),
        ("[" * 100_000, "bad-json"),
        ("[1]", "bad-json"),
        ('"text"', "bad-json"),
        ('{"choices": "x"}', "bad-json"),
        ('{"choices": [3]}', "bad-json"),
        ('{"choices": [{"delta": "x"}]}', "bad-json"),
        ('{"choices": [{"delta": {"content": 3}}]}', "bad-json"),
        ('{"choices": [{"delta": {"content": ["x"]}}]}', "bad-json"),
        ('{"choices": [{"delta": {"reasoning": {}, "reasoning_content": {"a": 1}}}]}', "bad-json"),
        ('{"choices": [{"delta": {"tool_calls": {"a": 1}}}]}', "bad-json"),
        ('{"choices": [{"delta": {"tool_calls": ["x"]}}]}', "bad-json"),
        ('{"choices": [{"delta": {"tool_calls": [{"function": "x"}]}}]}', "bad-json"),
        (
            '{"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": {"a": 1}}}]}}]}',
            "bad-json",
        ),
        ('{"error": {"message": "out of memory"}}', "broken-stream"),
    ],
)
def test_what_is_no_chunk_is_a_fault_of_its_kind(event, kind):
    with pytest.raises(StreamError) as caught:
        build(event)
    assert caught.value.kind == kind
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([chunk({"content": "a"}, "stop")], "no-done"),
        ([], "no-done"),
        ([chunk({"content": "a"}), "[DONE]"], "broken-stream"),
        ([chunk({"content": "a"}, "abort"), "[DONE]"], "broken-stream"),
        (["[DONE]"], "broken-stream"),
    ],
)
def test_a_stream_that_does_not_end_well_is_a_fault(events, kind):
    reply = build(*events)
    with pytest.raises(StreamError) as caught:
        reply.finish()
    assert caught.value.kind == kind


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_ends_of_the_models_own_are_fine(reason):
    build(chunk({"content": "a"}, reason), "[DONE]").finish()
