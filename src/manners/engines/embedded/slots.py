"""The cache of the running batch: one row a request, rows packed to the front.

Legend: S rows that exist, B rows that one step computes (the running ones, padded), H heads,
T positions, D head dimension.

transformers' own caches grow all rows together. Here each row has its own length: a step writes
every row's key at that row's next position, and a mask hides what lies behind it. A finished row
is overwritten by the last one, so the running rows are always a slice from 0 and no step gathers.

B and T are rounded up, to ROW_STEP and POSITION_STEP. The matrix kernels choose their order of
summation by shape, below 16 rows another one than above; with these steps a row's numbers are the
same bits whoever runs beside it (tests/engines/test_runner.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from ...errors import EngineError

ROW_STEP = 16
POSITION_STEP = 64


class Layout:
    """What all layers of one step share: how many rows and positions, and where each row writes."""

    def __init__(self) -> None:
        self.rows = 0
        self.positions = 0
        self.at_B: Tensor = torch.empty(0, dtype=torch.long)
        self.row_B: Tensor = torch.empty(0, dtype=torch.long)


class SlotAttention(DynamicLayer):  # type: ignore[misc]
    """Keys and values [S, H, T, D]; :meth:`update` writes one position a row."""

    def __init__(self, layout: Layout, like: DynamicLayer, rows: int) -> None:
        super().__init__()
        self.layout = layout
        _, heads, positions, _ = like.keys.shape
        capacity = _round_up(positions + 1, POSITION_STEP)
        self.keys = like.keys.new_zeros(rows, heads, capacity, like.keys.shape[-1])
        self.values = like.values.new_zeros(rows, heads, capacity, like.values.shape[-1])
        self.is_initialized = True

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        layout = self.layout
        self.keys[layout.row_B, :, layout.at_B] = key[:, :, 0]
        self.values[layout.row_B, :, layout.at_B] = value[:, :, 0]
        rows, positions = layout.rows, layout.positions
        return self.keys[:rows, :, :positions], self.values[:rows, :, :positions]

    def reserve(self, rows: int, positions: int) -> None:
        """Make room; what is there keeps its place."""
        have_rows, heads, have_positions, _ = self.keys.shape
        if rows <= have_rows and positions <= have_positions:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            # Doubling keeps the copies few while replies grow.
            wide = positions if positions <= have_positions else max(positions, 2 * have_positions)
            new = old.new_zeros(max(rows, have_rows), heads, max(wide, have_positions), old.shape[-1])
            new[:have_rows, :, :have_positions] = old
            setattr(self, name, new)

    def put(self, row: int, layer: DynamicLayer) -> None:
        length = layer.keys.shape[-2]
        for name in ("keys", "values"):
            own = getattr(self, name)[row]
            own[:, :length] = getattr(layer, name)[0]
            # A masked NaN left by another request would still be multiplied by zero, which is NaN.
            own[:, length:] = 0

    def move(self, source: int, target: int) -> None:
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]


class SlotState(LinearAttentionLayer):  # type: ignore[misc]
    """Convolution and recurrent states [S, ...]; a step sees and overwrites the first B rows."""

    def __init__(self, layout: Layout, like: LinearAttentionLayer, rows: int) -> None:
        super().__init__(number_of_states=like.number_of_states)
        self.layout = layout
        self.all: dict[str, dict[int, Tensor]] = {"conv_states": {}, "recurrent_states": {}}
        for state in range(like.number_of_states):
            for name, stores in self.all.items():
                source = getattr(like, name)[state]
                stores[state] = source.new_zeros(rows, *source.shape[1:])
            self.conv_kernel_size[state] = like.conv_kernel_size[state]
            self.is_conv_states_initialized[state] = True
            self.is_recurrent_states_initialized[state] = True
            self.has_previous_state[state] = True
        self.dtype, self.device = like.dtype, like.device

    def begin_step(self) -> None:
        for name, stores in self.all.items():
            for state, store in stores.items():
                getattr(self, name)[state] = store[: self.layout.rows]

    def reserve(self, rows: int, positions: int) -> None:
        for stores in self.all.values():
            for state, old in stores.items():
                if rows > old.shape[0]:
                    stores[state] = old.new_zeros(rows, *old.shape[1:])
                    stores[state][: old.shape[0]] = old

    def put(self, row: int, layer: LinearAttentionLayer) -> None:
        for name, stores in self.all.items():
            for state, store in stores.items():
                store[row] = getattr(layer, name)[state][0]

    def move(self, source: int, target: int) -> None:
        for stores in self.all.values():
            for store in stores.values():
                store[target] = store[source]


class Slots:
    """The running rows: admit after a prompt, step together, remove when done."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.lengths: list[int] = []
        self._layout = Layout()
        self._cache: Any = None

    def __len__(self) -> int:
        return len(self.lengths)

    def admit(self, cache: Any, length: int) -> int:
        """Copy the only row of ``cache`` in; returns its row. ``length`` tokens are in it."""
        row = len(self.lengths)
        rows = min(_round_up(max(row + 1, 2 * row), ROW_STEP), _round_up(self.max_rows, ROW_STEP))
        if self._cache is None:
            self._cache = Cache(layers=[_slot_layer(self._layout, layer, rows) for layer in cache.layers])
        for own, layer in zip(self._cache.layers, cache.layers, strict=True):
            own.reserve(rows, _round_up(length + 1, POSITION_STEP))
            own.put(row, layer)
        self.lengths.append(length)
        return row

    def remove(self, row: int) -> int:
        """Forget a row; the last row takes its place. Returns the row that moved (maybe ``row`` itself)."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self._cache.layers:
                layer.move(last, row)
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        return last

    def clear(self) -> None:
        """Forget everything, also the memory: after a failure nothing of it is trusted."""
        self.lengths.clear()
        self._cache = None

    def begin_step(self, device: torch.device) -> tuple[Any, Tensor, Tensor]:
        """Lay out one step.

        Returns:
            the cache for the model, positions int64 [B, 1], and the mask, bool [B, 1, 1, T], true
            where a row may look. Rows beyond the running ones compute on leftovers; nothing reads them.
        """
        rows = _round_up(len(self.lengths), ROW_STEP)
        positions = _round_up(max(self.lengths) + 1, POSITION_STEP)
        at_B = torch.tensor(self.lengths + [0] * (rows - len(self.lengths)), device=device)
        layout = self._layout
        layout.rows, layout.positions, layout.at_B = rows, positions, at_B
        layout.row_B = torch.arange(rows, device=device)
        for layer in self._cache.layers:
            layer.reserve(rows, positions)
            if isinstance(layer, SlotState):
                layer.begin_step()
        mask_BT = torch.arange(positions, device=device)[None] <= at_B[:, None]
        return self._cache, at_B[:, None], mask_BT[:, None, None]

    def end_step(self) -> None:
        """Every row has one token more."""
        self.lengths = [length + 1 for length in self.lengths]


def _slot_layer(layout: Layout, like: Any, rows: int) -> SlotAttention | SlotState:
    if type(like) is DynamicLayer:
        return SlotAttention(layout, like, rows)
    if type(like) is LinearAttentionLayer:
        return SlotState(layout, like, rows)
    raise EngineError(
        "unsupported-model",
        where="model",
        found=f"a layer caches in a {type(like).__name__}",
        consequence="The embedded server batches full attention and linear attention only.",
        fix="serve this model with vLLM or SGLang and give its URL",
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
