"""What can be typed: verbs, options and their help. ``cli`` says what they do.

The help of a verb is one arrow: what it reads and what it writes; then an example, and how it exits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import __version__

DEMO_RUN = Path("runs/demo")
_RUNGS = "max,mse,w4a16"
EXITS = """\
Exit: 0 done, all gates pass   2 usage   3 bad input or environment   4 a gate fails   5 inconclusive
      (1 is a crash, so that a crash is never read as a verdict; 130 is Ctrl-C)"""


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it returns has ``command``, a verb's name, and that verb's options."""
    parser = argparse.ArgumentParser(
        prog="manners",
        description="Round a fine-tuned language model to NVFP4 and prove that it still behaves.",
        epilog=f"{EXITS}\nProgress goes to stderr; the last line of stdout is one JSON object.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"manners {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for add in (_demo, _run, _quantize, _check, _serve, _ask, _judge, _report, _spec):
        add(verbs)
    return parser


# --- verbs ---------------------------------------------------------------------------------


def _demo(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "demo",
        "see it happen on a small bundled model, in minutes, on any machine",
        reads="the bundled parent (8 M parameters) and its probes",
        writes="RUN: run.json, candidates/, summary.json, report.md, report.html; a second call continues",
        example="manners demo",
    )
    _run_options(verb, output=DEMO_RUN)


def _run(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "run",
        "climb from the cheapest rung until a candidate behaves like its parent",
        reads="a parent (BF16 safetensors), a spec, conversations for calibration",
        writes="RUN: run.json, candidates/NAME/…, summary.json, report.md, report.html",
        example="manners run --parent ./parent --spec mine.yaml --data taught.jsonl --output runs/mine",
    )
    verb.add_argument("--parent", type=Path, required=True, metavar="DIR", help="the fine-tuned model")
    _spec_options(verb)
    verb.add_argument(
        "--data", type=Path, required=True, metavar="FILE.jsonl", help="conversations for calibration"
    )
    _run_options(verb, output=None)


def _quantize(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "quantize",
        "make one candidate: round, write, lint, read back and compare",
        reads="--model (BF16 safetensors) and --calib-data",
        writes="DIR/plan.json, DIR/checkpoint (compressed-tensors nvfp4-pack-quantized), DIR/candidate.json",
        example="manners quantize --model ./parent --rung mse --calib-data taught.jsonl --output out/mse",
    )
    verb.add_argument("--model", type=Path, required=True, metavar="DIR", help="the parent")
    verb.add_argument("--rung", choices=_RUNGS.split(","), default="mse", help="default: mse")
    verb.add_argument("--calib-data", type=Path, required=True, metavar="FILE.jsonl", help="conversations")
    verb.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="what is there, whole and of the same "
        "parent, is kept"
    )  # fmt: skip
    _device(verb)


def _check(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "check",
        "lint an NVFP4 checkpoint: will engines load it, and load it right?",
        reads="DIR",
        writes="nothing; findings go to stderr",
        example="manners check out/mse/checkpoint",
    )
    verb.add_argument("folder", type=Path, metavar="DIR")


def _serve(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "serve",
        "serve a parent or a candidate on 127.0.0.1 with an OpenAI-compatible API",
        reads="DIR",
        writes="one JSON line on stdout when it is ready, logs on stderr; Ctrl-C ends it",
        example="manners serve runs/demo/candidates/mse/checkpoint --port 8000",
    )
    verb.add_argument("folder", type=Path, metavar="DIR")
    verb.add_argument("--port", type=_whole(0, 65535), default=0, help="0 (default) takes a free one")
    verb.add_argument("--name", help="the model's name on the wire (default: the folder's)")
    verb.add_argument("--no-reasoning-split", action="store_true", help="leave thinking in the content")
    verb.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its first token"
    )
    _device(verb)


def _ask(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "ask",
        "put a spec's probes to any OpenAI-compatible URL and keep the raw replies",
        reads="--spec (and --probes); the key, if one is needed, from MANNERS_API_KEY",
        writes="--output, a file of transcripts; what it holds already is not asked again, but errors are",
        example="manners ask http://127.0.0.1:8000 --model mse --spec mine.yaml --output mse/replies.jsonl",
    )
    verb.add_argument("url", metavar="URL", help="with or without /v1")
    verb.add_argument("--model", required=True, help="the name that the server knows the model by")
    _spec_options(verb)
    verb.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    verb.add_argument(
        "--concurrency", type=_whole(1, 4096), default=5, help="conversations at the same time (default 5)"
    )


def _judge(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "judge",
        "hold a candidate's replies against its parent's, gate by gate; no server, no GPU",
        reads="TRANSCRIPTS.jsonl and --parent, both written by `manners ask`",
        writes="verdicts.json beside TRANSCRIPTS.jsonl",
        example="manners judge mse/replies.jsonl --parent parent/replies.jsonl --spec mine.yaml",
    )
    verb.add_argument("transcripts", type=Path, metavar="TRANSCRIPTS.jsonl")
    verb.add_argument(
        "--parent", type=Path, metavar="FILE.jsonl", help="the parent's transcripts; none: thresholds alone"
    )
    _spec_options(verb)


def _report(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "report",
        "write report.html and report.md of a run again",
        reads="RUN/summary.json, RUN/run.json and RUN/candidates",
        writes="RUN/report.html, RUN/report.md",
        example="manners report runs/demo",
    )
    verb.add_argument("run", type=Path, metavar="RUN")


def _spec(verbs: Any) -> None:
    verb = _verb(
        verbs,
        "spec",
        "print a bundled spec, to start your own from",
        reads="a bundled spec, or a YAML file to check",
        writes="the spec on stdout; without NAME, the names of the bundled ones",
        example="manners spec annie > mine.yaml",
    )
    verb.add_argument("name", nargs="?", metavar="NAME", help="of a bundled spec, or a YAML file")


# --- what verbs share ----------------------------------------------------------------------


def _verb(
    verbs: Any, name: str, purpose: str, *, reads: str, writes: str, example: str
) -> argparse.ArgumentParser:
    text = f"{purpose[0].upper()}{purpose[1:]}.\n\n  reads   {reads}\n  writes  {writes}"
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=purpose,
        description=text,
        epilog=f"Example:  {example}\n\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def _run_options(verb: argparse.ArgumentParser, output: Path | None) -> None:
    default = f" (default {output})" if output else ""
    verb.add_argument(
        "--output", type=Path, default=output, required=output is None, metavar="RUN",
        help=f"the run folder{default}; a run that is there is continued",
    )  # fmt: skip
    verb.add_argument("--rungs", default=_RUNGS, help=f"in this order (default {_RUNGS})")
    verb.add_argument(
        "--even-if-parent-fails", action="store_true",
        help="climb although the parent fails its own thresholds (the run ends there otherwise)",
    )  # fmt: skip
    verb.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    _device(verb)


def _spec_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--spec", required=True, metavar="FILE|NAME", help="a YAML file, or a bundled spec (annie)"
    )
    verb.add_argument(
        "--probes", type=Path, metavar="FILE.jsonl", help="probes, in place of those in the spec"
    )


def _device(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, …")


def _whole(least: int, most: int) -> Callable[[str], int]:
    """A type for argparse: a whole number in a range."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return parse
