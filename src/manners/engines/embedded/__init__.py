"""An OpenAI-compatible server for one small model: the parent in BF16 or a canonical NVFP4 checkpoint.

It exists so that the whole way runs anywhere, also without a GPU; it answers many short requests
at once and is no production server. Listens on 127.0.0.1.

    python -m manners.engines.embedded DIR --port 0

Why not ``transformers serve`` (looked at in 5.23): it accepts ``tool_choice`` and
``stream_options`` and ignores both, so a stream never carries usage; it ends no stream with
``[DONE]``, so that a broken stream looks like a finished one; unknown fields (``top_k`` too) are
answered 422; reasoning is split for the whole server or not at all, and it needs a web framework
that nothing else here needs.

What it cannot do: images, ``n`` > 1, ``logprobs``, forced tool calls, JSON schemas, penalties,
LoRA, several models, several GPUs. Each is refused with a 400 that says so. It has no TLS and no
keys, so it should stay on the loopback interface.

The files, from the wire to the numbers: ``server`` (HTTP) - ``protocol`` (what a request may say,
what a reply looks like) - ``reply`` (tokens to text, stop strings, deltas) - ``scheduler`` (which
request runs when) - ``runner`` (prompts and steps through the model) - ``prefix`` (states of shared
prompt beginnings) - ``slots`` (the cache of the running batch) - ``sampling`` (logits to a token).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def run_server(folder: str | Path, **options: Any) -> None:
    """Serve ``folder`` until SIGTERM or SIGINT; see :func:`manners.engines.embedded.server.run_server`."""
    from .server import run_server as run

    run(folder, **options)
