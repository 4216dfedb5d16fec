"""One question over HTTP, streamed: what came, when it came, and what was wrong with it.

A clock reading is taken as soon as bytes arrive, before they are decoded or parsed. Nothing is
retried: a retry would hide that the server fails, and would answer with a warmed cache.

The key comes from the environment variable MANNERS_API_KEY alone. It is sent as a bearer token and
nothing else; a server that repeats it in an error message gets it blotted out.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from ..errors import AskError
from .reply import ReplyBuilder, StreamError, short
from .sse import SSEReader
from .transcripts import Fault, FaultKind

API_KEY_VARIABLE = "MANNERS_API_KEY"
PREFLIGHT_S = 10.0
# A reply of max_tokens tokens is far below this; what is above it is no chat completion.
MAX_REPLY_BYTES = 16 * 2**20
_BLOT = f"[{API_KEY_VARIABLE}]"
# Shorter "keys" (EMPTY, x) are dummies; blotting them out of raw events would damage replies.
_SHORTEST_SECRET = 8


@dataclass
class Exchange:
    """What one request brought. Times are seconds since ``started_s``."""

    started_s: float
    reply: ReplyBuilder = field(default_factory=ReplyBuilder)
    events: list[tuple[float, str]] = field(default_factory=list)
    first_token_s: float | None = None
    first_content_s: float | None = None
    total_s: float = 0.0
    fault: Fault | None = None


def base_url(url: str) -> str:
    """The address without ``/v1`` and what follows.

    Raises:
        AskError: ``bad-url`` if it is no http(s) address, or carries a password.
    """
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    if "@" in parts.netloc:
        raise AskError(
            "bad-url",
            where="--url",
            found="the address carries a user name or password",
            consequence="It would be printed in messages and kept in files.",
            fix=f"leave it out and set {API_KEY_VARIABLE}",
        )
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise AskError(
            "bad-url",
            where=repr(url),
            found="not the address of a server",
            fix="give one such as http://127.0.0.1:8000",
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


class Client:
    """Asks one server. Use as ``async with Client(url) as client``."""

    def __init__(self, url: str, *, timeout_s: float = 120.0, connections: int = 64) -> None:
        self.url = base_url(url)
        self._timeout_s = timeout_s
        self._connections = connections
        self._session: aiohttp.ClientSession
        self._key = os.environ.get(API_KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise AskError(
                "bad-api-key",
                where=API_KEY_VARIABLE,
                found="characters that a header cannot carry (not shown)",
                fix="set it to the key alone, on one line",
            )

    async def __aenter__(self) -> Client:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=self._connections),
            # Each request has its own overall limit; see chat().
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PREFLIGHT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def check(self) -> None:
        """Make sure that somebody is there, before anything is asked.

        Raises:
            AskError: ``server-unreachable`` if nobody answers; ``server-refuses-key`` for 401 and
                403; ``server-not-ready`` for a 5xx. Any other answer will do, for not every server
                lists its models.
        """
        try:
            async with asyncio.timeout(PREFLIGHT_S), self._session.get(f"{self.url}/v1/models") as response:
                status = response.status
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            raise AskError(
                "server-unreachable",
                where=self.url,
                found=self._blotted(str(error)) or f"no answer within {PREFLIGHT_S:g} s",
                consequence="Nothing was asked.",
                fix="start the server, wait until it is ready, and check host and port",
            ) from None
        if status in (401, 403):
            raise AskError(
                "server-refuses-key",
                where=self.url,
                found=f"HTTP {status} {'with' if self._key else 'without'} a key",
                consequence="Nothing was asked.",
                fix=f"set the environment variable {API_KEY_VARIABLE}",
            )
        if status >= 500:
            raise AskError(
                "server-not-ready",
                where=self.url,
                found=f"HTTP {status} for /v1/models",
                consequence="Nothing was asked.",
                fix="wait until the model is loaded, or look into the server's log",
            )

    async def chat(self, body: Mapping[str, Any]) -> Exchange:
        """Send one request and read its stream to the end. Faults are returned, never raised."""
        data = json.dumps(body).encode()
        exchange = Exchange(started_s=time.monotonic())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(data, exchange)
        except StreamError as fault:
            exchange.fault = self._fault(fault.kind, fault.message)
        except aiohttp.ConnectionTimeoutError as error:
            exchange.fault = self._fault("connection", str(error))
        except TimeoutError:
            seen = f"{len(exchange.events)} events had come"
            exchange.fault = self._fault("timeout", f"not complete within {self._timeout_s:g} s; {seen}")
        except (aiohttp.ClientError, OSError) as error:
            exchange.fault = self._fault("connection", f"{type(error).__name__}: {error}")
        exchange.total_s = time.monotonic() - exchange.started_s
        return exchange

    async def _stream(self, data: bytes, exchange: Exchange) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        address = f"{self.url}/v1/chat/completions"
        async with self._session.post(address, data=data, headers=headers, allow_redirects=False) as response:
            await _refuse_bad_answer(response)
            try:
                await self._read_events(response, exchange)
            except TimeoutError:
                raise
            except (aiohttp.ClientError, OSError) as error:
                # The answer had begun, so this is not a matter of reaching the server.
                message = f"{type(error).__name__} after {len(exchange.events)} events: {error}"
                raise StreamError("broken-stream", message) from None
        exchange.reply.finish()

    async def _read_events(self, response: aiohttp.ClientResponse, exchange: Exchange) -> None:
        reader, reply, size = SSEReader(), exchange.reply, 0
        async for chunk in response.content.iter_any():
            now_s = time.monotonic() - exchange.started_s
            size += len(chunk)
            if size > MAX_REPLY_BYTES:
                raise StreamError("broken-stream", f"more than {MAX_REPLY_BYTES} bytes")
            events = [(now_s, self._blotted_event(event)) for event in reader.feed(chunk)]
            exchange.events += events  # all of them, even if the first turns out to be no JSON
            for _, event in events:
                reply.add(event)
                if exchange.first_token_s is None and reply.has_token:
                    exchange.first_token_s = now_s
                if exchange.first_content_s is None and reply.has_content:
                    exchange.first_content_s = now_s
                if reply.done:  # some servers keep the connection open after it
                    return

    def _fault(self, kind: FaultKind, message: str) -> Fault:
        return Fault(kind=kind, message=self._blotted(message))

    def _blotted(self, text: str) -> str:
        return text.replace(self._key, _BLOT) if self._key else text

    def _blotted_event(self, event: str) -> str:
        return self._blotted(event) if len(self._key) >= _SHORTEST_SECRET else event


async def _refuse_bad_answer(response: aiohttp.ClientResponse) -> None:
    """Raise StreamError unless the answer is 200 and an event stream."""
    if response.status == 200 and response.content_type == "text/event-stream":
        return
    try:
        body = (await response.content.read(4096)).decode("utf-8", "replace")
    except aiohttp.ClientError as error:  # the status has come, and says more than this
        body = f"({error})"
    found = f"HTTP {response.status} {response.reason}, {response.content_type}: {short(body, 1000)}"
    if 400 <= response.status < 500:
        raise StreamError("http-4xx", found)
    if response.status >= 500:
        raise StreamError("http-5xx", found)
    raise StreamError("broken-stream", f"no event stream, but {found}")
