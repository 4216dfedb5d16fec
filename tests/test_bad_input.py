"""Every refusal of the acceptance list, by the command that meets it: exit 3, four parts, nothing left.

``main`` runs in this process, so an exception that it does not turn into a message fails the test.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from manners import cli
from manners.errors import EngineError
from tests.checkpoint.folders import copy_of, edit_json, edit_tensors
from tests.runs import EASY, PlayedEngine, probe_data, spec_data, tree, write_inputs


@dataclass(frozen=True)
class Place:
    """A folder with good input in it, to be spoiled."""

    root: Path

    @property
    def parent(self) -> Path:
        return self.root / "parent"

    @property
    def spec(self) -> Path:
        return self.root / "spec.yaml"

    @property
    def data(self) -> Path:
        return self.root / "data.jsonl"

    def run(self, *more: str) -> list[str]:
        named = ["--parent", str(self.parent), "--spec", str(self.spec), "--data", str(self.data)]
        return ["run", *named, "--output", str(self.root / "run"), *more]

    def quantize(self) -> list[str]:
        named = ["--model", str(self.parent), "--calib-data", str(self.data)]
        return ["quantize", *named, "--output", str(self.root / "out")]

    def edit_spec(self, change: Callable[[dict[str, Any]], object]) -> None:
        data = yaml.safe_load(self.spec.read_text(encoding="utf-8"))
        change(data)
        self.spec.write_text(yaml.safe_dump(data), encoding="utf-8")


@pytest.fixture
def place(tiny_parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    def no_server(*_: Any, **__: Any) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("manners.ladder.embedded_server", no_server)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # main() sets it; so it is put back
    copy_of(tiny_parent, tmp_path / "parent")
    write_inputs(tmp_path, spec_data(EASY, count=3))
    return Place(tmp_path)


def refused(words: list[str], place: Place, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused; what it said on stderr. Nothing may be written."""
    capsys.readouterr()
    before = tree(place.root)
    code = cli.main(words)
    out, err = capsys.readouterr()
    assert code == 3, err
    assert out == ""
    assert tree(place.root) == before
    last = err[err.index("error[") :].splitlines()
    assert last[0].partition("]")[2].count(": ") >= 1, "place and what was found"
    assert last[-1].startswith("  Fix: ")
    assert len(last[-1]) > len("  Fix: ") + 10
    assert "Traceback" not in err
    return err[err.index("error[") :]


# --- the parent ----------------------------------------------------------------------------


def _weights(place: Place) -> Path:
    return place.parent / "model.safetensors"


def _truncate(place: Place) -> None:
    data = _weights(place).read_bytes()
    _weights(place).write_bytes(data[:-1])


def _only_a_pickle(place: Place) -> None:
    torch.save({"a": torch.ones(1)}, place.parent / "pytorch_model.bin")
    _weights(place).unlink()


def _narrow(width: int) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        edit_tensors(place.parent, lambda t: t.update({name: t[name][:, :width].contiguous()}))

    return spoil


def _nan(place: Place) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][2, 5] = float("nan")

    edit_tensors(place.parent, spoil)


PARENTS: list[tuple[Callable[[Place], object], str, str]] = [
    (lambda p: shutil.rmtree(p.parent), "folder-missing", "no such folder"),
    (lambda p: _weights(p).unlink(), "no-safetensors", "no *.safetensors file"),
    (_only_a_pickle, "pickle-checkpoint", "pytorch_model.bin, and no safetensors"),
    (_truncate, "truncated-shard", "bytes, its header promises"),
    (lambda p: _weights(p).write_bytes(b""), "truncated-shard", "0 bytes"),
    (_narrow(120), "width-16", "model.layers.0.mlp.down_proj"),
    (_narrow(112), "width-64", "model.layers.0.mlp.down_proj"),
    (_nan, "not-finite", "model.layers.1.mlp.up_proj.weight: nan at [2, 5]"),
    (lambda p: (p.parent / "config.json").unlink(), "config-missing", "no config.json"),
    (lambda p: (p.parent / "config.json").write_text("{"), "json-syntax", "config.json"),
    (lambda p: (p.parent / "tokenizer.json").unlink(), "no-tokenizer", "parent"),
]


@pytest.mark.parametrize(("spoil", "code", "found"), PARENTS, ids=[p[1] for p in PARENTS])
@pytest.mark.parametrize("verb", ["run", "quantize"])
def test_a_parent_that_cannot_be_used(
    verb: str, spoil: Callable[[Place], object], code: str, found: str, place: Place, capsys: Any
) -> None:
    spoil(place)
    words = place.run() if verb == "run" else place.quantize()
    err = refused(words, place, capsys)
    assert err.startswith(f"error[{code}] {place.root}") or code.startswith("width")
    assert str(place.parent) in err.splitlines()[0]
    assert found in err.splitlines()[0]


@pytest.mark.parametrize(
    ("spoil", "code"), [(_only_a_pickle, "pickle-checkpoint"), (_truncate, "truncated-shard")]
)
@pytest.mark.parametrize("verb", ["check", "serve"])
def test_other_verbs_refuse_the_same_folder(
    verb: str, spoil: Callable[[Place], object], code: str, place: Place, capsys: Any
) -> None:
    spoil(place)
    if verb == "serve":
        assert refused([verb, str(place.parent)], place, capsys).startswith(f"error[{code}]")
    else:  # a linter reports, as JSON too
        assert cli.main([verb, str(place.parent)]) == 3
        out, err = capsys.readouterr()
        assert f"error[{code}]" in err
        assert out == "" or code in json.loads(out)["findings"]


# --- spec, probes and conversations ------------------------------------------------------------


def _no_prompt(spec: dict[str, Any]) -> None:
    del spec["persona"]["system_prompt"]


def _unknown_tool(spec: dict[str, Any]) -> None:
    spec["probes"][0]["turns"][0]["expect"]["tool"] = "fly"


SPECS: list[tuple[Callable[[Place], object], str, str]] = [
    (lambda p: p.edit_spec(lambda s: s["gates"][0].update(name="be_nice")), "unknown-gate", "'be_nice'"),
    (lambda p: p.edit_spec(_no_prompt), "spec-field", "persona.system_prompt: Field required"),
    (lambda p: p.edit_spec(lambda s: s["gates"][0].pop("threshold")), "spec-field", "gates.0.threshold"),
    (lambda p: p.edit_spec(lambda s: s.pop("gates")), "spec-field", "gates: Field required"),
    (lambda p: p.edit_spec(lambda s: s.update(extra=1)), "spec-field", "extra"),
    (
        lambda p: p.edit_spec(lambda s: s["probes"][0]["turns"][0]["expect"].update(tool="x")),
        "spec-field",
        "'x'",
    ),
    (lambda p: p.spec.write_text("a: [", encoding="utf-8"), "spec-syntax", "spec.yaml"),
    (lambda p: p.spec.write_bytes(b"\xff\xfe\x00"), "spec-syntax", "spec.yaml"),
    (lambda p: p.spec.unlink(), "spec-missing", "no such file"),
    (lambda p: p.edit_spec(lambda s: s.pop("probes")), "no-probes", "no probes"),
    (lambda p: p.edit_spec(lambda s: s.update(probes="gone.jsonl")), "probes-missing", "gone.jsonl"),
]


@pytest.mark.parametrize(("spoil", "code", "found"), SPECS, ids=[s[1] for s in SPECS])
@pytest.mark.parametrize("verb", ["run", "ask", "judge"])
def test_a_spec_that_cannot_be_used(
    verb: str, spoil: Callable[[Place], object], code: str, found: str, place: Place, capsys: Any
) -> None:
    spoil(place)
    words = {
        "run": place.run(),
        "ask": ["ask", "http://127.0.0.1:9", "--model", "m", "--spec", str(place.spec), "--output",
                str(place.root / "replies.jsonl")],
        "judge": ["judge", str(place.root / "replies.jsonl"), "--spec", str(place.spec)],
    }[verb]  # fmt: skip
    err = refused(words, place, capsys)
    assert err.startswith(f"error[{code}] ")
    assert found in err.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [
        (None, "probes-missing", "no such file"),
        ("{", "probes-syntax", "probes.jsonl:1"),
        (b"\xff", "probes-syntax", "probes.jsonl:1"),
        ("", "no-probes", "no probes"),
        ('\n{"id": "a"}', "spec-field", "probes.jsonl:2: category"),
        (
            '{"id": "a", "category": "web", "turns": [{"content": "x", "expect": {"tool": "fly"}}]}',
            "unknown-tool",
            "probes.jsonl: probe a: expects tool 'fly'; tiny has web_search",
        ),
    ],
)
def test_probes_that_cannot_be_used(
    text: str | bytes | None, code: str, found: str, place: Place, capsys: Any
) -> None:
    path = place.root / "probes.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    err = refused(place.run("--probes", str(path)), place, capsys)
    assert err.startswith(f"error[{code}] ")
    assert found in err.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [
        (None, "conversations-missing", "no such file"),
        ("", "conversations-empty", "no conversation"),
        ('{"id": "a"}', "conversations-syntax", "data.jsonl:1: messages"),
        (b"\xff\n", "conversations-syntax", "data.jsonl:1"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "quantize"])
def test_conversations_that_cannot_be_used(
    verb: str, text: str | bytes | None, code: str, found: str, place: Place, capsys: Any
) -> None:
    place.data.unlink()
    if text is not None:
        place.data.write_bytes(text if isinstance(text, bytes) else text.encode())
    err = refused(place.run() if verb == "run" else place.quantize(), place, capsys)
    assert err.startswith(f"error[{code}] {place.data}")
    assert found in err.splitlines()[0]


def test_a_spec_whose_probes_stand_in_a_file_beside_it(place: Place, monkeypatch: Any, capsys: Any) -> None:
    """The good case, from another folder, so that the place of the file is known to be the spec's."""
    lines = "".join(json.dumps(probe) + "\n" for probe in probe_data(3))
    (place.root / "mine.jsonl").write_text(lines, encoding="utf-8")
    place.edit_spec(lambda s: s.update(probes="mine.jsonl"))
    monkeypatch.chdir("/")
    assert cli.main(place.run("--dry-run")) == 0
    assert "3 probes (5 replies)" in capsys.readouterr().err


# --- servers, devices and folders ------------------------------------------------------------


def test_a_server_that_is_not_there(place: Place, capsys: Any) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        words = ["ask", url, "--model", "m", "--spec", str(place.spec)]
        err = refused([*words, "--output", str(place.root / "new" / "replies.jsonl")], place, capsys)
    assert err.startswith(f"error[server-unreachable] {url}")


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://h/", "http://"])
def test_an_address_that_is_none(url: str, place: Place, capsys: Any) -> None:
    words = ["ask", url, "--model", "m", "--spec", str(place.spec), "--output", str(place.root / "r.jsonl")]
    assert refused(words, place, capsys).startswith("error[bad-url]")


@pytest.mark.parametrize("verb", ["run", "quantize", "serve"])
def test_a_device_that_is_not_there(verb: str, place: Place, capsys: Any) -> None:
    words = {"run": place.run(), "quantize": place.quantize(), "serve": ["serve", str(place.parent)]}[verb]
    err = refused([*words, "--device", "cuda:99"], place, capsys)
    assert err.startswith("error[no-device] cuda:99: this machine has cpu")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["judge", "gone.jsonl", "--spec", "spec.yaml"], "transcripts-missing"),
        (["report", "gone"], "summary-missing"),
        (["check", "gone"], "folder-missing"),
        (["serve", "gone"], "folder-missing"),
        (["spec", "gone"], "spec-missing"),
    ],
)
def test_files_that_are_not_there(
    words: list[str], code: str, place: Place, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(place.root)
    if words[0] == "check":
        assert cli.main(words) == 3
        assert f"error[{code}] gone: " in capsys.readouterr().err
    else:
        assert refused(words, place, capsys).startswith(f"error[{code}] gone")


def test_a_run_folder_of_another_order_is_named(place: Place, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("manners.ladder.embedded_server", PlayedEngine(lambda model, words: "Hello."))
    assert cli.main(place.run("--rungs", "w4a16")) == 5  # three probes decide nothing
    place.edit_spec(lambda s: s["probes"][1]["turns"][0].update(content="Goodbye!"))
    err = refused(place.run("--rungs", "w4a16"), place, capsys)
    assert err.startswith(
        f"error[other-run] {place.root / 'run'}: this folder holds a run with another probes\n"
    )


def test_an_output_that_is_a_file(place: Place, capsys: Any) -> None:
    (place.root / "run").write_text("mine", encoding="utf-8")
    assert refused(place.run(), place, capsys).startswith(f"error[not-a-folder] {place.root / 'run'}: ")


def test_a_model_that_the_engine_cannot_serve_ends_with_its_log_and_can_be_mended(
    place: Place, capsys: Any, monkeypatch: Any
) -> None:
    """What only a server finds out comes after the folder was made; what is there is a beginning."""

    def fails(*_: Any, **__: Any) -> None:
        raise EngineError(
            "engine-start", where="serve", found="it ended; its log ends:\n    boom", fix="mend it"
        )

    monkeypatch.setattr("manners.ladder.embedded_server", fails)
    assert cli.main(place.run("--rungs", "w4a16")) == 3
    assert "error[engine-start] serve: it ended; its log ends:\n    boom" in capsys.readouterr().err
    assert not (place.root / "run/summary.json").exists()
    monkeypatch.setattr("manners.ladder.embedded_server", PlayedEngine(lambda model, words: "Hello."))
    assert cli.main(place.run("--rungs", "w4a16")) == 5


def test_a_parent_that_changed_under_a_run_is_another_run(
    place: Place, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("manners.ladder.embedded_server", PlayedEngine(lambda model, words: "Hello."))
    assert cli.main(place.run("--rungs", "w4a16")) == 5
    edit_json(place.parent / "generation_config.json", lambda c: c.update(temperature=0.5))
    assert "a run with another parent\n" in refused(place.run("--rungs", "w4a16"), place, capsys)
