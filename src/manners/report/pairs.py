"""Parent's and candidate's replies side by side, where they differ.

What is worth a reader's time comes first: probes on which the candidate lost a gate, taking the
gates in turn so that one frequent failure does not hide the others; then replies that failed; then
probes on which it won a gate; then replies that differ only in words.

Which words differ is shown by a plain word diff of the two texts. It says nothing about which
difference mattered; the gates do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from ..ask.transcripts import Transcript
from ..spec import KNOWLEDGE_GATES
from .text import clip, visible

MOST_PAIRS = 12
_LONGEST_PART = 1200  # characters; the whole reply is in transcripts.jsonl
_LONGEST_QUESTION = 400
_LONGEST_REASON = 240

PartKind = Literal["thinks", "says", "calls"]
Flips = Mapping[str, Sequence[str]]
"""probe id -> the gates whose outcome flipped on it"""


@dataclass(frozen=True)
class Outcome:
    """What the judge found, by probe id."""

    lost: Flips
    won: Flips
    reasons: Mapping[str, Sequence[str]]
    """Why the candidate did not pass, in the judge's words."""


NOTHING_JUDGED = Outcome({}, {}, {})


@dataclass(frozen=True)
class Segment:
    text: str
    differs: bool


@dataclass(frozen=True)
class Part:
    kind: PartKind
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class Side:
    """One reply. ``fault`` is set if it is none: time-out, broken stream; ``cut`` if it ran out of tokens."""

    parts: tuple[Part, ...]
    fault: str | None
    cut: bool

    @property
    def text(self) -> str:
        """All parts as plain text, for ``report.md``."""
        lines = [part.text if part.kind == "says" else f"[{part.kind}] {part.text}" for part in self.parts]
        if self.fault:
            lines.append(f"[no whole reply: {self.fault}]")
        if self.cut:
            lines.append("[cut off at the token limit]")
        return "\n".join(lines) or "(empty reply)"


@dataclass(frozen=True)
class TurnPair:
    number: int
    asked_by: Literal["user", "tool"]
    question: str
    same: bool
    parent: Side | None
    candidate: Side | None
    """None where the conversation had ended before this turn."""


@dataclass(frozen=True)
class ProbePair:
    probe: str
    category: str
    lost: tuple[str, ...]
    won: tuple[str, ...]
    reasons: tuple[str, ...]
    turns: tuple[TurnPair, ...]

    @property
    def tags(self) -> tuple[str, ...]:
        return (*(f"lost {gate}" for gate in self.lost), *(f"won {gate}" for gate in self.won))


@dataclass(frozen=True)
class Differences:
    """Where one candidate answers differently from its parent."""

    candidate: str
    compared: int
    differing: int
    harmed: int
    shown: tuple[ProbePair, ...]

    @property
    def rest(self) -> int:
        return self.differing - len(self.shown)


def differences(
    name: str,
    parent: Mapping[str, Sequence[Transcript]],
    candidate: Mapping[str, Sequence[Transcript]],
    judged: Outcome,
    most: int = MOST_PAIRS,
) -> Differences:
    """Compare two sets of transcripts, by probe id; probes that only one side has are left out."""
    lost, won = judged.lost, judged.won
    both = [probe for probe in parent if probe in candidate]
    differing = [
        probe
        for probe in both
        if lost.get(probe) or won.get(probe) or not _all_same(parent[probe], candidate[probe])
    ]
    faulty = {probe for probe in differing if any(reply.error for reply in candidate[probe])}
    shown = _worth_showing(differing, lost, won, faulty)[:most]
    pairs = tuple(
        ProbePair(
            probe=visible(probe),
            category=visible(parent[probe][0].category) if parent[probe] else "",
            lost=_manners_first(lost.get(probe, ())),
            won=_manners_first(won.get(probe, ())),
            reasons=tuple(visible(clip(reason, _LONGEST_REASON)) for reason in judged.reasons.get(probe, ())),
            turns=_turns(parent[probe], candidate[probe]),
        )
        for probe in shown
    )
    harmed = sum(bool(lost.get(probe)) for probe in differing)
    return Differences(name, len(both), len(differing), harmed, pairs)


def _worth_showing(probes: Iterable[str], lost: Flips, won: Flips, faulty: Set[str]) -> list[str]:
    """Harms, failed replies, gains, other wording; harms and gains dealt out gate by gate."""
    harms: dict[tuple[str, ...], list[str]] = defaultdict(list)
    gains: dict[tuple[str, ...], list[str]] = defaultdict(list)
    faults: list[str] = []
    wording: list[str] = []
    for probe in probes:
        if lost.get(probe):
            harms[_manners_first(lost[probe])].append(probe)
        elif probe in faulty:
            faults.append(probe)
        elif won.get(probe):
            gains[_manners_first(won[probe])].append(probe)
        else:
            wording.append(probe)
    return [*_dealt(harms.values()), *faults, *_dealt(gains.values()), *wording]


def _dealt(piles: Iterable[list[str]]) -> list[str]:
    """One of each pile, then the second of each, and so on; larger piles first."""
    ordered = sorted(piles, key=len, reverse=True)
    rounds = max((len(pile) for pile in ordered), default=0)
    return [pile[i] for i in range(rounds) for pile in ordered if i < len(pile)]


def _manners_first(gates: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(gates, key=lambda gate: gate in KNOWLEDGE_GATES))


def _all_same(parent: Sequence[Transcript], candidate: Sequence[Transcript]) -> bool:
    return len(parent) == len(candidate) and all(map(_same, parent, candidate))


def _same(parent: Transcript, candidate: Transcript) -> bool:
    return _substance(parent) == _substance(candidate)


def _substance(reply: Transcript) -> tuple[object, ...]:
    """What a user or a program sees of a reply; ids and times are not part of it."""
    calls = tuple((call.name, call.arguments) for call in reply.tool_calls)
    return (
        reply.content,
        reply.reasoning,
        calls,
        reply.error and reply.error.kind,
        reply.finish_reason == "length",
    )


def _turns(parent: Sequence[Transcript], candidate: Sequence[Transcript]) -> tuple[TurnPair, ...]:
    of_parent = {reply.turn: reply for reply in parent}
    of_candidate = {reply.turn: reply for reply in candidate}
    return tuple(
        _turn(number, of_parent.get(number), of_candidate.get(number))
        for number in sorted(of_parent.keys() | of_candidate.keys())
    )


def _turn(number: int, parent: Transcript | None, candidate: Transcript | None) -> TurnPair:
    known = parent or candidate
    role, question = _question(known) if known else ("user", "")
    marked_parent, marked_candidate = _marked(_parts(parent), _parts(candidate))
    return TurnPair(
        number=number + 1,
        asked_by="tool" if role == "tool" else "user",
        question=clip(visible(question), _LONGEST_QUESTION),
        same=parent is not None and candidate is not None and _same(parent, candidate),
        parent=_side(parent, marked_parent),
        candidate=_side(candidate, marked_candidate),
    )


def _question(reply: Transcript) -> tuple[str, str]:
    """(role, text) of the message that this reply answers."""
    messages = reply.request.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    if not isinstance(last, dict):
        return "user", ""
    content = last.get("content")
    return str(last.get("role", "user")), content if isinstance(content, str) else ""


def _parts(reply: Transcript | None) -> dict[PartKind, str]:
    """Text by kind, ready to be seen."""
    if reply is None:
        return {}
    calls = "\n".join(f"{call.name}({call.arguments})" for call in reply.tool_calls)
    found: dict[PartKind, str] = {"thinks": reply.reasoning, "says": reply.content, "calls": calls}
    return {kind: clip(visible(text), _LONGEST_PART) for kind, text in found.items() if text}


def _side(reply: Transcript | None, parts: tuple[Part, ...]) -> Side | None:
    if reply is None:
        return None
    fault = visible(f"{reply.error.kind}, {clip(reply.error.message, 200)}") if reply.error else None
    return Side(parts, fault, reply.finish_reason == "length")


def _marked(
    parent: dict[PartKind, str], candidate: dict[PartKind, str]
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Both sides' parts with the words marked in which they differ."""
    left: list[Part] = []
    right: list[Part] = []
    for kind in ("thinks", "says", "calls"):
        before, after = parent.get(kind, ""), candidate.get(kind, "")
        old, new = word_diff(before, after)
        left += [Part(kind, old)] if before else []
        right += [Part(kind, new)] if after else []
    return tuple(left), tuple(right)


def word_diff(before: str, after: str) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """Both texts as segments that add up to them, those outside the common words marked."""
    old, new = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (before, after))
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    left: list[tuple[str, bool]] = []
    right: list[tuple[str, bool]] = []
    for kind, i0, i1, j0, j1 in matcher.get_opcodes():
        left.append(("".join(old[i0:i1]), kind != "equal"))
        right.append(("".join(new[j0:j1]), kind != "equal"))
    return _joined(left), _joined(right)


def _joined(pieces: Sequence[tuple[str, bool]]) -> tuple[Segment, ...]:
    """Marks that only a space keeps apart become one: a phrase reads better than its words."""
    pieces = [piece for piece in pieces if piece[0]]
    segments: list[Segment] = []
    for at, (text, differs) in enumerate(pieces):
        is_gap = 0 < at < len(pieces) - 1 and text.isspace() and "\n" not in text
        marked = differs or (is_gap and pieces[at - 1][1] and pieces[at + 1][1])
        if segments and segments[-1].differs == marked:
            segments[-1] = Segment(segments[-1].text + text, marked)
        else:
            segments.append(Segment(text, marked))
    return tuple(segments)
