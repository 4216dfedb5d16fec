"""The written form, held against compressed-tensors' own compressor and against rules 1 to 5."""

from __future__ import annotations

import json
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from manners.checkpoint import (
    Shard,
    check,
    default_ignore,
    fused_groups,
    lint,
    load_model,
    open_checkpoint,
    parent_linears,
    write_canonical,
)
from manners.errors import CheckpointError
from manners.nvfp4 import NVFP4Weight, quantize_weight
from tests.checkpoint.folders import copy_of, edit_json, edit_tensors
from tests.tiny import make_tiny_parent, sample_ids

Producers = dict[str, Callable[[Tensor], NVFP4Weight]]
ONE = torch.ones(1)
UP = "model.layers.0.mlp.up_proj"


def producers_for(folder: Path, scale: Tensor = ONE) -> Producers:
    linears = parent_linears(open_checkpoint(folder))
    kept = default_ignore(linears)
    return {name: partial(quantize_weight, global_scale=scale) for name in linears if name not in kept}


def write(parent: Path, target: Path, producers: Producers | None = None, inputs: bool = True) -> Path:
    producers = producers_for(parent) if producers is None else producers
    write_canonical(
        open_checkpoint(parent), target, producers, dict.fromkeys(producers, ONE) if inputs else None
    )
    return target


def test_bytes_are_compressed_tensors_own(tiny_parent: Path, tiny_candidate: Path) -> None:
    """Its observer, its scale arithmetic and its packer, fed with the fused group's joint amax."""
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    parent, written = (
        load_file(tiny_parent / "model.safetensors"),
        load_file(tiny_candidate / "model.safetensors"),
    )
    packed = [name.removesuffix(".weight_packed") for name in written if name.endswith(".weight_packed")]
    assert len(packed) == 25
    for group in fused_groups(packed):
        joint = torch.cat([parent[f"{name}.weight"].flatten() for name in group])
        # In float32: fed with bfloat16 it would round the global scale itself to bfloat16.
        gparam = generate_gparam(joint.amin().float(), joint.amax().float())
        for name in group:
            weight = parent[f"{name}.weight"]
            blocks = weight.unflatten(-1, (-1, 16))
            scale, _ = calculate_qparams(
                blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=gparam
            )
            state = {"weight": weight, "weight_scale": scale, "weight_global_scale": gparam}
            theirs = NVFP4PackedCompressor.compress(state, scheme)
            assert torch.equal(written[f"{name}.weight_packed"], theirs["weight_packed"]), name
            assert torch.equal(
                written[f"{name}.weight_scale"].view(torch.uint8), theirs["weight_scale"].view(torch.uint8)
            )
            assert torch.equal(written[f"{name}.weight_global_scale"], gparam.reshape(1)), name


def test_everything_else_keeps_its_bytes(tiny_parent: Path, tiny_candidate: Path) -> None:
    parent, written = (
        load_file(tiny_parent / "model.safetensors"),
        load_file(tiny_candidate / "model.safetensors"),
    )
    kept = [name for name in parent if name in written]
    assert {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.linear_attn.in_proj_a.weight",
    } < set(kept)
    assert all(torch.equal(parent[name], written[name]) for name in kept)
    assert {name.removesuffix(".weight") for name in set(parent) - set(kept)} == {
        name.removesuffix(".weight_packed") for name in written if name.endswith(".weight_packed")
    }


@pytest.mark.parametrize("kind", ["weight_global_scale", "input_global_scale"])
def test_fused_groups_share_globals_exactly(kind: str, tiny_candidate: Path) -> None:
    written = load_file(tiny_candidate / "model.safetensors")
    linears = [name.removesuffix(f".{kind}") for name in written if name.endswith(kind)]
    groups = [group for group in fused_groups(linears) if len(group) > 1]
    assert len(groups) == 3 + 1 + 4  # DeltaNet's qkv+z, attention's q/k/v, every layer's gate/up
    for group in groups:
        assert len({written[f"{name}.{kind}"].item() for name in group}) == 1
    assert len({written[f"{name}.{kind}"].item() for name in linears}) > 4


def test_config_is_minimal_and_explicit(tiny_candidate: Path, tiny_w4a16: Path) -> None:
    config = json.loads((tiny_candidate / "config.json").read_text())
    arguments = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": {**arguments, "dynamic": False},
        "input_activations": {**arguments, "dynamic": "local"},
    }
    quantization = config["quantization_config"]
    ignore = quantization.pop("ignore")
    assert quantization == {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
    delta = [f"model.layers.{i}.linear_attn.{name}" for i in range(3) for name in ("in_proj_a", "in_proj_b")]
    assert sorted(ignore) == sorted([*delta, "lm_head"])
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_text", ["Qwen3_5ForCausalLM"])
    w4a16 = json.loads((tiny_w4a16 / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    assert w4a16 == {"targets": ["Linear"], "weights": group["weights"]}
    assert not any("input_global_scale" in name for name in open_checkpoint(tiny_w4a16).names)


def test_compressed_tensors_accepts_the_config(tiny_candidate: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((tiny_candidate / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.config_groups["group_0"].input_activations.scale_dtype == torch.float8_e4m3fn


def test_tokenizer_is_the_same_to_those_who_use_it(tiny_parent: Path, tiny_candidate: Path) -> None:
    config = json.loads((tiny_candidate / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["chat_template"] == (tiny_candidate / "chat_template.jinja").read_text()
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_parent, tiny_candidate))
    turns = [{"role": "user", "content": "Was ist <think> 12 + 30?\n"}]
    rendered = [t.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for t in (old, new)]
    assert rendered[0] == rendered[1]
    ids = old.encode(rendered[0])
    assert new.encode(rendered[0]) == ids
    assert new.decode(ids, skip_special_tokens=True) == old.decode(ids, skip_special_tokens=True)
    assert new.eos_token_id == old.eos_token_id


def test_extra_special_tokens_become_an_object(tiny_parent: Path, tmp_path: Path) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    path = parent / "tokenizer_config.json"
    edit_json(path, lambda config: config.update(extra_special_tokens=["<|im_start|>", "<|im_end|>"]))
    folder = write(parent, tmp_path / "candidate")
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert sorted(written["extra_special_tokens"].values()) == ["<|im_end|>", "<|im_start|>"]
    assert AutoTokenizer.from_pretrained(folder).encode("<|im_start|>") == [1]


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_in_one_place_goes_to_both(place: str, tiny_parent: Path, tmp_path: Path) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    if place == "chat_template.jinja":
        edit_json(parent / "tokenizer_config.json", lambda config: config.pop("chat_template"))
    else:
        (parent / "chat_template.jinja").unlink()
    check(write(parent, tmp_path / "candidate"))


def test_no_template_at_all_is_refused(tiny_parent: Path, tmp_path: Path) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    edit_json(parent / "tokenizer_config.json", lambda config: config.pop("chat_template"))
    (parent / "chat_template.jinja").unlink()
    refuses("chat-template", "no chat_template.jinja", parent, tmp_path)


def refuses(code: str, says: str, parent: Path, tmp_path: Path, producers: Producers | None = None) -> None:
    with pytest.raises(CheckpointError, match=f"(?s)error\\[{code}\\].*{says}"):
        write(parent, tmp_path / "candidate", producers)
    assert [path.name for path in tmp_path.iterdir() if "candidate" in path.name] == []


def test_a_tied_head_has_no_tensor_but_stays_ignored(tmp_path: Path) -> None:
    parent = make_tiny_parent(tmp_path / "parent", tie_word_embeddings=True)
    folder = write(parent, tmp_path / "candidate")
    assert "lm_head.weight" not in open_checkpoint(folder).names
    assert "lm_head" in open_checkpoint(folder).config["quantization_config"]["ignore"]
    assert lint(folder) == []


def test_shards_and_index_mirror_the_parent(tmp_path: Path) -> None:
    parent = make_tiny_parent(tmp_path / "parent", max_shard_size="100KB")
    folder = write(parent, tmp_path / "candidate")
    assert lint(folder) == []
    assert [p.name for p in sorted(folder.glob("*.safetensors"))] == [
        p.name for p in sorted(parent.glob("*.safetensors"))
    ]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    checkpoint = open_checkpoint(folder)
    assert index["metadata"]["total_size"] == sum(info.bytes for info in checkpoint.infos.values())


def test_no_more_than_a_shard_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = make_tiny_parent(tmp_path / "parent", max_shard_size="100KB")
    alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
    read, most = 0, 0
    tensors_of = Shard.tensors

    def counted(shard: Shard) -> Iterator[tuple[str, Tensor]]:
        nonlocal read, most
        for name, tensor in tensors_of(shard):
            alive[read] = tensor
            read += 1
            most = max(most, sum(tensor.nbytes for tensor in alive.values()))
            yield name, tensor

    monkeypatch.setattr(Shard, "tensors", counted)
    write(parent, tmp_path / "candidate")
    checkpoint = open_checkpoint(parent)
    largest = max(path.stat().st_size for path in checkpoint.files)
    assert read == len(checkpoint.names)
    assert most <= 1.1 * largest < checkpoint.bytes / 3


def vision_language(tiny_parent: Path, target: Path) -> Path:
    """The same text model inside a vision-language save, with a vision tower and an MTP head."""
    parent = copy_of(tiny_parent, target)

    def wrap(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(192, 64, dtype=torch.bfloat16)
        tensors["mtp.fc.weight"] = torch.ones(64, 128, dtype=torch.bfloat16)

    edit_tensors(parent, wrap)
    text = json.loads((parent / "config.json").read_text())
    outer = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
    }
    (parent / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": False}))
    return parent


def test_a_vision_language_parent_becomes_text_only(tiny_parent: Path, tmp_path: Path) -> None:
    parent = vision_language(tiny_parent, tmp_path / "parent")
    folder = write(parent, tmp_path / "candidate")
    assert lint(folder) == []
    checkpoint = open_checkpoint(folder)
    plain = open_checkpoint(write(tiny_parent, tmp_path / "plain"))
    assert set(checkpoint.names) == {*plain.names, "mtp.fc.weight"}
    assert "mtp.fc" in checkpoint.config["quantization_config"]["ignore"]
    ids = torch.tensor(sample_ids())
    assert torch.equal(load_model(folder)(ids).logits, load_model(plain.path)(ids).logits)
    assert torch.equal(load_model(parent)(ids).logits, load_model(tiny_parent)(ids).logits)


def poison(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name].view(-1)[3] = float("nan")


@pytest.mark.parametrize("name", [f"{UP}.weight", "model.norm.weight"])
def test_nan_weights_are_named(name: str, tiny_parent: Path, tmp_path: Path) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    edit_tensors(parent, lambda tensors: poison(tensors, name))
    refuses("not-finite", f"{name}: nan at", parent, tmp_path)


@pytest.mark.parametrize(
    ("says", "change"),
    [
        (
            "quantization_config .fp8.",
            lambda f: edit_json(
                f / "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"})
            ),
        ),
        ("hf_quant_config.json", lambda f: (f / "hf_quant_config.json").write_text("{}")),
        (
            "up_proj.weight is U8",
            lambda f: edit_tensors(
                f, lambda t: t.update({f"{UP}.weight": torch.zeros(128, 32, dtype=torch.uint8)})
            ),
        ),
    ],
)
def test_an_already_quantized_parent(
    says: str, change: Callable[[Path], object], tiny_parent: Path, tmp_path: Path
) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    producers = producers_for(parent)
    change(parent)
    refuses("already-quantized", says, parent, tmp_path, producers)


@pytest.mark.parametrize(
    ("intermediate_size", "code", "says"),
    [
        (72, "width-16", "72 input columns, no multiple of 16"),
        (96, "width-64", "96 input columns, a multiple of 16"),
    ],
)
def test_widths(intermediate_size: int, code: str, says: str, tmp_path: Path) -> None:
    parent = make_tiny_parent(tmp_path / "parent", intermediate_size=intermediate_size)
    refuses(code, f"model.layers.0.mlp.down_proj: {says}", parent, tmp_path)


def test_a_split_group_is_refused(tiny_parent: Path, tmp_path: Path) -> None:
    producers = producers_for(tiny_parent)
    del producers["model.layers.3.self_attn.k_proj"]
    refuses("split-group", "q_proj.*k_proj, which engines merge", tiny_parent, tmp_path, producers)


def test_an_unknown_linear_is_refused(tiny_parent: Path, tmp_path: Path) -> None:
    producers = {**producers_for(tiny_parent), "model.layers.9.mlp.up_proj": producers_for(tiny_parent)[UP]}
    refuses("missing-tensor", "layers.9.mlp.up_proj: no such Linear", tiny_parent, tmp_path, producers)


def test_a_missing_input_scale_is_refused(tiny_parent: Path, tmp_path: Path) -> None:
    producers = producers_for(tiny_parent)
    for scales in ({}, dict.fromkeys(producers, torch.tensor(1.0)), dict.fromkeys(producers, ONE.double())):
        with pytest.raises(CheckpointError, match=r"missing-scale\]"):
            write_canonical(open_checkpoint(tiny_parent), tmp_path / "candidate", producers, scales)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_global_scale_names_the_tensor(tiny_parent: Path, tmp_path: Path) -> None:
    refuses("bad-scale", "in_proj_qkv.weight", tiny_parent, tmp_path, producers_for(tiny_parent, -ONE))


def test_nothing_half_written_after_a_kill(tiny_parent: Path, tmp_path: Path) -> None:
    """The process is killed while it rounds the fifth Linear; the old folder must stand as it was."""
    target = write(tiny_parent, tmp_path / "candidate")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    calls = 0

    def deadly(weight: Tensor) -> NVFP4Weight:
        nonlocal calls
        calls += 1
        if calls == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return quantize_weight(weight, 2 * ONE)

    child = os.fork()
    if child == 0:
        write(tiny_parent, target, dict.fromkeys(producers_for(tiny_parent), deadly))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    write(tiny_parent, target, producers_for(tiny_parent, 2 * ONE))
    assert [path.name for path in tmp_path.iterdir()] == ["candidate"]
    assert lint(target) == []


def test_a_folder_that_fails_verification_never_appears(tiny_parent: Path, tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert lint(folder) == []
        raise CheckpointError("round-trip", where="x", found="y", fix="z")

    producers = producers_for(tiny_parent)
    with pytest.raises(CheckpointError, match="round-trip"):
        write_canonical(open_checkpoint(tiny_parent), tmp_path / "candidate", producers, None, verify=refuse)
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_a_candidate_is_replaced(tiny_parent: Path, tmp_path: Path) -> None:
    parent = copy_of(tiny_parent, tmp_path / "parent")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    for target, says in ((parent, "this is the parent"), (tmp_path / "thesis", "no candidate")):
        before = {path.name: path.read_bytes() for path in target.iterdir()}
        with pytest.raises(CheckpointError, match=rf"output-occupied\].*{says}"):
            write(parent, target)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert lint(write(parent, tmp_path / "empty")) == []


def test_progress_counts_linears(tiny_parent: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    producers = producers_for(tiny_parent)
    write_canonical(
        open_checkpoint(tiny_parent), tmp_path / "candidate", producers, None, lambda *args: seen.append(args)
    )
    assert seen[-1] == (25, 25)
