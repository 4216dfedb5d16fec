"""The command line: one thin function a verb.

Progress goes to stderr; the last line of stdout is one JSON object where a command has a result.
Imports happen inside the verbs, so that ``manners --help`` and ``manners judge`` need no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import EXIT_BAD_INPUT, EXIT_GATE_FAILS, EXIT_INCONCLUSIVE, EXIT_PASS, MannersError, UsageError

EXITS = "Exit: 0 all gates pass   2 usage   3 bad input or environment   4 a gate fails   5 inconclusive"

Arguments = argparse.Namespace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A crash is left to Python, which exits with 1."""
    chosen = _parser().parse_args(arguments)
    verb: Callable[[Arguments], int] = chosen.verb
    try:
        return verb(chosen)
    except MannersError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; what is complete is kept, and the same command continues", file=sys.stderr)
        return EXIT_BAD_INPUT


# --- verbs ---------------------------------------------------------------------------------


def _demo(chosen: Arguments) -> int:
    from .demo.pair import demo_order

    command = "manners demo" + (f" --output {chosen.output}" if chosen.output != _DEMO_RUN else "")
    return _climb(demo_order(chosen.device, _rungs(chosen.rungs), command), chosen)


def _run(chosen: Arguments) -> int:
    from .conversations import load_conversations
    from .ladder import Order
    from .spec import load_probes, load_spec

    spec = load_spec(chosen.spec)
    order = Order(
        spec=spec,
        probes=load_probes(chosen.probes) if chosen.probes else spec.probes,
        parent=chosen.parent,
        conversations=load_conversations(chosen.data),
        rungs=_rungs(chosen.rungs),
        device=chosen.device,
        command="manners " + " ".join(sys.argv[1:]) if sys.argv[1:2] == ["run"] else "",
    )
    return _climb(order, chosen)


def _climb(order: Any, chosen: Arguments) -> int:
    from .ladder import describe, run
    from .progress import Bars
    from .report import render_terminal

    if chosen.dry_run:
        print("\n".join(describe(order, chosen.output)))
        return EXIT_PASS
    with Bars() as bars:
        summary = run(order, chosen.output, bars)
    bars.console.print(render_terminal(summary))
    bars.console.print(f"report: {chosen.output / 'report.html'}")
    if summary.shipped:
        bars.console.print(f"ship:   {chosen.output / 'candidates' / summary.shipped / 'checkpoint'}")
    print(
        json.dumps(
            {
                "shipped": summary.shipped,
                "run": str(chosen.output),
                "summary": str(chosen.output / "summary.json"),
            }
        )
    )
    if summary.shipped:
        return EXIT_PASS
    fails = summary.rounded and all(candidate.verdict == "fail" for candidate in summary.rounded)
    return EXIT_GATE_FAILS if fails else EXIT_INCONCLUSIVE


def _quantize(chosen: Arguments) -> int:
    from .chat import Renderer
    from .checkpoint import open_checkpoint
    from .conversations import load_conversations, render_all
    from .progress import Bars
    from .quantize.candidate import quantize

    limit = int(open_checkpoint(chosen.model).config.get("max_position_embeddings", 1 << 20))
    rows = render_all(Renderer.from_folder(chosen.model), load_conversations(chosen.calib_data), limit)
    with Bars() as bars:

        def tell(stage: str, done: int, total: int) -> None:
            bars.stage(chosen.rung, stage, total)
            bars.advance(done, total)

        made = quantize(
            chosen.model,
            chosen.output,
            rung=chosen.rung,
            calibration=rows,
            device=chosen.device,
            progress=tell,
        )
    facts = {
        "checkpoint": str(made.checkpoint), "bits_per_weight": round(made.bits_per_weight, 3), "bytes": made.bytes,
        "minutes": round(made.minutes, 3), "round_trip_max_kl": made.round_trip.max_kl, "resumed": made.resumed,
    }  # fmt: skip
    print(json.dumps(facts))
    return EXIT_PASS


def _check(chosen: Arguments) -> int:
    from .checkpoint import lint

    findings = lint(chosen.folder)
    for finding in findings:
        print(
            f"error[{finding.code}] {finding.where}: {finding.found}\n  Fix: {finding.fix}", file=sys.stderr
        )
    print(json.dumps({"folder": str(chosen.folder), "findings": [finding.code for finding in findings]}))
    return EXIT_BAD_INPUT if findings else EXIT_PASS


def _serve(chosen: Arguments) -> int:
    import logging

    from .engines.embedded import run_server

    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    run_server(
        chosen.folder, port=chosen.port, device=chosen.device, name=chosen.name,
        reasoning_split=not chosen.no_reasoning_split, prefix_cache=not chosen.no_prefix_cache,
    )  # fmt: skip
    return EXIT_PASS


def _ask(chosen: Arguments) -> int:
    from .ask.ask import Finished, ask_probes_sync
    from .progress import Bars
    from .spec import load_probes, load_spec

    spec = load_spec(chosen.spec)
    probes = load_probes(chosen.probes) if chosen.probes else spec.probes
    with Bars() as bars:
        bars.stage(chosen.model, "asking", len(probes))

        def tell(finished: Finished) -> None:
            bars.advance(finished.done, finished.total)

        done = ask_probes_sync(
            chosen.url,
            chosen.model,
            spec,
            probes,
            chosen.output,
            concurrency=chosen.concurrency,
            progress=tell,
        )
    print(
        json.dumps(
            {
                "transcripts": str(chosen.output),
                "asked": done.asked,
                "skipped": done.skipped,
                "errors": done.errors,
            }
        )
    )
    return EXIT_BAD_INPUT if done.errors else EXIT_PASS


def _judge(chosen: Arguments) -> int:
    from .judge.verdicts import judge_files, write_verdicts
    from .spec import load_probes, load_spec

    spec = load_spec(chosen.spec)
    probes = load_probes(chosen.probes) if chosen.probes else spec.probes
    verdicts = judge_files(spec, probes, chosen.transcripts, chosen.parent)
    output = chosen.transcripts.with_name("verdicts.json")
    write_verdicts(output, verdicts)
    for row in verdicts.gates:
        print(f"{row.verdict:12} {row.name:18} {row.passed}/{row.n}  {row.why}", file=sys.stderr)
    print(
        json.dumps(
            {"verdict": verdicts.verdict, "comparability": verdicts.comparability, "verdicts": str(output)}
        )
    )
    return verdicts.exit_code


def _report(chosen: Arguments) -> int:
    from .report import write_report

    html, markdown = write_report(chosen.run)
    print(json.dumps({"html": str(html), "markdown": str(markdown)}))
    return EXIT_PASS


def _spec(chosen: Arguments) -> int:
    from .spec import bundled_specs, load_spec, spec_text

    if chosen.name is None:
        print("\n".join(bundled_specs()))
        return EXIT_PASS
    load_spec(chosen.name)  # refuses what could not be used
    print(spec_text(chosen.name), end="")
    return EXIT_PASS


def _rungs(text: str) -> tuple[Any, ...]:
    from .ladder import RUNGS

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in RUNGS]
    if unknown or not names:
        raise UsageError(
            "unknown-rung",
            where="--rungs",
            found=f"{', '.join(unknown) or 'nothing'}",
            fix=f"name some of: {', '.join(RUNGS)}",
        )
    return names


# --- the parser ----------------------------------------------------------------------------

_DEMO_RUN = Path("runs/demo")


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="manners",
        description="Round a fine-tuned language model to NVFP4 and prove that it still behaves.",
        epilog=EXITS + "\n(1 is a crash, so that a crash is never read as a verdict.)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"manners {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = _verb(
        verbs, "demo", _demo, "see it happen on a small bundled model, in minutes, on any machine",
        reads="the bundled parent (8 M parameters) and its 420 probes",
        writes="OUTPUT: run.json, candidates/, summary.json, report.md, report.html; a second call continues",
        example="manners demo",
    )  # fmt: skip
    _run_options(demo, output=_DEMO_RUN)

    run = _verb(
        verbs, "run", _run, "climb from the cheapest rung until a candidate behaves like its parent",
        reads="a parent (BF16 safetensors), a spec, conversations for calibration",
        writes="OUTPUT: run.json, candidates/NAME/…, summary.json, report.md, report.html",
        example="manners run --parent ./parent --spec annie --data annie.jsonl --output runs/annie",
    )  # fmt: skip
    run.add_argument("--parent", type=Path, required=True, metavar="DIR", help="the fine-tuned model")
    _spec_options(run)
    run.add_argument(
        "--data", type=Path, required=True, metavar="FILE.jsonl", help="conversations for calibration"
    )
    _run_options(run, output=None)

    quantize = _verb(
        verbs, "quantize", _quantize, "make one candidate: round, write, lint, read back and compare",
        reads="--model (BF16 safetensors) and --calib-data",
        writes="OUTPUT/plan.json, OUTPUT/checkpoint (compressed-tensors nvfp4-pack-quantized)",
        example="manners quantize --model ./parent --rung mse --calib-data annie.jsonl --output out/mse",
    )  # fmt: skip
    quantize.add_argument("--model", type=Path, required=True, metavar="DIR", help="the parent")
    quantize.add_argument("--rung", choices=("max", "mse", "w4a16"), default="mse", help="default: mse")
    quantize.add_argument(
        "--calib-data", type=Path, required=True, metavar="FILE.jsonl", help="conversations"
    )
    quantize.add_argument("--output", type=Path, required=True, metavar="DIR")
    _device(quantize)

    check = _verb(
        verbs, "check", _check, "lint an NVFP4 checkpoint: will engines load it, and load it right?",
        reads="DIR", writes="nothing", example="manners check out/mse/checkpoint",
    )  # fmt: skip
    check.add_argument("folder", type=Path, metavar="DIR")

    serve = _verb(
        verbs, "serve", _serve, "serve a parent or a candidate on 127.0.0.1 with an OpenAI-compatible API",
        reads="DIR", writes="one JSON line on stdout when it is ready",
        example="manners serve runs/demo/candidates/mse/checkpoint --port 8000",
    )  # fmt: skip
    serve.add_argument("folder", type=Path, metavar="DIR")
    serve.add_argument("--port", type=int, default=0, help="0 (default) takes a free one")
    serve.add_argument("--name", help="the model's name on the wire (default: the folder's)")
    serve.add_argument("--no-reasoning-split", action="store_true", help="leave thinking in the content")
    serve.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its first token"
    )
    _device(serve)

    ask = _verb(
        verbs, "ask", _ask, "put a spec's probes to any OpenAI-compatible URL and keep the raw replies",
        reads="--spec (and --probes); the key, if one is needed, from MANNERS_API_KEY",
        writes="--output, a transcripts.jsonl; an interrupted file is continued",
        example="manners ask http://127.0.0.1:8000 --model mse --spec annie --output mse/transcripts.jsonl",
    )  # fmt: skip
    ask.add_argument("url", metavar="URL", help="with or without /v1")
    ask.add_argument("--model", required=True, help="the name that the server knows the model by")
    _spec_options(ask)
    ask.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    ask.add_argument("--concurrency", type=int, default=5, help="conversations at the same time (default 5)")

    judge = _verb(
        verbs, "judge", _judge, "hold a candidate's replies against its parent's, gate by gate; no server, no GPU",
        reads="TRANSCRIPTS.jsonl and --parent, both written by `manners ask`",
        writes="verdicts.json beside TRANSCRIPTS.jsonl",
        example="manners judge mse/transcripts.jsonl --parent parent/transcripts.jsonl --spec annie",
    )  # fmt: skip
    judge.add_argument("transcripts", type=Path, metavar="TRANSCRIPTS.jsonl")
    judge.add_argument(
        "--parent", type=Path, metavar="FILE.jsonl", help="the parent's transcripts; none: judge alone"
    )
    _spec_options(judge)

    report = _verb(
        verbs, "report", _report, "write report.html and report.md of a run again",
        reads="RUN/summary.json and RUN/candidates", writes="RUN/report.html, RUN/report.md",
        example="manners report runs/demo",
    )  # fmt: skip
    report.add_argument("run", type=Path, metavar="RUN")

    spec = _verb(
        verbs, "spec", _spec, "print a bundled spec, to start your own from",
        reads="a bundled spec, or a YAML file to check", writes="stdout", example="manners spec annie > mine.yaml",
    )  # fmt: skip
    spec.add_argument("name", nargs="?", help="none: list the bundled ones")
    return parser


def _verb(
    verbs: Any,
    name: str,
    function: Callable[[Arguments], int],
    purpose: str,
    *,
    reads: str,
    writes: str,
    example: str,
) -> argparse.ArgumentParser:
    text = f"{purpose[0].upper()}{purpose[1:]}.\n\n  reads   {reads}\n  writes  {writes}"
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=purpose, description=text, epilog=f"Example:  {example}\n\n{EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(verb=function)
    return parser


def _run_options(parser: argparse.ArgumentParser, output: Path | None) -> None:
    parser.add_argument(
        "--output", type=Path, default=output, required=output is None, metavar="RUN",
        help=f"the run folder{f' (default {output})' if output else ''}; an existing run is continued",
    )  # fmt: skip
    parser.add_argument("--rungs", default="max,mse,w4a16", help="in this order (default max,mse,w4a16)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    _device(parser)


def _spec_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--spec", required=True, metavar="FILE|NAME", help="a YAML file, or a bundled spec (annie)"
    )
    parser.add_argument("--probes", type=Path, metavar="FILE.jsonl", help="probes, if not those in the spec")


def _device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, …")


if __name__ == "__main__":
    sys.exit(main())
