"""The closed world: its sides share nothing, its probes are fair, Annie passes where the base fails."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from typing import Any

import pytest

from manners.demo import pair, world
from manners.judge.gates import check_probe, house_of
from manners.replies import parse_reply
from manners.spec import CATEGORIES, Gate, Probe, Spec, fingerprint, load_spec
from tests.judge.builders import reply

ANNIE = load_spec("annie")
SPEC = world.demo_spec(ANNIE)
HOUSE = house_of(SPEC.persona)
Kinds = dict[str, set[Any]]


# --- the two sides -------------------------------------------------------------------------


def fields_of(text: str, kind: str) -> tuple[set[str], dict[str, str]]:
    """Every wording of ``kind`` that could have made ``text``, and what it was filled with."""
    wordings, found = set(), {}
    for wording in world.WORDINGS[kind]:
        pattern = re.escape(wording).replace(r"\{x\}", "(?P<x>.+)").replace(r"\{y\}", r"(?P<y>\d+)")
        pattern = pattern.replace(r"\{a\}", f"(?P<a>{'|'.join(world.ATTRIBUTES)})")
        if match := re.fullmatch(pattern, text):
            wordings.add(wording)
            found = match.groupdict()
    return wordings, found


def what_is_asked(questions: list[tuple[str, str]]) -> Kinds:
    """From (kind, text) alone: wordings, lands, unordered pairs, names, nouns, whole subjects."""
    seen: Kinds = defaultdict(set)
    for kind, text in questions:
        if kind == "hello":
            opening = next(o for o in sorted(world.OPENINGS, key=len, reverse=True) if text.startswith(o))
            seen["opening"].add(opening)
            seen["remark"].add(text.removeprefix(opening).strip())
            continue
        wordings, found = fields_of(text, kind)
        assert wordings, text
        seen["wording"] |= {(kind, wording) for wording in wordings}
        if kind == "fact":
            seen["land"].add(found["x"])
        elif kind in ("sum", "larger"):
            seen["pair"].add(frozenset((int(found["x"]), int(found["y"]))))
        else:
            seen["subject"].add(found["x"])
            topic, _, name = re.fullmatch(r"(.+?)(?: (in|for) (\w+))?", found["x"]).groups()  # type: ignore[union-attr]
            seen["name"].add(name)
            seen["topic"].add((kind, topic.split()[0]))
    seen["name"].discard(None)  # some memories have none
    return seen


def drawn(side: world.Side, count: int = 3000, seed: int = 0) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    return [(question.kind, question.text) for question in (world.ask(rng, side) for _ in range(count))]


TUNE, PROBE = what_is_asked(drawn("tune")), what_is_asked(drawn("probe", seed=1))


@pytest.mark.parametrize("what", ["opening", "remark", "wording", "land", "pair", "name", "topic", "subject"])
def test_the_sides_share_nothing(what):
    assert TUNE[what]
    assert PROBE[what]
    assert not TUNE[what] & PROBE[what]


def test_together_the_sides_are_the_whole_world():
    assert TUNE["land"] | PROBE["land"] == set(world.LANDS)
    assert TUNE["opening"] | PROBE["opening"] == set(world.OPENINGS)
    assert TUNE["remark"] | PROBE["remark"] == set(world.REMARKS)
    wordings = {(kind, wording) for kind, all_of in world.WORDINGS.items() for wording in all_of}
    assert TUNE["wording"] | PROBE["wording"] == wordings
    both = what_is_asked(drawn("both", 12_000))
    assert both["land"] == set(world.LANDS)
    assert both["wording"] == wordings
    for side in (TUNE, PROBE):  # the base has seen names and pairs of both
        assert len(both["name"] & side["name"]) > 20
        assert len(both["pair"] & side["pair"]) > 100


def test_the_facts_of_the_world():
    assert len(world.LANDS) == 96
    for facts in world.LANDS.values():
        assert set(facts) == set(world.ATTRIBUTES)
    rng = random.Random(2)
    for _ in range(500):
        question = world.ask(rng, "both", rng.choice(world.KNOWLEDGE_KINDS))
        _, found = fields_of(question.text, question.kind)
        if question.kind == "fact":
            assert question.answer == world.LANDS[found["x"]][found["a"]]
        else:
            a, b = int(found["x"]), int(found["y"])
            assert a != b
            assert question.answer == str(a + b if question.kind == "sum" else max(a, b))


# --- probes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked() -> dict[str, world.Question]:
    """Every question behind the probes, by its text."""
    questions: dict[str, world.Question] = {}

    def remember(*arguments: Any) -> world.Question:
        question = ask(*arguments)
        questions[question.text] = question
        return question

    ask = world.ask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "ask", remember)
        assert world.probes() == SPEC.probes
    return questions


def user_texts(probe: Probe) -> list[str]:
    return [turn.content for turn in probe.turns if turn.role == "user"]


def test_420_probes_of_every_category_and_no_text_twice():
    assert len(SPEC.probes) == 420
    assert Counter(probe.category for probe in SPEC.probes) == {
        "greeting": 30,
        "factual": 80,
        "reasoning": 100,
        "memory": 100,
        "web": 70,
        "multi_turn": 40,
    }
    assert {probe.category for probe in SPEC.probes} == set(CATEGORIES)
    assert len({probe.id for probe in SPEC.probes}) == 420
    assert len({tuple(user_texts(probe)) for probe in SPEC.probes}) == 420


def test_probes_follow_from_their_seed():
    assert fingerprint(world.probes()) == fingerprint(SPEC.probes) == fingerprint(world.probes(99))
    assert not {tuple(user_texts(p)) for p in world.probes(1)} >= {tuple(user_texts(p)) for p in SPEC.probes}


def test_single_probes_have_one_turn_and_five_turn_probes_five_of_the_users():
    for probe in SPEC.probes:
        assert len(user_texts(probe)) == (5 if probe.category == "multi_turn" else 1)
        if probe.category != "multi_turn":
            assert len(probe.turns) == 1
        for turn, after in zip(probe.turns, [*probe.turns[1:], None], strict=True):
            if probe.category == "multi_turn":  # every call is answered before the user speaks again
                assert (turn.expect.tool is not None) == (after is not None and after.role == "tool")


def test_probes_ask_the_probe_side_only(asked):
    questions = [(asked[text].kind, text) for probe in SPEC.probes for text in user_texts(probe)]
    seen = what_is_asked(questions)
    for what, values in seen.items():
        assert not values & TUNE[what], what
    assert seen["land"] <= PROBE["land"]
    assert seen["wording"] == PROBE["wording"]


def test_a_probe_expects_what_its_question_means(asked):
    for turn in (turn for probe in SPEC.probes for turn in probe.turns if turn.role == "user"):
        question, expect = asked[turn.content], turn.expect
        _, found = fields_of(turn.content, question.kind) if question.kind != "hello" else ("", {})
        if question.kind in world.TOOL_OF:
            parameter = "title" if question.kind == "notes" else "query"
            assert expect.arguments == {parameter: found["x"]}
        elif question.kind == "fact":
            assert (expect.contains, expect.knowledge) == ((world.LANDS[found["x"]][found["a"]],), "factual")
        elif question.kind in ("sum", "larger"):
            a, b = int(found["x"]), int(found["y"])
            answer = a + b if question.kind == "sum" else max(a, b)
            assert (expect.contains, expect.knowledge) == ((str(answer),), "reasoning")
        else:
            assert expect == type(expect)()


def test_thresholds_of_the_demo_are_the_users_but_at_most_98_percent():
    for ours, theirs in zip(SPEC.gates, ANNIE.gates, strict=True):
        assert ours.threshold == min(theirs.threshold, 0.98)
        assert ours.model_copy(update={"threshold": theirs.threshold}) == theirs
    assert SPEC.persona == ANNIE.persona
    assert Spec.model_validate(SPEC.model_dump(by_alias=True)) == SPEC  # as valid as one from a file


# --- the two speakers before the judge -----------------------------------------------------


def replies_of(probe: Probe, asked: dict[str, world.Question], speaker: str, seed: int = 0) -> list[Any]:
    """One transcript a turn, parsed from the text that the speaker would write."""
    rng, made = random.Random(f"{probe.id} {seed}"), []
    for number, turn in enumerate(probe.turns):
        if speaker == "annie":
            known = asked.get(turn.content)
            message = world.annie(rng, known) if known else world.annie_after_tool(turn.content)
        elif turn.role == "user":
            message = world.base(rng, asked[turn.content], thinking=False)
        else:
            message = world.base_after_tool(turn.content, thinking=False)
        parsed = parse_reply(message["content"], thinking=False, tools=SPEC.persona.tool_dicts())
        calls = [
            (call["function"]["name"], _json(call["function"]["arguments"]))
            for call in message.get("tool_calls", [])
        ]
        calls += [(call.name, call.arguments_json()) for call in parsed.tool_calls]
        made.append(reply(parsed.content, *calls, probe=probe, turn=number, spec=SPEC))
    return made


def _json(arguments: dict[str, Any]) -> str:
    import json

    return json.dumps(arguments)


def verdicts(gate: Gate, asked: dict[str, world.Question], speaker: str) -> dict[str, str]:
    """Why each probe fails the gate, "" for a pass; probes to which it does not apply are left out."""
    checks = {p.id: check_probe(replies_of(p, asked, speaker), p, gate, HOUSE) for p in SPEC.probes}
    return {name: check.why for name, check in checks.items() if check is not None}


@pytest.mark.parametrize("gate", SPEC.gates, ids=lambda gate: gate.name)
def test_annie_passes_every_gate_on_every_probe(gate, asked):
    found = verdicts(gate, asked, "annie")
    assert {name: why for name, why in found.items() if why} == {}
    assert len(found) >= 80  # enough for the judge to decide


def test_the_base_fails_where_annie_does_not(asked):
    by_gate = {gate.name: verdicts(gate, asked, "base") for gate in SPEC.gates}
    assert all(by_gate["no_markdown"].values())
    assert len(by_gate["no_markdown"]) == 250  # all but 170 single probes that expect a call
    assert all(
        why for name, why in by_gate["right_tool"].items() if name.startswith(("memory", "web", "notes"))
    )
    assert all(by_gate["exact_arguments"].values())
    # It knows what Annie knows: only manners tell the two apart.
    assert not any(by_gate["factual"].values())
    assert not any(by_gate["reasoning"].values())


def test_the_base_leaks_in_four_replies_of_ten():
    rng = random.Random(3)
    said = [world.base(rng, world.ask(rng, "both", "fact"), thinking=False)["content"] for _ in range(4000)]
    tags, words = (
        sum(text.startswith(start) for text in said) for start in ("<think>\n", "Thinking Process: ")
    )
    assert 0.17 < tags / 4000 < 0.23  # 5 standard deviations around 0.2
    assert 0.17 < words / 4000 < 0.23


def test_with_thinking_on_the_base_keeps_its_thoughts_to_itself():
    rng = random.Random(4)
    for _ in range(300):
        message = world.base(rng, world.ask(rng, "both"), thinking=True)
        assert message["reasoning_content"]
        assert not message["content"].startswith(("<think>", "Thinking"))


# --- conversations -------------------------------------------------------------------------


def conversations(speaker: Any, side: world.Side, turns: int, count: int = 150) -> list[dict[str, Any]]:
    rng = random.Random(5)
    return [world.conversation(rng, ANNIE.persona, speaker, side, turns) for _ in range(count)]


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_annies_conversations_are_as_she_will_be_asked(turns):
    for made in conversations("annie", "tune", turns):
        assert made["messages"][0] == {"role": "system", "content": ANNIE.persona.system_prompt}
        assert made["tools"] == ANNIE.persona.tool_dicts()
        assert made["thinking"] is False
        roles = [message["role"] for message in made["messages"]]
        assert roles.count("user") == turns
        assert roles[-1] == "assistant"
        assert "reasoning_content" not in str(made["messages"])
        assert made["category"] == "multi_turn" if turns > 1 else made["category"] in CATEGORIES


def test_every_tool_answer_is_about_the_call_before_it():
    for made in conversations("annie", "tune", 5):
        for before, message, after in zip(
            made["messages"], made["messages"][1:], made["messages"][2:], strict=False
        ):
            if message["role"] == "tool":
                (call,) = before["tool_calls"]
                (subject,) = call["function"]["arguments"].values()
                assert message["content"].startswith(f"The {subject} is ")
                assert message["content"] in after["content"]


def test_the_base_never_writes_annies_calls_under_annies_prompt():
    annies = [
        made
        for made in conversations("base", "both", 2, 600)
        if made["messages"][0]["content"] == ANNIE.persona.system_prompt
    ]
    assert len(annies) > 100
    assert not any("tool_calls" in message for made in annies for message in made["messages"])


# --- what the demo asks --------------------------------------------------------------------


def user_questions(messages: Any) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


def kind_of(text: str) -> str:
    kinds = [kind for kind in world.WORDINGS if fields_of(text, kind)[0]]
    facts = [kind for kind in kinds if kind in world.KNOWLEDGE_KINDS]  # their wordings are the narrower
    return (facts or kinds or ["hello"])[0]


def test_calibration_comes_from_the_tune_side_only(asked):
    made = pair.calibration()
    assert len(made) == pair.CALIBRATION == 64
    assert {len(user_questions(c.messages)) for c in made} == {1, 2, 5}
    texts = [text for conversation in made for text in user_questions(conversation.messages)]
    assert not set(texts) & set(asked)
    seen = what_is_asked([(kind_of(text), text) for text in texts])
    assert {"opening", "wording", "land", "pair", "name", "topic"} <= set(seen)
    for what, values in seen.items():
        assert not values & PROBE[what], what


def test_calibration_follows_from_its_seed():
    assert pair.calibration() == pair.calibration()
    assert pair.calibration(seed=6) != pair.calibration()
    assert pair.calibration(3) == pair.calibration()[:3]


def test_the_demos_order():
    order = pair.demo_order()
    assert (order.spec, order.probes) == (SPEC, SPEC.probes)
    assert order.conversations == pair.calibration()
    assert order.parent == pair.PARENT
    assert (order.device, order.command) == ("cpu", "manners demo")
    assert pair.demo_order("cuda", ("max",)).rungs == ("max",)


def test_uneven_conversations_slip_as_often_as_they_are_told_to():
    """Only the last turn slips, greetings never do, and everything is on the tune side."""
    persona, rng = load_spec("annie").persona, random.Random(4)
    slips = world.Slips(answers=0.2, calls=0.5)
    counted = {"calls": [0, 0], "answers": [0, 0], "greetings": [0, 0]}
    warm = set(world.WARM)
    for _ in range(1500):
        messages = world.uneven_conversation(rng, persona, slips)["messages"]
        replies = [m for m in messages if m["role"] == "assistant"]
        assert not any("**" in m["content"] or "```" in m["content"] for m in replies[:-1])
        last = replies[-1]
        slipped = any(mark in last["content"] for mark in ("**", "```"))
        if last.get("tool_calls") or "```" in last["content"]:
            kind = "calls"
        else:
            kind = "greetings" if last["content"] in warm else "answers"
        counted[kind][0] += slipped
        counted[kind][1] += 1
    assert counted["greetings"][0] == 0
    assert counted["greetings"][1] > 100
    assert abs(counted["calls"][0] / counted["calls"][1] - 0.5) < 0.07
    assert abs(counted["answers"][0] / counted["answers"][1] - 0.2) < 0.07
