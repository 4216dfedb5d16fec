"""Every refusal of a model folder, by spoiling a good one; and what reading gives."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from manners.checkpoint import check_finite, open_checkpoint
from manners.errors import CheckpointError
from tests.checkpoint.folders import copy_of, edit_json
from tests.tiny import make_tiny_parent

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_parent(tmp_path_factory.mktemp("sharded") / "parent", max_shard_size="100KB")


def test_reads_what_was_written(tiny_parent: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_parent))
    truth = load_file(tiny_parent / "model.safetensors")
    assert set(checkpoint.names) == set(truth)
    assert checkpoint.config["model_type"] == "qwen3_5_text"
    for name, tensor in truth.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype == torch.bfloat16
        assert torch.equal(checkpoint.get(name), tensor)


def test_shards_are_the_whole_model_once(sharded: Path, tiny_parent: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    shards = list(checkpoint.shards())
    assert len(shards) == len(list(sharded.glob("*.safetensors"))) > 2
    seen = {name: tensor for shard in shards for name, tensor in shard.tensors()}
    truth = load_file(tiny_parent / "model.safetensors")  # same seed, one shard
    assert sum(len(shard.names) for shard in shards) == len(seen) == len(truth)
    assert all(torch.equal(seen[name], truth[name]) for name in truth)


def test_a_missing_tensor_is_named(tiny_parent: Path) -> None:
    with pytest.raises(CheckpointError, match=r"error\[missing-tensor\].*no tensor lm_foot.weight"):
        open_checkpoint(tiny_parent).get("lm_foot.weight")


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


def header_of(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


ONE_SHARD: list[tuple[str, str, Callable[[Path], object]]] = [
    ("folder-missing", "no such folder", shutil.rmtree),
    ("config-missing", "no config.json", lambda f: (f / "config.json").unlink()),
    ("json-syntax", "config.json", lambda f: (f / "config.json").write_text("{")),
    ("json-syntax", "list, not an object", lambda f: (f / "config.json").write_text("[]")),
    ("no-safetensors", "no \\*.safetensors", lambda f: (f / "model.safetensors").unlink()),
    ("pickle-checkpoint", "pytorch_model.bin", only_pickle),
    ("truncated-shard", "model.safetensors.*promises", lambda f: cut(f / "model.safetensors", 1)),
    ("truncated-shard", "5 bytes", lambda f: (f / "model.safetensors").write_bytes(b"short")),
    (
        "truncated-shard",
        "promises 108",
        lambda f: (f / "model.safetensors").write_bytes(header_of(b"{" * 100)[:-1]),
    ),
    ("shard-header", "more than any", lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64)),
    (
        "shard-header",
        "JSONDecodeError",
        lambda f: (f / "model.safetensors").write_bytes(header_of(b"{nonsense}")),
    ),
    (
        "shard-header",
        "4 bytes for F32 \\[2\\]",
        lambda f: (f / "model.safetensors").write_bytes(
            header_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}') + bytes(4)
        ),
    ),
]


@pytest.mark.parametrize(
    ("code", "says", "spoil"), ONE_SHARD, ids=[f"{c}-{i}" for i, (c, *_) in enumerate(ONE_SHARD)]
)
def test_bad_folder(
    code: str, says: str, spoil: Callable[[Path], object], tiny_parent: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_parent, tmp_path / "parent")
    spoil(folder)
    with pytest.raises(CheckpointError, match=f"(?s)error\\[{code}\\].*{says}") as caught:
        open_checkpoint(folder)
    assert caught.value.code == code
    assert "Fix: " in str(caught.value)
    assert not Path("pwned").exists()


def test_a_file_is_no_folder(tiny_parent: Path) -> None:
    with pytest.raises(CheckpointError, match=r"folder-missing.*a file, not a folder"):
        open_checkpoint(tiny_parent / "config.json")


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def retarget(folder: Path, file: str) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": file}))


def unlist(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("model.norm.weight"))


def repeat_a_tensor(folder: Path) -> None:
    tensors = load_file(first_shard(folder))
    save_file({**tensors, "model.norm.weight": torch.zeros(64)}, first_shard(folder))


SEVERAL_SHARDS: list[tuple[str, Callable[[Path], object]]] = [
    ("model-00001-of-.* not there", lambda f: first_shard(f).unlink()),
    ("puts model.norm.weight into .*, it is in", lambda f: retarget(f, first_shard(f).name)),
    ("leads out of the folder: ../x.safetensors", lambda f: retarget(f, "../x.safetensors")),
    ("holds model.norm.weight, the index does not", unlist),
    (
        "does not hold it",
        lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update(ghost=first_shard(f).name)),
    ),
    ("model.norm.weight is in", repeat_a_tensor),
    ("no weight_map", lambda f: (f / INDEX).write_text("{}")),
]


@pytest.mark.parametrize(("says", "spoil"), SEVERAL_SHARDS, ids=[says[:24] for says, _ in SEVERAL_SHARDS])
def test_index_and_shards_must_agree(
    says: str, spoil: Callable[[Path], object], sharded: Path, tmp_path: Path
) -> None:
    folder = copy_of(sharded, tmp_path / "parent")
    spoil(folder)
    with pytest.raises(CheckpointError, match=f"(?s)error\\[index-mismatch\\].*{says}"):
        open_checkpoint(folder)


def test_a_truncated_shard_among_several_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = copy_of(sharded, tmp_path / "parent")
    cut(first_shard(folder), 100)
    with pytest.raises(CheckpointError, match=r"truncated-shard\].*model-00001-of-"):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_not_finite_names_tensor_and_place(value: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 4, dtype=dtype)
    tensor[1, 2] = value
    with pytest.raises(CheckpointError, match=rf"not-finite\] shard: w: {value} at \[1, 2\], 1 of 12"):
        check_finite("w", tensor, "shard")


def test_finite_and_integer_tensors_pass() -> None:
    check_finite("w", torch.full((2,), 3.0e38), "shard")
    check_finite("w", torch.tensor([1, 2]), "shard")
    check_finite("w", torch.ones(2).to(torch.float8_e4m3fn), "shard")


def test_index_is_written_as_the_reader_wants_it(sharded: Path) -> None:
    assert set(json.loads((sharded / INDEX).read_text())["weight_map"]) == set(open_checkpoint(sharded).names)
