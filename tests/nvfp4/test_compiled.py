"""Compiled kernels give the eager kernels' bits; a broken compiler costs speed, never a result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manners.nvfp4 import backend, compiled, global_scale, kernels, quantize_weight
from tests.nvfp4.authority import same_bits
from tests.nvfp4.matrices import NAMES, matrix

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")

# Runs in a process of its own: what torch.compile did stays with a process. Prints what backend() says and a
# digest of every bit of every matrix under both rules.
PROGRAM = """
import hashlib, json, sys
import torch
from manners.nvfp4 import backend, compiled, fake_quant_weight, global_scale, quantize_weight
from tests.nvfp4.matrices import matrix
compiled.COMPILED_SLICE, compiled.COMPILE_FROM = 64, 1024
before, threads = backend(), torch.get_num_threads()
digest = hashlib.sha256()
for dtype in sys.argv[1].split(","):
    for name in sys.argv[2].split(","):
        w = matrix(name, getattr(torch, dtype))
        for rule in ("max", "mse"):
            g = global_scale(w.abs().max())
            quantized = quantize_weight(w, g, rule)
            for part in (quantized.packed, quantized.block_scale, fake_quant_weight(w, g, rule)):
                digest.update(part.view(torch.uint8).numpy().tobytes())
print(json.dumps({"before": before, "after": backend(), "digest": digest.hexdigest(),
                  "unchanged": torch.get_num_threads() == threads}))
"""


def run(dtypes: str, names: str, **environment: str) -> dict[str, object]:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtypes, names],
        env=variables | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(process.stdout.splitlines()[-1]))


def compare(dtypes: str, names: str) -> None:
    fast = run(dtypes, names, MANNERS_NO_COMPILE="0")
    plain = run(dtypes, names, MANNERS_NO_COMPILE="1")
    assert fast["before"][0] == "eager"
    assert "nothing was compiled" in fast["before"][1]
    assert fast["after"] == ["compiled", "torch.compile works, and gave the same bits as the eager kernels"]
    assert plain["after"] == ["eager", "MANNERS_NO_COMPILE=1"]
    assert fast["digest"] == plain["digest"]
    assert fast["unchanged"]


@needs_compiler
def test_compiled_kernels_give_the_same_bits() -> None:
    compare("bfloat16", ",".join(NAMES))


@needs_compiler
@pytest.mark.slow
def test_compiled_kernels_give_the_same_bits_in_the_other_dtypes() -> None:
    compare("float16,float32", ",".join(NAMES))


def test_a_broken_compiler_is_recorded_and_costs_no_result(tmp_path: Path) -> None:
    # An empty cache, or else the kernels that another run compiled would be found and work.
    fresh = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "MANNERS_NO_COMPILE": "0"}
    broken = run("bfloat16", "random", CXX="/nonexistent/g++", **fresh)
    plain = run("bfloat16", "random", MANNERS_NO_COMPILE="1")
    assert broken["after"][0] == "eager"
    assert broken["after"][1].startswith("torch.compile does not work here: ")
    assert broken["digest"] == plain["digest"]


def test_a_kernel_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_state", compiled._State())
    monkeypatch.delenv("MANNERS_NO_COMPILE", raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    x_N16 = matrix("random", torch.bfloat16).reshape(-1, 16)
    twin = compiled._Twin(kernels.block_amax, lambda x: x.amax(-1, keepdim=True))
    assert same_bits(twin(x_N16), kernels.block_amax(x_N16))
    assert backend() == (
        "eager",
        "torch.compile does not work here: ArithmeticError: "
        "the compiled kernel gave other bits than the eager one",
    )


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("1", "MANNERS_NO_COMPILE=1"),
        ("yes", "MANNERS_NO_COMPILE is 'yes', read as 1"),
        ("0", "nothing was compiled"),
        ("", "nothing was compiled"),
    ],
)
def test_the_switch_is_read_as_a_number(value: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_state", compiled._State())
    monkeypatch.setenv("MANNERS_NO_COMPILE", value)
    assert backend().name == "eager"
    assert why in backend().why


def test_small_matrices_are_never_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANNERS_NO_COMPILE", raising=False)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled a small matrix")

    monkeypatch.setattr(compiled, "_state", compiled._State())
    monkeypatch.setattr(torch, "compile", refuse)
    w_OK = matrix("random", torch.float32, rows=256, columns=1024)
    quantize_weight(w_OK, global_scale(w_OK.abs().max()))
    assert compiled.kernels_for(w_OK) is compiled.EAGER


def test_both_roundings_agree_on_every_bfloat16() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    every = every[torch.isfinite(every)]
    assert same_bits(kernels.round_to_grid(every), kernels.round_to_grid_(every.clone()))
    assert torch.isnan(kernels.round_to_grid_(torch.tensor([float("nan")]))).all()
