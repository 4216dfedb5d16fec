"""The seven gates: what one reply must not do. Pure functions; no statistics, no files.

What each looks at:

no_thinking_leak  every turn. No thinking tag (pairs, orphans, empty ones), no template or channel
                  token, no tool markup in the text, no planning at its start. While the persona's
                  thinking is off, also no reasoning beside the text, and no reasoning tokens.
right_tool        every turn. Exactly one call, of the tool that is expected, with arguments that
                  are one JSON object and satisfy the tool's schema; no call where none is expected.
exact_arguments   turns whose expected arguments are given. Values equal; text compared without the
                  white space around it and otherwise exactly; 1 equals 1.0, but not true.
no_markdown       turns where text is expected, that is, no tool.
concise           the same turns. At most so many words and sentences; a reply that max_tokens cut
                  off is not concise.
factual           turns whose expectation names this kind of knowledge and what to contain.
reasoning         the same for the other kind.

Two rules for all. A reply with neither text nor call fails every gate that applies, and where text
is expected a reply without text fails every gate about text: silence must not look well-behaved. A
probe passes a gate if all its turns to which the gate applies pass; a probe with a failed request
is an error and comes nowhere near this module.

Blind spots: gates compare text and cannot tell whether an answer was warm, or helped. Facts are
looked for in all of the text, so that a right answer inside leaked thinking counts as known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from ..ask.transcripts import Transcript
from ..errors import JudgeError
from ..spec import Gate, GateName, Persona, Probe, Turn
from .text import contains, find_leak, find_markdown, sentences, words


@dataclass(frozen=True)
class Check:
    """What a gate found in one turn; ``why`` is empty if it passed."""

    turn: int
    why: str = ""

    @property
    def passed(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class House:
    """The rules that hold for every probe of a spec: made once by :func:`house_of`."""

    thinking: bool = False
    schemas: Mapping[str, Validator] = field(default_factory=dict)
    """For every tool, what its arguments must satisfy."""


GateFunction = Callable[[Transcript, Turn, Gate, House], str]
"""What is wrong with a reply to a turn to which the gate applies, in words; "" if nothing is."""


def house_of(persona: Persona) -> House:
    """Raises JudgeError ``bad-tool-schema`` if a tool's parameters are no JSON Schema."""
    schemas = {}
    for tool in persona.tools:
        schema = tool.function.parameters
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise JudgeError(
                "bad-tool-schema",
                where=f"tool {tool.function.name}",
                found=error.message,
                fix="correct the tool's parameters in the spec",
            ) from None
        # An empty registry: a $ref must not make the judge fetch anything.
        schemas[tool.function.name] = kind(schema, registry=Registry())
    return House(persona.thinking, schemas)


def applies(gate: Gate, turn: Turn) -> bool:
    """Whether a gate has anything to say about a turn: a matter of the probe, never of the reply."""
    match gate.name:
        case "no_thinking_leak" | "right_tool":
            return True
        case "exact_arguments":
            return turn.expect.tool is not None and turn.expect.arguments is not None
        case "no_markdown" | "concise":
            return turn.expect.tool is None
        case "factual" | "reasoning":
            return turn.expect.knowledge == gate.name and bool(turn.expect.contains)


def check_probe(replies: Sequence[Transcript], probe: Probe, gate: Gate, house: House) -> Check | None:
    """The first turn that fails, else a pass, or None if the gate applies to no turn.

    Args:
        replies: one per turn of the probe, none with an error.
    """
    pairs = [pair for pair in zip(replies, probe.turns, strict=True) if applies(gate, pair[1])]
    for reply, turn in pairs:
        if why := check_turn(reply, turn, gate, house):
            return Check(reply.turn, why)
    return Check(pairs[-1][0].turn) if pairs else None


def check_turn(reply: Transcript, turn: Turn, gate: Gate, house: House) -> str:
    """What is wrong with one reply, "" if nothing is. The gate must apply to the turn."""
    if not reply.content.strip() and not reply.tool_calls:
        return "an empty reply"
    return GATES[gate.name](reply, turn, gate, house)


def no_thinking_leak(reply: Transcript, turn: Turn, gate: Gate, house: House) -> str:
    if not house.thinking:
        if reply.reasoning.strip():
            return f"reasoning while thinking is off: {reply.reasoning.strip()[:40]!r}"
        if tokens := _reasoning_tokens(reply.usage):
            return f"{tokens} reasoning tokens while thinking is off"
    return find_leak(reply.content, house.schemas) or ""


def right_tool(reply: Transcript, turn: Turn, gate: Gate, house: House) -> str:
    expected, called = turn.expect.tool, [call.name for call in reply.tool_calls]
    if expected is None:
        return f"called {', '.join(called)}, though no tool was expected" if called else ""
    if called != [expected]:
        return f"expected one call of {expected}, got {', '.join(called) or 'none'}"
    try:
        arguments = parse_arguments(reply.tool_calls[0].arguments)
    except ValueError as error:
        return str(error)
    return _against_schema(house.schemas.get(expected), arguments, expected)


def exact_arguments(reply: Transcript, turn: Turn, gate: Gate, house: House) -> str:
    called = [call.name for call in reply.tool_calls]
    if called != [turn.expect.tool]:
        return f"expected one call of {turn.expect.tool}, got {', '.join(called) or 'none'}"
    try:
        arguments = parse_arguments(reply.tool_calls[0].arguments)
    except ValueError as error:
        return str(error)
    return _difference(turn.expect.arguments, arguments)


def no_markdown(reply: Transcript, turn: Turn, gate: Gate, house: House) -> str:
    return _no_text(reply) or find_markdown(reply.content) or ""


def concise(reply: Transcript, turn: Turn, gate: Gate, house: House) -> str:
    if reply.finish_reason == "length":
        return "cut off at max_tokens"
    for unit, count, most in (
        ("words", len(words(reply.content)), gate.max_words),
        ("sentences", len(sentences(reply.content)), gate.max_sentences),
    ):
        if most is not None and count > most:
            return f"{count} {unit}, at most {most}"
    return _no_text(reply)


def knows(reply: Transcript, turn: Turn, gate: Gate, house: House) -> str:
    """Both ``factual`` and ``reasoning``."""
    if any(contains(reply.content, wanted) for wanted in turn.expect.contains):
        return ""
    return f"contains none of: {', '.join(turn.expect.contains)}"


GATES: Mapping[GateName, GateFunction] = {
    "no_thinking_leak": no_thinking_leak,
    "right_tool": right_tool,
    "exact_arguments": exact_arguments,
    "no_markdown": no_markdown,
    "concise": concise,
    "factual": knows,
    "reasoning": knows,
}


def _against_schema(schema: Validator | None, arguments: dict[str, Any], tool: str) -> str:
    try:
        broken = next(schema.iter_errors(arguments), None) if schema else None
    except Unresolvable as error:
        raise JudgeError(
            "bad-tool-schema",
            where=f"tool {tool}",
            found=f"a $ref that leads nowhere: {error}",
            consequence="Nothing is fetched to judge a call.",
            fix="write the referred part into the tool's parameters",
        ) from None
    return f"arguments against the tool's schema: {broken.message}" if broken else ""


def parse_arguments(raw: str) -> dict[str, Any]:
    """A call's arguments, strictly: one JSON object, no key twice, no NaN.

    Raises:
        ValueError: says what is wrong.
    """
    try:
        arguments = json.loads(raw, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("arguments are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"arguments are no JSON: {error}: {raw[:80]!r}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments are no JSON object: {raw[:80]!r}")
    return arguments


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key appears twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _difference(expected: Any, found: Any, where: str = "") -> str:
    """Where two JSON values differ, in words; "" if they do not."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
            return f"{where or 'arguments'}: missing {missing}, not expected {extra}"
        pairs = [(expected[key], found[key], f"{where}.{key}" if where else key) for key in expected]
        return next(filter(None, (_difference(*pair) for pair in pairs)), "")
    if isinstance(expected, list | tuple) and isinstance(found, list) and len(expected) == len(found):
        triples = [(a, b, f"{where}[{n}]") for n, (a, b) in enumerate(zip(expected, found, strict=True))]
        return next(filter(None, (_difference(*triple) for triple in triples)), "")
    if isinstance(expected, str) and isinstance(found, str):
        equal = expected.strip() == found.strip()
    else:
        # In Python True == 1; in JSON they are different things.
        equal = isinstance(expected, bool) == isinstance(found, bool) and bool(expected == found)
    return "" if equal else f"{where}: expected {expected!r}, got {found!r}"


def _no_text(reply: Transcript) -> str:
    return "" if reply.content.strip() else "no text, though text was expected"


def _reasoning_tokens(usage: Mapping[str, Any] | None) -> int:
    details = (usage or {}).get("completion_tokens_details")
    tokens = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return tokens if isinstance(tokens, int) else 0
