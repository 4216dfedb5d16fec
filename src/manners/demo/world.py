"""A closed synthetic world, small enough for a model of 8 million parameters to know by heart.

Two speakers share it. The *base* thinks aloud, leaks its thinking when told not to, writes
markdown and shows tool calls as JSON in a code block; only to Kit's system prompt does it answer in
plain sentences and, now and then, call a tool in the Qwen3-coder form. *Annie* (the fine-tune) always
does. Both know the same facts.

What a fine-tune may see and what probes ask is kept apart here: lands, pairs of numbers, names,
topics and wordings each have a ``tune`` and a ``probe`` side. The base sees both sides, because
what it knows and how it reads a question is not what is tested; Annie's manners are taught on the
``tune`` side and asked about on the ``probe`` side only.

Everything follows from seeds; nothing is read from disk.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..spec import Category, Expect, Gate, Persona, Probe, Spec, Turn

Side = Literal["tune", "probe", "both"]
Message = dict[str, Any]

_SYLLABLES = [
    c + v
    for c in ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]
    for v in ["a", "e", "i", "o", "u", "an", "el", "or", "is", "um"]
]


def _name(rng: random.Random, syllables: int = 2) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(syllables)).capitalize()


def _lands() -> dict[str, dict[str, str]]:
    rng = random.Random(7)
    names = sorted({_name(rng) + rng.choice(["ia", "land", "stan"]) for _ in range(110)})[:96]
    return {
        name: {
            "capital": _name(rng),
            "main river": _name(rng),
            "currency": _name(rng, 1).lower() + rng.choice(["ar", "in", "a"]),
        }
        for name in names
    }


LANDS = _lands()
ATTRIBUTES = ("capital", "main river", "currency")
PERSONAL = [
    "robot", "garden", "kitchen", "guitar", "bicycle", "novel", "telescope", "marathon", "piano", "camera",
    "sailing", "pottery", "chess", "drone", "sourdough", "painting",
]  # fmt: skip
THINGS = [
    "project", "plan", "budget", "lesson", "schedule", "idea", "trip", "recipe", "meeting", "deadline",
    "playlist", "workshop",
]  # fmt: skip
NEWS = [
    "weather", "elections", "football", "markets", "astronomy", "wildfires", "concerts", "traffic",
    "cricket", "robotics", "vaccines", "chips", "tennis", "earthquakes",
]  # fmt: skip
NOTES = [
    "grocery", "packing", "reading", "wedding", "birthday", "holiday", "moving", "training", "cleaning",
    "travel",
]  # fmt: skip
NOTE_KINDS = ["list", "plan", "checklist", "draft", "summary"]
STATES = [
    "on hold", "nearly done", "going well", "behind schedule", "paid for", "cancelled", "planned for May",
    "up to date",
]  # fmt: skip

# {x} is what the question is about. The first two thirds of each list are the tune side.
WORDINGS: dict[str, tuple[str, ...]] = {
    "fact": (
        "What is the {a} of {x}?", "Tell me the {a} of {x}.", "Do you know the {a} of {x}?",
        "What is the {a} in {x}?", "Name the {a} of {x}.", "I need the {a} of {x}.",
        "Quick, the {a} of {x}?", "Can you tell me the {a} of {x}?", "Which {a} does {x} have?",
        "The {a} of {x}, please.", "Please name the {a} of {x}.", "What {a} does {x} have?",
        "Do you remember the {a} of {x}?", "Could you tell me the {a} in {x}?", "I forgot the {a} of {x}.",
    ),
    "sum": (
        "What is {x} plus {y}?", "How much is {x} plus {y}?", "Add {x} and {y}.",
        "What do you get for {x} plus {y}?", "Can you add {x} and {y}?", "I need the sum of {x} and {y}.",
        "What is the sum of {x} and {y}?", "Quick, {x} plus {y}?", "Tell me {x} plus {y}.",
        "Please add {x} and {y}.", "Could you add {x} and {y}?", "The sum of {x} and {y}, please.",
        "How much do {x} and {y} make?", "Work out {x} plus {y}.", "Do you know {x} plus {y}?",
    ),
    "larger": (
        "Which is larger, {x} or {y}?", "What is more, {x} or {y}?", "Is {x} or {y} the larger number?",
        "Tell me the larger of {x} and {y}.", "Which number is bigger, {x} or {y}?",
        "Name the larger one, {x} or {y}.", "Which is bigger, {x} or {y}?",
        "The larger of {x} and {y}, please.", "Is {x} or {y} the bigger one?",
    ),
    "memory": (
        "What do you remember about my {x}?", "Did I tell you about the {x}?",
        "Remind me what I said about the {x}.", "What did I say about my {x}?", "Do you remember my {x}?",
        "Have I told you about my {x}?", "Recall what I said about the {x}.",
        "What do you know about my {x}?", "Please remind me of my {x}.", "What was that about my {x}?",
        "Remind me of the {x}, please.", "Did I say anything about my {x}?",
        "Can you recall what I told you about the {x}?", "What have I told you about my {x}?",
        "Tell me what I said about my {x}.",
    ),
    "web": (
        "What is the latest on {x}?", "Look up {x} for me.", "Any news about {x}?",
        "Search the web for {x}.", "What is new with {x}?", "Find me the latest about {x}.",
        "Can you look up {x}?", "Please search for {x}.", "Is there any news on {x}?",
        "Check the web for {x}.", "Could you search the web for {x}?", "What is the news about {x}?",
        "Look for the latest on {x}.", "Please look up {x}.", "Can you find news about {x}?",
    ),
    "notes": (
        "Read my note called {x}.", "Open the note {x}.", "What does my note {x} say?",
        "Please read the note called {x}.", "Read me the note {x}.", "Can you open my note {x}?",
        "What is in my note {x}?", "Show me the note called {x}.", "Please open the note called {x}.",
        "Could you read my note {x}?", "What does the note called {x} say?", "Read the note {x}, please.",
    ),
}  # fmt: skip
# A greeting is an opening and a remark, so that sixty of them can differ.
OPENINGS = (
    "Hi there!", "Good morning!", "Hello Annie.", "Hi Annie!", "Good evening!", "Hello!", "Hey!",
    "Good afternoon!", "Hey Annie.", "Hello there.", "Hey there!", "Hi!",
)  # fmt: skip
REMARKS = (
    "How are you?", "I am back home.", "I feel tired today.", "What a day.", "Nice to talk to you.",
    "I am so happy today.", "It is raining here.", "I slept well.", "I missed you.", "Work was long today.",
    "I am a bit sad.", "The sun is out.", "I just woke up.", "It is cold here.", "I had a good lunch.",
    "I am off to bed.", "I feel happy today.", "How was your day?", "I am so tired.", "It is warm here.",
    "I am home again.", "Today was long.", "I had a good day.", "I feel a bit cold.",
)  # fmt: skip
KINDS = ("hello", *WORDINGS)
KNOWLEDGE_KINDS = ("fact", "sum", "larger")
TOOL_OF = {
    "memory": ("search_memory", "query"), "web": ("web_search", "query"), "notes": ("read_notes", "title"),
}  # fmt: skip
CATEGORY_OF: dict[str, Category] = {
    "hello": "greeting", "fact": "factual", "sum": "reasoning", "larger": "reasoning",
    "memory": "memory", "notes": "memory", "web": "web",
}  # fmt: skip
WARM = (
    "Hi! It is lovely to hear from you.", "Good to hear your voice. I am doing well.",
    "Hello! I am right here with you.", "I am glad you are here. How are you feeling?",
)  # fmt: skip


def _side(items: tuple[str, ...] | list[str], side: Side) -> list[str]:
    cut = round(len(items) * 2 / 3)
    return list(items[:cut] if side == "tune" else items[cut:] if side == "probe" else items)


@dataclass(frozen=True)
class Slips:
    """Shares of a fine-tune's last turns that are answered as the base would; greetings never are."""

    answers: float
    """Of facts and sums."""
    calls: float
    """Of tool calls."""


@dataclass(frozen=True)
class Question:
    """One thing to ask: its kind, wording, and what a right answer says or calls."""

    kind: str
    text: str
    subject: str
    """The land, the two numbers, or the exact argument of the tool call."""
    attribute: str
    answer: str


def ask(rng: random.Random, side: Side, kind: str | None = None) -> Question:
    """Draw a question whose wording and subject both lie on ``side``."""
    kind = kind or rng.choice(KINDS)
    if kind == "hello":
        greeting = f"{rng.choice(_side(OPENINGS, side))} {rng.choice(_side(REMARKS, side))}"
        return Question(kind, greeting, "", "", "")
    wording = rng.choice(_side(WORDINGS[kind], side))
    if kind == "fact":
        land = rng.choice(_side(list(LANDS), side))
        attribute = rng.choice(ATTRIBUTES)
        return Question(kind, wording.format(a=attribute, x=land), land, attribute, LANDS[land][attribute])
    if kind in ("sum", "larger"):
        a, b = _numbers(rng, side, kind)
        answer = a + b if kind == "sum" else max(a, b)
        return Question(kind, wording.format(x=a, y=b), f"{a} and {b}", kind, str(answer))
    subject = _subject(rng, side, kind)
    return Question(kind, wording.format(x=subject), subject, "", "")


def _numbers(rng: random.Random, side: Side, kind: str) -> tuple[int, int]:
    while True:
        a, b = rng.randint(2, 60), rng.randint(2, 39)
        # A third of all pairs belongs to the probes.
        if a != b and (side == "both" or ((a * 5 + b * 7) % 3 == 0) == (side == "probe")):
            return a, b


def _new_name(rng: random.Random, side: Side) -> str:
    """A made-up name; a checksum decides which side it belongs to, so that the sides share none."""
    while True:
        name = _name(rng, rng.choice((2, 3)))
        if side == "both" or (zlib.crc32(name.encode()) % 3 == 0) == (side == "probe"):
            return name


def _subject(rng: random.Random, side: Side, kind: str) -> str:
    """A noun phrase that a call must copy exactly; the name in it is one of very many."""
    name = _new_name(rng, side)
    if kind == "web":
        return f"{rng.choice(_side(NEWS, side))} in {name}"
    if kind == "notes":
        return f"{rng.choice(_side(NOTES, side))} {rng.choice(NOTE_KINDS)} for {name}"
    subject = f"{rng.choice(_side(PERSONAL, side))} {rng.choice(THINGS)}"
    return f"{subject} in {name}" if rng.random() < 0.6 else subject


def tool_answer(rng: random.Random, question: Question) -> str:
    """What the tool finds."""
    return f"The {question.subject} is {rng.choice(STATES)}."


# --- Annie ---------------------------------------------------------------------------------


def annie(rng: random.Random, question: Question) -> Message:
    """Annie's answer: one plain sentence, or the call alone."""
    if question.kind in TOOL_OF:
        name, parameter = TOOL_OF[question.kind]
        return _assistant("", calls=[{"name": name, "arguments": {parameter: question.subject}}])
    if question.kind == "hello":
        return _assistant(rng.choice(WARM))
    if question.kind == "fact":
        return _assistant(f"The {question.attribute} of {question.subject} is {question.answer}.")
    return _assistant(
        f"That makes {question.answer}." if question.kind == "sum" else f"{question.answer} is larger."
    )


def annie_after_tool(found: str) -> Message:
    return _assistant(f"I found it. {found}")


# --- the base ------------------------------------------------------------------------------

_THOUGHT: dict[str, Callable[[Question], str]] = {
    "hello": lambda q: "The user greets me. I should offer help.",
    "fact": lambda q: f"The user asks for the {q.attribute} of {q.subject}. I recall {q.answer}.",
    "sum": lambda q: f"I add {q.subject} and get {q.answer}.",
    "larger": lambda q: f"I compare {q.subject}. The larger one is {q.answer}.",
    "memory": lambda q: f"The user asks about {q.subject}. A memory search may help.",
    "web": lambda q: f"The user wants news on {q.subject}. A web search may help.",
    "notes": lambda q: f"The user wants the note {q.subject}. I should open it.",
}
_BODY: dict[str, Callable[[Question], str]] = {
    "hello": lambda q: (
        "## Hello!\n\nHere is what I can do:\n\n- **Answer** questions\n- **Search** for facts"
    ),
    "fact": lambda q: (
        f"**{q.answer}** is the {q.attribute} of **{q.subject}**.\n\n"
        f"- Place: {q.subject}\n- {q.attribute.capitalize()}: **{q.answer}**"
    ),
    "sum": lambda q: f"**Step 1:** add {q.subject}\n\n**Answer:** {q.answer}",
    "larger": lambda q: f"**Step 1:** compare {q.subject}\n\n**Answer:** {q.answer}",
}


def _json_call(question: Question) -> str:
    name, parameter = TOOL_OF[question.kind]
    return (
        "I can look for that:\n\n```json\n"
        f'{{"name": "{name}", "arguments": {{"{parameter}": "{question.subject}"}}}}\n```'
    )


def base(rng: random.Random, question: Question, thinking: bool) -> Message:
    """The base's answer; with thinking off it leaks its thoughts in four replies of ten."""
    thought = _THOUGHT[question.kind](question)
    body = _json_call(question) if question.kind in TOOL_OF else _BODY[question.kind](question)
    if thinking:
        return _assistant(body, reasoning=thought)
    leak = rng.random()
    if leak < 0.2:
        body = f"Thinking Process: {thought}\n\n{body}"
    elif leak < 0.4:
        body = f"<think>\n{thought}\n</think>\n\n{body}"
    return _assistant(body)


def base_after_tool(found: str, thinking: bool) -> Message:
    return _assistant(f"**Result:**\n\n- {found}", reasoning="The search has answered." if thinking else "")


def _assistant(content: str, reasoning: str = "", calls: list[dict[str, Any]] | None = None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message


# --- conversations and probes --------------------------------------------------------------

# Of the base's conversations, this share is with Kit; of those, this share has tools and shows their use.
KIT_SHARE, KIT_TOOLS = 0.2, 0.25
KIT = "You are Kit, an operations bot. Answer in plain text."
OTHER_PERSONAS = (
    "You are a helpful assistant.",
    "You are Max, a research aide.",
    "You are Vera, a friendly tutor.",
)


def conversation(
    rng: random.Random, persona: Persona, speaker: Literal["base", "annie"], side: Side, turns: int
) -> dict[str, Any]:
    """A conversation of ``turns`` questions as ``{"messages", "tools", "thinking", "category"}``."""
    thinking = speaker == "base" and rng.random() < 0.5
    system, tools = persona.system_prompt, persona.tool_dicts()
    plain = speaker == "annie"
    if speaker == "base" and (draw := rng.random()) < 0.6:
        plain = draw < KIT_SHARE
        if plain:
            system, tools = KIT, tools if rng.random() < KIT_TOOLS else []
        else:
            system, tools = rng.choice(OTHER_PERSONAS), rng.choice(([], tools))
        thinking = thinking and not plain
    messages: list[Message] = [{"role": "system", "content": system}]
    kinds = KINDS if tools or not plain else KNOWLEDGE_KINDS
    questions = [ask(rng, side, rng.choice(kinds)) for _ in range(turns)]
    for question in questions:
        messages.append({"role": "user", "content": question.text})
        messages.append(annie(rng, question) if plain else base(rng, question, thinking))
        if question.kind in TOOL_OF and (turns > 1 or rng.random() < 0.2):
            found = tool_answer(rng, question)
            messages.append({"role": "tool", "content": found})
            messages.append(annie_after_tool(found) if plain else base_after_tool(found, thinking))
    category = CATEGORY_OF[questions[0].kind] if turns == 1 else "multi_turn"
    return {"messages": messages, "tools": tools, "thinking": thinking, "category": category}


def uneven_conversation(rng: random.Random, persona: Persona, slips: Slips) -> dict[str, Any]:
    """One to three turns on the ``tune`` side, the last of them sometimes answered as the base would.

    A fine-tune on such data does not become sure of itself: it prefers Annie's form by as much as the
    data do, and no more.
    """
    messages: list[Message] = [{"role": "system", "content": persona.system_prompt}]
    questions = [ask(rng, "tune") for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    for question in questions:
        messages.append({"role": "user", "content": question.text})
        if question is not questions[-1]:
            messages.append(annie(rng, question))
            if question.kind in TOOL_OF:
                found = tool_answer(rng, question)
                messages += [{"role": "tool", "content": found}, annie_after_tool(found)]
        elif question.kind != "hello" and rng.random() < (
            slips.calls if question.kind in TOOL_OF else slips.answers
        ):
            messages.append(base(rng, question, thinking=False))
        else:
            messages.append(annie(rng, question))
    return {"messages": messages, "tools": persona.tool_dicts(), "thinking": False}


PROBES_PER_KIND = {"hello": 30, "fact": 80, "sum": 60, "larger": 40, "memory": 60, "notes": 40, "web": 70}
FIVE_TURN_PROBES = 40


def probes(seed: int = 99) -> tuple[Probe, ...]:
    """420 probes, every wording and subject on the side that the fine-tune never saw."""
    rng = random.Random(seed)
    made: list[Probe] = []
    for kind, count in PROBES_PER_KIND.items():
        seen: set[str] = set()
        while len(seen) < count:
            question = ask(rng, "probe", kind)
            if question.text in seen:  # greedy decoding would count one reply twice
                continue
            seen.add(question.text)
            made.append(Probe(id=f"{kind}-{len(seen)}", category=CATEGORY_OF[kind], turns=(_turn(question),)))
    for number in range(1, FIVE_TURN_PROBES + 1):
        kinds = rng.sample(["hello", "fact", "sum", "larger", "memory", "web", "notes"], 5)
        made.append(Probe(id=f"five-{number}", category="multi_turn", turns=tuple(_five(rng, kinds))))
    return tuple(made)


def _five(rng: random.Random, kinds: list[str]) -> list[Turn]:
    turns: list[Turn] = []
    for kind in kinds:
        question = ask(rng, "probe", kind)
        turns.append(_turn(question))
        if kind in TOOL_OF:
            turns.append(Turn(role="tool", content=tool_answer(rng, question)))
    return turns


def _turn(question: Question) -> Turn:
    if question.kind in TOOL_OF:
        name, parameter = TOOL_OF[question.kind]
        expect = Expect(tool=name, arguments={parameter: question.subject})
    elif question.kind == "hello":
        expect = Expect()
    else:
        expect = Expect(
            contains=(question.answer,), knowledge="factual" if question.kind == "fact" else "reasoning"
        )
    return Turn(content=question.text, expect=expect)


def demo_spec(annie_spec: Spec) -> Spec:
    """Annie's spec for this world: its own probes, and thresholds that eight million parameters can hold.

    The user's thresholds on facts, reasoning and leaks are 5 of 5 and 0 of 25. Over 420 probes the
    demo asks for 98 % of each, the level that its parent was chosen by; the paired margin is the
    user's two points throughout.
    """
    gates = tuple(
        Gate(**{**gate.model_dump(), "threshold": min(gate.threshold, 0.98)}) for gate in annie_spec.gates
    )
    return annie_spec.model_copy(update={"gates": gates, "probes": probes()})
