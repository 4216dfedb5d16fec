"""Qwen3.5's DeltaNet layer on a CPU, in fewer passes over its state than transformers' reference.

Legend: B rows, T positions of this call, C channels of the convolution, H value heads, K and V head
dimensions of keys and values; S_BHKV is the recurrent state.

The mathematics is transformers' (``Qwen3_5GatedDeltaNet``, 5.23; Gated Delta Networks, arXiv
2412.06464): per position, with decay a and learning rate b,

    S <- a S + k (b (v - a S^T k))^T        out = S^T q

- one position: ``S^T k`` and ``S^T q`` are read in one pass, the update is one more.
- many positions: chunks of at most 64 that are not padded, and the triangular system is solved
  for the corrected values only, because the state before the chunk is known.

Results differ from the reference by rounding (about 1e-6 in the logits). :func:`speed_up` swaps the
forward of one model's layers after comparing them with their own, and changes nothing else.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...nvfp4.linear import NVFP4Linear
from .merge import Merged

CHUNK = 64
TOLERANCE = 1e-3
_log = logging.getLogger(__name__)


def speed_up(model: Any) -> bool:
    """Give the model's DeltaNet layers the forward of this module, if it computes the same.

    Returns:
        whether it did; false for models without such layers and where the two disagree by more
        than TOLERANCE of the largest value, as they would after a change in transformers.
    """
    layers = [module for module in model.modules() if type(module).__name__ == "Qwen3_5GatedDeltaNet"]
    if not layers:
        return False
    if not _agrees(model, layers[0]):
        _log.warning("this transformers' DeltaNet is not the one known here; its own, slower forward is used")
        return False
    for layer in layers:
        layer.forward = FastDeltaNet(layer).forward
    return True


class FastDeltaNet:
    """The forward of one ``Qwen3_5GatedDeltaNet``, over that module's own weights."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._qkv_z = Merged([layer.in_proj_qkv, layer.in_proj_z])
        self._b_a = Merged([layer.in_proj_b, layer.in_proj_a])

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """As the module's own, which is called for what this one cannot do.

        Args:
            hidden_states: [B, T, hidden].
            cache_params: its states are overwritten. Without one, the module's own forward runs.
            attention_mask: marks padding; with one, the module's own forward runs.
        """
        layer = self._layer
        if cache_params is None or attention_mask is not None:
            own: Tensor = type(layer).forward(layer, hidden_states, cache_params, attention_mask, **others)
            return own
        rows, positions, _width = hidden_states.shape
        state_BHKV = cache_params.get_recurrent_state(layer.layer_idx)
        decoding = state_BHKV is not None and positions == 1
        qkv, z = self._qkv_z(hidden_states)
        b, a = self._b_a(hidden_states)
        qkv_BCT = qkv.transpose(1, 2)
        if decoding:
            qkv_BTC = _conv_step(layer, qkv_BCT, cache_params.get_conv_state(layer.layer_idx))[:, None]
        else:
            qkv_BTC = _conv(layer, qkv_BCT, cache_params)
        q, k, v = torch.split(qkv_BTC, [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
        q_BHTK = _unit(_heads(q, layer.head_k_dim, layer.num_v_heads)) * layer.head_k_dim**-0.5
        k_BHTK = _unit(_heads(k, layer.head_k_dim, layer.num_v_heads))
        v_BHTV = _heads(v, layer.head_v_dim, layer.num_v_heads)
        b_BHT = b.sigmoid().transpose(1, 2).float()
        rate_BTH = functional.softplus(a.float() + layer.dt_bias)
        log_decay_BHT = (-layer.A_log.float().exp() * rate_BTH).transpose(1, 2)
        if decoding:
            out_BHTV = _step(q_BHTK, k_BHTK, v_BHTV, log_decay_BHT, b_BHT, state_BHKV)
        else:
            if state_BHKV is None:
                state_BHKV = q_BHTK.new_zeros(rows, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
            out_BHTV, state_BHKV = _chunks(q_BHTK, k_BHTK, v_BHTV, log_decay_BHT, b_BHT, state_BHKV)
            cache_params.update_recurrent_state(state_BHKV, layer.layer_idx)
        out = out_BHTV.transpose(1, 2).reshape(-1, layer.head_v_dim).to(hidden_states.dtype)
        normed = layer.norm(out, z.reshape(-1, layer.head_v_dim))
        mixed: Tensor = layer.out_proj(normed.reshape(rows, positions, -1))
        return mixed


def _heads(x_BTC: Tensor, width: int, heads: int) -> Tensor:
    """float32 [B, heads, T, width]; a key head serves several value heads where there are fewer of them."""
    x: Tensor = x_BTC.reshape(*x_BTC.shape[:2], -1, width).transpose(1, 2).float()
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def _conv_step(layer: Any, new_BC1: Tensor, state: Tensor) -> Tensor:
    """Shift the newest inputs in (state [B, C, W], in place) and convolve once: [B, C]."""
    window = torch.cat([state[..., 1:], new_BC1], dim=-1)
    state.copy_(window)
    return functional.silu((window * layer.conv1d.weight.squeeze(1)).sum(dim=-1))


def _conv(layer: Any, new_BCT: Tensor, cache: Any) -> Tensor:
    """Causal depthwise convolution over T positions that follow what the cache holds: [B, T, C]."""
    positions, width = new_BCT.shape[-1], layer.conv_kernel_size
    seen = cache.update_conv_state(new_BCT, layer.layer_idx, conv_kernel_size=width)
    seen = functional.pad(seen, (width - 1, 0))[..., -(positions + width - 1) :]
    weight_CW = layer.conv1d.weight.squeeze(1)
    out = seen[..., :positions] * weight_CW[:, :1]
    for tap in range(1, width):
        out.addcmul_(seen[..., tap : tap + positions], weight_CW[:, tap : tap + 1])
    return functional.silu(out).transpose(1, 2)


def _step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, b: Tensor, state_BHKV: Tensor) -> Tensor:
    """One position; all inputs [B, H, 1, ...]. The state is updated in place; returns [B, H, 1, V]."""
    decay_BH11 = log_decay.exp()[..., None]
    read_BH2V = torch.cat([k, q], dim=2) @ state_BHKV
    change = (v - decay_BH11 * read_BH2V[:, :, :1]) * b[..., None]
    out = decay_BH11 * read_BH2V[:, :, 1:] + (q * k).sum(dim=-1, keepdim=True) * change
    state_BHKV.mul_(decay_BH11).addcmul_(k.transpose(2, 3), change)
    return out


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, b: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """All T positions; inputs [B, H, T, ...]. Returns [B, H, T, V] and the new state."""
    outs = []
    for begin in range(0, q.shape[2], CHUNK):
        part = slice(begin, begin + CHUNK)
        out, state_BHKV = _chunk(
            q[:, :, part], k[:, :, part], v[:, :, part], log_decay[:, :, part], b[:, :, part], state_BHKV
        )
        outs.append(out)
    return torch.cat(outs, dim=2), state_BHKV


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    so_far = log_decay.cumsum(dim=-1)
    # between[i, j]: decay from after position j to position i; exp never sees a positive number.
    between = (so_far[..., :, None] - so_far[..., None, :]).clamp_(max=0).exp_().tril_()
    k_transposed, kb = k.transpose(2, 3), k * b[..., None]
    since_begin = so_far.exp()[..., None]
    wanted = v * b[..., None] - (kb * since_begin) @ state
    # The diagonal counts as one and what is above it is not read.
    values = torch.linalg.solve_triangular(
        (kb @ k_transposed).mul_(between), wanted, upper=False, unitriangular=True
    )
    out = (q * since_begin) @ state + (q @ k_transposed).mul_(between) @ values
    to_end = (so_far[..., -1:] - so_far).exp()[..., None]
    state = state * since_begin[:, :, -1:] + (k * to_end).transpose(2, 3) @ values
    return out, state


@torch.inference_mode()
def _agrees(model: Any, layer: Any) -> bool:
    """Compare the two forwards of one layer on made-up input: 70 positions, 5 more, then one."""
    from transformers import DynamicCache

    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 76, config.hidden_size, generator=generator).to(layer.in_proj_a.weight)
    pieces = (x[:, :70], x[:, 70:75], x[:, 75:])
    theirs, ours = DynamicCache(config=config), DynamicCache(config=config)
    # Rounding the input of out_proj would turn a difference in the last bit into a step of the grid.
    rounding = [m for m in layer.modules() if isinstance(m, NVFP4Linear) and m.quantize_input]
    try:
        for linear in rounding:
            linear.quantize_input = False
        fast = FastDeltaNet(layer)
        for piece in pieces:
            want = type(layer).forward(layer, piece, cache_params=theirs)
            got = fast.forward(piece, ours)
            if not bool((want - got).abs().max() <= TOLERANCE * want.abs().max()):
                return False
    except (AttributeError, RuntimeError, TypeError):
        _log.exception("the comparison of the two DeltaNet forwards failed")
        return False
    finally:
        for linear in rounding:
            linear.quantize_input = True
    return True
