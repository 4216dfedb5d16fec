"""Is this folder a canonical checkpoint that every engine reads alike? One code per rule.

:func:`lint` lists what is wrong, the gravest first; :func:`check` raises the first of it. Each rule
stands for a failure that was seen in an engine: a crash at load, or, worse, a silent wrong number.

What it cannot see: whether the weights are right (:mod:`.roundtrip` compares logits), nor other
families' expected layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..nvfp4 import BLOCK
from .canonical import PORTABLE_WIDTH
from .lint_config import Finding, config_findings, text_findings
from .names import canonical_name, expected_linears, fused_groups, linear_names
from .reader import Checkpoint, check_finite, open_checkpoint

_PACKED = ".weight_packed"
_GLOBALS = ("weight_global_scale", "input_global_scale")


@dataclass(frozen=True)
class _Layout:
    """Which Linear is stored how."""

    checkpoint: Checkpoint
    packed: tuple[str, ...]
    plain: tuple[str, ...]
    ignore: tuple[str, ...]
    quantize_inputs: bool

    def file(self, name: str) -> str:
        return f"{self.checkpoint.infos[name].file.name}: {name}"

    def wanted(self) -> tuple[str, ...]:
        """The tensors that a packed Linear has beside its codes."""
        return ("weight_scale", *_GLOBALS) if self.quantize_inputs else ("weight_scale", _GLOBALS[0])


def lint(folder: str | Path) -> list[Finding]:
    """All rules that the folder breaks, the first to be mended first. Reads every tensor once."""
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        return [Finding.of(error)]
    findings = list(config_findings(checkpoint.path, checkpoint.config))
    layout = _layout(checkpoint)
    findings += _name_findings(layout)
    findings += _ignore_findings(layout)
    broken = list(_shape_findings(layout))
    findings += broken
    if not broken:  # numbers are looked at only where shapes and dtypes are as they must be
        findings += _fused_findings(layout)
        findings += _number_findings(layout)
    findings += text_findings(checkpoint.path)
    return findings


def check(folder: str | Path) -> None:
    """Raise the first finding as a CheckpointError of the same code."""
    findings = lint(folder)
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise findings[0].error(more)


def _layout(checkpoint: Checkpoint) -> _Layout:
    quantization = checkpoint.config.get("quantization_config")
    quantization = quantization if isinstance(quantization, dict) else {}
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    packed = tuple(n.removesuffix(_PACKED) for n in checkpoint.names if n.endswith(_PACKED))
    plain = tuple(linear_names(checkpoint.shapes()))
    return _Layout(
        checkpoint,
        packed,
        plain,
        tuple(str(name) for name in quantization.get("ignore") or ()),
        isinstance(first, dict) and bool(first.get("input_activations")),
    )


def _name_findings(layout: _Layout) -> Iterator[Finding]:
    """tensor-name, stray-tensor, missing-tensor, missing-scale."""
    names = set(layout.checkpoint.names)
    for name in layout.checkpoint.names:
        if canonical_name(name) != name:
            yield Finding(
                "tensor-name",
                layout.file(name),
                "a vision-language name in a text-only checkpoint",
                "write the checkpoint with manners quantize, which renames to model.layers.*",
                "Engines that load the text class would miss this tensor.",
            )
        linear, _, last = name.rpartition(".")
        belongs = last in layout.wanted() and linear in layout.packed
        if last in ("weight_scale", *_GLOBALS) and not belongs:
            reason = "its Linear is not packed" if linear not in layout.packed else "the config says W4A16"
            yield Finding(
                "stray-tensor", layout.file(name), f"a scale, but {reason}", "write the checkpoint again"
            )
        if last == "weight" and f"{linear}{_PACKED}" in names:
            found = "stored both plain and packed"
            yield Finding("stray-tensor", layout.file(name), found, "write the checkpoint again")
    stored = {*layout.packed, *layout.plain}
    where = str(layout.checkpoint.path)
    for linear in expected_linears(layout.checkpoint.config):
        if linear not in stored:
            found = f"no {linear}.weight_packed and no {linear}.weight"
            yield Finding("missing-tensor", where, found, "write the checkpoint again from the whole parent")
    for linear in layout.packed:
        for last in layout.wanted():
            if f"{linear}.{last}" not in names:
                yield Finding(
                    "missing-scale",
                    layout.file(f"{linear}{_PACKED}"),
                    f"no {linear}.{last} beside it",
                    "write the checkpoint again",
                    "Engines would leave the scale uninitialised.",
                )


def _ignore_findings(layout: _Layout) -> Iterator[Finding]:
    """ignore-pattern, ignore-unknown, ignore-quantized, ignore-missing, ignore-half-group."""
    where = f"{layout.checkpoint.path / 'config.json'}: ignore"
    for name in layout.ignore:
        if name.startswith("re:") or "*" in name:
            yield Finding(
                "ignore-pattern",
                where,
                f"the pattern {name!r}",
                "write out the full names",
                "Engines match patterns against different names (some against the fused one).",
            )
        elif name in layout.packed:
            found = f"{name} is listed, and yet stored in NVFP4"
            yield Finding("ignore-quantized", where, found, "take it off the list, or store it in BF16")
        elif name not in layout.plain and name != "lm_head":
            yield Finding("ignore-unknown", where, f"{name} names no Linear", "take it off the list")
    for name in layout.plain:
        if name not in layout.ignore:
            yield Finding(
                "ignore-missing",
                where,
                f"{name} is stored plain, and not listed",
                f'add "{name}"',
                "Engines would wait for its scales and compute with uninitialised ones.",
            )
    for group in fused_groups([*layout.packed, *layout.plain]):
        listed = [name for name in group if name in layout.ignore]
        if listed and len(listed) < len(group):
            other = next(name for name in group if name not in layout.ignore)
            yield Finding(
                "ignore-half-group",
                where,
                f"{listed[0]} is listed, {other} is not",
                "list both, or neither",
                "Engines merge the two into one matrix, which has one format.",
            )


def _shape_findings(layout: _Layout) -> Iterator[Finding]:
    """packed-shape, width, scale-shape, global-shape: what headers alone tell."""
    infos = layout.checkpoint.infos
    for linear in layout.packed:
        packed = infos[f"{linear}{_PACKED}"]
        where = layout.file(f"{linear}{_PACKED}")
        if packed.dtype != "U8" or len(packed.shape) != 2:
            found = f"{packed.dtype} {list(packed.shape)}, need U8 [O, K/2]"
            yield Finding("packed-shape", where, found, "write the checkpoint again")
            continue
        rows, columns = packed.shape[0], 2 * packed.shape[1]
        if columns % PORTABLE_WIDTH:
            yield Finding(
                "width",
                where,
                f"{columns} input columns, no multiple of {PORTABLE_WIDTH}",
                f"keep {linear} in BF16",
                "llama.cpp packs 64 weights together and would refuse it.",
            )
        scale = infos.get(f"{linear}.weight_scale")
        if scale and (scale.dtype, scale.shape) != ("F8_E4M3", (rows, columns // BLOCK)):
            found = f"{scale.dtype} {list(scale.shape)}, need F8_E4M3 [{rows}, {columns // BLOCK}]"
            fix = "store the block scales in plain row order, not swizzled or padded"
            yield Finding("scale-shape", layout.file(f"{linear}.weight_scale"), found, fix)
        for last in _GLOBALS:
            info = infos.get(f"{linear}.{last}")
            if info and (info.dtype, info.shape) != ("F32", (1,)):
                found = f"{info.dtype} {list(info.shape)}, need F32 [1]"
                yield Finding(
                    "global-shape", layout.file(f"{linear}.{last}"), found, "write the checkpoint again"
                )


def _fused_findings(layout: _Layout) -> Iterator[Finding]:
    """fused-scale: exact equality, because engines take one member's global for all."""
    for group in fused_groups(layout.packed):
        for last in _GLOBALS:
            (first, reference), *others = _globals(layout, group, last).items() or [("", 0.0)]
            for name, value in others:
                # NaN and numbers below 0 have a rule of their own, global-not-finite.
                if value == reference or not (value > 0 and reference > 0):
                    continue
                factor = max(value, reference) / min(value, reference)
                yield Finding(
                    "fused-scale",
                    layout.file(f"{name}.{last}"),
                    f"{value:.9g}, but {reference:.9g} in {first}",
                    "round both under one global scale (manners quantize does), or keep both in BF16",
                    f"Engines serve the two as one matrix under one scale: one would be {factor:.3g}x wrong.",
                )


def _globals(layout: _Layout, group: tuple[str, ...], last: str) -> dict[str, float]:
    names = [name for name in group if f"{name}.{last}" in layout.checkpoint.infos]
    return {name: float(layout.checkpoint.get(f"{name}.{last}").item()) for name in names}


def _number_findings(layout: _Layout) -> Iterator[Finding]:
    """global-not-finite, scale-negative, not-finite: every tensor is read once, one at a time."""
    for shard in layout.checkpoint.shards():
        for name, tensor in shard.tensors():
            linear, _, last = name.rpartition(".")
            if last in layout.wanted() and linear not in layout.packed:
                continue  # a stray scale: its shape may be anything, and it has a finding already
            yield from _bad_numbers(layout.file(name), name, tensor)


def _bad_numbers(where: str, name: str, tensor: Tensor) -> Iterator[Finding]:
    last = name.rpartition(".")[2]
    if last in _GLOBALS:
        value = float(tensor.item())
        if not (torch.isfinite(tensor).all() and value > 0):
            found = f"{value:g}, need a finite number above 0"
            yield Finding("global-not-finite", where, found, "calibrate and quantize again")
    elif last == "weight_scale":
        byte = tensor.view(torch.uint8)
        # The sign is E4M3's highest bit; 0x7f is its NaN.
        bad = (byte >= 0x80) | (byte == 0x7F)
        if bad.any():
            place = bad.nonzero()[0].tolist()
            value = tensor.float()[tuple(place)].item()
            found = f"{value:g} at {place}, {int(bad.sum())} block scales are below 0 or NaN"
            fix = "quantize again; engines read these bytes as unsigned numbers"
            yield Finding("scale-negative", where, found, fix)
    else:
        try:
            check_finite(name, tensor, where)
        except CheckpointError as error:
            yield Finding("not-finite", where, error.found, error.fix, error.consequence)
