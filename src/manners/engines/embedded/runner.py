"""The model: a prompt goes in alone, piece by piece; then its row steps together with all others.

Prompts are not batched with each other, so a prompt's numbers depend on nothing but its tokens.
Steps are, and ``slots`` keeps their rows independent to the bit on a CPU for models whose matrices
the kernels do not split along K (up to about 1024 columns; :meth:`Runner.check_independence`
measures it at the start). Larger models and GPUs keep it to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError
from .deltanet import speed_up
from .merge import merge_mlps
from .prefix import PrefixCache, cuts, restore, snapshot
from .slots import Slots


class Runner:
    """One model and its running rows. Not thread-safe: one thread owns it.

    Args:
        model: a transformers causal language model in eval mode.
        end_ids: tokens that end a turn; prompts are cut after them.
        max_rows: how many requests may run at once.
        prefix_bytes: memory for the states of shared prompt beginnings; 0 switches it off.
    """

    def __init__(
        self, model: Any, *, end_ids: Collection[int], max_rows: int = 64, prefix_bytes: int = 1 << 28
    ) -> None:
        self.device: torch.device = model.device
        self.slots = Slots(max_rows)
        self.prefix = PrefixCache(prefix_bytes)
        self._backbone = model.base_model
        self._head = model.get_output_embeddings()
        self._config = model.config.get_text_config()
        self._end_ids = frozenset(end_ids)
        if self.device.type == "cpu":
            speed_up(model)
            merge_mlps(model)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> tuple[Any, Tensor]:
        """Run a prompt of at least one token.

        Returns:
            its cache (one row), and the logits of what follows, float [V].
        """
        from transformers import DynamicCache

        ends = cuts(ids, self._end_ids)
        cache = DynamicCache(config=self._config)
        # The last piece is computed always: its hidden state gives the first token.
        begin, states = self.prefix.longest(ids, ends[:-1])
        if states is not None:
            restore(states, cache)
        hidden_BTH = None
        for end in ends[ends.index(begin) + 1 if begin else 0 :]:
            piece = torch.tensor([ids[begin:end]], device=self.device)
            hidden_BTH = self._backbone(
                input_ids=piece, past_key_values=cache, use_cache=True
            ).last_hidden_state
            begin = end
            if end != ends[-1] and self.prefix.max_bytes:
                self.prefix.keep(ids[:end], snapshot(cache))
        assert hidden_BTH is not None
        logits_V: Tensor = self._head(hidden_BTH[:, -1])[0]
        return cache, logits_V

    @torch.inference_mode()
    def admit(self, cache: Any, length: int) -> int:
        """Give a prefilled request a row among the running ones; returns the row."""
        return self.slots.admit(cache, length)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Feed each running row its newest token; logits of the next, float [n, V]."""
        cache, position_B1, mask_B11T = self.slots.begin_step(self.device)
        padded = [*tokens, *[tokens[0]] * (len(position_B1) - len(tokens))]
        hidden_B1H = self._backbone(
            input_ids=torch.tensor(padded, device=self.device)[:, None],
            position_ids=position_B1,
            attention_mask=mask_B11T,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        self.slots.end_step()
        logits_BV: Tensor = self._head(hidden_B1H[:, 0])
        return logits_BV[: len(tokens)]

    @torch.inference_mode()
    def remove(self, row: int) -> int:
        """End a row; the last one takes its place. Returns the row that moved."""
        return self.slots.remove(row)

    def check_independence(self, vocabulary: int) -> bool:
        """Whether one row gives the same bits alone and among others, tried on made-up tokens.

        Leaves no rows behind. Serves as warm-up, too: the first calls are the slow ones.
        """
        if len(self.slots):
            raise RuntimeError("rows are running")
        prompt = [(7 * i + 3) % vocabulary for i in range(40)]
        alone = self._three_steps(prompt, before=0, after=0)
        crowd = min(self.slots.max_rows - 1, 37)
        among = self._three_steps(prompt, before=crowd // 2, after=crowd - crowd // 2)
        return torch.equal(alone, among)

    def _three_steps(self, prompt: list[int], before: int, after: int) -> Tensor:
        lengths = (
            [5 + (11 * i) % 90 for i in range(before)]
            + [len(prompt)]
            + [3 + (7 * i) % 80 for i in range(after)]
        )
        rows = [prompt[:1] * length if i != before else prompt for i, length in enumerate(lengths)]
        for ids in rows:
            self.admit(self.prefill(ids)[0], len(ids))
        steps = [self.step([prompt[step]] * len(rows))[before] for step in range(3)]
        self.slots.clear()
        return torch.stack(steps)


def load(folder: str | Path, device: str) -> Any:
    """The model of a parent or canonical folder: float32 on a CPU, bfloat16 on a GPU.

    Raises:
        EngineError: ``no-device`` if the device is not there, ``unsupported-model`` for a model
            with logit soft-capping, which the head here would skip.
        CheckpointError: from the reader.
    """
    from ...checkpoint.load import load_model

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError(
            "no-device", where=device, found="this machine shows no CUDA device", fix="use --device cpu"
        )
    model = load_model(folder, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        raise EngineError(
            "unsupported-model",
            where=str(folder),
            found="final_logit_softcapping",
            fix="serve this model with vLLM or SGLang and give its URL",
        )
    return model
