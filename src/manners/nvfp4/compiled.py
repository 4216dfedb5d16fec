"""The kernels through torch.compile, where that works and pays; without it where not.

A matrix is worked off in slices, so that little memory is needed and most of it stays in the cache. All
slices have one shape: each kernel is compiled once per dtype. That takes seconds, so it starts with the
first matrix of ``COMPILE_FROM`` elements or more. On a GPU everything stays eager: Triton's division is
not correctly rounded, and would break the bits.

Nobody needs a compiler: the first failure, of whatever kind, is recorded (``backend()`` tells it) and
ends compiling for this process. ``MANNERS_NO_COMPILE=1`` keeps it from starting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import kernels

EAGER_SLICE = 1 << 14  # blocks; 2**13 to 2**15 are as fast, 2**16 leaves the second-level cache
COMPILED_SLICE = 1 << 16  # blocks; a call costs about 0.1 ms whatever its size
COMPILE_FROM = 1 << 23  # elements; below, a compiler would take longer than the whole model does without it


class Backend(NamedTuple):
    """How large matrices on the CPU are worked off in this process, and why so."""

    name: Literal["compiled", "eager"]
    why: str


class Kernels(NamedTuple):
    """The four kernels of one backend, shapes as in ``kernels``, and how many blocks to give them at once."""

    slice_blocks: int
    block_amax: Callable[[Tensor], Tensor]
    fake_quant: Callable[[Tensor, Tensor], Tensor]
    codes: Callable[[Tensor, Tensor], Tensor]
    block_error: Callable[[Tensor, Tensor], Tensor]


EAGER = Kernels(EAGER_SLICE, kernels.block_amax, kernels.fake_quant, kernels.codes, kernels.block_error)


class _Twin:
    """One kernel compiled, with the eager one to fall back on and to be checked against."""

    def __init__(self, eager: Callable[..., Tensor], source: Callable[..., Tensor]) -> None:
        self.eager = eager
        # One compiling thread: more would start a pool of processes that outlives the call.
        self.compiled = torch.compile(source, fullgraph=True, dynamic=False, options={"compile_threads": 1})
        self.checked: set[torch.dtype] = set()

    def __call__(self, x: Tensor, *scale: Tensor) -> Tensor:
        if _state.failure is not None:
            return self.eager(x, *scale)
        try:
            result: Tensor = self.compiled(x, *scale)
            if x.dtype not in self.checked:
                _refuse_other_bits(result, self.eager(x, *scale))
                self.checked.add(x.dtype)
        except Exception as error:  # compilers fail in every way there is; the eager kernel needs none
            lines = str(error).strip().splitlines() or [""]
            _state.failure = f"{type(error).__name__}: {lines[0]}"
            return self.eager(x, *scale)
        _state.compiled = True
        return result


class _State:
    """What happened so far in this process."""

    failure: str | None = None
    compiled: bool = False
    twins: Kernels | None = None


_state = _State()


def kernels_for(x: Tensor) -> Kernels:
    """The kernels to work off a tensor with: compiled ones for a large one on the CPU."""
    if x.device.type != "cpu" or x.numel() < COMPILE_FROM or _switched_off() or _state.failure is not None:
        return EAGER
    if _state.twins is None:
        rounding = kernels.round_to_grid
        _state.twins = Kernels(
            COMPILED_SLICE,
            _Twin(kernels.block_amax, kernels.block_amax),
            _Twin(kernels.fake_quant, partial(kernels.fake_quant, rounding=rounding)),
            _Twin(kernels.codes, kernels.codes),
            _Twin(kernels.block_error, partial(kernels.block_error, rounding=rounding)),
        )
    return _state.twins


def slices(blocks: int, size: int) -> Iterator[slice]:
    """Slices over [0, blocks), all of one size: the last overlaps the one before. Fewer blocks: one slice."""
    for start in range(0, blocks, size):
        end = min(start + size, blocks)
        yield slice(max(0, end - size), end)


def backend() -> Backend:
    """How large matrices on the CPU are worked off from now on, as far as this process knows."""
    if off := _switched_off():
        return Backend("eager", off)
    if _state.failure is not None:
        return Backend("eager", f"torch.compile does not work here: {_state.failure}")
    if _state.compiled:
        return Backend("compiled", "torch.compile works, and gave the same bits as the eager kernels")
    return Backend("eager", f"no matrix of {COMPILE_FROM} elements or more yet, nothing was compiled")


def _switched_off() -> str:
    """Why compiling is switched off by the environment; empty if it is not."""
    value = os.environ.get("MANNERS_NO_COMPILE", "0")
    if value in ("0", ""):
        return ""
    return "MANNERS_NO_COMPILE=1" if value == "1" else f"MANNERS_NO_COMPILE is {value!r}, read as 1"


def _refuse_other_bits(compiled: Tensor, eager: Tensor) -> None:
    if not torch.equal(compiled.contiguous().view(torch.uint8), eager.contiguous().view(torch.uint8)):
        raise ArithmeticError("the compiled kernel gave other bits than the eager one")
