"""``python -m manners.engines.embedded DIR``: serve one model folder, without the rest of the house."""

from __future__ import annotations

import argparse
import logging
import sys

from ...errors import EXIT_USAGE, MannersError
from .server import run_server


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 stopped by a signal, 2 usage, 3 a folder or machine that cannot be served."""
    parser = argparse.ArgumentParser(
        prog="python -m manners.engines.embedded",
        description="Serve a model folder on 127.0.0.1 with an OpenAI-compatible chat API. "
        "One JSON line on stdout says when it is ready and where; logs go to stderr.",
    )
    parser.add_argument("folder", metavar="DIR", help="a parent in BF16 or a canonical NVFP4 checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 (default) takes a free one")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--name", help="the model's name on the wire (default: the folder's)")
    parser.add_argument("--no-reasoning-split", action="store_true", help="leave thinking in the content")
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its first token"
    )
    parser.add_argument("--max-rows", type=int, default=64, help="requests that run at once (default 64)")
    parser.add_argument("--max-context", type=int, help="prompt and reply, in tokens (default: the model's)")
    parser.add_argument(
        "--threads",
        type=int,
        help="CPU threads (default: OMP_NUM_THREADS, else one a core, less one for a small model)",
    )
    parser.add_argument("--until-stdin-closes", action="store_true", help="stop when standard input ends")
    chosen = parser.parse_args(arguments)
    for name in ("max_rows", "max_context", "threads"):
        if getattr(chosen, name) is not None and getattr(chosen, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        run_server(
            chosen.folder,
            host=chosen.host,
            port=chosen.port,
            device=chosen.device,
            name=chosen.name,
            reasoning_split=not chosen.no_reasoning_split,
            prefix_cache=not chosen.no_prefix_cache,
            max_rows=chosen.max_rows,
            max_context=chosen.max_context,
            threads=chosen.threads,
            until_stdin_closes=chosen.until_stdin_closes,
        )
    except MannersError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    # Not main()'s own business: argparse exits with 2 by itself, which is EXIT_USAGE.
    assert EXIT_USAGE == 2
    sys.exit(main())
