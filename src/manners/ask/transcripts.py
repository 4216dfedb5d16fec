"""The transcript of one reply, and the JSONL file that holds one such line a reply.

Every line says what was asked, of which model, under which persona, so that a file needs no
companion: lines from another spec, other probes or another model are found out one by one, on
resuming and on judging. The raw events are kept; ``content``, ``reasoning`` and ``tool_calls`` are
what they add up to.

Lines are appended whole, all turns of a probe in one write. A killed process therefore leaves at
most one half line, at the end, which is dropped when the file is continued. Nothing
is synced to disk: a power cut may cost more than one probe. Two processes must not write one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import AskError
from ..files import write_bytes
from ..spec import Probe, Spec, fingerprint

FaultKind = Literal["timeout", "connection", "http-4xx", "http-5xx", "broken-stream", "bad-json", "no-done"]
"""What can be wrong with a single reply:

timeout        not complete within the time allowed
connection     no connection, or closed before the answer began
http-4xx/5xx   the server refused, or failed
broken-stream  closed in the middle, an error object in the stream, no event stream at all, or no
               finish reason of the model's own
bad-json       an event that is no JSON, or no chunk of a chat completion
no-done        ended politely, but without ``[DONE]``
"""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fault(_Record):
    kind: FaultKind
    message: str


class Call(_Record):
    """A tool call as the model wrote it: ``arguments`` is text, perhaps no JSON at all."""

    name: str
    arguments: str
    id: str | None = None


class Asked(_Record):
    """What has to be equal for two replies to belong to one run."""

    spec: str
    """The spec's name, for people."""
    sha256: str
    """Of persona and asking: what reaches the model. Gates may change without asking again."""
    model: str
    """The name that was sent to the server."""
    served: dict[str, str] = {}
    """What the caller knows about the server: engine, version, a hash of the checkpoint."""


class Transcript(_Record):
    """One reply as it came over the wire. All times in seconds, on a monotonic clock."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    probe: str
    probe_sha256: str
    turn: int = Field(ge=0)
    """Index into the probe's turns."""
    category: str
    asked: Asked
    request: dict[str, Any]
    """The body that was sent. Headers, and with them the key, are never kept."""
    history: Literal["own", "reference"] = "own"
    """``reference``: an earlier call that a tool's turn had to answer was missing or unreadable, so
    the probe's own call stands in the history in its place."""
    started_s: float
    """When the request was sent; counts from an arbitrary point, equal within one process."""
    events: list[tuple[float, str]] = []
    """Data of every event, each with the seconds from ``started_s`` to its arrival, taken before
    anything was parsed. Events that came in one read share a time."""
    content: str = ""
    reasoning: str = ""
    tool_calls: list[Call] = []
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    first_token_s: float | None = None
    """To the first thing that the model wrote, reasoning included."""
    first_content_s: float | None = None
    """To the first visible text or tool call: what a user waits for."""
    total_s: float
    error: Fault | None = None
    """If set, this is no reply, whatever the other fields hold."""


def asked_of(spec: Spec, model: str, served: Mapping[str, str] | None = None) -> Asked:
    """The identity of a run of ``spec`` against ``model``."""
    return Asked(
        spec=spec.name,
        sha256=fingerprint([spec.persona, spec.asking]),
        model=model,
        served=dict(served or {}),
    )


def dump(transcripts: Iterable[Transcript]) -> bytes:
    """As JSONL. ASCII only, so that no reader splits a line at U+2028."""
    return b"".join(
        json.dumps(transcript.model_dump(mode="json", by_alias=True)).encode() + b"\n"
        for transcript in transcripts
    )


def load_transcripts(path: Path) -> dict[str, list[Transcript]]:
    """All transcripts of a file by probe id, each probe's in the order of its turns.

    Raises:
        AskError: ``transcripts-missing``; ``transcripts-syntax`` (with the line) for a line that is
            no transcript, a half-written last one included; ``transcripts-repeated`` if two lines
            hold the same turn.
    """
    if not path.is_file():
        raise AskError(
            "transcripts-missing", where=str(path), found="no such file", fix="write it with `manners ask`"
        )
    return _grouped([_line(raw, path, n) for n, raw in _numbered_lines(path.read_bytes())], path)


def complete_probes(path: Path, probes: Sequence[Probe], asked: Asked) -> dict[str, list[Transcript]]:
    """What a file already holds of a run: the probes of which every turn was answered.

    Left out, to be asked again, are probes that were cut off and probes that met an error: an error
    says something about the server, not about the model. A half-written last line is ignored. A
    missing file holds nothing.

    Raises:
        AskError: ``transcripts-other-spec``, ``transcripts-other-model`` or
            ``transcripts-other-probes`` if the file belongs to another run; ``transcripts-syntax``
            or ``transcripts-repeated`` if it is damaged.
    """
    if not path.exists():
        return {}
    whole = _without_half_line(path.read_bytes())
    found = _grouped([_line(line, path, n) for n, line in _numbered_lines(whole)], path)
    by_id = {probe.id: probe for probe in probes}
    for transcripts in found.values():
        for transcript in transcripts:
            _refuse_other_run(transcript, asked, by_id, path)
    return {
        name: transcripts
        for name, transcripts in found.items()
        if is_complete(transcripts, by_id[name]) and not any(transcript.error for transcript in transcripts)
    }


def prune(path: Path, complete: Mapping[str, Sequence[Transcript]]) -> None:
    """Take out of a file all but ``complete``, so that the rest can be asked again."""
    data = dump(transcript for transcripts in complete.values() for transcript in transcripts)
    if path.exists() and path.read_bytes() != data:
        write_bytes(path, data)


def is_complete(transcripts: Sequence[Transcript], probe: Probe) -> bool:
    """Every turn is there, or an error that ended the conversation is."""
    turns = [transcript.turn for transcript in transcripts]
    ended_early = bool(transcripts) and transcripts[-1].error is not None
    return turns == list(range(len(turns if ended_early else probe.turns)))


class TranscriptWriter:
    """Appends to a file; each call of :meth:`append` is one write of whole lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, transcripts: Iterable[Transcript]) -> None:
        data = memoryview(dump(transcripts))
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> TranscriptWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Every line begins so; a file that ends otherwise is not one of ours that was cut off.
_OPENING = b'{"schema": 1, "probe": "'


def _without_half_line(raw: bytes) -> bytes:
    whole, newline, half = raw.rpartition(b"\n")
    is_ours = half[: len(_OPENING)] == _OPENING[: len(half)]
    return whole + newline if is_ours else raw


def _numbered_lines(raw: bytes) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line in enumerate(raw.split(b"\n"), start=1) if line.strip()]


def _line(raw: bytes, path: Path, number: int) -> Transcript:
    try:
        return Transcript.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise AskError(
            "transcripts-syntax",
            where=f"{path}:{number}",
            found=f"no transcript: {field + ': ' if field else ''}{first['msg']}",
            fix="if asking was interrupted, ask again with the same file; otherwise give it another name",
        ) from None


def _grouped(transcripts: Iterable[Transcript], path: Path) -> dict[str, list[Transcript]]:
    by_probe: dict[str, dict[int, Transcript]] = {}
    for transcript in transcripts:
        turns = by_probe.setdefault(transcript.probe, {})
        if transcript.turn in turns:
            raise AskError(
                "transcripts-repeated",
                where=f"{path}: probe {transcript.probe}, turn {transcript.turn}",
                found="two lines hold this turn",
                consequence="Counting both, or choosing one, would change the score.",
                fix="delete the file and ask again; let only one process write it",
            )
        turns[transcript.turn] = transcript
    return {probe: [turns[n] for n in sorted(turns)] for probe, turns in by_probe.items()}


def _refuse_other_run(transcript: Transcript, asked: Asked, probes: Mapping[str, Probe], path: Path) -> None:
    theirs, fix = transcript.asked, "give another file, or delete this one to ask again"
    consequence = "Replies to different questions would be counted as one run."
    if theirs.sha256 != asked.sha256:
        raise AskError(
            "transcripts-other-spec",
            where=str(path),
            found=f"asked with spec {theirs.spec} {theirs.sha256[:12]}, now {asked.spec} {asked.sha256[:12]}",
            consequence=consequence,
            fix=fix,
        )
    if (theirs.model, theirs.served) != (asked.model, asked.served):
        raise AskError(
            "transcripts-other-model",
            where=str(path),
            found=f"asked of {theirs.model} {theirs.served or ''}, now {asked.model} {asked.served or ''}",
            consequence=consequence,
            fix=fix,
        )
    probe = probes.get(transcript.probe)
    if probe is None or fingerprint(probe) != transcript.probe_sha256:
        raise AskError(
            "transcripts-other-probes",
            where=f"{path}: probe {transcript.probe}",
            found="not among the probes now given" if probe is None else "asked in another wording",
            consequence=consequence,
            fix=fix,
        )
