"""A model folder as a transformers model that runs here: parents as they are, candidates emulated.

A candidate's weights are decoded once; its Linears then round their inputs in plain PyTorch
(:class:`manners.nvfp4.NVFP4Linear`), on any device, without compressed-tensors. What that leaves
out: the order in which a GPU's FP4 kernels add, so logits of a real engine differ in the last bits.

Weights are decoded to bfloat16 and only then converted to ``dtype``. compressed-tensors does the
same, and only so are the numbers equal to its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..nvfp4 import FormatError, NVFP4Linear, NVFP4Weight, dequantize
from .reader import Checkpoint, open_checkpoint

_PACKED = ".weight_packed"
_SCALES = (".weight_scale", ".weight_global_scale", ".input_global_scale")


def load_model(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """Load a parent or a canonical checkpoint.

    Args:
        folder: a model folder; nothing is ever fetched.
        device: where the model goes.
        dtype: what it computes in; float32 is the quickest on most CPUs.

    Returns:
        The transformers model, in eval mode, with the folder's generation config. A candidate's
        packed Linears are :class:`NVFP4Linear`, W4A4 or W4A16 as its config says.

    Raises:
        CheckpointError: those of :func:`open_checkpoint`; ``unknown-quantization`` for another
            format; ``missing-tensor`` if weights are missing (transformers would invent them);
            ``missing-scale`` and the codes of FormatError for a packed Linear that is not whole;
            ``load-failed`` if transformers refuses, e.g. because shapes do not fit the config.
    """
    checkpoint = open_checkpoint(folder)
    is_candidate = _is_canonical(checkpoint)
    try:
        with _quiet():
            model = _load_candidate(checkpoint, dtype) if is_candidate else _load_parent(checkpoint, dtype)
    except (ValueError, RuntimeError, OSError) as error:
        raise CheckpointError(
            "load-failed",
            where=str(checkpoint.path),
            found=f"transformers says: {str(error).strip().splitlines()[0]}",
            fix="check that config.json belongs to these weights, and that transformers knows its model_type",
        ) from error
    return model.to(device).eval()


def replace_linears(
    model: nn.Module, weights: Mapping[str, Tensor], input_global_scales: Mapping[str, Tensor] | None
) -> None:
    """Put an NVFP4Linear in the place of each named Linear, in place.

    Args:
        weights: module name -> rounded weight [O, K], in the dtype to compute in.
        input_global_scales: float32 [1] by module name (W4A4), or None (W4A16).
    """
    for name, weight in weights.items():
        parent, _, last = name.rpartition(".")
        old = model.get_submodule(name)
        scale = None if input_global_scales is None else input_global_scales[name]
        bias = old.bias if isinstance(old.bias, Tensor) else None
        setattr(model.get_submodule(parent), last, NVFP4Linear(weight, bias, scale).to(weight.device))


def _is_canonical(checkpoint: Checkpoint) -> bool:
    quantization = checkpoint.config.get("quantization_config")
    if quantization is None:
        return False
    if isinstance(quantization, dict) and quantization.get("format") == "nvfp4-pack-quantized":
        return True
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    raise CheckpointError(
        "unknown-quantization",
        where=str(checkpoint.path / "config.json"),
        found=f"quantization_config of {method!r}",
        fix="give a BF16 parent, or a checkpoint that manners quantize wrote",
    )


def _load_parent(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.path,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    _refuse_missing(checkpoint, info)
    return model


def _load_candidate(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    import transformers

    fields = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    config = transformers.AutoConfig.for_model(**fields)
    group = next(iter(checkpoint.config["quantization_config"]["config_groups"].values()))
    packed, state = _decode(checkpoint, dtype)
    model_class = _model_class(checkpoint)
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    _refuse_missing(checkpoint, info)
    if (checkpoint.path / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint.path)
    globals_ = None
    if group.get("input_activations"):
        globals_ = {name: _get(checkpoint, f"{name}.input_global_scale") for name in packed}
    replace_linears(model, {name: model.get_submodule(name).weight.detach() for name in packed}, globals_)
    return model


def _model_class(checkpoint: Checkpoint) -> Any:
    """The one class that the config names, if transformers has it."""
    import transformers

    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(name, str) and name.endswith("ForCausalLM") and hasattr(transformers, name):
        return getattr(transformers, name)
    raise CheckpointError(
        "config-class",
        where=str(checkpoint.path / "config.json"),
        found=f"architectures {names!r}",
        fix="name one text class that this version of transformers has",
    )


def _decode(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[list[str], dict[str, Tensor]]:
    """(packed Linears, state dict with every weight decoded to ``dtype``)."""
    packed: list[str] = []
    state: dict[str, Tensor] = {}
    for name in checkpoint.names:
        if name.endswith(_PACKED):
            linear = name.removesuffix(_PACKED)
            packed.append(linear)
            state[f"{linear}.weight"] = _decode_one(checkpoint, linear).to(dtype)
        elif not name.endswith(_SCALES):
            state[name] = checkpoint.get(name)
    return packed, state


def _decode_one(checkpoint: Checkpoint, linear: str) -> Tensor:
    parts = [_get(checkpoint, linear + last) for last in (_PACKED, *_SCALES[:2])]
    try:
        return dequantize(NVFP4Weight(*parts), torch.bfloat16)
    except FormatError as error:
        where = f"{checkpoint.path}: {linear}"
        raise CheckpointError(
            error.code, where=where, found=error.found, fix="run manners lint on it"
        ) from error


def _get(checkpoint: Checkpoint, name: str) -> Tensor:
    if name not in checkpoint.infos:
        raise CheckpointError(
            "missing-scale",
            where=str(checkpoint.path),
            found=f"no {name}",
            fix="write the checkpoint again with manners quantize",
        )
    return checkpoint.get(name)


def _refuse_missing(checkpoint: Checkpoint, info: Mapping[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            "missing-tensor",
            where=str(checkpoint.path),
            found=f"no tensor {missing[0]}" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
            consequence="transformers would fill it with random numbers.",
            fix="save the whole model into the folder",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal, and put the switch back."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
