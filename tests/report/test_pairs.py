"""Harms come first, no frequent failure hides the others, and a diff adds up to its texts."""

from __future__ import annotations

import random

from manners.ask.transcripts import Asked, Call, Fault, Transcript
from manners.report.pairs import NOTHING_JUDGED, Outcome, differences, word_diff

ASKED = Asked(spec="annie", sha256="0", model="m")


def reply(probe: str, content: str = "hello", turn: int = 0, **more: object) -> Transcript:
    fields = {
        "probe": probe,
        "probe_sha256": "0",
        "turn": turn,
        "category": "greeting",
        "asked": ASKED,
        "request": {"messages": [{"role": "user", "content": f"question {turn}"}]},
        "started_s": 0.0,
        "content": content,
        "finish_reason": "stop",
        "total_s": 0.1,
        **more,
    }
    return Transcript.model_validate(fields)


def one_turn(names: str, **more: object) -> dict[str, list[Transcript]]:
    return {name: [reply(name, **more)] for name in names.split()}  # type: ignore[arg-type]


def test_order() -> None:
    parent = one_turn("same b1 a1 a2 a3 won fault words")
    candidate = one_turn("b1 a1 a2 a3 won fault words", content="other") | one_turn("same")
    candidate["fault"] = [reply("fault", error=Fault(kind="timeout", message="slow"))]
    lost = {"a1": ["no_markdown"], "a2": ["no_markdown"], "a3": ["no_markdown"], "b1": ["factual", "concise"]}
    found = differences("max", parent, candidate, Outcome(lost, {"won": ["concise"]}, {"a1": ["bold"]}))
    assert [pair.probe for pair in found.shown] == ["a1", "b1", "a2", "a3", "fault", "won", "words"]
    assert (found.compared, found.differing, found.harmed, found.rest) == (8, 7, 4, 0)
    assert found.shown[0].reasons == ("bold",)
    assert found.shown[1].tags == ("lost concise", "lost factual")
    assert found.shown[5].tags == ("won concise",)


def test_the_rest_is_counted() -> None:
    names = " ".join(f"p{i}" for i in range(30))
    found = differences("max", one_turn(names), one_turn(names, content="other"), NOTHING_JUDGED)
    assert len(found.shown) == 12
    assert found.rest == 18


def test_ids_and_times_are_no_difference_but_calls_are() -> None:
    def call(arguments: str, identity: str) -> dict[str, list[Transcript]]:
        calls = [Call(name="web_search", arguments=arguments, id=identity)]
        return {"p": [reply("p", "", tool_calls=calls)]}

    same = differences("max", call("{}", "1"), call("{}", "2"), NOTHING_JUDGED)
    assert same.differing == 0
    other = differences("max", call('{"query": "a"}', "1"), call('{"query": "b"}', "1"), NOTHING_JUDGED)
    side = other.shown[0].turns[0].candidate
    assert side is not None
    assert side.text == '[calls] web_search({"query": "b"})'
    assert [part.text for part in side.parts for part in part.segments if part.differs] == ["b"]


def test_a_conversation_that_ended_early() -> None:
    parent = {"p": [reply("p"), reply("p", "fine", 1)]}
    candidate = {"p": [reply("p", "", error=Fault(kind="broken-stream", message="closed\x1b[2J"))]}
    first, second = differences("max", parent, candidate, NOTHING_JUDGED).shown[0].turns
    assert first.candidate is not None
    assert first.candidate.fault == "broken-stream, closed⟨U+001B⟩[2J"
    assert not first.same
    assert second.candidate is None
    assert second.question == "question 1"


def test_long_and_cut_replies() -> None:
    parent = {"p": [reply("p")]}
    candidate = {"p": [reply("p", "word " * 1000, finish_reason="length", reasoning="hm")]}
    side = differences("max", parent, candidate, NOTHING_JUDGED).shown[0].turns[0].candidate
    assert side is not None
    assert [part.kind for part in side.parts] == ["thinks", "says"]
    assert side.text.endswith("… (3800 more characters)\n[cut off at the token limit]")


def test_requests_without_usable_messages() -> None:
    for request in (
        {},
        {"messages": []},
        {"messages": ["x"]},
        {"messages": [{"role": "user", "content": None}]},
    ):
        parent, candidate = (
            {"p": [reply("p", request=request)]},
            {"p": [reply("p", "other", request=request)]},
        )
        assert differences("max", parent, candidate, NOTHING_JUDGED).shown[0].turns[0].question == ""


def test_word_diff_adds_up() -> None:
    chance = random.Random(5)
    words = ["one", " ", "two", "\n", ".", "<b>", "é", "  "]
    for _ in range(300):
        before, after = ("".join(chance.choices(words, k=chance.randrange(12))) for _ in range(2))
        old, new = word_diff(before, after)
        assert "".join(segment.text for segment in old) == before
        assert "".join(segment.text for segment in new) == after
        # Spaces between two marks belong to the mark, so they may be marked on one side only.
        kept = ["".join(s.text for s in side if not s.differs) for side in (old, new)]
        assert "".join(kept[0].split()) == "".join(kept[1].split())


def test_a_changed_phrase_is_one_mark() -> None:
    old, new = word_diff("It is a fine day.", "It was some bad day.")
    assert [(segment.text, segment.differs) for segment in old] == [
        ("It ", False),
        ("is a fine", True),
        (" day.", False),
    ]
    assert [segment.text for segment in new if segment.differs] == ["was some bad"]
