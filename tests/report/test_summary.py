"""summary.json: what is written is read back, and what contradicts itself is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manners.errors import RunError
from manners.report import Summary, load_summary, save_summary

Change = Callable[[dict[str, Any]], None]


def gate(**changes: Any) -> dict[str, Any]:
    row = {
        "name": "right_tool",
        "n": 100,
        "passed": 97,
        "interval": [0.914, 0.994],
        "parent_passed": 98,
        "verdict": "pass",
    }
    return {**row, **changes}


def contract() -> dict[str, Any]:
    """The contract of the design, and nothing beyond it."""
    parent = {"name": "parent", "strategy": "BF16", "bits_per_weight": 16.0, "bytes": 100, "minutes": 0.0}
    mse = {"name": "mse", "strategy": "W4A4", "bits_per_weight": 4.7, "bytes": 30, "minutes": 0.4}
    own = gate(passed=98, interval=[0.93, 0.998])
    return {
        "schema": 1,
        "spec": "annie",
        "parent": "models/parent",
        "comparability": "comparable",
        "shipped": "mse",
        "candidates": [{**parent, "gates": [own]}, {**mse, "gates": [gate()]}],
    }


def write(folder: Path, data: Any) -> None:
    (folder / "summary.json").write_text(json.dumps(data), encoding="utf-8")


def test_the_bare_contract_is_enough(tmp_path: Path) -> None:
    write(tmp_path, contract())
    summary = load_summary(tmp_path)
    assert [candidate.name for candidate in summary.rounded] == ["mse"]
    assert summary.rounded[0].gates[0].points == pytest.approx(-1.0)
    assert summary.probes == 100


def test_saving_keeps_what_it_does_not_know(tmp_path: Path) -> None:
    data = contract()
    data["new_in_a_later_version"] = {"a": [1]}
    data["candidates"][1]["gates"][0]["also_new"] = "b"
    data["shipped"] = None
    save_summary(Summary.model_validate(data), tmp_path)
    saved = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert saved["shipped"] is None
    assert saved["new_in_a_later_version"] == {"a": [1]}
    assert saved["candidates"][1]["gates"][0]["also_new"] == "b"
    assert load_summary(tmp_path) == Summary.model_validate(data)


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, contract())

    def no_rename(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", no_rename)
    with pytest.raises(OSError, match="disk full"):
        save_summary(Summary.model_validate({**contract(), "spec": "other"}), tmp_path)
    assert load_summary(tmp_path).spec == "annie"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_paired_difference_counts_where_there_are_errors() -> None:
    row = gate(passed=95, interval=[0.88, 0.985], errors=2, harms=1, gains=0, pairs=98, delta=-1 / 98)
    summary = Summary.model_validate(
        {**contract(), "candidates": [{**contract()["candidates"][1], "gates": [row]}]}
    )
    assert summary.rounded[0].gates[0].points == pytest.approx(-100 / 98)


def set_gate(**changes: Any) -> Change:
    return lambda data: data["candidates"][1]["gates"][0].update(changes)


def set_top(**changes: Any) -> Change:
    return lambda data: data.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_top(schema=2), r"schema: Input should be 1"),
        (set_top(comparability="maybe"), "comparability: Input should be 'comparable'"),
        (set_top(shipped="max"), r"shipped is 'max', candidates are \['parent', 'mse'\]"),
        (set_top(shipped="parent"), "shipped is 'parent'"),
        (set_top(comparability="void"), "the comparison is void, so 'mse' cannot ship"),
        (lambda data: data.pop("spec"), "spec: Field required"),
        (lambda data: data["candidates"][1].update(name="parent"), "two candidates of one name"),
        (lambda data: data["candidates"][1].update(gates=[]), "'mse' cannot ship, its gates say nothing"),
        (set_gate(verdict="fail"), "'mse' cannot ship, its gates say fail"),
        (set_gate(verdict="inconclusive"), "'mse' cannot ship, its gates say inconclusive"),
        (set_gate(passed=101), "passed is 101, of only n = 100"),
        (set_gate(errors=101), "errors is 101, of only n = 100"),
        (set_gate(interval=[0.994, 0.914]), r"interval is \[0.994, 0.914\]"),
        (set_gate(interval=[0.1, 0.2]), r"interval \[0.1, 0.2\] does not hold 97/100"),
        (set_gate(harms=3, gains=0), "passed differs from the parent's by -1, gains minus harms by -3"),
        (set_gate(threshold=97), "threshold: Input should be less than or equal to 1"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    data = contract()
    change(data)
    write(tmp_path, data)
    with pytest.raises(RunError, match=message) as caught:
        load_summary(tmp_path)
    assert caught.value.code == "summary-field"
    assert str(tmp_path / "summary.json") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "summary-missing"),
        ("{", "summary-syntax"),
        ('{"schema": NaN}', "summary-syntax"),
        ("[]", "summary-field"),
    ],
)
def test_no_summary_at_all(tmp_path: Path, text: str | None, code: str) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunError) as caught:
        load_summary(tmp_path)
    assert caught.value.code == code
