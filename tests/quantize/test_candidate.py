"""quantize() end to end on a tiny parent: what it leaves, when it works again, and what it never leaves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manners.checkpoint import compare_logits, lint, load_model
from manners.errors import CheckpointError, MannersError, QuantizeError
from manners.nvfp4 import NVFP4Linear
from manners.quantize import candidate as candidate_module
from manners.quantize import load_plan, quantize
from tests.checkpoint.folders import copy_of
from tests.tiny import make_tiny_parent, sample_ids

IDS = sample_ids(seed=1, rows=4)


@pytest.mark.parametrize("rung", ["max", "mse", "w4a16"])
def test_a_candidate_is_whole_checked_and_found_again(rung: Any, tiny_parent: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made = quantize(
        tiny_parent, tmp_path / "out", rung=rung, calibration=IDS, progress=lambda *a: seen.append(a)
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "candidate.json",
        "checkpoint",
        "plan.json",
    ]
    assert made.checkpoint == tmp_path / "out" / "checkpoint"
    assert lint(made.checkpoint) == []
    assert load_plan(tmp_path / "out" / "plan.json") == made.plan
    assert made.round_trip.max_abs_diff == 0.0
    assert made.round_trip.n_tokens == 4 * 24
    assert made.bytes == (made.checkpoint / "model.safetensors").stat().st_size
    stages = [stage for stage, *_ in seen]
    wanted = (
        ["weights", "calibrate", "write", "verify"] if rung != "w4a16" else ["weights", "write", "verify"]
    )
    assert list(dict.fromkeys(stages)) == wanted
    assert all(done <= total for _, done, total in seen)

    before = (made.checkpoint / "model.safetensors").stat().st_mtime_ns
    again = quantize(tiny_parent, tmp_path / "out", rung=rung, calibration=IDS)
    assert again.resumed
    assert (again.plan, again.bytes, again.round_trip) == (made.plan, made.bytes, made.round_trip)
    assert (made.checkpoint / "model.safetensors").stat().st_mtime_ns == before


def test_mse_rounds_weights_closer_than_max(tiny_parent: Path, tmp_path: Path) -> None:
    parent = load_model(tiny_parent)
    error = {}
    for rung in ("max", "mse"):
        model = load_model(quantize(tiny_parent, tmp_path / rung, rung=rung, calibration=IDS).checkpoint)
        error[rung] = {
            name: float((module.weight - parent.get_submodule(name).weight).detach().square().sum())
            for name, module in model.named_modules()
            if isinstance(module, NVFP4Linear)
        }
    assert all(error["mse"][name] <= error["max"][name] for name in error["max"])
    assert sum(error["mse"].values()) < 0.95 * sum(error["max"].values())


def test_input_scales_come_from_calibration(tiny_parent: Path, tmp_path: Path) -> None:
    folder = quantize(tiny_parent, tmp_path / "out", rung="max", calibration=IDS).checkpoint
    model, inputs = load_model(tiny_parent), []
    name = "model.layers.2.mlp.down_proj"
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0].abs().max()))
    with torch.no_grad():
        for row in IDS:
            model(torch.tensor([row]))
    written = load_file(folder / "model.safetensors")[f"{name}.input_global_scale"]
    assert written.item() == pytest.approx(2688 / float(max(inputs)), rel=1e-4)


@pytest.mark.parametrize("change", ["calibration", "rung", "parent", "record", "shard"])
def test_work_is_done_again_when_its_origin_changed(change: str, tiny_parent: Path, tmp_path: Path) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    arguments: dict[str, Any] = {"rung": "max", "calibration": IDS}
    folder = quantize(parent, tmp_path / "out", **arguments).checkpoint
    if change == "calibration":
        arguments["calibration"] = IDS[:2]
    elif change == "rung":
        arguments["rung"] = "mse"
    elif change == "parent":
        tensors = load_file(parent / "model.safetensors")
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, parent / "model.safetensors", metadata={"format": "pt"})
    elif change == "record":
        (tmp_path / "out" / "candidate.json").write_text("{")
    else:
        shard = folder / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
    again = quantize(parent, tmp_path / "out", **arguments)
    assert not again.resumed
    assert lint(folder) == []
    assert quantize(parent, tmp_path / "out", **arguments).resumed


def test_a_stop_midway_leaves_no_record_and_no_half_checkpoint(
    tiny_parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    quantize(tiny_parent, out, rung="max", calibration=IDS)
    before = (out / "checkpoint" / "model.safetensors").read_bytes()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(candidate_module, "round_trip", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_parent, out, rung="mse", calibration=IDS)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint", "plan.json"]
    assert (out / "checkpoint" / "model.safetensors").read_bytes() == before
    monkeypatch.undo()
    assert not quantize(tiny_parent, out, rung="mse", calibration=IDS).resumed


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_float_parents(dtype: torch.dtype, tmp_path: Path) -> None:
    parent = make_tiny_parent(tmp_path / "parent", dtype=dtype)
    made = quantize(parent, tmp_path / "out", rung="mse", calibration=IDS)
    assert made.round_trip.max_abs_diff == 0.0
    assert lint(made.checkpoint) == []


def test_kept_linears_stay_as_they_were(tiny_parent: Path, tmp_path: Path) -> None:
    down = "model.layers.0.mlp.down_proj"
    made = quantize(tiny_parent, tmp_path / "out", rung="max", calibration=IDS, keep_bf16=[down])
    written, parent = (load_file(folder / "model.safetensors") for folder in (made.checkpoint, tiny_parent))
    assert torch.equal(written[f"{down}.weight"], parent[f"{down}.weight"])
    assert down in json.loads((made.checkpoint / "config.json").read_text())["quantization_config"]["ignore"]


def test_same_input_same_bytes(tiny_parent: Path, tmp_path: Path) -> None:
    folders = [quantize(tiny_parent, tmp_path / n, rung="mse", calibration=IDS).checkpoint for n in "ab"]
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name


def spoilt(code: str, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    if code == "not-finite":
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("inf")
        save_file(tensors, folder / "model.safetensors")
    elif code == "truncated-shard":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    elif code == "config-missing":
        (folder / "config.json").unlink()
    elif code == "no-safetensors":
        (folder / "model.safetensors").unlink()
    elif code == "pickle-checkpoint":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif code == "folder-missing":
        shutil.rmtree(folder)
    elif code == "activations-not-finite":
        tensors["model.layers.0.input_layernorm.weight"].fill_(3e38)
        save_file(tensors, folder / "model.safetensors")


BAD_PARENTS = [
    "not-finite",
    "truncated-shard",
    "config-missing",
    "no-safetensors",
    "pickle-checkpoint",
    "folder-missing",
    "activations-not-finite",
]


@pytest.mark.parametrize("code", BAD_PARENTS)
def test_bad_parents_leave_no_checkpoint(code: str, tiny_parent: Path, tmp_path: Path) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    spoilt(code, parent)
    with pytest.raises((CheckpointError, QuantizeError)) as caught:
        quantize(parent, tmp_path / "out", rung="max", calibration=IDS)
    assert caught.value.code == code
    assert isinstance(caught.value, MannersError)
    assert caught.value.exit_code == 3
    assert not list((tmp_path / "out").glob("*check*")) if (tmp_path / "out").exists() else True


def test_a_candidate_is_no_parent(tiny_candidate: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already-quantized"):
        quantize(tiny_candidate, tmp_path / "out", rung="max", calibration=IDS)


def test_w4a4_without_calibration_is_refused(tiny_parent: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="no-calibration"):
        quantize(tiny_parent, tmp_path / "out", rung="max", calibration=[])


def test_rounding_moves_the_model_but_not_far(tiny_parent: Path, tiny_w4a16: Path) -> None:
    result = compare_logits(load_model(tiny_parent), load_model(tiny_w4a16), sample_ids())
    assert 1e-3 < result.max_kl < 10
