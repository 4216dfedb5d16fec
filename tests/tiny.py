"""A tiny Qwen3.5 text model with random weights, grown from a seed: no test downloads anything.

It has the shape of the real family (DeltaNet layers, then one with attention; gated q_proj; BF16
safetensors; ChatML tokenizer and template), outlier channels in weights and norms so that NVFP4
rounding is felt, and widths that are multiples of 64. It says nothing sensible.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

VOCABULARY = 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Added but not special: decoding keeps them, so that a leaked <think> is seen.
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CORPUS = (
    "You are Annie, a warm voice companion. Be concise. Never use markdown.",
    "What is the capital of France? The capital of France is Paris. What is two plus three?",
    "Do you remember what I said about the garden? search_memory query web_search latest news",
    "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "Good morning! I am glad that you are back home, and I would love to hear how your evening went.",
    "Yesterday we talked about your sourdough project, the marathon lessons and a trip to the mountains.",
    '<function=web_search>\n<parameter=query>\nweather\n</parameter>\n</function> {"name": "arguments"}',
)


def make_tiny_parent(
    folder: Path,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 4,
    *,
    tie_word_embeddings: bool = False,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> Path:
    """Write a parent into ``folder`` (made if needed) and return it.

    Args:
        folder: where config, shards, tokenizer and chat template go.
        seed: of the weights; the tokenizer is always the same one.
        hidden: width, a multiple of 64.
        layers: every fourth has attention, the others DeltaNet.
        tie_word_embeddings: no lm_head tensor; the embedding is used twice.
        max_shard_size: a small value such as "100KB" gives several shards and an index.
        dtype: of the weights on disk.
        config: further fields of Qwen3_5TextConfig, over those chosen here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    config = {"tie_word_embeddings": tie_word_embeddings, "eos_token_id": 2, "pad_token_id": 0, **config}
    model = tiny_model(seed, hidden, layers, **config)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    template = chat_template()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _edit_json(folder / "tokenizer_config.json", chat_template=template)
    _edit_json(folder / "generation_config.json", eos_token_id=[2, 0], pad_token_id=0, do_sample=False)
    return folder


def tiny_model(seed: int = 0, hidden: int = 64, layers: int = 4, **config: Any) -> Qwen3_5ForCausalLM:
    """The model in memory, float32, eval mode. The global random state is left as it was."""
    heads = hidden // 32
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "bos_token_id": None,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).eval()
        _roughen(model)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens, trained in memory; ids 0..2 are the special tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def chat_template() -> str:
    """The template that the demo pair uses."""
    return (resources.files("manners") / "demo" / "chat_template.jinja").read_text(encoding="utf-8")


def sample_ids(seed: int = 0, rows: int = 2, length: int = 24) -> list[list[int]]:
    """Random token ids, e.g. for calibration."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(3, VOCABULARY, (rows, length), generator=generator).tolist()
    return ids


def _roughen(model: torch.nn.Module) -> None:
    """Larger weights with a few outlier columns, and outlier channels in the norms."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
                if "embed_tokens" not in name:
                    parameter[:, torch.randperm(parameter.shape[1])[:2]] *= 8
            elif name.endswith("layernorm.weight"):
                parameter[torch.randperm(parameter.shape[0])[:2]] += 6


def _edit_json(path: Path, **fields: Any) -> None:
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**data, **fields}, indent=2) + "\n", encoding="utf-8")
