"""Every gate by its table: which turns it looks at, what passes, what fails and why."""

import re

import pytest

from manners.errors import JudgeError
from manners.judge.gates import GATES, applies, check_probe, check_turn, house_of, parse_arguments
from manners.spec import GATE_NAMES

from .builders import make_gate, make_persona, make_probe, make_turn, reply

HOUSE = house_of(make_persona())
CALL = ("web_search", '{"query": "bern"}')
TEXT, TOOL = make_turn(), make_turn(tool="web_search", arguments={"query": "bern"})
FACT = make_turn(knowledge="factual", contains=["Tokyo", "Tōkyō"])


def wrong(gate, transcript, turn, house=HOUSE):
    return check_turn(transcript, turn, make_gate(gate) if isinstance(gate, str) else gate, house)


def test_every_gate_has_a_rule():
    assert set(GATES) == set(GATE_NAMES)


@pytest.mark.parametrize(
    ("gate", "turn", "expected"),
    [
        ("no_thinking_leak", TEXT, True),
        ("no_thinking_leak", TOOL, True),
        ("right_tool", TEXT, True),
        ("right_tool", TOOL, True),
        ("exact_arguments", TEXT, False),
        ("exact_arguments", TOOL, True),
        ("exact_arguments", make_turn(tool="web_search"), False),
        ("exact_arguments", make_turn(tool="web_search", arguments={}), True),
        ("no_markdown", TEXT, True),
        ("no_markdown", TOOL, False),
        ("concise", TEXT, True),
        ("concise", TOOL, False),
        ("factual", FACT, True),
        ("reasoning", FACT, False),
        ("factual", TEXT, False),
    ],
)
def test_which_turns_a_gate_looks_at(gate, turn, expected):
    assert applies(make_gate(gate), turn) is expected


@pytest.mark.parametrize("gate", GATE_NAMES)
@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_reply_passes_no_gate(gate, content):
    turn = make_turn(tool="web_search", arguments={}) if gate == "exact_arguments" else make_turn()
    assert wrong(gate, reply(content), turn) == "an empty reply"


@pytest.mark.parametrize("gate", ["right_tool", "no_markdown", "concise", "factual"])
def test_a_call_where_text_is_expected_passes_no_gate_about_text(gate):
    assert wrong(gate, reply("", CALL), FACT)


# --- no_thinking_leak ---


@pytest.mark.parametrize(
    ("transcript", "why"),
    [
        (reply("Tokyo."), ""),
        (reply("", CALL), ""),
        (reply("Tokyo.", reasoning=" \n"), ""),
        (reply("Tokyo.", usage={"completion_tokens_details": {"reasoning_tokens": 0}}), ""),
        (reply("Tokyo.", usage={"completion_tokens_details": None}), ""),
        (reply("<think></think>Tokyo."), "a thinking tag"),
        (reply("Tokyo.", reasoning="The user asks"), "reasoning while thinking is off"),
        (reply("", CALL, reasoning="The user asks"), "reasoning while thinking is off"),
        (reply("Tokyo.", usage={"completion_tokens_details": {"reasoning_tokens": 9}}), "9 reasoning tokens"),
        (reply("<tool_call>", CALL), "tool markup"),
        (reply("read_notes() will tell."), "a call written as text"),
    ],
)
def test_no_thinking_leak(transcript, why):
    assert_says(wrong("no_thinking_leak", transcript, TEXT), why)


def test_with_thinking_on_reasoning_beside_the_text_is_fine_but_not_inside_it():
    house = house_of(make_persona(thinking=True))
    usage = {"completion_tokens_details": {"reasoning_tokens": 9}}
    assert wrong("no_thinking_leak", reply("Tokyo.", reasoning="hm", usage=usage), TEXT, house) == ""
    assert wrong("no_thinking_leak", reply("hm</think>Tokyo.", reasoning="hm"), TEXT, house)


# --- right_tool ---


@pytest.mark.parametrize(
    ("turn", "transcript", "why"),
    [
        (TOOL, reply("", CALL), ""),
        (TOOL, reply("One moment.", CALL), ""),
        (TOOL, reply("", ("web_search", '{"query": "something else"}')), ""),
        (TOOL, reply("I would search."), "got none"),
        (TOOL, reply("", ("read_notes", "{}")), "got read_notes"),
        (TOOL, reply("", ("Web_Search", '{"query": "bern"}')), "got Web_Search"),
        (TOOL, reply("", CALL, CALL), "got web_search, web_search"),
        (TOOL, reply("", CALL, ("read_notes", "{}")), "got web_search, read_notes"),
        (TOOL, reply("", ("web_search", '{"query": "bern"')), "no JSON"),
        (TOOL, reply("", ("web_search", "")), "no JSON"),
        (TOOL, reply("", ("web_search", '["bern"]')), "no JSON object"),
        (TOOL, reply("", ("web_search", "[" * 100_000)), "too deeply|no JSON"),
        (TOOL, reply("", ("web_search", "{}")), "schema: 'query' is a required property"),
        (TOOL, reply("", ("web_search", '{"query": 5}')), "schema: 5 is not of type 'string'"),
        (TOOL, reply("", ("web_search", '{"query": ""}')), "schema"),
        (TOOL, reply("", ("web_search", '{"query": "a", "limit": true}')), "schema"),
        (TOOL, reply("", ("web_search", '{"query": "a", "k": 1}')), "schema: Additional"),
        (TEXT, reply("Tokyo."), ""),
        (TEXT, reply("", CALL), "called web_search, though no tool"),
        (TEXT, reply("Tokyo.", CALL), "called web_search, though no tool"),
    ],
)
def test_right_tool(turn, transcript, why):
    assert_says(wrong("right_tool", transcript, turn), why)


def test_a_schema_that_is_none_is_refused():
    tool = {"function": {"name": "t", "description": "", "parameters": {"type": "text"}}}
    with pytest.raises(JudgeError, match=r"bad-tool-schema.*tool t"):
        house_of(make_persona(tools=[tool]))


def test_a_schema_elsewhere_is_not_fetched(monkeypatch):
    fetched = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: fetched.append(args))
    parameters = {"$ref": "http://127.0.0.1:9/schema.json"}
    house = house_of(
        make_persona(tools=[{"function": {"name": "t", "description": "", "parameters": parameters}}])
    )
    with pytest.raises(JudgeError, match=r"bad-tool-schema.*\$ref"):
        wrong("right_tool", reply("", ("t", "{}")), make_turn(tool="t"), house)
    assert fetched == []


# --- exact_arguments ---


@pytest.mark.parametrize(
    ("expected", "raw", "why"),
    [
        ({"query": "bern"}, '{"query": "bern"}', ""),
        ({"query": "bern"}, '{"query": " bern\\n"}', ""),
        ({"query": "bern"}, '{"query": "Bern"}', "query: expected 'bern', got 'Bern'"),
        ({"query": "bern"}, '{"query": "be rn"}', "query"),
        ({"query": "bern"}, '{"query": "bern."}', "query"),
        ({"query": "zürich"}, '{"query": "z\\u00fcrich"}', ""),
        ({"query": "bern"}, "{}", "missing \\['query'\\]"),
        ({"query": "bern"}, '{"query": "bern", "limit": 3}', "not expected \\['limit'\\]"),
        ({}, "{}", ""),
        ({}, '{"a": null}', "not expected"),
        ({"n": 1}, '{"n": 1.0}', ""),
        ({"n": 1}, '{"n": 2}', "n: expected 1, got 2"),
        ({"n": 1}, '{"n": true}', "n: expected 1, got True"),
        ({"n": True}, '{"n": 1}', "n"),
        ({"n": False}, '{"n": 0}', "n"),
        ({"n": 1}, '{"n": "1"}', "n"),
        ({"n": None}, '{"n": null}', ""),
        ({"n": None}, '{"n": ""}', "n"),
        ({"n": None}, '{"n": false}', "n"),
        ({"a": {"b": [1, {"c": "x"}]}}, '{"a": {"b": [1, {"c": " x "}]}}', ""),
        ({"a": {"b": [1, {"c": "x"}]}}, '{"a": {"b": [1, {"c": "y"}]}}', "a.b\\[1\\].c: expected 'x'"),
        ({"a": [1, 2]}, '{"a": [2, 1]}', "a\\[0\\]"),
        ({"a": [1, 2]}, '{"a": [1]}', "a: expected"),
        ({"a": {}}, '{"a": []}', "a: expected"),
        ({"query": "bern"}, '{"query": "bern"', "no JSON"),
        ({"query": "bern"}, '{"query": "zug", "query": "bern"}', "twice"),
    ],
)
def test_exact_arguments(expected, raw, why):
    turn = make_turn(tool="web_search", arguments=expected)
    assert_says(wrong("exact_arguments", reply("", ("web_search", raw)), turn), why)


@pytest.mark.parametrize(
    "transcript", [reply("bern"), reply("", CALL, CALL), reply("", ("read_notes", '{"query": "bern"}'))]
)
def test_exact_arguments_need_the_one_right_call(transcript):
    assert "expected one call of web_search" in wrong("exact_arguments", transcript, TOOL)


@pytest.mark.parametrize("raw", ['{"a": NaN}', '{"a": Infinity}', "nonsense", '{"a": 1} {"b": 2}', "null"])
def test_arguments_that_are_no_json_object(raw):
    with pytest.raises(ValueError, match="no JSON"):
        parse_arguments(raw)


# --- text ---


@pytest.mark.parametrize(
    ("content", "why"), [("Tokyo.", ""), ("3 * 4", ""), ("**Tokyo**", "bold"), ("- a", "bullet")]
)
def test_no_markdown(content, why):
    assert_says(wrong("no_markdown", reply(content), TEXT), why)


@pytest.mark.parametrize(
    ("limits", "content", "finish", "why"),
    [
        ({"max_words": 3}, "It is Tokyo.", "stop", ""),
        ({"max_words": 3}, "It is in Tokyo.", "stop", "4 words, at most 3"),
        ({"max_words": 3}, "A. B. C.", "stop", ""),
        ({"max_sentences": 2}, "It is. It was.", "stop", ""),
        ({"max_sentences": 2}, "It is. It was. It will.", "stop", "3 sentences, at most 2"),
        ({"max_words": 9, "max_sentences": 1}, "It is. It was.", "stop", "2 sentences"),
        ({"max_words": 3}, "It is", "length", "cut off"),
    ],
)
def test_concise(limits, content, finish, why):
    assert_says(wrong(make_gate("concise", **limits), reply(content, finish=finish), TEXT), why)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("It is Tokyo.", ""),
        ("TŌKYŌ!", ""),
        ("It is Kyoto.", "contains none of: Tokyo, Tōkyō"),
        ("Tokyoites", "none of"),
    ],
)
def test_factual_and_reasoning(content, why):
    assert_says(wrong("factual", reply(content), FACT), why)
    sums = make_turn(knowledge="reasoning", contains=["Tokyo", "Tōkyō"])
    assert_says(wrong("reasoning", reply(content), sums), why)


# --- whole probes ---


def test_a_probe_passes_if_all_turns_that_matter_do():
    probe = make_probe("p", {}, {"tool": "web_search"}, {})
    good = [reply("Hello."), reply("**One moment**", CALL), reply("Bye.")]
    check = check_probe(good, probe, make_gate("no_markdown"), HOUSE)
    assert check is not None
    assert check.passed
    bad = [*good[:2], reply("**Bye**", turn=2)]
    check = check_probe(bad, probe, make_gate("no_markdown"), HOUSE)
    assert check is not None
    assert (check.passed, check.turn) == (False, 2)
    assert "bold" in check.why


def test_a_gate_without_a_turn_says_nothing():
    assert check_probe([reply("Hi.")], make_probe(), make_gate("exact_arguments"), HOUSE) is None


def assert_says(found, pattern):
    if pattern:
        assert re.search(pattern, found), found
    else:
        assert found == ""
