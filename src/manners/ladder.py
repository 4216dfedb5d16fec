"""The way from a parent to a candidate that behaves, rung by rung, cheapest first.

Every stage reads files and writes files, so a run that was stopped goes on where it stood, and a
finished one is only read again. This is the only room, beside the command line, that knows all others.

    check   everything that can be refused, before a folder is made or a server started
    parent  serve, ask, judge against the thresholds    the truth that candidates are held against
    rung    quantize, round trip, serve, ask, judge paired with the parent
    stop    at the first rung whose gates all pass

A parent that fails its own thresholds ends the run there: rounding it would cost minutes to learn
that the copy fails too, and what needs mending is the fine-tune or the threshold. A parent that is
inconclusive (too few probes) does not: its rungs still show what rounding breaks.

Torch and transformers are imported where they are used: reading a finished run again loads no model.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from . import __version__
from .ask.ask import Finished, ask_probes_sync
from .ask.transcripts import Asked, Transcript, asked_of, complete_probes, load_transcripts
from .conversations import Conversation
from .engines.process import embedded_server
from .errors import (
    EXIT_GATE_FAILS,
    EXIT_INCONCLUSIVE,
    EXIT_PASS,
    AskError,
    CheckpointError,
)
from .judge.verdicts import Verdicts, judge, write_verdicts
from .preflight import calibration, check, check_deeply, model_threads, parent_bits
from .report import CandidateSummary, GateRow, Summary, save_summary, write_report
from .run_folder import RunFolder, Stage, alone, read_state
from .spec import Probe, Spec

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .quantize.plan import Rung

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
    """What is asked of a run. All but rungs and command decides the results, and is kept in ``run.json``."""

    spec: Spec
    probes: tuple[Probe, ...]
    parent: Path
    conversations: tuple[Conversation, ...]
    rungs: tuple[Rung, ...] = RUNGS
    device: str = "cpu"
    seed: int = 0
    command: str = ""
    """How a person repeats the run."""


def run(
    order: Order, run_dir: Path, watcher: Watcher | None = None, *, even_if_parent_fails: bool = False
) -> Summary:
    """Climb until a candidate passes; write the run folder; return its summary.

    Args:
        run_dir: made if needed. A folder of the same order is taken up where it stood; rungs may be
            others, and the summary then tells of those that were asked for now.
        watcher: told of every step.
        even_if_parent_fails: climb although the parent fails its own thresholds, to see what breaks.

    Raises:
        RunError: ``no-probes``, ``no-rungs``, and those of :mod:`.run_folder`.
        MannersError: those of checkpoint, chat, quantize, the embedded engine, ask and judge.
    """
    watcher = watcher or Silent()
    parent, wanted = check(order)
    if not read_state(run_dir, wanted):
        watcher.stage(PARENT, "checking", len(parent.names))
        check_deeply(order, parent, watcher.advance)
    with alone(run_dir):
        # Read again: another process may have begun or finished this run in between.
        kept = RunFolder(run_dir, order, read_state(run_dir, wanted), wanted)
        return _Climb(order, parent, wanted["parent_sha256"], kept, watcher).climb(even_if_parent_fails)


def exit_code(summary: Summary) -> int:
    """What a run's end means to a script.

    0 if a candidate ships. 5 if the comparison is void, or if a candidate is inconclusive: more
    probes, or asking again, may still let one pass. 4 if there is no such hope: the parent or every
    candidate fails.
    """
    if summary.shipped:
        return EXIT_PASS
    if summary.comparability == "void":
        return EXIT_INCONCLUSIVE
    judged = summary.rounded or summary.candidates
    return EXIT_GATE_FAILS if all(one.verdict == "fail" for one in judged) else EXIT_INCONCLUSIVE


def describe(order: Order, run_dir: Path) -> list[str]:
    """What :func:`run` would do, for ``--dry-run``. Writes nothing; refuses what can be told from headers."""
    from .quantize.plan import STRATEGIES

    parent, wanted = check(order)
    continues = read_state(run_dir, wanted) is not None
    replies = sum(len(probe.turns) for probe in order.probes)
    free = shutil.disk_usage(_existing(run_dir)).free
    asking = f"{len(order.probes)} probes ({replies} replies)"
    lines = [
        f"{'parent':11} {order.parent}  ({parent.bytes / 1e6:.1f} MB)",
        f"{'spec':11} {order.spec.name}: {len(order.spec.gates)} gates, {asking}",
        f"{'calibrate':11} {len(order.conversations)} conversations",
        f"{'run folder':11} {run_dir}  ({'continues' if continues else 'new'}; {free / 1e9:.1f} GB free)",
        "",
        f"{PARENT:11} ask the embedded engine on {order.device}, judge; stop here if a threshold is not met",
    ]
    lines += [f"{rung:11} {STRATEGIES[rung]}; ask the same, judge against the parent" for rung in order.rungs]
    return [*lines, "", "The first rung whose gates all pass ships, and ends the run."]


# --- the climb -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Made:
    """A rung's checkpoint as it stands, and what the report says of it."""

    checkpoint: Path
    sha256: str
    facts: dict[str, Any]
    anew: bool


class _Climb:
    """One call of :func:`run`, inside the folder's lock."""

    def __init__(
        self, order: Order, parent: Checkpoint, parent_sha: str, kept: RunFolder, watcher: Watcher
    ) -> None:
        self.order, self.parent, self.parent_sha = order, parent, parent_sha
        self.kept, self.watcher = kept, watcher
        self.rows: list[CandidateSummary] = []

    def climb(self, even_if_parent_fails: bool) -> Summary:
        last, replies = self._parent(even_if_parent_fails)
        shipped: str | None = None
        climbs = last.verdict != "fail" or even_if_parent_fails
        for rung in self.order.rungs if climbs else ():
            last = self._rung(rung, replies)
            shipped = rung if last.verdict == "pass" else None
            # After every rung, so that a run that is stopped later can be reported on.
            save_summary(self._summary(last, shipped), self.kept.path)
            if shipped:
                break
        summary = self._summary(last, shipped)
        save_summary(summary, self.kept.path)
        self.watcher.stage("report", "writing", 1)
        write_report(self.kept.path)
        self.watcher.advance(1, 1)
        return summary

    def _parent(self, even_if_fails: bool) -> tuple[Verdicts, dict[str, list[Transcript]]]:
        order = self.order
        with self.kept.stage(PARENT) as stage:
            replies = self._ask(PARENT, order.parent, self.parent_sha, stage)
            verdicts = self._judged(PARENT, stage, judge(order.spec, order.probes, replies))
        note = None
        if verdicts.verdict == "fail":
            failing = ", ".join(gate.name for gate in verdicts.gates if gate.verdict == "fail")
            so = "" if even_if_fails else "; no rung was tried, because a rounded copy would fail too"
            note = f"fails its own threshold on {failing}{so}"
        facts: dict[str, Any] = {
            "strategy": "the fine-tuned model as it is",
            "bits_per_weight": parent_bits(self.parent),
            "bytes": self.parent.bytes,
            "note": note,
        }
        self.rows.append(_row(PARENT, facts, stage, verdicts))
        return verdicts, replies

    def _rung(self, rung: Rung, truth: dict[str, list[Transcript]]) -> Verdicts:
        order = self.order
        with self.kept.stage(rung) as stage:
            made = self._make(rung, stage)
            replies = self._ask(rung, made.checkpoint, made.sha256, stage, anew=made.anew)
            verdicts = self._judged(rung, stage, judge(order.spec, order.probes, replies, truth))
        self.rows.append(_row(rung, made.facts, stage, verdicts))
        return verdicts

    def _make(self, rung: Rung, stage: Stage) -> _Made:
        """The rung's checkpoint: the one that is there, if it is the one that was verified."""
        from .checkpoint import fingerprint_weights, open_checkpoint

        output = self.kept.candidate(rung)
        checkpoint = output / "checkpoint"
        if known := stage.facts.get("checkpoint_sha256"):
            if _sha256_of(checkpoint) == known and (output / "plan.json").is_file():
                return _Made(checkpoint, known, stage.facts["made"], anew=False)
            # Not what was verified and asked. Without its record, quantize makes it again.
            (output / "candidate.json").unlink(missing_ok=True)
        facts = self._quantize(rung, output, stage)
        sha = fingerprint_weights(open_checkpoint(checkpoint))
        stage.facts |= {"checkpoint_sha256": sha, "made": facts}
        self.kept.save()
        return _Made(checkpoint, sha, facts, anew=True)

    def _quantize(self, rung: Rung, output: Path, stage: Stage) -> dict[str, Any]:
        from .quantize.candidate import quantize
        from .quantize.plan import STRATEGIES

        def tell(step: str, done: int, total: int) -> None:
            stage.worked = True
            self.watcher.stage(rung, step, total)
            self.watcher.advance(done, total)

        rows = calibration(self.order, self.parent)
        device, seed = self.order.device, self.order.seed
        with model_threads(self.parent):
            made = quantize(
                self.order.parent, output, rung=rung, calibration=rows, device=device, seed=seed,
                progress=tell,
            )  # fmt: skip
        trip = asdict(made.round_trip)
        return {
            "strategy": STRATEGIES[rung],
            "bits_per_weight": round(made.bits_per_weight, 3),
            "bytes": made.bytes,
            "round_trip": {
                "max_abs_diff": trip["max_abs_diff"], "max_kl": trip["max_kl"], "tokens": trip["n_tokens"]
            },
        }  # fmt: skip

    def _ask(
        self, name: str, model: Path, sha: str, stage: Stage, *, anew: bool = False
    ) -> dict[str, list[Transcript]]:
        """All replies of one model; only those that are missing are asked, and for none no server starts."""
        order, output = self.order, self.kept.candidate(name) / "transcripts.jsonl"
        output.parent.mkdir(parents=True, exist_ok=True)
        served = {"engine": _engine(order), "checkpoint_sha256": sha}
        self.watcher.stage(name, "asking", len(order.probes))
        complete = _complete(output, order, asked_of(order.spec, name, served), anew)
        self.watcher.advance(complete, len(order.probes))
        if complete < len(order.probes):
            stage.worked = True

            def tell(finished: Finished) -> None:
                self.watcher.advance(finished.done, finished.total)

            log = output.with_name("engine.log")
            with embedded_server(model, device=order.device, log_path=log, name=name) as server:
                ask_probes_sync(
                    server.url, name, order.spec, order.probes, output, served=served, progress=tell
                )
                server.check()
        return load_transcripts(output)

    def _judged(self, name: str, stage: Stage, verdicts: Verdicts) -> Verdicts:
        write_verdicts(self.kept.candidate(name) / "verdicts.json", verdicts)
        stage.facts["verdict"] = verdicts.verdict
        self.watcher.judged(name, verdicts)
        return verdicts

    def _summary(self, last: Verdicts, shipped: str | None) -> Summary:
        state = self.kept.state
        return Summary(
            schema=1,
            spec=self.order.spec.name,
            parent=self.order.parent.name,
            comparability=last.comparability,
            shipped=shipped,
            candidates=tuple(self.rows),
            differences=() if last.comparability == "comparable" else (last.comparability_why,),
            engine=_engine(self.order),
            versions=state["versions"],
            hardware=state["hardware"],
            seeds=state["seeds"],
            n_probes=len(self.order.probes),
            limits=last.limits,
            commands=tuple(state["commands"]),
        )


def _row(name: str, facts: dict[str, Any], stage: Stage, verdicts: Verdicts) -> CandidateSummary:
    return CandidateSummary.model_validate(
        {**facts, "name": name, "minutes": stage.minutes, "gates": tuple(map(GateRow.of, verdicts.gates))}
    )


def _complete(output: Path, order: Order, asked: Asked, anew: bool) -> int:
    """How many probes a transcripts file already answers; replies of a checkpoint that is gone go too."""
    try:
        return len(complete_probes(output, order.probes, asked))
    except AskError as error:
        if not (anew and error.code == "transcripts-other-model"):
            raise
        output.unlink()
        return 0


def _sha256_of(checkpoint: Path) -> str | None:
    from .checkpoint import fingerprint_weights, open_checkpoint

    try:
        return fingerprint_weights(open_checkpoint(checkpoint))
    except CheckpointError:
        return None


def _engine(order: Order) -> str:
    return f"manners embedded {__version__} ({order.device})"


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
