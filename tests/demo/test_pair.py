"""The bundled pair: its form here, its behaviour in the slow test that runs the whole demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manners.checkpoint import open_checkpoint
from manners.demo.pair import BASE, PAIR, PARENT, demo_order
from manners.report import load_summary
from manners.spec import KNOWLEDGE_GATES

MANNERS = {"no_thinking_leak", "right_tool", "exact_arguments", "no_markdown", "concise"}


@pytest.mark.parametrize("folder", [BASE, PARENT], ids=["base", "parent"])
def test_each_is_a_small_hybrid_in_bfloat16(folder: Path):
    checkpoint = open_checkpoint(folder)
    parameters = sum(_count(checkpoint, name) for name in checkpoint.names)
    assert parameters <= 10_000_000
    assert all(path.stat().st_size <= 20_000_000 for path in checkpoint.files)
    assert checkpoint.config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert set(checkpoint.config["layer_types"]) == {"linear_attention", "full_attention"}
    assert (folder / "chat_template.jinja").is_file()


def _count(checkpoint, name: str) -> int:
    count = 1
    for size in checkpoint.shape(name):
        count *= size
    return count


def test_base_and_parent_differ_in_weights_alone():
    base, parent = open_checkpoint(BASE), open_checkpoint(PARENT)
    assert base.config == parent.config
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (BASE / name).read_bytes() == (PARENT / name).read_bytes()
    assert (BASE / "chat_template.jinja").read_text() == (PAIR.parent / "chat_template.jinja").read_text()
    changed = [name for name in base.names if not base.get(name).equal(parent.get(name))]
    assert changed


def test_the_demo_asks_what_the_world_holds():
    order = demo_order()
    assert len(order.probes) >= 400
    assert {gate.name for gate in order.spec.gates} == MANNERS | KNOWLEDGE_GATES


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_shows_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Parent at 98 % everywhere; max loses manners, not knowledge; what ships is within two points."""
    from manners.cli import main

    assert main(["demo", "--output", str(tmp_path / "run")]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    summary = load_summary(tmp_path / "run")
    assert summary.shipped == said["shipped"] is not None
    assert summary.comparability == "comparable"
    parent = summary.parent_row
    assert parent is not None
    assert all(gate.share >= 0.98 and not gate.errors for gate in parent.gates)
    rounded = summary.candidate("max")
    assert rounded is not None
    worse = {gate.name for gate in rounded.gates if (gate.p_worse or 0.0) < 0.05}
    assert worse & MANNERS
    assert not worse & KNOWLEDGE_GATES
    shipped = summary.candidate(summary.shipped or "")
    assert shipped is not None
    assert max(gate.n for gate in shipped.gates) >= 400
    for gate in shipped.gates:
        assert gate.points >= -2.0, gate
        assert gate.interval[0] <= gate.share <= gate.interval[1]
