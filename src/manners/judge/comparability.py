"""Which transcripts belong together: with these probes and this spec, and with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ..ask.transcripts import Asked, Transcript, asked_of, is_complete
from ..errors import JudgeError
from ..spec import Probe, Spec, fingerprint

Replies = Mapping[str, Sequence[Transcript]]
"""Transcripts by probe id, each probe's in the order of its turns."""
Comparability = Literal["comparable", "stack-comparison", "void"]


def checked(spec: Spec, probes: Sequence[Probe], replies: Replies, side: str) -> Asked:
    """What one side was asked, after making sure that it was all asked so; errors as :func:`judge`."""
    unasked = [probe.id for probe in probes if not is_complete(replies.get(probe.id, ()), probe)]
    if unasked:
        raise JudgeError(
            "transcripts-incomplete",
            where=f"{side}'s transcripts",
            found=f"{len(unasked)} of {len(probes)} probes not asked to the end, first {unasked[0]}",
            consequence="A score over the rest would be a score over other probes.",
            fix="repeat `manners ask` with the same file: it continues",
        )
    wording = {probe.id: fingerprint(probe) for probe in probes}
    other = [r.probe for rs in replies.values() for r in rs if wording.get(r.probe) != r.probe_sha256]
    if other:
        raise JudgeError(
            "transcripts-other-probes",
            where=f"{side}'s transcripts: probe {other[0]}",
            found="not among the probes now given" if other[0] not in wording else "asked in another wording",
            consequence="It would be judged by the expectations of another question.",
            fix="judge with the probes that were asked, or ask again",
        )
    asked = replies[probes[0].id][0].asked
    mixed = next((r for rs in replies.values() for r in rs if r.asked != asked), None)
    if mixed is not None:
        raise JudgeError(
            "transcripts-mixed",
            where=f"{side}'s transcripts: probe {mixed.probe}",
            found=f"asked of {mixed.asked.model}, others of {asked.model}, or served or asked otherwise",
            fix="keep one file for one model",
        )
    now = asked_of(spec, asked.model).sha256
    if asked.sha256 != now:
        raise JudgeError(
            "transcripts-other-spec",
            where=f"{side}'s transcripts",
            found=f"asked with spec {asked.spec} {asked.sha256[:12]}, now {spec.name} {now[:12]}",
            consequence="Persona, tools or sampling were others; only gates may change without asking.",
            fix="judge with the spec that was asked with, or ask again",
        )
    return asked


def compare(
    asked: Asked, parent_asked: Asked, probes: Sequence[Probe], candidate: Replies, parent: Replies
) -> tuple[Comparability, str]:
    """Whether a difference may be laid to the weights.

    First prompts must have the same number of tokens on both sides, else template or tokenizer
    differ. (Later ones hold the model's own replies.) What was said about the servers must be equal
    but for the keys that begin with ``checkpoint``.
    """
    lengths = [(p.id, _prompt_tokens(candidate[p.id][0]), _prompt_tokens(parent[p.id][0])) for p in probes]
    known = [
        (name, ours, theirs) for name, ours, theirs in lengths if ours is not None and theirs is not None
    ]
    other = [row for row in known if row[1] != row[2]]
    if other:
        name, ours, theirs = other[0]
        return "void", (
            f"{len(other)} of {len(known)} first prompts differ in length, {name}: {ours} tokens, "
            f"the parent's {theirs}; chat template or tokenizer are not the same"
        )
    keys = sorted(
        k for k in asked.served.keys() | parent_asked.served.keys() if not k.startswith("checkpoint")
    )
    for key in keys:
        mine, its = asked.served.get(key), parent_asked.served.get(key)
        if mine != its:
            return "stack-comparison", f"{key}: {mine}, the parent's {its}"
    return (
        "comparable",
        f"{len(known)} of {len(probes)} first prompts known to have the same number of tokens",
    )


def _prompt_tokens(reply: Transcript) -> int | None:
    tokens = (reply.usage or {}).get("prompt_tokens")
    return tokens if isinstance(tokens, int) else None
