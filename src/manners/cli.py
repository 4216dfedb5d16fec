"""The command line: one thin function a verb.

Progress goes to stderr; the last line of stdout is one JSON object where a command has a result.
Imports happen inside the verbs, so that ``manners --help`` and ``manners judge`` need no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_PASS, MannersError, RunError, SpecError, UsageError
from .parser import make_parser

if TYPE_CHECKING:
    from .ladder import Order
    from .quantize.plan import Rung
    from .spec import Probe, Spec

Arguments = argparse.Namespace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A crash is left to Python, which exits with 1."""
    chosen = make_parser().parse_args(arguments)
    # Before transformers is imported: what it advises on stderr is about kernels that nobody asked for.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return _VERBS[chosen.command](chosen)
    except MannersError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder that may not be written
        print(_of_the_system(error), file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("stopped; what is complete is kept, and the same command continues", file=sys.stderr)
        return EXIT_INTERRUPTED


# --- verbs ---------------------------------------------------------------------------------


def _demo(chosen: Arguments) -> int:
    from .demo.pair import demo_order

    return _climb(demo_order(chosen.device, _rungs(chosen.rungs), _command("demo", chosen)), chosen)


def _run(chosen: Arguments) -> int:
    from .conversations import load_conversations
    from .ladder import Order

    rungs = _rungs(chosen.rungs)
    spec, probes = _spec_and_probes(chosen)
    order = Order(
        spec=spec,
        probes=probes,
        parent=chosen.parent,
        conversations=load_conversations(chosen.data),
        rungs=rungs,
        device=chosen.device,
        command=_command("run", chosen),
    )
    return _climb(order, chosen)


def _climb(order: Order, chosen: Arguments) -> int:
    from .ladder import describe, exit_code, run
    from .progress import Bars
    from .report import render_terminal

    if chosen.dry_run:
        print("\n".join(describe(order, chosen.output)), file=sys.stderr)
        _result({"dry_run": True, "run": str(chosen.output), "rungs": list(order.rungs)})
        return EXIT_PASS
    with Bars() as bars:
        summary = run(order, chosen.output, bars, even_if_parent_fails=chosen.even_if_parent_fails)
    bars.console.print()
    bars.console.print(render_terminal(summary))
    bars.say(f"\nreport: {chosen.output / 'report.html'}")
    if not summary.rounded:
        bars.say("no rung was tried; --even-if-parent-fails climbs all the same")
    if summary.shipped:
        bars.say(f"ship:   {chosen.output / 'candidates' / summary.shipped / 'checkpoint'}")
    _result(
        {
            "shipped": summary.shipped,
            "run": str(chosen.output),
            "summary": str(chosen.output / "summary.json"),
            "report": str(chosen.output / "report.html"),
        }
    )
    return exit_code(summary)


def _quantize(chosen: Arguments) -> int:
    from .preflight import check_device, context_of, model_threads

    check_device(chosen.device)

    from .chat import Renderer
    from .checkpoint import open_checkpoint
    from .conversations import load_conversations, render_all
    from .progress import Bars
    from .quantize.candidate import quantize

    parent = open_checkpoint(chosen.model)
    conversations = load_conversations(chosen.calib_data)
    rows = render_all(Renderer.from_folder(chosen.model), conversations, context_of(parent))
    with Bars() as bars, model_threads(parent):

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
    _result(
        {
            "checkpoint": str(made.checkpoint),
            "bits_per_weight": round(made.bits_per_weight, 3),
            "bytes": made.bytes,
            "minutes": round(made.minutes, 3),
            "round_trip_max_kl": made.round_trip.max_kl,
            "resumed": made.resumed,
        }
    )
    return EXIT_PASS


def _check(chosen: Arguments) -> int:
    from .checkpoint import lint

    findings = lint(chosen.folder)
    for finding in findings:
        print(
            f"error[{finding.code}] {finding.where}: {finding.found}\n  Fix: {finding.fix}", file=sys.stderr
        )
    _result({"folder": str(chosen.folder), "findings": [finding.code for finding in findings]})
    return EXIT_BAD_INPUT if findings else EXIT_PASS


def _serve(chosen: Arguments) -> int:
    import logging

    from .engines.embedded import run_server
    from .preflight import check_device

    check_device(chosen.device)
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

    spec, probes = _spec_and_probes(chosen)
    _need_probes(probes, chosen)
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
    if done.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(done.errors.items()))
        bars.say(f"{sum(done.errors.values())} probes met errors ({kinds}); the same command asks them again")
    _result(
        {
            "transcripts": str(chosen.output),
            "asked": done.asked,
            "skipped": done.skipped,
            "errors": done.errors,
        }
    )
    return EXIT_BAD_INPUT if done.errors else EXIT_PASS


def _judge(chosen: Arguments) -> int:
    from .judge.verdicts import judge_files, write_verdicts

    spec, probes = _spec_and_probes(chosen)
    _need_probes(probes, chosen)
    verdicts = judge_files(spec, probes, chosen.transcripts, chosen.parent)
    output = chosen.transcripts.with_name("verdicts.json")
    write_verdicts(output, verdicts)
    for row in verdicts.gates:
        print(f"{row.verdict:12} {row.name:18} {row.passed}/{row.n}  {row.why}", file=sys.stderr)
    _result({"verdict": verdicts.verdict, "comparability": verdicts.comparability, "verdicts": str(output)})
    return verdicts.exit_code


def _report(chosen: Arguments) -> int:
    from .report import write_report

    html, markdown = write_report(chosen.run)
    _result({"html": str(html), "markdown": str(markdown)})
    return EXIT_PASS


def _spec(chosen: Arguments) -> int:
    from .spec import bundled_specs, load_spec, spec_text

    if chosen.name is None:
        _say("\n".join(bundled_specs()) + "\n")
        return EXIT_PASS
    load_spec(chosen.name)  # refuses what could not be used
    _say(spec_text(chosen.name))
    return EXIT_PASS


_VERBS: dict[str, Callable[[Arguments], int]] = {
    "demo": _demo,
    "run": _run,
    "quantize": _quantize,
    "check": _check,
    "serve": _serve,
    "ask": _ask,
    "judge": _judge,
    "report": _report,
    "spec": _spec,
}


# --- what verbs share ----------------------------------------------------------------------


def _rungs(text: str) -> tuple[Rung, ...]:
    from .ladder import RUNGS

    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in RUNGS or names.count(name) > 1]
    if wrong or not names:
        raise UsageError(
            "unknown-rung",
            where="--rungs",
            found=", ".join(wrong) or "nothing",
            fix=f"name some of, each once: {', '.join(RUNGS)}",
        )
    return tuple(rung for name in names for rung in RUNGS if rung == name)


def _spec_and_probes(chosen: Arguments) -> tuple[Spec, tuple[Probe, ...]]:
    """The spec, and the probes of ``--probes`` or its own.

    Raises SpecError ``unknown-tool``, and those of loading.
    """
    from .spec import load_probes, load_spec

    spec = load_spec(chosen.spec)
    if chosen.probes is None:
        return spec, spec.probes
    probes = load_probes(chosen.probes)
    # Probes in the spec itself are held against its tools by the spec's own check.
    known = sorted(tool.function.name for tool in spec.persona.tools)
    for probe in probes:
        for turn in probe.turns:
            if turn.expect.tool is not None and turn.expect.tool not in known:
                raise SpecError(
                    "unknown-tool",
                    where=f"{chosen.probes}: probe {probe.id}",
                    found=f"expects tool {turn.expect.tool!r}; {spec.name} has {', '.join(known) or 'none'}",
                    consequence="No model could pass it.",
                    fix="correct the probe, or give the persona that tool",
                )
    return spec, probes


def _need_probes(probes: Sequence[Probe], chosen: Arguments) -> None:
    if not probes:
        raise SpecError(
            "no-probes",
            where=str(chosen.probes or chosen.spec),
            found="no probes",
            fix="add probes to the spec, or give --probes FILE.jsonl",
        )


def _command(verb: str, chosen: Arguments) -> str:
    """The command that repeats a run, without what is as by default."""
    usual = make_parser().parse_args([verb, *_NEEDED[verb]])
    words = ["manners", verb]
    for name in ("parent", "spec", "probes", "data", "output", "rungs", "device", "even_if_parent_fails"):
        value = getattr(chosen, name, None)
        if value is not None and value != getattr(usual, name):
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


# The options without which a verb's defaults cannot be read; no file has an empty name.
_NEEDED = {"demo": [], "run": [f"--{name}=" for name in ("parent", "spec", "data", "output")]}


def _result(data: Mapping[str, Any]) -> None:
    """The last line of stdout."""
    _say(json.dumps(data) + "\n")


def _say(text: str) -> None:
    """To stdout. A reader that has gone (``| head``) changes neither the work done nor its exit code."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Or Python would try to flush it once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_the_system(error: OSError) -> RunError:
    return RunError(
        "system",
        where=str(error.filename or "the system"),
        found=error.strerror or f"{type(error).__name__}: {error}",
        consequence="What was complete is kept.",
        fix="make room or give rights, then repeat the command: it continues",
    )


if __name__ == "__main__":
    sys.exit(main())
