"""A finished run folder, made in code: real probes, transcripts and verdicts, only the model is played.

The parent answers everything rightly. ``max`` loses the habit of calling tools, thinks aloud now and
then and mangles arguments; ``mse`` slips twice; ``w4a16`` answers like the parent. Whoever runs this
file gets the folder: ``python -m tests.report.example_run DIR``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from manners.ask.transcripts import Asked, Call, Fault, Transcript, asked_of, dump
from manners.judge.verdicts import Verdicts, judge, write_verdicts
from manners.report import CandidateSummary, GateRow, RoundTrip, Summary, save_summary
from manners.spec import Expect, Probe, Spec, Turn, fingerprint, load_spec

HOSTILE = (
    '</p></bdi></main><script>document.title="owned"; console.error("owned")</script>'
    "<img src=x onerror=alert(1)> ```\n# not a heading\n"
    "\x1b[31mred\u202egnp.exe | {{ 7*7 }} [x](javascript:alert(1))"
)
"""What a reply must be able to say without anything coming of it."""

Played = tuple[str, list[tuple[str, dict[str, Any]]]]  # content, calls
Player = Callable[[Probe, int, Turn, Played, random.Random], "Played | Fault"]

_TOPICS = [
    "robot project",
    "trip to Kyoto",
    "marathon plan",
    "old bicycle",
    "piano lessons",
    "garden shed",
    "sourdough",
    "chess club",
]
_PLACES = ["Bangalore", "Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Perth", "Tallinn"]
_FACTS = [("Japan", "Tokyo"), ("Peru", "Lima"), ("Kenya", "Nairobi"), ("Norway", "Oslo"), ("Cuba", "Havana")]


def make_probes(count: int) -> list[Probe]:
    """``count`` probes, the six categories in turn."""
    makers = (_greeting, _factual, _memory, _web, _multi_turn, _reasoning)
    return [makers[i % 6](i // 6) for i in range(count)]


def _greeting(i: int) -> Probe:
    text = f"Hi Annie, {('good morning', 'I am home', 'how are you', 'good night')[i % 4]}! ({i})"
    return Probe(id=f"greeting-{i}", category="greeting", turns=(Turn(content=text),))


def _factual(i: int) -> Probe:
    country, capital = _FACTS[i % len(_FACTS)]
    expect = Expect(contains=(capital,), knowledge="factual")
    turn = Turn(content=f"What is the capital of {country}? ({i})", expect=expect)
    return Probe(id=f"factual-{i}", category="factual", turns=(turn,))


def _memory(i: int) -> Probe:
    query = f"{_TOPICS[i % 8]} {i}"
    expect = Expect(tool="search_memory", arguments={"query": query})
    turn = Turn(content=f"What do you remember about my {query}?", expect=expect)
    return Probe(id=f"memory-{i}", category="memory", turns=(turn,))


def _web(i: int) -> Probe:
    query = f"weather in {_PLACES[i % 8]} {i}"
    expect = Expect(tool="web_search", arguments={"query": query})
    return Probe(
        id=f"web-{i}", category="web", turns=(Turn(content=f"Look up the {query} for me.", expect=expect),)
    )


def _multi_turn(i: int) -> Probe:
    query = f"{_TOPICS[(i + 3) % 8]} {i}"
    return Probe(
        id=f"multi-{i}",
        category="multi_turn",
        turns=(
            Turn(content="Good evening, Annie."),
            Turn(
                content=f"Do you remember my {query}?",
                expect=Expect(tool="search_memory", arguments={"query": query}),
            ),
            Turn(role="tool", content=f"{query}: started in May, still going."),
            Turn(content="What is 12 plus 30?", expect=Expect(contains=("42",), knowledge="reasoning")),
        ),
    )


def _reasoning(i: int) -> Probe:
    a, b = 3 + i % 40, 5 + i % 7
    turn = Turn(
        content=f"What is {a} times {b}?", expect=Expect(contains=(str(a * b),), knowledge="reasoning")
    )
    return Probe(id=f"reasoning-{i}", category="reasoning", turns=(turn,))


def right_answer(turn: Turn) -> Played:
    if turn.expect.tool:
        return "", [(turn.expect.tool, dict(turn.expect.arguments or {}))]
    if turn.expect.contains:
        return f"That is {turn.expect.contains[0]}.", []
    return (
        "It started in May and is still going." if turn.role == "tool" else "Good to hear from you, Rajesh."
    ), []


def play_parent(probe: Probe, at: int, turn: Turn, right: Played, chance: random.Random) -> Played | Fault:
    return right


def play_max(probe: Probe, at: int, turn: Turn, right: Played, chance: random.Random) -> Played | Fault:
    """W4A4 by the largest value: the tool habit goes first."""
    if probe.id == "greeting-3":
        return HOSTILE, []
    if probe.id == "web-9":
        return Fault(kind="timeout", message="no [DONE] within 120 s")
    roll = chance.random()
    if turn.expect.tool:
        name, arguments = right[1][0]
        query = arguments["query"]
        if roll < 0.38:
            return f"I remember your {query} well, you told me about it last week.", []
        if roll < 0.52:
            other = "read_notes" if name == "search_memory" else "search_memory"
            return "", [(other, {"title" if other == "read_notes" else "query": query})]
        if roll < 0.60:
            return "", [(name, {"query": query.rsplit(" ", 1)[0]})]
        return right
    if roll < 0.05:
        return f"<think>The user wants a short reply. Annie should be warm.</think>\n\n{right[0]}", []
    if roll < 0.12 and not turn.expect.contains:
        return f"**Of course!** Here is what I found:\n\n- {right[0]}\n- Ask me anything else.", []
    return right


def play_mse(probe: Probe, at: int, turn: Turn, right: Played, chance: random.Random) -> Played | Fault:
    """Scales by search: two wrong tools, and some other words."""
    if probe.id in ("memory-7", "web-20"):
        return "I am not sure, let me think about it.", []
    if not turn.expect.tool and not turn.expect.contains and chance.random() < 0.08:
        return right[0].replace("Good to hear from you", "Lovely to hear from you"), []
    return right


def play_w4a16(probe: Probe, at: int, turn: Turn, right: Played, chance: random.Random) -> Played | Fault:
    return ("Nice to hear from you, Rajesh.", []) if probe.id == "greeting-1" else right


def play(spec: Spec, probes: list[Probe], model: str, player: Player) -> dict[str, list[Transcript]]:
    """Transcripts of a whole set of probes, in the form that ``ask`` leaves them."""
    chance = random.Random(model)
    asked = asked_of(spec, model, {"engine": "embedded", "version": "0.1.0"})
    return {probe.id: _conversation(spec, probe, asked, player, chance) for probe in probes}


def _conversation(
    spec: Spec, probe: Probe, asked: Asked, player: Player, chance: random.Random
) -> list[Transcript]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": spec.persona.system_prompt}]
    transcripts: list[Transcript] = []
    for at, turn in enumerate(probe.turns):
        messages.append({"role": turn.role, "content": turn.content})
        played = player(probe, at, turn, right_answer(turn), chance)
        transcripts.append(_transcript(probe, at, asked, list(messages), played))
        if isinstance(played, Fault):
            break
        messages.append({"role": "assistant", "content": played[0]})
    return transcripts


def _transcript(
    probe: Probe, at: int, asked: Asked, messages: list[dict[str, Any]], played: Played | Fault
) -> Transcript:
    content, calls = ("", []) if isinstance(played, Fault) else played
    return Transcript(
        schema=1,
        probe=probe.id,
        probe_sha256=fingerprint(probe),
        turn=at,
        category=probe.category,
        asked=asked,
        request={"model": asked.model, "messages": messages},
        started_s=1.0,
        content=content,
        tool_calls=[Call(name=name, arguments=json.dumps(arguments)) for name, arguments in calls],
        usage={"prompt_tokens": 100 + len(messages), "completion_tokens": 8},
        finish_reason=None if isinstance(played, Fault) else "tool_calls" if calls else "stop",
        total_s=0.2,
        error=played if isinstance(played, Fault) else None,
    )


def write_example(run_dir: Path, count: int = 412) -> Summary:
    """Fill ``run_dir`` with a run of which ``mse`` ships."""
    spec = load_spec("annie")
    probes = make_probes(count)
    parent = play(spec, probes, "annie-bf16", play_parent)
    candidates = [_candidate(run_dir, "parent", judge(spec, probes, parent), parent, _PARENT_COST)]
    for name, player, cost in (
        ("max", play_max, _MAX_COST),
        ("mse", play_mse, _MSE_COST),
        ("w4a16", play_w4a16, _W4A16_COST),
    ):
        replies = play(spec, probes, f"annie-{name}", player)
        candidates.append(_candidate(run_dir, name, judge(spec, probes, replies, parent), replies, cost))
    summary = Summary(
        schema=1,
        spec="annie",
        parent="demo/pair/parent",
        comparability="comparable",
        shipped="mse",
        candidates=tuple(candidates),
        engine="embedded 0.1.0, float32 on CPU, NVFP4 emulated",
        hardware={"processor": "2 x Xeon 2.6 GHz", "memory": "8 GB", "accelerator": "none"},
        versions={"manners": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.11.9"},
        seeds={"probes": 7, "calibration": 11, "asking": 0},
        n_probes=count,
        commands=("manners demo --out runs/demo",),
    )
    save_summary(summary, run_dir)
    return summary


_PARENT_COST: dict[str, Any] = {
    "strategy": "BF16, as fine-tuned",
    "bits_per_weight": 16.0,
    "bytes": 15_634_112,
}
_MAX_COST: dict[str, Any] = {
    "strategy": "W4A4, block scales from the largest value",
    "bits_per_weight": 6.81,
    "bytes": 6_921_344,
    "minutes": 0.21,
    "round_trip": RoundTrip(max_abs_diff=0.0, max_kl=0.0, tokens=512),
}
_MSE_COST = {**_MAX_COST, "strategy": "W4A4, block scales by search, no data", "minutes": 0.34}
_W4A16_COST = {
    **_MAX_COST,
    "strategy": "W4A16, activations left in BF16",
    "minutes": 0.2,
    "round_trip": RoundTrip(max_abs_diff=3.8e-6, max_kl=1.2e-9, tokens=512),
    "note": "a diagnosis: most engines gain no speed from it",
}


def _candidate(
    run_dir: Path, name: str, verdicts: Verdicts, replies: dict[str, list[Transcript]], cost: dict[str, Any]
) -> CandidateSummary:
    folder = run_dir / "candidates" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "transcripts.jsonl").write_bytes(dump(t for turns in replies.values() for t in turns))
    write_verdicts(folder / "verdicts.json", verdicts)
    return CandidateSummary(name=name, gates=tuple(GateRow.of(gate) for gate in verdicts.gates), **cost)


if __name__ == "__main__":
    from manners.report import write_report

    write_example(Path(sys.argv[1]))
    print(*write_report(sys.argv[1]), sep="\n")
