"""Writing the canonical checkpoint: compressed-tensors ``nvfp4-pack-quantized``, one group, text only.

The rules it follows (research: what vLLM, SGLang, TensorRT-LLM, transformers and llama.cpp all load):

1. Members of a fused group share weight and input globals exactly; globals are float32 [1], finite, > 0.
2. ``ignore`` lists every Linear that stays as it is, by its full name; no group is split.
3. Widths are multiples of 64; block scales are E4M3, non-negative, in plain row order.
4. Text-only class, names ``model.layers.*``, a minimal ``quantization_config``, no second metadata file.
5. Tokenizer class ``PreTrainedTokenizerFast``; the template is in ``chat_template.jinja`` and in
   ``tokenizer_config.json``.

Per Linear, with O output rows and K input columns::

    weight_packed        U8       [O, K/2]   low nibble = even column
    weight_scale         F8_E4M3  [O, K/16]
    weight_global_scale  F32      [1]        2688 / amax of the fused group; divides
    input_global_scale   F32      [1]        W4A4 only: 2688 / amax of the calibrated input

Everything else keeps the parent's bytes. Shards keep the parent's borders, so that no more than one
of them is in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError
from ..files import folder_at_once, write_json, write_text
from ..nvfp4 import BLOCK, FormatError, NVFP4Weight
from .names import canonical_name, fused_partners, linear_names
from .reader import INDEX, Checkpoint, Shard, check_finite, read_json

PORTABLE_WIDTH = 64
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
Producer = Callable[[Tensor], NVFP4Weight]
Progress = Callable[[int, int], None]
"""Called with (Linears done, Linears in all)."""

_COPIED = ("tokenizer.json", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
           "tokenizer.model", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")  # fmt: skip
# Without scale_dtype, compressed-tensors' own emulation leaves the block scales of activations
# unrounded, and what it computes is not what a GPU computes.
NVFP4_ARGUMENTS = {
    "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": BLOCK,
    "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip


def write_canonical(
    parent: Checkpoint,
    folder: Path,
    producers: Mapping[str, Producer],
    input_global_scales: Mapping[str, Tensor] | None,
    progress: Progress | None = None,
    verify: Callable[[Path], None] | None = None,
) -> None:
    """Write the candidate's folder, whole or not at all.

    Args:
        parent: where all other tensors, the tokenizer and the chat template come from.
        folder: made, or replaced once the new one is complete.
        producers: canonical Linear name -> function from its weight [O, K] to the rounded weight.
        input_global_scales: float32 [1] per name in ``producers`` (W4A4), or None (W4A16).
        progress: see :data:`Progress`.
        verify: looks at the finished folder before it takes its place; if it raises, nothing is left.

    Raises:
        CheckpointError: ``already-quantized`` if the parent is; ``output-occupied`` if ``folder`` holds
            anything but an older candidate; ``split-group`` if only part of a
            fused group is in ``producers``; ``missing-tensor`` for a name the parent lacks;
            ``missing-scale`` if an input global is missing; ``width``, ``not-finite``, ``bad-scale``
            (see :class:`manners.nvfp4.FormatError`), each with the tensor's name.
    """
    refuse_quantized(parent)
    _check_target(parent, folder)
    linears = parent_linears(parent)
    _check_producers(parent, linears, producers, input_global_scales)
    with folder_at_once(folder) as part:
        weight_map: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(parent.shards(), start=1):
            tensors = _convert(shard, producers, input_global_scales)
            name = _shard_name(number, len(parent.files))
            if tensors:
                save_file(tensors, part / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(sorted(tensors), name)
            total += sum(tensor.nbytes for tensor in tensors.values())
            if progress:
                progress(sum(f"{linear}.weight_packed" in weight_map for linear in producers), len(producers))
        if len(parent.files) > 1:
            write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        ignore = [linear for linear in linears if linear not in producers]
        if "lm_head" not in linears:
            # A tied head has no tensor, but engines still see a Linear of that name.
            ignore.append("lm_head")
        write_json(
            part / "config.json", canonical_config(parent.config, ignore, input_global_scales is not None)
        )
        copy_text_files(parent.path, part)
        if verify:
            verify(part)


def refuse_quantized(parent: Checkpoint) -> None:
    """Raise CheckpointError ``already-quantized`` unless the weights are plain floats."""
    found = ""
    if "quantization_config" in parent.config:
        method = (parent.config["quantization_config"] or {}).get("quant_method", "?")
        found = f"config.json has a quantization_config ({method})"
    elif (parent.path / "hf_quant_config.json").is_file():
        found = "hf_quant_config.json is there"
    else:
        odd = [
            n
            for n in parent.names
            if n.endswith(".weight") and parent.infos[n].dtype not in ("BF16", "F16", "F32")
        ]
        if odd:
            found = f"{odd[0]} is {parent.infos[odd[0]].dtype}"
    if found:
        raise CheckpointError(
            "already-quantized",
            where=str(parent.path),
            found=found,
            consequence="Rounding what is already rounded adds the two errors.",
            fix="give the BF16 model that the fine-tune saved",
        )


def parent_linears(parent: Checkpoint) -> dict[str, tuple[int, int]]:
    """Canonical names of the parent's Linears with their (O, K), in file order."""
    found = {}
    shapes = parent.shapes()
    for stored in linear_names(shapes):
        name = canonical_name(f"{stored}.weight")
        if name is not None:
            rows, columns = shapes[f"{stored}.weight"]
            found[name.removesuffix(".weight")] = (rows, columns)
    return found


def canonical_config(config: Mapping[str, Any], ignore: list[str], quantize_inputs: bool) -> dict[str, Any]:
    """The parent's config as a text-only one, with the minimal ``quantization_config``.

    A vision-language config hands over its ``text_config``; everything else is kept as it is.
    """
    text = dict(config)
    if isinstance(nested := config.get("text_config"), dict):
        text = {**nested, "architectures": config.get("architectures", [])}
        for field in ("eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype", "transformers_version"):
            if field in config:
                text.setdefault(field, config[field])
    if text.get("model_type") in ("qwen3_5", "qwen3_5_text"):
        text |= {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    return {**text, "quantization_config": quantization_config(ignore, quantize_inputs)}


def quantization_config(ignore: list[str], quantize_inputs: bool) -> dict[str, Any]:
    """compressed-tensors' description of one NVFP4 group. It forbids unknown keys, so there are few."""
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**NVFP4_ARGUMENTS, "dynamic": False}}
    if quantize_inputs:
        group["input_activations"] = {**NVFP4_ARGUMENTS, "dynamic": "local"}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def copy_text_files(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation config, made loadable by transformers 4 and 5.

    Raises:
        CheckpointError: ``chat-template`` if the parent has none.
    """
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / "generation_config.json").is_file():
        write_json(target / "generation_config.json", read_json(source / "generation_config.json"))
    path = source / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    template = _template(source, config)
    write_text(target / "chat_template.jinja", template)
    write_json(target / "tokenizer_config.json", tokenizer_config(config, template))


def tokenizer_config(config: Mapping[str, Any], template: str) -> dict[str, Any]:
    """``tokenizer_config.json`` under rule 5.

    transformers 5 writes the class ``TokenizersBackend`` and a list of extra special tokens;
    transformers 4 knows neither. Both versions read tokenizer.json under the class set here.
    """
    fixed = {**config, "tokenizer_class": TOKENIZER_CLASS, "chat_template": template}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, list):
        fixed["extra_special_tokens"] = {f"extra_special_token_{i}": token for i, token in enumerate(extra)}
    return fixed


def _template(source: Path, config: Mapping[str, Any]) -> str:
    path = source / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(template, str) and template.strip():
        return template
    raise CheckpointError(
        "chat-template",
        where=str(source),
        found="no chat_template.jinja, and none in tokenizer_config.json",
        consequence="An engine would guess how turns are marked, and the manners would be gone.",
        fix="copy chat_template.jinja from the model that was fine-tuned",
    )


def _convert(
    shard: Shard, producers: Mapping[str, Producer], input_global_scales: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """One parent shard as the candidate's tensors."""
    out: dict[str, Tensor] = {}
    for stored, tensor in shard.tensors():
        name = canonical_name(stored)
        if name is None:
            continue
        check_finite(stored, tensor, shard.path)
        linear = name.removesuffix(".weight")
        if linear == name or linear not in producers:
            out[name] = tensor
            continue
        rounded = _produce(f"{shard.path}: {stored}", producers[linear], tensor)
        out[f"{linear}.weight_packed"] = rounded.packed.cpu()
        out[f"{linear}.weight_scale"] = rounded.block_scale.cpu()
        # Clones: safetensors refuses tensors that share memory, as a fused group's globals do.
        out[f"{linear}.weight_global_scale"] = rounded.global_scale.cpu().clone()
        if input_global_scales is not None:
            out[f"{linear}.input_global_scale"] = input_global_scales[linear].cpu().clone()
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _produce(where: str, producer: Producer, weight: Tensor) -> NVFP4Weight:
    try:
        return producer(weight)
    except FormatError as error:
        raise CheckpointError(
            "width" if error.code == "block-shape" else error.code,
            where=where,
            found=error.found,
            fix="keep this Linear in BF16 (plan format bf16)",
        ) from error


def _check_target(parent: Checkpoint, folder: Path) -> None:
    """Only an empty folder or an older candidate is ever replaced."""
    if not folder.exists():
        return
    config = folder / "config.json"
    is_candidate = config.is_file() and "quantization_config" in config.read_text(encoding="utf-8")
    if is_candidate or (folder.is_dir() and not any(folder.iterdir())):
        return
    same = folder.resolve() == parent.path.resolve()
    raise CheckpointError(
        "output-occupied",
        where=str(folder),
        found="this is the parent" if same else "something that is no candidate",
        consequence="Writing there would delete it.",
        fix="give another folder, or empty this one yourself",
    )


def _check_producers(
    parent: Checkpoint,
    linears: Mapping[str, tuple[int, int]],
    producers: Mapping[str, Producer],
    input_global_scales: Mapping[str, Tensor] | None,
) -> None:
    for name in producers:
        if name not in linears:
            raise _refusal("missing-tensor", parent, name, "no such Linear", "make the plan from this parent")
        if linears[name][1] % PORTABLE_WIDTH:
            raise width_error(str(parent.path), name, linears[name][1])
        left_out = [p for p in fused_partners(name) if p in linears and p not in producers]
        if left_out:
            found = f"NVFP4, but {left_out[0]}, which engines merge with it, is not"
            raise _refusal("split-group", parent, name, found, "give all members of a fused group one format")
        if input_global_scales is None:
            continue
        scale = input_global_scales.get(name)
        if scale is None or scale.shape != (1,) or scale.dtype != torch.float32:
            found = f"input global scale {None if scale is None else (scale.dtype, list(scale.shape))}"
            raise _refusal("missing-scale", parent, name, found, "calibrate, or write W4A16")


def width_error(where: str, name: str, columns: int) -> CheckpointError:
    """The refusal of a Linear whose width fits no block (``width-16``) or not every engine (``width-64``)."""
    if columns % BLOCK:
        return CheckpointError(
            "width-16",
            where=f"{where}: {name}",
            found=f"{columns} input columns, no multiple of {BLOCK}",
            consequence=f"NVFP4 shares one scale among {BLOCK} columns, so no engine could read it.",
            fix=f"keep {name} in BF16",
        )
    return CheckpointError(
        "width-64",
        where=f"{where}: {name}",
        found=f"{columns} input columns, a multiple of {BLOCK} but not of {PORTABLE_WIDTH}",
        consequence=f"llama.cpp packs {PORTABLE_WIDTH} weights together and would refuse the checkpoint.",
        fix=f"keep {name} in BF16",
    )


def _refusal(code: str, parent: Checkpoint, name: str, found: str, fix: str) -> CheckpointError:
    return CheckpointError(code, where=f"{parent.path}: {name}", found=found, fix=fix)


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
