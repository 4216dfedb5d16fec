"""Prompts in pieces, and the states at their seams, so that a shared system prompt is computed once.

A prompt is always cut the same way, by its own tokens alone: after the first end of a turn (the
system prompt), then after later ends of turns that lie at least MIN_PIECE tokens on, and anyway
every MAX_PIECE tokens. Each piece is one forward pass. The states after a piece are kept under
the exact tokens that led to them; a prompt that begins with the same tokens starts from there.
Because the cuts do not depend on what is cached, the numbers are the same bits with and without it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MIN_PIECE = 64
MAX_PIECE = 512


def cuts(ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Where the pieces of a prompt end, ascending; the last is ``len(ids)``."""
    ends: list[int] = []
    begin = 0
    for place, token in enumerate(ids, start=1):
        length = place - begin
        ends_turn = token in end_ids and (begin == 0 or length >= MIN_PIECE)
        if ends_turn or length == MAX_PIECE or place == len(ids):
            ends.append(place)
            begin = place
    return ends


@dataclass(frozen=True)
class LayerState:
    """One layer of one row: ``keys``/``values`` [1, H, T, D], or states by index."""

    keys: Tensor | None
    values: Tensor | None
    conv_states: dict[int, Tensor]
    recurrent_states: dict[int, Tensor]

    def tensors(self) -> list[Tensor]:
        pair = [tensor for tensor in (self.keys, self.values) if tensor is not None]
        return [*pair, *self.conv_states.values(), *self.recurrent_states.values()]


Snapshot = tuple[LayerState, ...]


def snapshot(cache: Any) -> Snapshot:
    """Copy the states out of a transformers cache."""
    states = []
    for layer in cache.layers:
        if hasattr(layer, "recurrent_states"):
            conv = {i: state.clone() for i, state in layer.conv_states.items()}
            recurrent = {i: state.clone() for i, state in layer.recurrent_states.items()}
            states.append(LayerState(None, None, conv, recurrent))
        else:
            # Keys and values grow by concatenation, which copies: no clone is needed.
            states.append(LayerState(layer.keys, layer.values, {}, {}))
    return tuple(states)


def restore(states: Snapshot, cache: Any) -> None:
    """Put the states into a fresh cache; the snapshot stays untouched."""
    for index, state in enumerate(states):
        layer = cache.layers[index]
        if state.keys is not None:
            layer.update(state.keys, state.values)
        for i, conv in state.conv_states.items():
            layer.update_conv_state(conv, i)
        for i, recurrent in state.recurrent_states.items():
            layer.update_recurrent_state(recurrent, i)


class PrefixCache:
    """Least recently used snapshots within ``max_bytes``; 0 keeps nothing."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, ids: Sequence[int], ends: Sequence[int]) -> tuple[int, Snapshot | None]:
        """The longest kept beginning of ``ids`` that ends at one of ``ends``; (0, None) if there is none."""
        for end in reversed(ends):
            key = _key(ids[:end])
            if key in self._kept:
                self._kept.move_to_end(key)
                self.hits += 1
                return end, self._kept[key]
        return 0, None

    def keep(self, ids: Sequence[int], states: Snapshot) -> None:
        size = _bytes(states)
        key = _key(ids)
        if size > self.max_bytes or key in self._kept:
            return
        self._kept[key] = states
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.bytes -= _bytes(dropped)


def _key(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()


def _bytes(states: Snapshot) -> int:
    return sum(tensor.numel() * tensor.element_size() for state in states for tensor in state.tensors())
