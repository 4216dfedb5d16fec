"""A parent becomes a candidate: plan, statistics, rounding, writing, reading back.

``output_dir`` gets ``plan.json``, ``checkpoint/`` and, last of all, ``candidate.json``, which says
what the checkpoint was made from. Only if that file is there and agrees is the work not done again.
The checkpoint takes its place after the linter passed it and the round trip came out equal.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import (
    Checkpoint,
    RoundTrip,
    canonical_name,
    check,
    fingerprint_weights,
    load_model,
    open_checkpoint,
    parent_linears,
    read_json,
    replace_linears,
    round_trip,
    write_canonical,
)
from ..errors import CheckpointError
from ..files import write_json, write_text
from ..nvfp4 import NVFP4Weight, fake_quant_weight, global_scale, quantize_weight
from .plan import Plan, Rung, ScaleRule, bits_per_weight, make_plan
from .statistics import activation_amax, weight_amax

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, in all); the stages are weights, calibrate, write and verify."""

_RECORD = "candidate.json"
_VERIFY_ROWS, _VERIFY_TOKENS = 4, 128


@dataclass(frozen=True)
class Candidate:
    """One quantized version of the parent, complete and checked."""

    checkpoint: Path
    plan: Plan
    bits_per_weight: float
    bytes: int
    """Of all safetensors files."""
    minutes: float
    """Wall time of the making; the first making's, if resumed."""
    round_trip: RoundTrip
    resumed: bool = False


def quantize(
    parent_dir: str | Path,
    output_dir: str | Path,
    *,
    rung: Rung,
    calibration: Sequence[Sequence[int]],
    device: str | torch.device = "cpu",
    keep_bf16: Collection[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Candidate:
    """Make a candidate, or return the one that is already there.

    Args:
        parent_dir: a BF16, FP16 or FP32 parent.
        output_dir: made if needed; see the module.
        rung: ``max``, ``mse`` or ``w4a16``.
        calibration: token ids, one row per conversation; only W4A4 rungs need any.
        device: where statistics and rounding run. A GPU computes in bfloat16, a CPU in float32.
        keep_bf16: see :func:`make_plan`.
        progress: see :data:`Progress`.

    Raises:
        CheckpointError: those of open_checkpoint, make_plan, write_canonical, check and round_trip.
        QuantizeError: those of make_plan and activation_amax.
    """
    started = time.monotonic()
    tell = progress or (lambda stage, done, total: None)
    output = Path(output_dir)
    parent = open_checkpoint(parent_dir)
    plan = make_plan(parent, rung, keep_bf16=keep_bf16, seed=seed)
    origin = _origin(parent, plan, calibration if plan.quantize_inputs else ())
    if done := _resume(output, plan, origin):
        return done
    globals_ = {
        name: global_scale(amax) for name, amax in weight_amax(parent, plan, partial(tell, "weights")).items()
    }
    model = load_model(parent_dir, device, _compute_dtype(device))
    input_globals = None
    if plan.quantize_inputs:
        seen = activation_amax(model, calibration, plan, partial(tell, "calibrate"))
        input_globals = {name: global_scale(torch.tensor(amax)) for name, amax in seen.items()}
    producers = {
        name: partial(_quantize, global_scale=globals_[name], rule=_rule(plan, name), device=device)
        for name in plan.nvfp4()
    }
    ids = _verification_ids(model, calibration)
    results: list[RoundTrip] = []

    def verify(folder: Path) -> None:
        tell("verify", 0, 2)
        check(folder)
        tell("verify", 1, 2)
        _fake_quantize(model, parent, plan, globals_, input_globals)
        results.append(round_trip(folder, model, ids))
        tell("verify", 2, 2)

    # Only now, so that weights or conversations that are refused leave nothing behind.
    output.mkdir(parents=True, exist_ok=True)
    (output / _RECORD).unlink(missing_ok=True)
    write_text(output / "plan.json", plan.model_dump_json(indent=2, by_alias=True) + "\n")
    checkpoint = output / "checkpoint"
    write_canonical(parent, checkpoint, producers, input_globals, partial(tell, "write"), verify)
    candidate = Candidate(
        checkpoint,
        plan,
        bits_per_weight(plan, parent_linears(parent)),
        open_checkpoint(checkpoint).bytes,
        (time.monotonic() - started) / 60,
        results[0],
    )
    _record(output, candidate, origin)
    return candidate


def _fake_quantize(
    model: Any,
    parent: Checkpoint,
    plan: Plan,
    globals_: Mapping[str, Tensor],
    input_globals: Mapping[str, Tensor] | None,
) -> None:
    """Turn the parent in memory into the candidate, without a look at the files that were written."""
    wanted = set(plan.nvfp4())
    old = next(model.parameters())
    for stored in parent.names:
        name = (canonical_name(stored) or "").removesuffix(".weight")
        if name not in wanted or not stored.endswith(".weight"):
            continue
        weight = _exact(parent.get(stored)).to(old.device)
        rounded = fake_quant_weight(weight, globals_[name].to(old.device), _rule(plan, name))
        # Through bfloat16, as load_model and compressed-tensors decode.
        replace_linears(model, {name: rounded.to(torch.bfloat16).to(old.dtype)}, input_globals)


def _quantize(
    weight: Tensor, *, global_scale: Tensor, rule: ScaleRule, device: str | torch.device
) -> NVFP4Weight:
    return quantize_weight(_exact(weight).to(device), global_scale.to(device), rule)


def _exact(weight: Tensor) -> Tensor:
    """float16 as float32: rounding back to float16 would not give the values that the file decodes to."""
    return weight.float() if weight.dtype == torch.float16 else weight


def _rule(plan: Plan, name: str) -> ScaleRule:
    return plan.linears[name].scale_rule or "max"


def _compute_dtype(device: str | torch.device) -> torch.dtype:
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def _verification_ids(model: Any, calibration: Sequence[Sequence[int]]) -> list[list[int]]:
    """A few short rows for the round trip; without calibration the first ids of the vocabulary serve."""
    rows = [list(row[:_VERIFY_TOKENS]) for row in calibration if len(row)][:_VERIFY_ROWS]
    return rows or [list(range(min(32, int(model.config.vocab_size))))]


def _origin(parent: Checkpoint, plan: Plan, calibration: Sequence[Sequence[int]]) -> dict[str, str]:
    """What a candidate depends on, as sha256 (hex)."""
    return {
        "parent_sha256": fingerprint_weights(parent),
        "plan_sha256": _sha256(plan.model_dump_json().encode()),
        "calibration_sha256": _sha256(json.dumps([list(row) for row in calibration]).encode()),
    }


def _record(output: Path, candidate: Candidate, origin: Mapping[str, str]) -> None:
    write_json(
        output / _RECORD,
        {
            "schema": 1,
            **origin,
            "bits_per_weight": candidate.bits_per_weight,
            "bytes": candidate.bytes,
            "minutes": candidate.minutes,
            "round_trip": asdict(candidate.round_trip),
        },
    )


def _resume(output: Path, plan: Plan, origin: Mapping[str, str]) -> Candidate | None:
    """The candidate that is there, if it was made from the same things and its files are whole."""
    if not (output / _RECORD).is_file():
        return None
    try:
        record = read_json(output / _RECORD)
        size = open_checkpoint(output / "checkpoint").bytes
        if any(record[name] != value for name, value in origin.items()) or record["bytes"] != size:
            return None
        return Candidate(
            output / "checkpoint",
            plan,
            float(record["bits_per_weight"]),
            size,
            float(record["minutes"]),
            RoundTrip(**record["round_trip"]),
            resumed=True,
        )
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None  # a damaged folder is made again


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
