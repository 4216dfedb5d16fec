"""Specs, probes and replies in as few words as a test of the judge needs."""

from __future__ import annotations

from typing import Any

from manners.ask.transcripts import Call, Fault, Transcript, asked_of
from manners.spec import Gate, Persona, Probe, Spec, Turn, fingerprint

SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "minLength": 1}, "limit": {"type": "integer"}},
    "required": ["query"],
    "additionalProperties": False,
}
TOOLS = [
    {"function": {"name": "web_search", "description": "Search", "parameters": SEARCH}},
    {"function": {"name": "read_notes", "description": "Notes", "parameters": {"type": "object"}}},
]


def make_persona(**changes: Any) -> Persona:
    data = {"name": "Annie", "system_prompt": "You are Annie.", "tools": TOOLS}
    return Persona.model_validate(data | changes)


def make_gate(name: str, threshold: float = 0.95, **more: Any) -> Gate:
    limits = {"max_words": 40, "max_sentences": 3} if name == "concise" and not more else {}
    return Gate.model_validate({"name": name, "threshold": threshold, **limits, **more})


def make_spec(*gates: Gate, **changes: Any) -> Spec:
    data = {"schema": 1, "name": "test", "persona": make_persona(), "gates": gates}
    return Spec.model_validate(data | changes)


def make_turn(**expect: Any) -> Turn:
    return Turn.model_validate({"content": "?", "expect": expect})


def make_probe(name: str = "p", *expects: dict[str, Any], category: str = "factual") -> Probe:
    turns = [{"content": f"{name}?", "expect": expect} for expect in expects or ({},)]
    return Probe.model_validate({"id": name, "category": category, "turns": turns})


def reply(
    content: str = "",
    *calls: tuple[str, str],
    probe: Probe | None = None,
    turn: int = 0,
    spec: Spec | None = None,
    model: str = "m",
    served: dict[str, str] | None = None,
    error: str | None = None,
    finish: str = "stop",
    **more: Any,
) -> Transcript:
    probe = probe or make_probe()
    return Transcript(
        probe=probe.id,
        probe_sha256=fingerprint(probe),
        turn=turn,
        category=probe.category,
        asked=asked_of(spec or make_spec(make_gate("right_tool")), model, served),
        request={},
        started_s=0.0,
        total_s=1.0,
        content=content,
        tool_calls=[Call(name=name, arguments=arguments) for name, arguments in calls],
        finish_reason=finish,
        error=Fault(kind=error, message="it broke") if error else None,  # type: ignore[arg-type]
        **more,
    )
