"""How long the embedded server takes for many short probes that share a system prompt.

    python benchmarks/embedded_throughput.py DIR [--requests 400] [--concurrency 64]

DIR is any folder that `manners serve` takes. The client runs on the same machine, as it does in a
run, so the time is what a run would wait. Requests stream, greedy, with thinking off and 25 tokens
at most; random words make the questions differ. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from manners.engines.process import embedded_server

SYSTEM = "You are Annie, a warm voice companion. Be concise. Never use markdown. Answer in one sentence. "
WORDS = ("garden", "trip", "weather", "recipe", "piano", "memory", "river", "currency", "lesson", "news")


async def one(
    session: aiohttp.ClientSession, url: str, model: str, seed: int
) -> tuple[float, float, int, int]:
    """Seconds to the first event and to the end; tokens of prompt and reply."""
    chance = random.Random(seed)
    question = " ".join(chance.choice(WORDS) for _ in range(8))
    body = {
        "model": model,
        "messages": [{"role": "system", "content": SYSTEM * 3}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 25,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    begun = time.monotonic()
    first = None
    lines: list[bytes] = []
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{response.status}: {await response.text()}")
        async for line in response.content:
            first = first or time.monotonic() - begun
            if line.startswith(b"data:"):
                lines.append(line)
    if first is None or lines[-1].strip() != b"data: [DONE]":
        raise SystemExit("a stream broke off")
    usage = json.loads(lines[-2].removeprefix(b"data: "))["usage"]
    return first, time.monotonic() - begun, usage["prompt_tokens"], usage["completion_tokens"]


async def load(url: str, model: str, requests: int, concurrency: int) -> dict[str, float]:
    places = asyncio.Semaphore(concurrency)

    async def queued(seed: int) -> tuple[float, float, int, int]:
        async with places:
            return await one(session, url, model, seed)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun = time.monotonic()
        seen = await asyncio.gather(*(queued(seed) for seed in range(requests)))
        seconds = time.monotonic() - begun
    return {
        "requests": requests,
        "concurrency": concurrency,
        "seconds": round(seconds, 2),
        "prompt_tokens": statistics.mean(row[2] for row in seen),
        "reply_tokens": statistics.mean(row[3] for row in seen),
        "reply_tokens_per_s": round(sum(row[3] for row in seen) / seconds, 1),
        "first_token_s_median": round(statistics.median(row[0] for row in seen), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-prefix-cache", action="store_true")
    chosen = parser.parse_args()
    log = Path(tempfile.mkdtemp()) / "server.log"
    with embedded_server(
        chosen.folder, log_path=log, threads=chosen.threads, prefix_cache=not chosen.no_prefix_cache
    ) as server:
        measured = asyncio.run(load(server.url, server.model, chosen.requests, chosen.concurrency))
        server.check()
    busy = round(os.getloadavg()[0], 2)
    print(json.dumps({**measured, "cores": os.cpu_count(), "load_average_after": busy}))


if __name__ == "__main__":
    main()
