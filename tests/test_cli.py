"""The command line as a user meets it: processes, streams, exit codes, real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manners import cli
from manners.checkpoint import lint
from manners.ladder import RUNGS
from manners.parser import make_parser
from manners.report import load_summary
from tests.checkpoint.folders import copy_of
from tests.runs import EASY, HARD, PlayedEngine, spec_data, tree, write_inputs

VERBS = ("demo", "run", "quantize", "check", "serve", "ask", "judge", "report", "spec")
# A process in which some libraries cannot be imported.
WITHOUT = """
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {banned}:
            raise AssertionError(name + " was imported")
sys.meta_path.insert(0, Ban())
from manners.cli import main
sys.exit(main(sys.argv[1:]))
"""

# More probes than are asked at once (64), so that some are still to come when the first are done.
MANY = 150

Result = subprocess.CompletedProcess[str]


def manners(*words: object, **options: Any) -> Result:
    command = [sys.executable, "-m", "manners", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def without_torch(*words: object) -> Result:
    code = WITHOUT.format(banned={"torch", "transformers", "safetensors"})
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, check=False
    )


def last_json(result: Result) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return data


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # main() sets it if it is not set; set here, it is put back after each test.
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"), spec_data(EASY))


@pytest.fixture(scope="module")
def finished(
    tiny_parent: Path, inputs: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    """A run by a process of its own, with real servers. Read only: copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    return folder, manners("run", "--parent", tiny_parent, *inputs, "--output", folder, env=environment)


# --- a run ---------------------------------------------------------------------------------


def test_a_run_ships_and_leaves_the_folder_of_the_design(finished: tuple[Path, Result]) -> None:
    run, result = finished
    assert (result.returncode, result.stdout.count("\n")) == (0, 1), result.stderr
    assert last_json(result) == {
        "shipped": "max",
        "run": str(run),
        "summary": str(run / "summary.json"),
        "report": str(run / "report.html"),
    }
    files = set(tree(run))
    wanted = {"run.json", "summary.json", "report.md", "report.html", "probes.jsonl"}
    wanted |= {"conversations/calibration.jsonl", "candidates/max/plan.json", "candidates/max/checkpoint"}
    for name in ("parent", "max"):
        wanted |= {f"candidates/{name}/{file}" for file in ("transcripts.jsonl", "verdicts.json")}
    assert wanted <= files
    assert not any("/mse" in name or name.endswith(".part") for name in files)  # max was enough
    assert lint(run / "candidates/max/checkpoint") == []

    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["schema"], summary["spec"], summary["shipped"]) == (1, "tiny", "max")
    assert (summary["comparability"], summary["parent"]) == ("comparable", "parent")
    assert [one["name"] for one in summary["candidates"]] == ["parent", "max"]
    for one in summary["candidates"]:
        assert {"strategy", "bits_per_weight", "bytes", "minutes"} <= set(one)
        (gate,) = one["gates"]
        assert {k: gate[k] for k in ("name", "n", "passed", "parent_passed", "verdict")} == {
            "name": "no_thinking_leak", "n": 33, "passed": 33, "parent_passed": 33, "verdict": "pass",
        }  # fmt: skip
        assert gate["interval"][0] < 1.0 == gate["interval"][1]
    assert summary["candidates"][0]["bits_per_weight"] == 16.0


def test_every_turn_was_asked_a_tools_turn_among_them(finished: tuple[Path, Result]) -> None:
    run, _ = finished
    lines = (run / "candidates/max/transcripts.jsonl").read_text(encoding="utf-8").splitlines()
    weather = sorted((t for t in map(json.loads, lines) if t["probe"] == "weather"), key=lambda t: t["turn"])
    assert [t["turn"] for t in weather] == [0, 1, 2]
    assert weather[1]["request"]["messages"][-1]["role"] == "tool"
    # A random model makes no call, so the probe's own stands in the history.
    assert [t["history"] for t in weather] == ["own", "reference", "reference"]
    assert len(lines) == 35
    assert all(json.loads(line)["error"] is None for line in lines)


def test_a_log_gets_lines_and_no_bars_and_no_advice_from_libraries(finished: tuple[Path, Result]) -> None:
    _, result = finished
    assert "\r" not in result.stderr
    assert "\x1b" not in result.stderr
    assert "━" not in result.stderr
    stages = re.findall(r"^\[ *[\d.]+ s\] +(\w+) (\w+) \(\d+\)$", result.stderr, re.MULTILINE)
    steps = ["weights", "calibrate", "write", "verify", "asking"]
    wanted = [("parent", "checking"), ("parent", "asking"), *(("max", step) for step in steps)]
    assert stages == [*wanted, ("report", "writing")]
    assert "[transformers]" not in result.stderr
    assert "Warning" not in result.stderr
    assert "max ships: its one gate passes" in result.stderr


def test_a_second_call_reads_what_is_there_and_is_quick(
    finished: tuple[Path, Result], tiny_parent: Path, inputs: list[str]
) -> None:
    run, first = finished
    before, engine_log = tree(run), (run / "candidates/max/engine.log").stat().st_mtime_ns
    began = time.monotonic()
    again = manners("run", "--parent", tiny_parent, *inputs, "--output", run)
    seconds = time.monotonic() - began
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert tree(run) == before  # transcripts, minutes and all
    assert (run / "candidates/max/engine.log").stat().st_mtime_ns == engine_log
    # 2.5 s on 2 idle cores, most of it imports; a server alone would take as long again.
    assert seconds < 15


def _start(*words: object, until: Callable[[], bool]) -> subprocess.Popen[str]:
    """A process that has come so far, and is still at work."""
    process = subprocess.Popen(
        [sys.executable, "-m", "manners", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if until():
            return process
        time.sleep(0.002)
    process.kill()
    raise AssertionError(process.communicate())


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_killed_while_asking_it_goes_on_and_ends_with_a_verdict(tiny_parent: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    spec = spec_data(HARD, EASY, count=MANY)
    words = ["run", "--parent", tiny_parent, *write_inputs(tmp_path, spec), "--output", run]
    transcripts = run / "candidates/parent/transcripts.jsonl"
    process = _start(*words, until=lambda: _lines(transcripts) >= 5)
    process.send_signal(signal.SIGKILL)
    assert process.communicate(timeout=60)[0] == ""
    kept = transcripts.read_bytes()
    whole = kept[: kept.rindex(b"\n") + 1]
    assert 5 <= whole.count(b"\n") < MANY + 2

    # No random model passes the gate: the parent itself fails, and there the run ends.
    result = manners(*words)
    assert result.returncode == 4, result.stderr
    assert last_json(result)["shipped"] is None
    assert "the parent itself fails right_tool" in result.stderr
    assert "--even-if-parent-fails" in result.stderr
    assert not (run / "candidates/max").exists()
    complete = transcripts.read_bytes()
    assert complete.startswith(whole)
    asked = [(t["probe"], t["turn"]) for t in map(json.loads, complete.splitlines())]
    assert len(asked) == len(set(asked)) == MANY + 2


def test_ctrl_c_is_exit_130_without_a_traceback(tiny_parent: Path, inputs: list[str], tmp_path: Path) -> None:
    """Here while the server is being started; in the middle of asking, too, only files count."""
    run = tmp_path / "run"
    log = run / "candidates/parent/engine.log"
    process = _start("run", "--parent", tiny_parent, *inputs, "--output", run, until=log.is_file)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("stopped; what is complete is kept, and the same command continues\n")
    assert "Traceback" not in err
    stage = json.loads((run / "run.json").read_text(encoding="utf-8"))["stages"]["parent"]
    assert stage["state"] == "begun"
    assert not (run / "summary.json").exists()


def test_too_few_probes_end_in_exit_5(tiny_parent: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("manners.ladder.embedded_server", PlayedEngine(lambda model, words: "Hello."))
    options = write_inputs(tmp_path, spec_data(EASY, count=5))
    words = ["run", "--parent", str(tiny_parent), *options, "--output", str(tmp_path / "run")]
    assert cli.main([*words, "--rungs", "w4a16"]) == 5


def test_a_candidate_that_fails_ends_in_exit_4(tiny_parent: Path, tmp_path: Path, monkeypatch: Any) -> None:
    wordy = PlayedEngine(lambda model, words: "Well. " * (9 if model == "max" else 1))
    monkeypatch.setattr("manners.ladder.embedded_server", wordy)
    options = write_inputs(tmp_path, spec_data({"name": "concise", "threshold": 0.9, "max_words": 3}))
    words = ["run", "--parent", str(tiny_parent), *options, "--output", str(tmp_path / "run")]
    assert cli.main([*words, "--rungs", "max"]) == 4
    shown = load_summary(tmp_path / "run").commands
    assert shown == (
        f"manners run --parent {tiny_parent} --spec {tmp_path}/spec.yaml --data {tmp_path}/data.jsonl "
        f"--output {tmp_path}/run --rungs max",
    )


@pytest.mark.parametrize("verb", ["run", "demo"])
def test_a_dry_run_tells_and_does_nothing(
    verb: str, tiny_parent: Path, inputs: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("manners.demo.pair.PARENT", tiny_parent)
    words = ["--parent", str(tiny_parent), *inputs] if verb == "run" else []
    assert cli.main([verb, *words, "--output", "run", "--rungs", "mse", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"dry_run": True, "run": "run", "rungs": ["mse"]}
    assert "least squared error" in err
    assert list(tmp_path.iterdir()) == []


# --- the other verbs -------------------------------------------------------------------------


def test_ask_and_judge_by_hand(tmp_path: Path, capsys: Any) -> None:
    spec = write_inputs(tmp_path, spec_data({"name": "no_thinking_leak", "threshold": 0.9}))[:2]
    failing = {"Hello, number 3!"}

    def answer(model: str, words: str) -> str | int:
        if words in failing:
            return 500
        return "<think>Hm." if model == "worse" and words.endswith(("1!", "2!")) else "Hello."

    def ask(url: str, model: str) -> tuple[int, dict[str, Any], str]:
        code = cli.main(["ask", url, "--model", model, *spec, "--output", str(tmp_path / model / "t.jsonl")])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with PlayedEngine(answer)(tmp_path, name="any") as server:
        code, told, err = ask(server.url, "parent")
        assert (code, told["asked"], told["errors"]) == (3, 33, {"http-5xx": 1})
        assert "1 probes met errors (1 http-5xx); the same command asks them again" in err
        failing.clear()
        code, told, _ = ask(server.url, "parent")
        assert (code, told["asked"], told["skipped"], told["errors"]) == (0, 1, 32, {})
        assert ask(server.url, "worse")[0] == 0
    parent, worse = (str(tmp_path / name / "t.jsonl") for name in ("parent", "worse"))
    assert cli.main(["judge", parent, *spec]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "pass"
    for words, code in (["judge", worse, "--parent", parent], 4), (["judge", parent, "--parent", worse], 4):
        # The second is held against a worse parent, and meets the threshold.
        wanted = code if words[1] == worse else 0
        result = without_torch(*words, *spec)
        assert result.returncode == wanted, result.stderr
    verdicts = json.loads((tmp_path / "worse/verdicts.json").read_text(encoding="utf-8"))
    assert verdicts["verdict"] == "fail"


def test_quantize_check_and_report(
    finished: tuple[Path, Result], tiny_parent: Path, inputs: list[str], tmp_path: Path, capsys: Any
) -> None:
    data = inputs[inputs.index("--data") + 1]
    words = ["quantize", "--model", str(tiny_parent), "--calib-data", data, "--rung", "max"]
    assert cli.main([*words, "--output", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["checkpoint"], told["resumed"]) == (str(tmp_path / "out/checkpoint"), False)
    # One way only: by hand, the same bytes come out as in a run.
    assert tree(tmp_path / "out/checkpoint") == tree(finished[0] / "candidates/max/checkpoint")

    assert cli.main(["check", told["checkpoint"]]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    (tmp_path / "out/checkpoint/chat_template.jinja").unlink()
    assert cli.main(["check", told["checkpoint"]]) == 3
    out, err = capsys.readouterr()
    (code,) = json.loads(out)["findings"]
    assert f"error[{code}]" in err

    run = copy_of(finished[0], tmp_path / "run")
    before = tree(run)
    (run / "report.html").unlink()
    result = without_torch("report", run)
    assert (result.returncode, last_json(result)["html"]) == (0, str(run / "report.html")), result.stderr
    assert tree(run) == before


def test_spec_prints_what_can_be_used_again(tmp_path: Path) -> None:
    listed = without_torch("spec")
    assert (listed.returncode, listed.stdout) == (0, "annie\n")
    printed = without_torch("spec", "annie")
    (tmp_path / "mine.yaml").write_text(printed.stdout, encoding="utf-8")
    again = without_torch("spec", tmp_path / "mine.yaml")
    assert (again.returncode, again.stdout) == (0, printed.stdout)


def test_a_reader_that_has_gone_is_no_crash(tmp_path: Path) -> None:
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a stream, not a path
        read, write = os.pipe()
        os.close(read)
        process = subprocess.Popen(
            [sys.executable, "-m", "manners", "spec", "annie"], stdin=nothing, stdout=write,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.close(write)
        _, err = process.communicate()
    assert (process.returncode, err) == (0, "")


# --- help and usage --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_one_arrow_and_says_how_it_exits(verb: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        cli.main([verb, "--help"])
    text = capsys.readouterr().out
    for part in ("\n  reads   ", "\n  writes  ", "\nExample:  manners ", "\nExit: 0 "):
        assert text.count(part) == 1, part
    for code in (
        "0 done",
        "2 usage",
        "3 bad input",
        "4 a gate fails",
        "5 inconclusive",
        "1 is a crash",
        "130",
    ):
        assert code in text


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_in_the_help_can_be_parsed(verb: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    (example,) = re.findall(r"^Example:  manners (.*?)(?: > .*)?$", capsys.readouterr().out, re.MULTILINE)
    assert make_parser().parse_args(example.split()).command == verb


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)])
def test_help_needs_no_torch(words: list[str]) -> None:
    result = without_torch(*words)
    assert (result.returncode, result.stderr) == (0, "")
    assert "manners" in result.stdout


def test_the_ban_on_torch_would_be_noticed(tmp_path: Path) -> None:
    result = without_torch("check", tmp_path)
    assert result.returncode == 1
    assert "was imported" in result.stderr


def test_the_parser_knows_the_ladders_rungs() -> None:
    words = ["quantize", "--model", "m", "--calib-data", "d", "--output", "o", "--rung"]
    for rung in RUNGS:
        assert make_parser().parse_args([*words, rung]).rung == rung
    assert make_parser().parse_args(["demo"]).rungs == ",".join(RUNGS)


RUN = ["run", "--parent", "p", "--spec", "annie", "--data", "d", "--output", "o"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["run", "--parent", "p"], "required: --spec, --data, --output"),
        (["ask", "http://127.0.0.1:9"], "required: --model, --spec, --output"),
        ([*RUN, "--frobnicate"], "unrecognized arguments: --frobnicate"),
        ([*RUN, "--dry"], "unrecognized arguments: --dry"),
        (["quantize", "--model", "m", "--calib-data", "d", "--output", "o", "--rung", "best"], "'best'"),
        (["serve", "d", "--port", "65536"], "'65536' is no whole number from 0 to 65535"),
        (["ask", "u", "--model", "m", "--spec", "s", "--output", "o", "--concurrency", "0"], "from 1 to"),
        (["ask", "u", "--model", "m", "--spec", "s", "--output", "o", "--concurrency", "x"], "'x' is no"),
    ],
)
def test_wrong_usage_is_exit_2(words: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    out, err = capsys.readouterr()
    assert said in err
    assert err.startswith("usage: manners")
    assert out == ""


@pytest.mark.parametrize(
    ("rungs", "found"), [("best", "best"), ("max,best", "best"), (",", "nothing"), ("max,max", "max, max")]
)
def test_an_unknown_rung_is_exit_2(rungs: str, found: str, capsys: Any) -> None:
    assert cli.main([*RUN, "--rungs", rungs]) == 2
    assert capsys.readouterr().err.startswith(f"error[unknown-rung] --rungs: {found}\n  Fix: name some of")


# --- how it ends -----------------------------------------------------------------------------


def test_a_crash_is_exit_1_with_a_traceback() -> None:
    code = (
        "import sys, manners.cli as c\nc._VERBS['spec'] = lambda chosen: 1 // 0\nsys.exit(c.main(['spec']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert result.stdout == ""


def test_the_system_refusing_is_bad_environment(capsys: Any, monkeypatch: Any) -> None:
    def full(chosen: Any) -> int:
        raise OSError(28, "No space left on device", "/x/report.html")

    monkeypatch.setitem(cli._VERBS, "spec", full)
    assert cli.main(["spec"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("error[system] /x/report.html: No space left on device\n")
    assert "\n  Fix: " in err
