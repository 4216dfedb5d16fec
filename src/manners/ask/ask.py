"""A set of probes, put to a server, many at once; every reply goes to a transcripts file.

A probe is a conversation: each turn is asked with the model's own earlier replies as history. Where
a tool's turn has to answer a call that the model did not make (or wrote as something other than a
JSON object, which no server would take back), the call that the probe expects stands in the history
instead, and the transcripts from there on say ``history: "reference"``. Reasoning is not sent back.

What this cannot see: whether the server batches, caches or rounds differently under load. Greedy
replies may differ between one request at a time and sixty-four; put parent and candidate alike.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AskError
from ..spec import Expect, Probe, Spec, fingerprint
from .client import Client, Exchange
from .transcripts import Asked, Call, Transcript, TranscriptWriter, asked_of, complete_probes, prune

DEFAULT_CONCURRENCY = 64
DEFAULT_TIMEOUT_S = 120.0
# So many failures in a row are the server's, and asking on would only fill a file with errors.
HOPELESS_AFTER = 16

Message = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """One probe is done; what a progress bar needs."""

    probe: str
    error: str | None
    """The kind of error that ended it, if one did."""
    done: int
    """Probes in the file now, those of an earlier run included."""
    total: int


@dataclass(frozen=True)
class Asking:
    """What one call of :func:`ask_probes` did."""

    asked: int
    skipped: int
    """Probes whose replies were already in the file."""
    errors: dict[str, int]
    """Probes that met an error, by kind. They will be asked again next time."""
    wall_s: float


async def ask_probes(
    url: str,
    model: str,
    spec: Spec,
    probes: Sequence[Probe],
    out_path: Path,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    served: Mapping[str, str] | None = None,
    progress: Callable[[Finished], None] | None = None,
) -> Asking:
    """Put every probe that ``out_path`` does not hold yet to the server at ``url``.

    Args:
        url: with or without ``/v1``.
        model: the name that the server knows the model by.
        concurrency: conversations at the same time.
        timeout_s: for one reply, from sending to ``[DONE]``.
        served: what is known about the server and its weights (engine, version, a hash of the
            checkpoint). Written into every line; on resuming it must be equal.
        progress: called after every finished probe.

    Raises:
        AskError: before anything is asked, ``server-unreachable``, ``server-refuses-key``,
            ``server-not-ready``, ``bad-url``, ``bad-api-key``, and those of
            :func:`transcripts.complete_probes`; later ``server-refuses-requests`` if none of the first
            requests was accepted, ``server-gone`` if the server cannot be reached any more. What
            is complete stays in the file. A single failed reply is recorded, not raised.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}, must be at least 1")
    started_s = time.monotonic()
    asked = asked_of(spec, model, served)
    complete = complete_probes(out_path, probes, asked)
    waiting = [probe for probe in probes if probe.id not in complete]
    watch = _Watch(url, len(complete), len(probes), progress)
    if not waiting:  # no server is needed
        prune(out_path, complete)
    else:
        async with Client(url, timeout_s=timeout_s, connections=concurrency) as client:
            await client.check()
            prune(out_path, complete)
            with TranscriptWriter(out_path) as writer:
                await _work_together(client, spec, asked, waiting, writer, watch, concurrency)
    return Asking(watch.asked, len(complete), dict(watch.errors), time.monotonic() - started_s)


def ask_probes_sync(
    url: str,
    model: str,
    spec: Spec,
    probes: Sequence[Probe],
    out_path: Path,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    served: Mapping[str, str] | None = None,
    progress: Callable[[Finished], None] | None = None,
) -> Asking:
    """:func:`ask_probes` for callers without an event loop. Ctrl-C keeps what is complete."""
    return asyncio.run(
        ask_probes(
            url,
            model,
            spec,
            probes,
            out_path,
            concurrency=concurrency,
            timeout_s=timeout_s,
            served=served,
            progress=progress,
        )
    )


async def ask_one(client: Client, spec: Spec, probe: Probe, asked: Asked) -> list[Transcript]:
    """Hold one conversation. It ends at the first error, for there is no history to go on with."""
    messages: list[Message] = [{"role": "system", "content": spec.persona.system_prompt}]
    transcripts: list[Transcript] = []
    probe_sha256, own = fingerprint(probe), True
    for number, turn in enumerate(probe.turns):
        if turn.role == "user":
            messages.append({"role": "user", "content": turn.content})
        else:
            if not _can_be_answered(transcripts[-1].tool_calls):
                messages[-1] = _reference_call(probe.turns[number - 1].expect, number - 1)
                own = False
            for call in messages[-1]["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": turn.content})
        body = request_body(spec, asked.model, messages)
        exchange = await client.chat(body)
        transcript = _transcript(exchange, body, probe, probe_sha256, number, asked, own)
        transcripts.append(transcript)
        if transcript.error is not None:
            break
        messages.append(_assistant(transcript))
    return transcripts


def request_body(spec: Spec, model: str, messages: Sequence[Message]) -> dict[str, Any]:
    """A request in the form of OpenAI's chat API, with the thinking switch of vLLM and SGLang."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "temperature": spec.asking.temperature,
        "max_tokens": spec.asking.max_tokens,
        "seed": spec.asking.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": spec.persona.thinking},
    }
    if spec.persona.tools:  # servers refuse an empty list
        body["tools"] = spec.persona.tool_dicts()
    return body


async def _work_together(
    client: Client,
    spec: Spec,
    asked: Asked,
    waiting: Sequence[Probe],
    writer: TranscriptWriter,
    watch: _Watch,
    concurrency: int,
) -> None:
    shared = iter(waiting)  # each worker takes the next probe from it
    tasks = [
        asyncio.create_task(_work(client, spec, asked, shared, writer, watch)) for _ in range(concurrency)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:  # after Ctrl-C or an AskError, no task may write to a closed file
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _work(
    client: Client,
    spec: Spec,
    asked: Asked,
    waiting: Iterator[Probe],
    writer: TranscriptWriter,
    watch: _Watch,
) -> None:
    for probe in waiting:
        transcripts = await ask_one(client, spec, probe, asked)
        writer.append(transcripts)
        watch.finished(probe, transcripts[-1])


class _Watch:
    """Counts finished probes, tells the caller, and gives up on a server that is past hope."""

    def __init__(self, url: str, done: int, total: int, progress: Callable[[Finished], None] | None) -> None:
        self._url, self._done, self._total, self._progress = url, done, total, progress
        self.asked = 0
        self.errors: Counter[str] = Counter()
        self._unreached_in_a_row = 0

    def finished(self, probe: Probe, last: Transcript) -> None:
        kind = last.error.kind if last.error else None
        self.asked += 1
        self._done += 1
        if kind:
            self.errors[kind] += 1
        self._unreached_in_a_row = self._unreached_in_a_row + 1 if kind == "connection" else 0
        if self._progress:
            self._progress(Finished(probe.id, kind, self._done, self._total))
        if last.error:
            self._give_up_if_hopeless(last.error.message)

    def _give_up_if_hopeless(self, message: str) -> None:
        if self._unreached_in_a_row >= HOPELESS_AFTER:
            raise AskError(
                "server-gone",
                where=self._url,
                found=f"{self._unreached_in_a_row} conversations in a row found no server: {message}",
                consequence="Replies that were complete are kept.",
                fix="look into the server's log, start it again, and repeat the command: it continues",
            )
        if self.asked == self.errors["http-4xx"] == HOPELESS_AFTER:
            raise AskError(
                "server-refuses-requests",
                where=self._url,
                found=f"the first {self.asked} requests were all refused: {message}",
                consequence="This says something about the server's settings, nothing about the model.",
                fix="vLLM takes tools only with --enable-auto-tool-choice --tool-call-parser qwen3_coder; "
                "compare the model's name with /v1/models",
            )


def _can_be_answered(calls: Sequence[Call]) -> bool:
    """At least one call, and all of them such that a server takes them back as history."""
    return bool(calls) and all(call.name and _is_json_object(call.arguments) for call in calls)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _assistant(transcript: Transcript) -> Message:
    """The model's reply as history. Its text is sent back as it came, leaks included."""
    message: Message = {"role": "assistant", "content": transcript.content}
    if _can_be_answered(transcript.tool_calls):
        message["tool_calls"] = [
            _call(call.id or f"call_{transcript.turn}_{n}", call.name, call.arguments)
            for n, call in enumerate(transcript.tool_calls)
        ]
    return message


def _reference_call(expect: Expect, turn: int) -> Message:
    assert expect.tool is not None, "Probe refuses a tool's turn after a turn that expects no call"
    call = _call(
        f"call_{turn}_reference", expect.tool, json.dumps(expect.arguments or {}, ensure_ascii=False)
    )
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _transcript(
    exchange: Exchange,
    body: dict[str, Any],
    probe: Probe,
    probe_sha256: str,
    turn: int,
    asked: Asked,
    own: bool,
) -> Transcript:
    reply = exchange.reply
    return Transcript(
        probe=probe.id,
        probe_sha256=probe_sha256,
        turn=turn,
        category=probe.category,
        asked=asked,
        request=body,
        history="own" if own else "reference",
        started_s=exchange.started_s,
        events=exchange.events,
        content=reply.content,
        reasoning=reply.reasoning,
        tool_calls=reply.tool_calls,
        usage=reply.usage,
        finish_reason=reply.finish_reason,
        first_token_s=exchange.first_token_s,
        first_content_s=exchange.first_content_s,
        total_s=exchange.total_s,
        error=exchange.fault,
    )
