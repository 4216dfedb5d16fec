"""HTTP around a service: routes, errors in OpenAI's form, start and stop.

stdout carries one JSON line when the server is ready; logs and everything else go to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from aiohttp import web

from ... import __version__
from ...chat import Renderer
from ...errors import EngineError
from .protocol import BadRequestError, error_body, parse_request
from .service import Service, sampling_defaults

MAX_BODY_BYTES = 32 << 20
PREFIX_BYTES = 256 << 20
SMALL_HIDDEN = 1024
_log = logging.getLogger(__name__)
SERVICE = web.AppKey("service", Service)


@dataclass(frozen=True)
class Facts:
    """What /health tells about this server besides its load; two runs can be told apart by it."""

    version: str
    device: str
    started: int
    independent_rows: bool
    prefix_cache: bool
    reasoning_split: bool


FACTS = web.AppKey("facts", Facts)


@dataclass(frozen=True)
class Options:
    """How a folder is served.

    port 0 takes a free one. ``name`` None is the folder's. ``max_context`` None is the model's own.
    ``threads`` None is :func:`default_threads`. ``until_stdin_closes`` ties the server's
    life to the process that started it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    name: str | None = None
    reasoning_split: bool = True
    prefix_cache: bool = True
    max_rows: int = 64
    max_context: int | None = None
    threads: int | None = None
    until_stdin_closes: bool = False


def run_server(folder: str | Path, **options: Any) -> None:
    """Serve ``folder`` until SIGTERM or SIGINT.

    Args:
        folder: a parent in BF16 or a canonical NVFP4 checkpoint.
        options: the fields of :class:`Options`.

    Raises:
        EngineError: ``no-device``, ``unsupported-model``, ``port-in-use``.
        CheckpointError, ChatError: the folder cannot be read.
    """
    chosen = Options(**options)
    ready_to = sys.stdout
    # What a library prints must not end up before the one line that the starter waits for.
    with contextlib.redirect_stdout(sys.stderr):
        model, renderer = _load(Path(folder), chosen)
        asyncio.run(_serve(Path(folder), chosen, model, renderer, ready_to))


def default_name(folder: Path) -> str:
    """The folder's name; for a run's ``candidates/NAME/checkpoint`` it is NAME."""
    folder = folder.resolve()
    return folder.parent.name if folder.name == "checkpoint" and folder.parent.name else folder.name


def default_threads(hidden_size: int) -> int:
    """CPU threads: OMP_NUM_THREADS, else one a core, less one for a small model.

    A small model's matrices gain little from a second core, and its threads spin against HTTP and
    the client: on 2 busy cores, 400 probes of the 8 M shape took 16 s with one thread and 23 s with two.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1) if hidden_size <= SMALL_HIDDEN else cores


def build_app(service: Service, facts: Facts) -> web.Application:
    """Routes over a service whose scheduler runs. ``facts`` are told by /health."""
    app = web.Application(middlewares=[_errors_as_json], client_max_size=MAX_BODY_BYTES)
    app[SERVICE], app[FACTS] = service, facts
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/health", _health)
    return app


def make_web_runner(app: web.Application) -> web.AppRunner:
    """handler_cancellation: a client that leaves cancels its handler, and with it its place in the batch."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)


async def _chat(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    body = parse_request(_json(await request.read()), model=service.name, defaults=service.defaults)
    asked = service.accept(body)
    try:
        if not body.stream:
            return web.json_response(await service.whole(asked))
        chunks = service.chunks(asked)
        # Headers go out with the first token: until then a failure is still an honest 500.
        first = await anext(chunks)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        # A client that left is no error of this server's, and nobody is there to be told.
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            await response.write(first)
            async for chunk in chunks:
                await response.write(chunk)
            await response.write_eof()
        return response
    finally:
        # Also when the client is gone, which cancels this handler.
        service.abandon(asked)


async def _models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    model = {
        "id": service.name,
        "object": "model",
        "created": request.app[FACTS].started,
        "owned_by": "manners",
        "max_model_len": service.max_context,
    }
    return web.json_response({"object": "list", "data": [model]})


async def _health(request: web.Request) -> web.Response:
    scheduler = request.app[SERVICE].scheduler
    running, waiting = scheduler.load()
    alive = scheduler.alive()
    said = {
        "status": "ok" if alive else "dead",
        "running": running,
        "waiting": waiting,
        **asdict(request.app[FACTS]),
    }
    return web.json_response(said, status=200 if alive else 503)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path}: {error.reason}"
        code = {404: "unknown_route", 405: "wrong_method", 413: "body_too_large"}.get(error.status)
        return web.json_response(
            error_body(message, kind="invalid_request_error", code=code), status=error.status
        )
    except Exception as error:
        _log.exception("%s %s failed", request.method, request.path)
        message = f"{type(error).__name__}: {error}"
        return web.json_response(error_body(message, kind="server_error", code="internal_error"), status=500)


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}", code="malformed_json") from error


def _load(folder: Path, options: Options) -> tuple[Any, Renderer]:
    import torch

    from ...checkpoint.reader import open_checkpoint
    from .runner import load

    begun = time.monotonic()
    # First, because it says best what is wrong with a folder; it reads headers only.
    open_checkpoint(folder)
    renderer = Renderer.from_folder(folder)
    model = load(folder, options.device)
    torch.set_num_threads(options.threads or default_threads(int(model.config.get_text_config().hidden_size)))
    _log.info("loaded %s on %s in %.1f s", folder, options.device, time.monotonic() - begun)
    return model, renderer


async def _serve(folder: Path, options: Options, model: Any, renderer: Renderer, ready_to: TextIO) -> None:
    from .runner import Runner

    text_config = model.config.get_text_config()
    own_context = int(text_config.max_position_embeddings)
    runner = Runner(
        model,
        end_ids=renderer.stop_ids,
        max_rows=options.max_rows,
        prefix_bytes=PREFIX_BYTES if options.prefix_cache else 0,
    )
    independent = runner.check_independence(int(text_config.vocab_size))
    if not independent:
        _log.warning("rows of a batch differ in the last bits from the same request alone")
    service = Service(
        name=options.name or default_name(folder),
        renderer=renderer,
        runner=runner,
        max_rows=options.max_rows,
        max_context=min(options.max_context or own_context, own_context),
        split_reasoning=options.reasoning_split,
        defaults=sampling_defaults(folder),
    )
    facts = Facts(
        version=__version__,
        device=options.device,
        started=int(time.time()),
        independent_rows=independent,
        prefix_cache=options.prefix_cache,
        reasoning_split=options.reasoning_split,
    )
    web_runner = make_web_runner(build_app(service, facts))
    await web_runner.setup()
    try:
        port = await _listen(web_runner, options)
        service.scheduler.start()
        stop = _stop_event(options)
        ready = {"ready": True, "url": f"http://{options.host}:{port}", "model": service.name}
        print(json.dumps(ready), file=ready_to, flush=True)
        await stop.wait()
        _log.info("stopping")
    finally:
        await web_runner.cleanup()
        service.scheduler.stop()


async def _listen(web_runner: web.AppRunner, options: Options) -> int:
    site = web.TCPSite(web_runner, options.host, options.port)
    try:
        await site.start()
    except OSError as error:
        raise EngineError(
            "port-in-use",
            where=f"{options.host}:{options.port}",
            found=str(error),
            fix="choose another --port; 0 takes a free one",
        ) from error
    port: int = web_runner.addresses[0][1]
    return port


def _stop_event(options: Options) -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    if options.until_stdin_closes:

        def watch() -> None:
            # Raw reads: a buffered reader would hold its lock while the interpreter goes down.
            while os.read(0, 4096):
                pass
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=watch, name="stdin", daemon=True).start()
    return stop
