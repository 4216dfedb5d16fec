"""What the tensors of a checkpoint are called, and what follows from a name. Knows no files.

Engines merge some Linears into one matrix when they load a model: a *fused group*. Such a group
has one global scale at run time, whatever the file says, so its members must be rounded alike or
stay BF16 together. The groups are those of vLLM 0.33 and SGLang 0.5.23 for Qwen3.5 and for plain
Llama-like models (research/serving.md, section 1).

What it does not know: mixture-of-experts layers, and other families' merged names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
)
_GROUP_OF = {member: members for members in FUSED for member in members}

# A vision-language save puts the text model below this; text-only engines want it gone.
_TEXT_PREFIX = "model.language_model."
_NOT_TEXT = ("model.visual.", "visual.")
_MTP = "mtp."


def canonical_name(stored: str) -> str | None:
    """The name a tensor has in the canonical, text-only checkpoint; None if it has no place there.

    ``model.language_model.layers.0…`` becomes ``model.layers.0…``; the vision tower is left out;
    the ``mtp.`` head is kept, because engines speculate with it.
    """
    if stored.startswith(_NOT_TEXT):
        return None
    if stored.startswith(_TEXT_PREFIX):
        return "model." + stored.removeprefix(_TEXT_PREFIX)
    return stored


def linear_names(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Modules that are Linears: a two-dimensional ``….weight`` that is no embedding. In file order.

    Args:
        shapes: tensor name -> shape, e.g. ``{"model.norm.weight": (64,)}``.
    """
    return [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and "embed" not in name.split(".")[-2]
    ]


def expected_linears(config: Mapping[str, Any]) -> list[str]:
    """The Linears that a Qwen3.5 text config promises; empty for other families, which are not checked."""
    if config.get("model_type") != "qwen3_5_text":
        return []
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    delta = tuple(
        f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    )
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    names = []
    for layer, kind in enumerate(config.get("layer_types") or ()):
        members = (attention if kind == "full_attention" else delta) + mlp
        names += [f"model.layers.{layer}.{member}" for member in members]
    return names if config.get("tie_word_embeddings") else [*names, "lm_head"]


def default_ignore(linears: Iterable[str]) -> list[str]:
    """The Linears that stay BF16 in every plan of ours.

    lm_head (its error goes straight into the logits), DeltaNet's in_proj_b and in_proj_a (a few
    rows that steer the state's decay; engines merge the two), and all of the ``mtp.`` head.
    """
    return [name for name in linears if _stays_bf16(name)]


def _stays_bf16(name: str) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last in ("lm_head", "in_proj_b", "in_proj_a") or name.startswith((_MTP, *_NOT_TEXT))


def fused_key(linear: str) -> str:
    """The name a fused group goes by: its first member's; a Linear on its own is its own group."""
    head, tail = _split(linear)
    members = _GROUP_OF.get(tail)
    return f"{head}{members[0]}" if members else linear


def fused_partners(linear: str) -> tuple[str, ...]:
    """All names that engines merge with this one, itself included, in the engines' order."""
    head, tail = _split(linear)
    return tuple(f"{head}{member}" for member in _GROUP_OF.get(tail, (tail,)))


def fused_groups(linears: Iterable[str]) -> list[tuple[str, ...]]:
    """Split Linears into fused groups, in order of first appearance; most have one member.

    >>> fused_groups(["l.mlp.gate_proj", "l.mlp.down_proj", "l.mlp.up_proj"])
    [('l.mlp.gate_proj', 'l.mlp.up_proj'), ('l.mlp.down_proj',)]
    """
    groups: dict[str, list[str]] = {}
    for name in linears:
        groups.setdefault(fused_key(name), []).append(name)
    return [tuple(members) for members in groups.values()]


def _split(linear: str) -> tuple[str, str]:
    """("model.layers.0.", "mlp.up_proj"): the last two parts are what groups are told by."""
    parts = linear.split(".")
    head = ".".join(parts[:-2])
    return (f"{head}." if head else ""), ".".join(parts[-2:])
