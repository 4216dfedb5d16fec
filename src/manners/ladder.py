"""The way from a parent to a candidate that behaves, rung by rung, cheapest first.

Every stage reads files and writes files, so a run that was stopped goes on where it stood, and a
finished one is only read again. This is the only room, beside the command line, that knows all others.

    parent: serve, ask, judge (thresholds)          the truth that candidates are held against
    rung:   quantize, round trip, serve, ask, judge paired with the parent
    stop at the first rung whose gates all pass
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from . import __version__
from .ask.ask import Finished, ask_probes_sync
from .ask.transcripts import asked_of, complete_probes, load_transcripts
from .checkpoint import fingerprint_weights, open_checkpoint, write_json, write_text
from .conversations import Conversation, dump_conversations, render_all
from .engines.process import embedded_server
from .errors import RunError
from .judge.verdicts import Verdicts, judge, write_verdicts
from .quantize.candidate import Candidate, quantize
from .quantize.plan import STRATEGIES, Rung
from .report import CandidateSummary, GateRow, RoundTrip, Summary, save_summary, write_report
from .spec import Probe, Spec, dump_probes, fingerprint

RUNGS: tuple[Rung, ...] = ("max", "mse", "w4a16")
PARENT = "parent"


class Watcher(Protocol):
    """What a run tells while it works; the command line draws it."""

    def stage(self, candidate: str, stage: str, total: int) -> None: ...
    def advance(self, done: int, total: int) -> None: ...
    def judged(self, candidate: str, verdicts: Verdicts) -> None: ...


class Silent:
    """A watcher that says nothing."""

    def stage(self, candidate: str, stage: str, total: int) -> None: ...
    def advance(self, done: int, total: int) -> None: ...
    def judged(self, candidate: str, verdicts: Verdicts) -> None: ...


@dataclass(frozen=True)
class Order:
    """What is asked of a run. Everything in it decides the result, and is kept in ``run.json``."""

    spec: Spec
    probes: tuple[Probe, ...]
    parent: Path
    conversations: tuple[Conversation, ...]
    rungs: tuple[Rung, ...] = RUNGS
    device: str = "cpu"
    seed: int = 0
    command: str = ""
    """How a person repeats the run."""


def run(order: Order, run_dir: Path, watcher: Watcher | None = None) -> Summary:
    """Climb until a candidate passes; write the run folder; return its summary.

    Args:
        run_dir: made if needed. A folder of the same order is taken up where it stood.
        watcher: told of every step.

    Raises:
        RunError: ``no-probes``, ``other-run`` if ``run_dir`` belongs to another order.
        MannersError: those of quantize, the embedded engine, ask and judge.
    """
    watcher = watcher or Silent()
    if not order.probes:
        raise RunError(
            "no-probes",
            where=order.spec.name,
            found="the spec has no probes",
            fix="add probes, or give --probes FILE",
        )
    parent_sha = fingerprint_weights(open_checkpoint(order.parent))
    state = _open_run(order, run_dir, parent_sha)
    folder = run_dir / "candidates"

    began = time.monotonic()
    _ask(order, order.parent, PARENT, parent_sha, run_dir, watcher)
    parent_replies = load_transcripts(folder / PARENT / "transcripts.jsonl")
    truth = judge(order.spec, order.probes, parent_replies)
    write_verdicts(folder / PARENT / "verdicts.json", truth)
    watcher.judged(PARENT, truth)
    minutes = _stage_done(state, run_dir, PARENT, truth, began)

    rows = [_parent_row(order, truth, minutes)]
    last: Verdicts = truth
    shipped: str | None = None
    for rung in order.rungs:
        began = time.monotonic()
        candidate = _quantize(order, rung, folder / rung, watcher)
        sha = fingerprint_weights(open_checkpoint(candidate.checkpoint))
        _ask(order, candidate.checkpoint, rung, sha, run_dir, watcher)
        last = judge(
            order.spec, order.probes, load_transcripts(folder / rung / "transcripts.jsonl"), parent_replies
        )
        write_verdicts(folder / rung / "verdicts.json", last)
        watcher.judged(rung, last)
        minutes = _stage_done(state, run_dir, rung, last, began)
        rows.append(_candidate_row(candidate, last, minutes))
        shipped = rung if last.verdict == "pass" else None
        save_summary(_summary(order, rows, last, shipped, state), run_dir)
        if shipped:
            break
    summary = _summary(order, rows, last, shipped, state)
    save_summary(summary, run_dir)
    watcher.stage("report", "writing", 1)
    write_report(run_dir)
    watcher.advance(1, 1)
    return summary


def describe(order: Order, run_dir: Path) -> list[str]:
    """What :func:`run` would do, for ``--dry-run``; reads headers only."""
    parent = open_checkpoint(order.parent)
    turns = sum(len(probe.turns) for probe in order.probes)
    free = shutil.disk_usage(_existing(run_dir)).free
    lines = [
        f"parent      {order.parent}  ({parent.bytes / 1e6:.1f} MB)",
        f"spec        {order.spec.name}: {len(order.spec.gates)} gates, {len(order.probes)} probes, {turns} replies each",
        f"calibrate   {len(order.conversations)} conversations",
        f"run folder  {run_dir}  ({'continues' if (run_dir / 'run.json').is_file() else 'new'}; "
        f"{free / 1e9:.1f} GB free)",
        f"{PARENT:11} ask {len(order.probes)} probes on the embedded engine ({order.device}), judge",
    ]
    lines += [
        f"{rung:11} {STRATEGIES[rung]}; then ask the same probes, judge against the parent"
        for rung in order.rungs
    ]
    return [*lines, "stops at the first rung whose gates all pass"]


# --- stages --------------------------------------------------------------------------------


def _quantize(order: Order, rung: Rung, output: Path, watcher: Watcher) -> Candidate:
    from .chat import Renderer

    parent = open_checkpoint(order.parent)
    limit = int(parent.config.get("max_position_embeddings", 1 << 20))
    calibration = render_all(Renderer.from_folder(order.parent), order.conversations, limit)

    def tell(stage: str, done: int, total: int) -> None:
        watcher.stage(rung, stage, total)
        watcher.advance(done, total)

    return quantize(
        order.parent,
        output,
        rung=rung,
        calibration=calibration,
        device=order.device,
        seed=order.seed,
        progress=tell,
    )


def _ask(order: Order, model_dir: Path, name: str, sha: str, run_dir: Path, watcher: Watcher) -> None:
    """Put the probes to the embedded engine; a complete file needs no engine."""
    output = run_dir / "candidates" / name / "transcripts.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    served = {"engine": _engine(order), "checkpoint_sha256": sha}
    watcher.stage(name, "asking", len(order.probes))
    complete = complete_probes(output, order.probes, asked_of(order.spec, name, served))
    watcher.advance(len(complete), len(order.probes))
    if len(complete) == len(order.probes):
        return

    def tell(finished: Finished) -> None:
        watcher.advance(finished.done, finished.total)

    log = output.parent / "engine.log"
    with embedded_server(model_dir, device=order.device, log_path=log, name=name) as server:
        ask_probes_sync(server.url, name, order.spec, order.probes, output, served=served, progress=tell)
        server.check()


# --- what is kept --------------------------------------------------------------------------


def _open_run(order: Order, run_dir: Path, parent_sha: str) -> dict[str, Any]:
    """Read or begin ``run.json``; refuse a folder that belongs to another order."""
    identity = {
        "spec_sha256": fingerprint(order.spec.model_copy(update={"probes": ()})),
        "probes_sha256": fingerprint(order.probes),
        "parent_sha256": parent_sha,
        "conversations_sha256": hashlib.sha256(dump_conversations(order.conversations).encode()).hexdigest(),
        "seed": str(order.seed),
        "device": order.device,
        "manners": __version__,
    }
    path = run_dir / "run.json"
    if path.is_file():
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            before = state["identity"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                "run-syntax",
                where=str(path),
                found=str(error),
                fix="remove the folder, or give another --output",
            ) from error
        if before != identity:
            other = sorted(
                key for key in identity.keys() | before.keys() if identity.get(key) != before.get(key)
            )
            raise RunError(
                "other-run",
                where=str(run_dir),
                found=f"this folder holds a run with another {', '.join(key.removesuffix('_sha256') for key in other)}",
                consequence="Its replies would be mixed with those of this run.",
                fix="give another --output, or remove the folder",
            )
        return state
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "conversations").mkdir(exist_ok=True)
    write_text(run_dir / "probes.jsonl", dump_probes(order.probes))
    write_text(run_dir / "conversations" / "calibration.jsonl", dump_conversations(order.conversations))
    state = {
        "schema": 1,
        "identity": identity,
        "asked": {
            "spec": order.spec.name,
            "parent": order.parent.name,
            "rungs": list(order.rungs),
            "device": order.device,
        },
        "seeds": {"run": order.seed, "asking": order.spec.asking.seed},
        "versions": _versions(),
        "hardware": _hardware(order.device),
        "commands": [order.command] if order.command else [],
        "stages": {},
    }
    write_json(path, state)
    return state


def _stage_done(state: dict[str, Any], run_dir: Path, name: str, verdicts: Verdicts, began: float) -> float:
    """Record a stage; minutes are those of the call that did the work, not of one that read it again."""
    stages = state["stages"]
    known = stages.get(name)
    if known is None:
        known = {"verdict": verdicts.verdict, "minutes": round((time.monotonic() - began) / 60, 3)}
    stages[name] = {**known, "verdict": verdicts.verdict}
    write_json(run_dir / "run.json", state)
    return float(known["minutes"])


def _parent_row(order: Order, verdicts: Verdicts, minutes: float) -> CandidateSummary:
    return CandidateSummary(
        name=PARENT,
        strategy="the fine-tuned model as it is",
        bits_per_weight=16.0,
        bytes=open_checkpoint(order.parent).bytes,
        minutes=minutes,
        gates=tuple(GateRow.of(gate) for gate in verdicts.gates),
    )


def _candidate_row(candidate: Candidate, verdicts: Verdicts, minutes: float) -> CandidateSummary:
    return CandidateSummary(
        name=candidate.plan.strategy,
        strategy=STRATEGIES[candidate.plan.strategy],
        bits_per_weight=round(candidate.bits_per_weight, 3),
        bytes=candidate.bytes,
        minutes=minutes,
        gates=tuple(GateRow.of(gate) for gate in verdicts.gates),
        round_trip=RoundTrip.model_validate(_round_trip(candidate)),
    )


def _round_trip(candidate: Candidate) -> dict[str, Any]:
    fields = asdict(candidate.round_trip)
    return {"max_abs_diff": fields["max_abs_diff"], "max_kl": fields["max_kl"], "tokens": fields["n_tokens"]}


def _summary(
    order: Order,
    rows: Sequence[CandidateSummary],
    last: Verdicts,
    shipped: str | None,
    state: Mapping[str, Any],
) -> Summary:
    differences = () if last.comparability == "comparable" else (last.comparability_why,)
    return Summary(
        schema=1,
        spec=order.spec.name,
        parent=order.parent.name,
        comparability=last.comparability,
        shipped=shipped,
        candidates=tuple(rows),
        differences=differences,
        engine=_engine(order),
        versions=state["versions"],
        hardware=state["hardware"],
        seeds=state["seeds"],
        n_probes=len(order.probes),
        limits=last.limits,
        commands=tuple(state["commands"]),
    )


def _engine(order: Order) -> str:
    return f"manners embedded {__version__} ({order.device})"


def _versions() -> dict[str, str]:
    names = ("manners", "torch", "transformers", "safetensors", "scipy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _hardware(device: str) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {"machine": platform.machine(), "cores": str(cores), "device": device}
    if device.startswith("cuda"):
        import torch

        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
