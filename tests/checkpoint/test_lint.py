"""One case per rule: a good folder with one thing spoilt must give exactly that rule's code and place."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manners.checkpoint import check, lint
from manners.errors import CheckpointError
from tests.checkpoint.folders import copy_of, edit_json, edit_tensors

Spoil = Callable[[Path], object]
QKV, Z = "model.layers.0.linear_attn.in_proj_qkv", "model.layers.0.linear_attn.in_proj_z"
DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"
GROUP = "config_groups"


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Spoil:
    return lambda folder: edit_tensors(folder, change)


def config(change: Callable[[dict[str, Any]], object]) -> Spoil:
    return lambda folder: edit_json(folder / "config.json", change)


def quantization(change: Callable[[dict[str, Any]], object]) -> Spoil:
    return config(lambda c: change(c["quantization_config"]))


def ignore(change: Callable[[list[str]], object]) -> Spoil:
    return quantization(lambda q: change(q["ignore"]))


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Spoil:
    return lambda folder: edit_json(folder / "tokenizer_config.json", change)


def scaled(name: str, factor: float) -> Spoil:
    return tensors(lambda t: t.update({name: t[name] * factor}))


def filled(name: str, value: float) -> Spoil:
    return tensors(lambda t: t[name].fill_(value))


def byte(name: str, value: int) -> Spoil:
    def change(t: dict[str, Tensor]) -> None:
        t[name].view(torch.uint8)[1, 2] = value

    return tensors(change)


def narrow(t: dict[str, Tensor]) -> None:
    """48 of down_proj's 128 columns: three whole blocks, no multiple of 64."""
    t[f"{DOWN}.weight_packed"] = t[f"{DOWN}.weight_packed"][:, :24].contiguous()
    t[f"{DOWN}.weight_scale"] = t[f"{DOWN}.weight_scale"][:, :3].contiguous()


def renamed(t: dict[str, Tensor]) -> None:
    t["model.language_model.norm.weight"] = t.pop("model.norm.weight")


def nan_in(name: str) -> Spoil:
    return tensors(lambda t: t[name].view(-1)[:1].fill_(float("nan")))


def group(change: Callable[[dict[str, Any]], object]) -> Spoil:
    return quantization(lambda q: change(q[GROUP]["group_0"]))


W4A16 = group(lambda g: g.pop("input_activations"))

# code, what the finding must say (place and value), how to spoil the folder
CASES: list[tuple[str, str, Spoil]] = [
    ("fused-scale", rf"{Z}.weight_global_scale.* in {QKV}", scaled(f"{Z}.weight_global_scale", 1 + 2**-23)),
    ("fused-scale", rf"{Z}.input_global_scale.* in {QKV}", scaled(f"{Z}.input_global_scale", 2.0)),
    (
        "global-not-finite",
        f"{DOWN}.weight_global_scale: nan",
        filled(f"{DOWN}.weight_global_scale", float("nan")),
    ),
    (
        "global-not-finite",
        f"{DOWN}.weight_global_scale: inf",
        filled(f"{DOWN}.weight_global_scale", float("inf")),
    ),
    (
        "global-not-finite",
        f"{QKV}.weight_global_scale: nan",
        filled(f"{QKV}.weight_global_scale", float("nan")),
    ),
    ("global-not-finite", f"{DOWN}.input_global_scale: 0", filled(f"{DOWN}.input_global_scale", 0.0)),
    ("global-not-finite", f"{DOWN}.input_global_scale: -1", filled(f"{DOWN}.input_global_scale", -1.0)),
    (
        "global-shape",
        rf"{DOWN}.input_global_scale: F32 \[\], need",
        tensors(lambda t: t.update({f"{DOWN}.input_global_scale": torch.tensor(1.0)})),
    ),
    (
        "global-shape",
        rf"{DOWN}.weight_global_scale: BF16 \[1\], need",
        tensors(lambda t: t.update({f"{DOWN}.weight_global_scale": torch.ones(1).bfloat16()})),
    ),
    ("scale-negative", rf"{DOWN}.weight_scale: -1 at \[1, 2\], 1 block", byte(f"{DOWN}.weight_scale", 0xB8)),
    ("scale-negative", rf"{DOWN}.weight_scale: nan at \[1, 2\]", byte(f"{DOWN}.weight_scale", 0x7F)),
    ("scale-negative", rf"{DOWN}.weight_scale: -0 at \[1, 2\]", byte(f"{DOWN}.weight_scale", 0x80)),
    (
        "scale-shape",
        rf"{DOWN}.weight_scale: F8_E4M3 \[128, 8\], need F8_E4M3 \[64, 8\]",
        tensors(lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"].repeat(2, 1)})),
    ),
    (
        "scale-shape",
        rf"{DOWN}.weight_scale: F32 \[64, 8\]",
        tensors(lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"].float()})),
    ),
    (
        "packed-shape",
        rf"{DOWN}.weight_packed: I8 \[64, 64\], need U8",
        tensors(lambda t: t.update({f"{DOWN}.weight_packed": t[f"{DOWN}.weight_packed"].view(torch.int8)})),
    ),
    ("width", f"{DOWN}.weight_packed: 48 input columns, no multiple of 64", tensors(narrow)),
    (
        "missing-scale",
        f"{DOWN}.weight_packed: no {DOWN}.weight_global_scale",
        tensors(lambda t: t.pop(f"{DOWN}.weight_global_scale")),
    ),
    (
        "missing-scale",
        f"{DOWN}.weight_packed: no {DOWN}.input_global_scale",
        tensors(lambda t: t.pop(f"{DOWN}.input_global_scale")),
    ),
    (
        "missing-tensor",
        "no lm_head.weight_packed and no lm_head.weight",
        tensors(lambda t: t.pop("lm_head.weight")),
    ),
    (
        "stray-tensor",
        "lm_head.weight_scale: a scale, but its Linear is not packed",
        tensors(lambda t: t.update({"lm_head.weight_scale": torch.ones(1)})),
    ),
    ("stray-tensor", "input_global_scale: a scale, but the config says W4A16", W4A16),
    (
        "not-finite",
        "model.embed_tokens.weight: nan at",
        nan_in("model.embed_tokens.weight"),
    ),
    ("tensor-name", "model.language_model.norm.weight", tensors(renamed)),
    ("ignore-pattern", "the pattern 're:.*mtp.*'", ignore(lambda names: names.append("re:.*mtp.*"))),
    ("ignore-pattern", r"the pattern '\*vision\*'", ignore(lambda names: names.append("*vision*"))),
    (
        "ignore-unknown",
        "model.layers.7.mlp names no",
        ignore(lambda names: names.append("model.layers.7.mlp")),
    ),
    ("ignore-quantized", f"{DOWN} is listed, and yet", ignore(lambda names: names.append(DOWN))),
    (
        "ignore-missing",
        "lm_head is stored plain, and not listed",
        ignore(lambda names: names.remove("lm_head")),
    ),
    ("stray-quant-config", "hf_quant_config.json", lambda f: (f / "hf_quant_config.json").write_text("{}")),
    (
        "config-class",
        "ConditionalGeneration",
        config(lambda c: c.update(architectures=["XForConditionalGeneration"])),
    ),
    ("config-class", "vision_config", config(lambda c: c.update(vision_config={}))),
    ("config-class", "architectures None", config(lambda c: c.pop("architectures"))),
    (
        "quantization-config",
        "the field 'kv_cache_scheme'",
        quantization(lambda q: q.update(kv_cache_scheme=None)),
    ),
    (
        "quantization-config",
        "format is 'float-quantized'",
        quantization(lambda q: q.update(format="float-quantized")),
    ),
    ("quantization-config", "'group_1'.*need one", quantization(lambda q: q[GROUP].update(group_1={}))),
    ("quantization-config", "targets .'re:.*'.", group(lambda g: g.update(targets=["re:.*"]))),
    (
        "quantization-config",
        "scale_dtype is None",
        group(lambda g: g["input_activations"].pop("scale_dtype")),
    ),
    ("quantization-config", "group_size is 32", group(lambda g: g["weights"].update(group_size=32))),
    ("quantization-config", "observer is 'x'", group(lambda g: g["weights"].update(observer="x"))),
    ("quantization-config", "dynamic is True", group(lambda g: g["input_activations"].update(dynamic=True))),
    ("quantization-config", "ignore is no list", quantization(lambda q: q.update(ignore="lm_head"))),
    ("quantization-config", "group_0 has the field", group(lambda g: g.update(output_activations=None))),
    ("tokenizer-missing", "no tokenizer.json", lambda f: (f / "tokenizer.json").unlink()),
    (
        "tokenizer-class",
        "'TokenizersBackend'",
        tokenizer(lambda c: c.update(tokenizer_class="TokenizersBackend")),
    ),
    ("extra-special-tokens", "is a list", tokenizer(lambda c: c.update(extra_special_tokens=["<x>"]))),
    ("chat-template", "no chat_template.jinja", lambda f: (f / "chat_template.jinja").unlink()),
    ("chat-template", "but no chat_template in", tokenizer(lambda c: c.pop("chat_template"))),
    ("chat-template", "differ", lambda f: (f / "chat_template.jinja").write_text("{{ messages }}")),
    # What the reader refuses, the linter reports.
    ("json-syntax", "tokenizer_config.json", lambda f: (f / "tokenizer_config.json").write_text("{")),
    ("truncated-shard", "model.safetensors", lambda f: (f / "model.safetensors").write_bytes(b"x")),
]
# Spoiling one thing may break a second rule; that must be one of these.
ALSO = {"ignore is no list": {"ignore-unknown", "ignore-missing"}}


@pytest.mark.parametrize(
    ("code", "says", "spoil"), CASES, ids=[f"{code}-{i}" for i, (code, *_) in enumerate(CASES)]
)
def test_rule(code: str, says: str, spoil: Spoil, tiny_candidate: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_candidate, tmp_path / "bad")
    spoil(folder)
    findings = lint(folder)
    assert {finding.code for finding in findings} - ALSO.get(says, set()) == {code}
    assert any(re.search(says, f"{finding.where}: {finding.found}") for finding in findings), findings
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    assert caught.value.code == findings[0].code
    assert "Fix: " in str(caught.value)


def test_half_a_group(tiny_candidate: Path, tmp_path: Path) -> None:
    """up_proj in BF16 beside a packed gate_proj: the group rule names both."""
    folder = copy_of(tiny_candidate, tmp_path / "bad")

    def unpack(t: dict[str, Tensor]) -> None:
        for name in [name for name in t if name.startswith(f"{UP}.")]:
            del t[name]
        t[f"{UP}.weight"] = torch.ones(128, 64, dtype=torch.bfloat16)

    edit_tensors(folder, unpack)
    ignore(lambda names: names.append(UP))(folder)
    (finding,) = lint(folder)
    assert finding.code == "ignore-half-group"
    assert finding.found == f"{UP} is listed, {UP.replace('up_proj', 'gate_proj')} is not"


def test_both_plain_and_packed(tiny_candidate: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_candidate, tmp_path / "bad")
    edit_tensors(folder, lambda t: t.update({f"{DOWN}.weight": torch.ones(64, 128, dtype=torch.bfloat16)}))
    found = {(finding.code, finding.found) for finding in lint(folder)}
    assert ("stray-tensor", "stored both plain and packed") in found


def test_good_folders_have_no_findings(tiny_candidate: Path, tiny_w4a16: Path) -> None:
    assert lint(tiny_candidate) == []
    assert lint(tiny_w4a16) == []
    check(tiny_candidate)


def test_a_parent_is_no_canonical_checkpoint(tiny_parent: Path) -> None:
    codes = {finding.code for finding in lint(tiny_parent)}
    assert {"quantization-config", "tokenizer-class", "ignore-missing"} <= codes


def test_fused_scale_says_both_values_and_the_factor(tiny_candidate: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_candidate, tmp_path / "bad")
    scaled(f"{Z}.weight_global_scale", 2.0)(folder)
    text = str(lint(folder)[0])
    assert text.startswith(f"error[fused-scale] model.safetensors: {Z}.weight_global_scale: ")
    assert "2x wrong" in text
    assert "Fix: round both under one global scale" in text


def test_several_findings_are_counted(tiny_candidate: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_candidate, tmp_path / "bad")
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match=r"stray-quant-config\].*\(and 1 more\)"):
        check(folder)


def test_every_rule_has_a_case() -> None:
    """The codes in the linter's own source, against the codes tested here."""
    modules = [import_module(f"manners.checkpoint.{name}") for name in ("lint", "lint_config")]
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)
    codes = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source))
    assert len(codes) > 20
    assert codes - {code for code, *_ in CASES} == {"ignore-half-group"}
