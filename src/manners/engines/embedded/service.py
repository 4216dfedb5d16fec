"""One loaded model behind the chat endpoint: a request becomes a job, its tokens become chunks.

Rules that clients rely on: the role comes in the first chunk; a tool call comes whole in one chunk;
``finish_reason`` in the last chunk that has a choice; usage after it, in a chunk without choices;
then ``[DONE]``. A stream that fails half-way carries an error object and no ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...chat import Renderer
from ...errors import ChatError
from ...replies import Delta, ReplyParser
from .protocol import BadRequestError, ChatRequest, Json, error_body
from .reply import Detokenizer, FinishReason, ReplyStream
from .sampling import Sampling
from .scheduler import Batch, Event, Job, Scheduler


@dataclass(frozen=True)
class Asked:
    """A request that was accepted: what goes into the model, and how its tokens are read."""

    request: ChatRequest
    prompt_ids: list[int]
    job: Job
    events: asyncio.Queue[Event]
    reply: ReplyStream


class Service:
    """Answers chat requests with one model.

    Args:
        name: the model's name on the wire.
        renderer: the model's template and tokenizer.
        runner: the model; the service owns it from now on.
        max_rows: requests that run at once.
        max_context: prompt and reply together, in tokens.
        split_reasoning: whether thinking goes into ``reasoning_content`` or stays in the content.
        defaults: sampling for requests that ask for none.
    """

    def __init__(
        self,
        *,
        name: str,
        renderer: Renderer,
        runner: Any,
        max_rows: int,
        max_context: int,
        split_reasoning: bool,
        defaults: Sampling,
    ) -> None:
        self.name = name
        self.defaults = defaults
        self.max_context = max_context
        self._renderer = renderer
        self._split_reasoning = split_reasoning
        self._loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(
            runner, stop_ids=renderer.stop_ids, max_rows=max_rows, deliver=self._deliver
        )

    def accept(self, request: ChatRequest) -> Asked:
        """Render the prompt and hand it to the scheduler.

        Raises:
            BadRequestError: the template refuses the messages, or the prompt fills the context.
        """
        ids = self._prompt_ids(request)
        room = self.max_context - len(ids)
        if room < 1:
            raise BadRequestError(
                f"the prompt has {len(ids)} tokens; prompt and reply together may have {self.max_context}",
                param="messages",
                code="context_length_exceeded",
            )
        events: asyncio.Queue[Event] = asyncio.Queue()
        job = Job(
            prompt_ids=ids,
            sampling=request.sampling,
            max_tokens=min(request.max_tokens or room, room),
            sink=events.put_nowait,
        )
        reply = ReplyStream(
            Detokenizer(self._decode),
            stops=request.stops,
            parser=ReplyParser(
                thinking=request.thinking,
                split_reasoning=self._split_reasoning,
                tools=request.tools if request.parse_tools else None,
            ),
            thinking=request.thinking,
        )
        self.scheduler.submit(job)
        return Asked(request, ids, job, events, reply)

    async def whole(self, asked: Asked) -> Json:
        """The answer as one object. Raises what the model raised."""
        deltas: list[Delta] = []
        finish: FinishReason = "stop"
        async for new, ended in self._steps(asked):
            deltas += new
            finish = ended or finish
        return {
            **self._head("chat.completion"),
            "choices": [{"index": 0, "message": _message(deltas), "finish_reason": finish, "logprobs": None}],
            "usage": _usage(asked),
        }

    async def chunks(self, asked: Asked) -> AsyncIterator[bytes]:
        """The answer as server-sent events; the first one comes with the first token.

        Raises what the model raised, if that happened before the first token; later it is told in
        the stream.
        """
        head = self._head("chat.completion.chunk")
        if asked.request.include_usage:
            head["usage"] = None
        begun, calls = False, 0
        try:
            async for new, ended in self._steps(asked):
                if not begun:
                    begun = True
                    yield _sse(_chunk(head, {"role": "assistant", "content": ""}))
                for delta in new:
                    yield _sse(_chunk(head, _delta(delta, calls)))
                    calls += delta.tool_call is not None
                if ended:
                    yield _sse(_chunk(head, {}, ended))
        except Exception as error:
            if not begun:
                raise
            yield _sse(error_body(_cause(error), kind="server_error", code="generation_failed"))
            return
        if asked.request.include_usage:
            yield _sse({**head, "choices": [], "usage": _usage(asked)})
        yield b"data: [DONE]\n\n"

    def abandon(self, asked: Asked) -> None:
        """Nobody listens any more (or all was said): free the row."""
        self.scheduler.cancel(asked.job)

    async def _steps(self, asked: Asked) -> AsyncIterator[tuple[list[Delta], FinishReason | None]]:
        reply = asked.reply
        while True:
            event = await asked.events.get()
            if event.error is not None:
                raise event.error
            if event.token is None:
                # The end-of-turn token was generated, too.
                reply.completion_tokens += 1
                deltas = []
            else:
                deltas = reply.feed(event.token)
            finish = "stop" if reply.stopped else event.finish
            if finish is None:
                yield deltas, None
            else:
                deltas += reply.finish()
                yield deltas, reply.finish_reason(finish)
                return

    def _prompt_ids(self, request: ChatRequest) -> list[int]:
        try:
            text = self._renderer.prompt_text(request.messages, request.tools, request.thinking)
            text.encode()
        except ChatError as error:
            raise BadRequestError(
                f"{error.found} ({error.code})", param="messages", code=error.code
            ) from error
        except UnicodeEncodeError as error:
            raise BadRequestError(
                "messages hold half of a surrogate pair, which is no text", param="messages"
            ) from error
        return self._renderer.encode(text)

    def _decode(self, ids: Any) -> str:
        text: str = self._renderer.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _deliver(self, batch: Batch) -> None:
        """From the model's thread: one wake-up of the loop a step, however many requests run."""
        try:
            self._loop.call_soon_threadsafe(_hand_out, batch)
        except RuntimeError:
            # The loop is closed: the server is going down and nobody listens.
            for job, _ in batch:
                job.cancelled = True

    def _head(self, kind: str) -> Json:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
        }


def sampling_defaults(folder: Path) -> Sampling:
    """What generation_config.json says if it samples, else OpenAI's temperature of 1."""
    path = folder / "generation_config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        said = {}
    if not isinstance(said, dict) or not said.get("do_sample"):
        return Sampling(temperature=1.0)
    return Sampling(
        temperature=float(said.get("temperature") or 1.0),
        top_p=float(said.get("top_p") or 1.0),
        top_k=int(said.get("top_k") or 0),
    )


def _hand_out(batch: Batch) -> None:
    for job, event in batch:
        job.sink(event)


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _chunk(head: Json, delta: Json, finish: FinishReason | None = None) -> Json:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}


def _delta(delta: Delta, index: int) -> Json:
    if delta.tool_call is not None:
        return {"tool_calls": [{"index": index, **_call(delta)}]}
    return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}


def _call(delta: Delta) -> Json:
    assert delta.tool_call is not None
    function = {"name": delta.tool_call.name, "arguments": delta.tool_call.arguments_json()}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _message(deltas: list[Delta]) -> Json:
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    reasoning = "".join(delta.text for delta in deltas if delta.kind == "reasoning").strip()
    calls = [_call(delta) for delta in deltas if delta.tool_call is not None]
    message: Json = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _usage(asked: Asked) -> Json:
    prompt, reply = len(asked.prompt_ids), asked.reply
    return {
        "prompt_tokens": prompt,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": prompt + reply.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
    }


def _sse(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
