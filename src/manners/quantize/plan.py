"""The plan of a candidate: for every Linear its format, scale rule and activation rule, and why.

A plan is made from names and shapes alone; it needs no weights and can be read before any work is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..checkpoint import (
    PORTABLE_WIDTH,
    Checkpoint,
    default_ignore,
    fused_groups,
    parent_linears,
    refuse_quantized,
    width_error,
)
from ..errors import QuantizeError

Rung = Literal["max", "mse", "w4a16"]
Format = Literal["nvfp4", "bf16"]
ScaleRule = Literal["max", "mse"]
Activations = Literal["w4a4", "w4a16"]

STRATEGIES: dict[Rung, str] = {
    "max": "NVFP4 W4A4, block scales from each block's largest weight",
    "mse": "NVFP4 W4A4, block scales of least squared error, no data needed",
    "w4a16": "NVFP4 weights, activations left alone: a diagnosis",
}
_BF16_BITS = 16.0
_NVFP4_BITS = 4 + 8 / 16  # a code per weight and an E4M3 scale per 16


class LinearPlan(BaseModel):
    """What happens to one Linear. ``scale_rule`` and ``activations`` are None where it stays BF16."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Format
    scale_rule: ScaleRule | None = None
    activations: Activations | None = None
    why: str


class Plan(BaseModel):
    """``plan.json``. ``linears`` is keyed by canonical name and in file order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    strategy: Rung
    seed: int = 0
    linears: dict[str, LinearPlan]

    def nvfp4(self) -> list[str]:
        """The Linears that are rounded, in file order."""
        return [name for name, linear in self.linears.items() if linear.format == "nvfp4"]

    @property
    def quantize_inputs(self) -> bool:
        """Whether activations are rounded (W4A4). One group per checkpoint: all Linears or none."""
        return any(linear.activations == "w4a4" for linear in self.linears.values())


def make_plan(checkpoint: Checkpoint, rung: Rung, *, keep_bf16: Collection[str] = (), seed: int = 0) -> Plan:
    """Decide what happens to every Linear of a parent.

    Args:
        checkpoint: the parent.
        rung: ``max``, ``mse`` or ``w4a16``, see :data:`STRATEGIES`.
        keep_bf16: further Linears to keep, by canonical name; their fused partners are kept too.
        seed: recorded; these rungs draw nothing at random.

    Raises:
        QuantizeError: ``unknown-rung``; ``unknown-linear`` for a name in ``keep_bf16`` that the parent
            lacks; ``nothing-to-quantize`` if every Linear stays BF16.
        CheckpointError: ``already-quantized``; ``width-16`` or ``width-64`` for a Linear whose width
            fits no block of 16, or not every engine.
    """
    where = str(checkpoint.path)
    if rung not in get_args(Rung):
        raise QuantizeError(
            "unknown-rung", where=where, found=f"rung {rung!r}", fix=f"use one of {', '.join(get_args(Rung))}"
        )
    refuse_quantized(checkpoint)
    shapes = parent_linears(checkpoint)
    if unknown := sorted(set(keep_bf16) - set(shapes)):
        raise QuantizeError(
            "unknown-linear",
            where=where,
            found=f"keep_bf16 names {unknown[0]}, which is no Linear of this parent",
            fix=f"use full names, such as {next(iter(shapes), 'model.layers.0.mlp.up_proj')}",
        )
    kept = set(default_ignore(shapes))
    asked = {name for group in fused_groups(shapes) if set(group) & set(keep_bf16) for name in group}
    linears = {}
    for name, (_, columns) in shapes.items():
        if name in kept:
            linears[name] = LinearPlan(format="bf16", why="kept in every plan: small or close to the logits")
        elif name in asked:
            linears[name] = LinearPlan(format="bf16", why="asked for, or fused with one that was")
        elif columns % PORTABLE_WIDTH:
            raise width_error(where, name, columns)
        else:
            linears[name] = _rounded(rung)
    plan = Plan(strategy=rung, seed=seed, linears=linears)
    if not plan.nvfp4():
        raise QuantizeError(
            "nothing-to-quantize",
            where=where,
            found=f"{len(linears)} Linears, all of which stay BF16",
            fix="give a language model, and keep fewer Linears",
        )
    return plan


def bits_per_weight(plan: Plan, shapes: Mapping[str, tuple[int, int]]) -> float:
    """Mean bits per weight over all Linears of the plan, block scales included.

    Embeddings, norms and tensor-wide scales do not count.

    Args:
        shapes: (O, K) per canonical name, as :func:`manners.checkpoint.parent_linears` gives them.
    """
    bits = weights = 0.0
    for name, linear in plan.linears.items():
        rows, columns = shapes[name]
        weights += rows * columns
        bits += rows * columns * (_NVFP4_BITS if linear.format == "nvfp4" else _BF16_BITS)
    return bits / weights


def load_plan(path: Path) -> Plan:
    """Read ``plan.json``. Raises QuantizeError ``plan-syntax``."""
    try:
        return Plan.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise QuantizeError(
            "plan-syntax", where=str(path), found=str(error), fix="make the plan again"
        ) from error


def _rounded(rung: Rung) -> LinearPlan:
    return LinearPlan(
        format="nvfp4",
        scale_rule="mse" if rung == "mse" else "max",
        activations="w4a16" if rung == "w4a16" else "w4a4",
        why=STRATEGIES[rung],
    )
