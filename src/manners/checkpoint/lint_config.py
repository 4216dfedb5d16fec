"""The linter's rules about text: config.json, tokenizer_config.json, the chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .canonical import NVFP4_ARGUMENTS, TOKENIZER_CLASS
from .reader import read_json

_GROUP_FIELDS = {"targets", "weights", "input_activations"}
_FIELDS = {"quant_method", "format", "quantization_status", "config_groups", "ignore"}


@dataclass(frozen=True)
class Finding:
    """One broken rule. ``code`` is stable, ``where`` names file and tensor or field."""

    code: str
    where: str
    found: str
    fix: str
    consequence: str = ""

    @classmethod
    def of(cls, error: CheckpointError) -> Finding:
        return cls(error.code, error.where, error.found, error.fix, error.consequence)

    def error(self, more: str = "") -> CheckpointError:
        return CheckpointError(
            self.code,
            where=self.where,
            found=f"{self.found}{more}",
            consequence=self.consequence,
            fix=self.fix,
        )

    def __str__(self) -> str:
        return str(self.error())


def config_findings(folder: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    """stray-quant-config, config-class, quantization-config."""
    if (folder / "hf_quant_config.json").exists():
        yield Finding(
            "stray-quant-config",
            str(folder / "hf_quant_config.json"),
            "a second quantization config",
            "delete it; config.json says it all",
            "TensorRT-LLM prefers this file to config.json.",
        )
    where = str(folder / "config.json")
    kind, architectures = config.get("model_type"), config.get("architectures")
    nested = [field for field in ("text_config", "vision_config") if field in config]
    one_text_class = (
        isinstance(architectures, list)
        and len(architectures) == 1
        and str(architectures[0]).endswith("ForCausalLM")
    )
    if nested or kind == "qwen3_5" or not one_text_class:
        found = f"model_type {kind!r}, architectures {architectures!r}" + (f", {nested[0]}" if nested else "")
        yield Finding(
            "config-class",
            where,
            found,
            'write the text-only class, e.g. "qwen3_5_text" with ["Qwen3_5ForCausalLM"]',
            "Engines would build a vision-language model and look for an image processor.",
        )
    problem = _quantization_problem(config.get("quantization_config"))
    if problem:
        yield Finding(
            "quantization-config",
            f"{where}: quantization_config",
            problem,
            "write the checkpoint with manners quantize",
            "compressed-tensors forbids unknown fields, and some engines read only one NVFP4 group.",
        )


def text_findings(folder: Path) -> Iterator[Finding]:
    """tokenizer-missing, tokenizer-class, extra-special-tokens, chat-template, json-syntax."""
    path = folder / "tokenizer_config.json"
    absent = [name for name in ("tokenizer.json", path.name) if not (folder / name).is_file()]
    if absent:
        yield Finding(
            "tokenizer-missing", str(folder), f"no {absent[0]}", "copy the parent's tokenizer files"
        )
        return
    try:
        config = read_json(path)
    except CheckpointError as error:
        yield Finding.of(error)
        return
    if config.get("tokenizer_class") != TOKENIZER_CLASS:
        yield Finding(
            "tokenizer-class",
            str(path),
            f"tokenizer_class {config.get('tokenizer_class')!r}, need {TOKENIZER_CLASS!r}",
            f'write "tokenizer_class": "{TOKENIZER_CLASS}"',
            "Engines on transformers 4 do not know the class names that transformers 5 writes.",
        )
    extra = config.get("extra_special_tokens")
    if extra is not None and not isinstance(extra, dict):
        yield Finding(
            "extra-special-tokens",
            str(path),
            f"extra_special_tokens is a {type(extra).__name__}, need an object",
            'write {"name": "token"} pairs',
            "transformers 4 stops with \"'list' object has no attribute 'keys'\".",
        )
    yield from _template_findings(folder, config.get("chat_template"))


def _template_findings(folder: Path, inline: object) -> Iterator[Finding]:
    path = folder / "chat_template.jinja"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not text.strip():
        found = "no chat_template.jinja, or an empty one"
    elif not isinstance(inline, str):
        found = "chat_template.jinja, but no chat_template in tokenizer_config.json"
    elif inline != text:
        found = "chat_template.jinja and the chat_template in tokenizer_config.json differ"
    else:
        return
    yield Finding(
        "chat-template",
        str(folder),
        found,
        "put the same template into both files",
        "Some engines read one, some the other: the same request would be rendered in two ways.",
    )


def _quantization_problem(quantization: object) -> str | None:
    """What differs from the one quantization_config that every engine reads; None if nothing does."""
    if not isinstance(quantization, dict):
        return "none" if quantization is None else f"a {type(quantization).__name__}, not an object"
    if unknown := sorted(set(quantization) - _FIELDS):
        return f"the field {unknown[0]!r}"
    wanted = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
    }
    for field, value in wanted.items():
        if quantization.get(field) != value:
            return f"{field} is {quantization.get(field)!r}, need {value!r}"
    if not isinstance(quantization.get("ignore"), list):
        return "ignore is no list of names"
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or list(groups) != ["group_0"] or not isinstance(groups["group_0"], dict):
        return f"config_groups {sorted(groups) if isinstance(groups, dict) else groups!r}, need one, group_0"
    return _group_problem(groups["group_0"])


def _group_problem(group: Mapping[str, Any]) -> str | None:
    if unknown := sorted(set(group) - _GROUP_FIELDS):
        return f"group_0 has the field {unknown[0]!r}"
    if group.get("targets") != ["Linear"]:
        return f"group_0 targets {group.get('targets')!r}, need ['Linear']"
    for field, dynamic in (("weights", False), ("input_activations", "local")):
        arguments = group.get(field)
        wanted = {**NVFP4_ARGUMENTS, "dynamic": dynamic}
        if arguments is None and field == "input_activations":
            continue
        if not isinstance(arguments, dict):
            return f"group_0 has no {field}"
        for name in sorted({*wanted, *arguments}):
            if arguments.get(name) != wanted.get(name):
                return f"group_0 {field}: {name} is {arguments.get(name)!r}, need {wanted.get(name)!r}"
    return None
