"""The climb: real rounding, real files and real HTTP, with replies that are played."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manners import ladder, preflight
from manners.checkpoint import open_checkpoint
from manners.errors import ChatError, CheckpointError, EngineError, QuantizeError, RunError
from manners.judge.verdicts import Verdicts
from manners.report import CandidateSummary, GateRow, Summary, load_summary
from manners.run_folder import alone
from manners.spec import Probe
from tests.checkpoint.folders import copy_of, edit_json, edit_tensors
from tests.runs import ENOUGH, PlayedEngine, conversations, make_order, tree
from tests.tiny import make_tiny_parent

LEAK = {"name": "no_thinking_leak", "threshold": 0.9, "margin": 0.02}
MARKDOWN = {"name": "no_markdown", "threshold": 0.9}
STEPS = ("weights", "calibrate", "write", "verify", "asking")
REPLIES = ENOUGH + 2  # one probe has three turns


class StoppedError(Exception):
    """Somebody pulled the plug."""


class Log:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, str]] = []
        self.verdicts: dict[str, str] = {}

    def stage(self, candidate: str, stage: str, total: int) -> None:
        if (candidate, stage) not in self.stages[-1:]:
            self.stages.append((candidate, stage))

    def advance(self, done: int, total: int) -> None:
        assert 0 <= done <= total

    def judged(self, candidate: str, verdicts: Verdicts) -> None:
        self.verdicts[candidate] = verdicts.verdict


def good(model: str, words: str) -> str | int:
    return "Good morning!"


def leaks(*models: str) -> Callable[[str, str], str | int]:
    """Some models think aloud, in a third of their replies; the others never."""

    def answer(model: str, words: str) -> str | int:
        thinks = model in models and words.endswith(("1!", "4!", "7!"))
        return "<think>Hm.</think> Hello!" if thinks else "Good morning!"

    return answer


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> PlayedEngine:
    played = PlayedEngine(good)
    monkeypatch.setattr(ladder, "embedded_server", played)
    return played


@pytest.fixture(scope="module")
def finished(tiny_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that shipped max. Read only: copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder, "embedded_server", PlayedEngine(good))
        assert ladder.run(make_order(tiny_parent, LEAK), folder).shipped == "max"
    return folder


def state_of(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((run / "run.json").read_text(encoding="utf-8"))
    return state


# --- the climb -----------------------------------------------------------------------------


def test_it_climbs_to_the_first_rung_that_passes_and_no_further(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    engine.answer = leaks("max")
    log = Log()
    order = make_order(tiny_parent, LEAK, MARKDOWN, command="manners run …")
    summary = ladder.run(order, tmp_path / "run", log)

    assert engine.started == ["parent", "max", "mse"]
    assert log.verdicts == {"parent": "pass", "max": "fail", "mse": "pass"}
    assert summary.shipped == "mse"
    assert ladder.exit_code(summary) == 0
    assert load_summary(tmp_path / "run") == summary
    assert [one.name for one in summary.candidates] == ["parent", "max", "mse"]
    assert sorted(path.name for path in (tmp_path / "run" / "candidates").iterdir()) == [
        "max",
        "mse",
        "parent",
    ]
    assert list(dict.fromkeys(log.stages)) == [
        ("parent", "checking"),
        ("parent", "asking"),
        *[
            (rung, s)
            for rung in ("max", "mse")
            for s in ("weights", "calibrate", "write", "verify", "asking")
        ],
        ("report", "writing"),
    ]
    mse = summary.candidate("mse")
    assert mse is not None
    plan = json.loads((tmp_path / "run/candidates/mse/plan.json").read_text(encoding="utf-8"))
    assert plan["strategy"] == "mse"
    assert 4.5 < (mse.bits_per_weight or 0) < 16
    assert mse.bytes == open_checkpoint(tmp_path / "run/candidates/mse/checkpoint").bytes
    assert mse.round_trip is not None
    assert mse.round_trip.max_abs_diff == 0.0
    state = state_of(tmp_path / "run")
    assert {name: (s["state"], s["verdict"]) for name, s in state["stages"].items()} == {
        "parent": ("done", "pass"),
        "max": ("done", "fail"),
        "mse": ("done", "pass"),
    }
    assert state["commands"] == ["manners run …"]
    assert state["asked"]["rungs"] == ["max", "mse", "w4a16"]


def test_rungs_are_tried_in_the_order_that_was_asked_for(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    engine.answer = leaks("w4a16", "max")
    summary = ladder.run(make_order(tiny_parent, LEAK, rungs=("w4a16", "max")), tmp_path / "run")
    assert [one.name for one in summary.rounded] == ["w4a16", "max"]
    assert summary.shipped is None
    assert ladder.exit_code(summary) == 4
    # Another rung later, in the same folder: nothing that is known is asked again.
    engine.started.clear()
    later = make_order(tiny_parent, LEAK, rungs=("max", "mse"), command="manners run … --rungs max,mse")
    for _ in range(2):
        summary = ladder.run(later, tmp_path / "run")
    assert summary.commands == ("manners run … --rungs max,mse",)
    assert engine.started == ["mse"]
    assert [one.name for one in summary.rounded] == ["max", "mse"]
    assert summary.shipped == "mse"
    assert state_of(tmp_path / "run")["asked"]["rungs"] == ["max", "mse"]


def test_a_parent_that_fails_ends_the_run_unless_told_otherwise(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    engine.answer = leaks("parent", "max")
    order = make_order(tiny_parent, LEAK, MARKDOWN, rungs=("max",))
    summary = ladder.run(order, tmp_path / "run")
    assert engine.started == ["parent"]
    assert (summary.shipped, summary.rounded, ladder.exit_code(summary)) == (None, (), 4)
    assert summary.parent_row is not None
    assert "fails its own threshold on no_thinking_leak; no rung was tried" in (summary.parent_row.note or "")
    assert not (tmp_path / "run/candidates/max").exists()
    for name in ("report.md", "report.html"):
        assert "the parent itself fails" in (tmp_path / "run" / name).read_text(encoding="utf-8")

    summary = ladder.run(order, tmp_path / "run", even_if_parent_fails=True)
    assert engine.started == ["parent", "max"]  # the parent was not asked again
    assert [one.name for one in summary.rounded] == ["max"]
    assert summary.parent_row is not None
    assert (summary.parent_row.note or "").endswith("fails its own threshold on no_thinking_leak")
    assert ladder.exit_code(summary) == 4


def test_too_few_probes_are_inconclusive_and_do_not_end_the_climb(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    summary = ladder.run(make_order(tiny_parent, LEAK, count=29, rungs=("max",)), tmp_path / "run")
    assert engine.started == ["parent", "max"]
    assert [one.verdict for one in summary.candidates] == ["inconclusive", "inconclusive"]
    assert ladder.exit_code(summary) == 5


def test_another_prompt_length_voids_the_comparison(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    engine.prompt_tokens["max"] = 12
    summary = ladder.run(make_order(tiny_parent, LEAK, rungs=("max",)), tmp_path / "run")
    assert (summary.comparability, summary.shipped) == ("void", None)
    assert "12 tokens, the parent's 11" in summary.differences[0]
    assert ladder.exit_code(summary) == 5


def test_failed_replies_are_asked_again_by_the_next_call_and_only_they(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    broken = {"Hello, number 3!", "Hello, number 5!"}
    engine.answer = lambda model, words: 500 if model == "max" and words in broken else "Hello!"
    order = make_order(tiny_parent, LEAK, rungs=("max",))
    summary = ladder.run(order, tmp_path / "run")
    candidate = summary.candidate("max")
    assert candidate is not None
    assert candidate.gates[0].errors == 2
    assert ladder.exit_code(summary) == 5
    before = state_of(tmp_path / "run")["stages"]

    engine.answer = good
    engine.requests.clear()
    assert ladder.run(order, tmp_path / "run").shipped == "max"
    assert sorted(engine.requests) == sorted(("max", words) for words in broken)
    after = state_of(tmp_path / "run")["stages"]
    assert after["parent"] == before["parent"]
    assert after["max"]["minutes"] > before["max"]["minutes"]


def _summary(parent: str, rounded: list[str], comparability: Any = "comparable") -> Summary:
    def one(name: str, verdict: str) -> CandidateSummary:
        gate = GateRow(
            name="concise",
            n=9,
            passed=9,
            interval=(0.6, 1.0),
            parent_passed=9,
            verdict=verdict,  # type: ignore[arg-type]
        )
        return CandidateSummary(name=name, strategy="", gates=(gate,))

    names = ("max", "mse", "w4a16")
    candidates = (one("parent", parent), *(one(n, v) for n, v in zip(names, rounded, strict=False)))
    shipped = next((n for n, v in zip(names, rounded, strict=False) if v == "pass"), None)
    return Summary(
        schema=1, spec="s", parent="p", comparability=comparability, candidates=candidates,
        shipped=None if comparability == "void" else shipped,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parent", "rounded", "comparability", "code"),
    [
        ("pass", ["fail", "pass"], "comparable", 0),
        ("pass", ["pass"], "stack-comparison", 0),
        ("pass", ["fail", "fail"], "comparable", 4),
        ("fail", [], "comparable", 4),
        ("fail", ["fail"], "comparable", 4),
        ("pass", ["fail", "inconclusive"], "comparable", 5),
        ("pass", ["inconclusive", "fail"], "comparable", 5),
        ("inconclusive", ["fail"], "comparable", 4),
        ("pass", ["fail"], "void", 5),
        ("pass", ["pass"], "void", 5),
    ],
)
def test_exit_codes(parent: str, rounded: list[str], comparability: str, code: int) -> None:
    assert ladder.exit_code(_summary(parent, rounded, comparability)) == code


# --- taking a run up again -------------------------------------------------------------------


def test_a_finished_run_is_only_read_again(
    finished: Path, tiny_parent: Path, engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done again")

    monkeypatch.setattr("manners.quantize.candidate.quantize", never)
    monkeypatch.setattr("manners.chat.Renderer.from_folder", never)
    before, run_json = tree(finished), (finished / "run.json").stat().st_mtime_ns
    summary = ladder.run(make_order(tiny_parent, LEAK), finished)
    assert engine.started == []
    assert summary.shipped == "max"
    assert tree(finished) == before
    assert (finished / "run.json").stat().st_mtime_ns == run_json


@pytest.mark.parametrize(("stop_at", "name"), [(1, "parent"), (20, "parent"), (20, "max")])
def test_stopped_while_asking_only_what_is_missing_is_asked(
    stop_at: int, name: str, tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    order, run = make_order(tiny_parent, LEAK, rungs=("max",)), tmp_path / "run"
    if name == "max":
        ladder.run(replace(order, rungs=("w4a16",)), run)  # the parent's replies are there
        engine.requests.clear()
    engine.held = {f"Hello, number {n}!" for n in range(24, 32)}
    with pytest.raises(StoppedError):
        ladder.run(order, run, _StopIn(name, stop_at))
    engine.held = set()
    transcripts = run / "candidates" / name / "transcripts.jsonl"
    kept = transcripts.read_bytes()
    assert stop_at <= kept.count(b"\n") <= REPLIES - 8
    stopped = state_of(run)["stages"][name]
    assert stopped["state"] == "begun"
    assert stopped["minutes"] > 0

    kept_words = {t["request"]["messages"][-1]["content"] for t in map(json.loads, kept.splitlines())}
    engine.requests.clear()
    assert ladder.run(order, run).shipped == "max"
    assert transcripts.read_bytes().startswith(kept)
    assert sum(model == name for model, _ in engine.requests) == REPLIES - kept.count(b"\n")
    assert not kept_words & {words for model, words in engine.requests if model == name}
    again = state_of(run)["stages"][name]
    assert again["state"] == "done"
    assert again["minutes"] > stopped["minutes"]


class _StopIn(Log):
    """Stops in the asking of one candidate only."""

    def __init__(self, name: str, stop_at: int) -> None:
        super().__init__()
        self.name, self.limit = name, stop_at

    def advance(self, done: int, total: int) -> None:
        if self.stages[-1] == (self.name, "asking") and done >= self.limit:
            raise StoppedError


def _truncate(candidate: Path) -> None:
    shard = candidate / "checkpoint" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def _flip_a_bit(candidate: Path) -> None:
    shard = candidate / "checkpoint" / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def _other_template(candidate: Path) -> None:
    (candidate / "checkpoint" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")


def _no_plan(candidate: Path) -> None:
    (candidate / "plan.json").unlink()


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, _other_template, _no_plan])
def test_a_damaged_candidate_is_made_again_and_its_replies_still_hold(
    damage: Callable[[Path], None], finished: Path, tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    run = copy_of(finished, tmp_path / "run")
    candidate = run / "candidates" / "max"
    whole = tree(candidate / "checkpoint")
    minutes = state_of(run)["stages"]["max"]["minutes"]
    damage(candidate)
    assert ladder.run(make_order(tiny_parent, LEAK), run).shipped == "max"
    assert tree(candidate / "checkpoint") == whole
    assert (candidate / "plan.json").is_file()
    assert engine.started == []  # the same bytes came out, so the replies are theirs
    assert state_of(run)["stages"]["max"]["minutes"] > minutes


def test_replies_of_a_checkpoint_that_came_out_otherwise_are_asked_again(
    finished: Path, tiny_parent: Path, tmp_path: Path, engine: PlayedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manners.quantize import candidate

    run = copy_of(finished, tmp_path / "run")
    _truncate(run / "candidates" / "max")
    amax = candidate.activation_amax
    monkeypatch.setattr(
        candidate, "activation_amax", lambda *a: {name: 2 * value for name, value in amax(*a).items()}
    )
    engine.answer = leaks("max")
    assert ladder.run(make_order(tiny_parent, LEAK, rungs=("max",)), run).shipped is None
    assert engine.started == ["max"]
    assert len(engine.requests) == REPLIES


def _changed(order: ladder.Order, what: str, parent: Path, tmp_path: Path) -> ladder.Order:
    spec = order.spec
    match what:
        case "spec":
            return replace(order, spec=spec.model_copy(update={"name": "other"}))
        case "probes":
            return replace(order, probes=order.probes[:-1])
        case "conversations":
            return replace(order, conversations=conversations(2))
        case "seed":
            return replace(order, seed=1)
        case "parent":
            other = copy_of(parent, tmp_path / "other")
            edit_json(other / "config.json", lambda c: c.update(rms_norm_eps=1e-5))
            return replace(order, parent=other)
    raise AssertionError(what)


@pytest.mark.parametrize("what", ["spec", "probes", "conversations", "seed", "parent"])
def test_another_order_is_refused_by_name_and_leaves_the_folder_alone(
    what: str, finished: Path, tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    order = _changed(make_order(tiny_parent, LEAK), what, tiny_parent, tmp_path)
    before = tree(finished)
    with pytest.raises(RunError, match=rf"error\[other-run\].*another {what}\n"):
        ladder.run(order, finished)
    with pytest.raises(RunError, match="other-run"):
        ladder.describe(order, finished)
    assert tree(finished) == before


def test_a_file_of_the_run_that_was_lost_or_edited_is_written_again(
    finished: Path, tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    run = copy_of(finished, tmp_path / "run")
    lost = ["summary.json", "report.html", "probes.jsonl", "conversations/calibration.jsonl"]
    lost += ["candidates/max/verdicts.json"]
    before = tree(run)
    for name in lost:
        (run / name).unlink()
    (run / "report.md").write_text("edited", encoding="utf-8")
    ladder.run(make_order(tiny_parent, LEAK), run)
    assert tree(run) == before
    (run / "probes.jsonl").write_text("edited", encoding="utf-8")
    ladder.run(make_order(tiny_parent, LEAK), run)
    assert tree(run) == before
    assert engine.started == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"stages": {}}', "KeyError: 'identity'"),
        ('{"identity": {}, "stages": {"max": {}}, "commands": [], "asked": {}}', "KeyError: 'state'"),
        ('{"identity": {}, "stages": {}, "commands": 3, "asked": {}}', "no commands"),
        (
            '{"identity": {}, "stages": {"max": {"state": 1, "minutes": 1}}, "commands": [], "asked": {}}',
            "state",
        ),
    ],
)
def test_a_broken_run_json_is_refused(
    text: str, found: str, tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=rf"error\[run-syntax\] .*run\.json: .*{found}"):
        ladder.run(make_order(tiny_parent), tmp_path)
    assert (tmp_path / "run.json").read_text(encoding="utf-8") == text


# --- whose folder it is ----------------------------------------------------------------------


def test_a_folder_with_other_files_is_not_written_into(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    (tmp_path / "probes.jsonl").write_text("mine", encoding="utf-8")
    before = tree(tmp_path)
    with pytest.raises(RunError, match=r"error\[not-a-run\].*no run\.json, but probes\.jsonl"):
        ladder.run(make_order(tiny_parent), tmp_path)
    assert tree(tmp_path) == before


def test_a_file_in_the_place_of_the_folder_is_refused(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    (tmp_path / "run").write_text("mine", encoding="utf-8")
    for where in (tmp_path / "run", tmp_path / "run" / "deeper"):
        with pytest.raises(RunError, match=r"error\[not-a-folder\]"):
            ladder.run(make_order(tiny_parent), where)
    assert (tmp_path / "run").read_text(encoding="utf-8") == "mine"


def test_what_was_left_of_a_run_that_never_began_is_no_hindrance(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    (tmp_path / ".lock").write_text("process 1 on elsewhere", encoding="utf-8")
    (tmp_path / ".run.json.part").write_text("{", encoding="utf-8")
    assert ladder.run(make_order(tiny_parent, rungs=("max",)), tmp_path).shipped == "max"
    assert not (tmp_path / ".run.json.part").exists()
    assert (tmp_path / ".lock").read_text(encoding="utf-8") == ""


HOLD = """
import sys, time
from pathlib import Path
from manners.run_folder import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes_cannot_work_in_one_folder_and_a_dead_one_holds_nothing(
    finished: Path, tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    run = copy_of(finished, tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"error\[run-busy\].*process {holder.pid} on .* is at work"):
            ladder.run(make_order(tiny_parent, LEAK), run)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    assert ladder.run(make_order(tiny_parent, LEAK), run).shipped == "max"


def test_the_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), alone(tmp_path):
        _ = 1 / 0
    with alone(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text(encoding="utf-8")


# --- before anything is written --------------------------------------------------------------


def _nan(parent: Path) -> None:
    edit_tensors(parent, lambda t: t["model.norm.weight"].__setitem__(3, float("nan")))


def _no_template(parent: Path) -> None:
    (parent / "chat_template.jinja").unlink()
    edit_json(parent / "tokenizer_config.json", lambda c: c.pop("chat_template"))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_nan, CheckpointError, r"error\[not-finite\].*model\.norm\.weight: nan at \[3\]"),
        (_no_template, ChatError, r"error\[no-chat-template\]"),
        (
            lambda p: edit_json(p / "config.json", lambda c: c.update(max_position_embeddings=8)),
            ChatError,
            r"error\[too-long\] conversation c0: \d+ tokens, the model takes 8",
        ),
    ],
)
def test_what_would_come_up_after_minutes_is_refused_first(
    spoil: Callable[[Path], None],
    error: type[Exception],
    message: str,
    tiny_parent: Path,
    tmp_path: Path,
    engine: PlayedEngine,
) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    spoil(parent)
    with pytest.raises(error, match=message):
        ladder.run(make_order(parent), tmp_path / "run")
    assert engine.started == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"probes": ()}, RunError, r"error\[no-probes\] tiny"),
        ({"rungs": ()}, RunError, r"error\[no-rungs\].*none"),
        ({"rungs": ("max", "max")}, RunError, r"error\[no-rungs\].*max, max"),
        ({"rungs": ("best",)}, QuantizeError, r"error\[unknown-rung\].*'best'"),
        ({"device": "cuda:77"}, EngineError, r"error\[no-device\] cuda:77: this machine has cpu"),
        ({"device": "cpux"}, EngineError, r"error\[no-device\] cpux"),
    ],
)
def test_orders_that_cannot_be_run(
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    tiny_parent: Path,
    tmp_path: Path,
    engine: PlayedEngine,
) -> None:
    for what in (ladder.run, ladder.describe):
        with pytest.raises(error, match=message):
            what(replace(make_order(tiny_parent), **changes), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_describe_tells_the_way_and_writes_nothing(
    finished: Path, tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    order = make_order(tiny_parent, LEAK, rungs=("mse", "max"))
    text = "\n".join(ladder.describe(order, tmp_path / "a" / "run"))
    assert f"{ENOUGH} probes ({REPLIES} replies)" in text
    assert re.search(r"run folder .*/a/run  \(new; [\d.]+ GB free\)", text)
    assert text.index("\nmse ") < text.index("\nmax ")
    assert list(tmp_path.iterdir()) == []
    before = tree(finished)
    assert "(continues; " in "\n".join(ladder.describe(order, finished))
    assert tree(finished) == before
    assert engine.started == []


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float32, 32)])
def test_the_parents_bits_are_those_of_its_files(dtype: torch.dtype, bits: float, tmp_path: Path) -> None:
    assert preflight.parent_bits(open_checkpoint(make_tiny_parent(tmp_path, dtype=dtype))) == bits


def test_threads_are_the_engines_and_put_back(tiny_parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, before = open_checkpoint(tiny_parent), torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pytest.raises(ZeroDivisionError, match="3"), preflight.model_threads(parent):
        raise ZeroDivisionError(torch.get_num_threads())
    assert torch.get_num_threads() == before


def test_probes_may_be_others_than_the_specs_own(
    tiny_parent: Path, tmp_path: Path, engine: PlayedEngine
) -> None:
    probes = tuple(
        Probe.model_validate({"id": f"p{n}", "category": "greeting", "turns": [{"content": f"Hi {n}"}]})
        for n in range(30)
    )
    summary = ladder.run(make_order(tiny_parent, LEAK, probes=probes, rungs=("max",)), tmp_path / "run")
    assert (summary.shipped, summary.n_probes) == ("max", 30)
    assert {words for _, words in engine.requests} == {f"Hi {n}" for n in range(30)}
