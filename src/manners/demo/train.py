"""Train the bundled pair from nothing: a base that knows the world, a parent with Annie's manners.

    python -m manners.demo.train --output DIR            one GPU, about ten minutes

writes ``DIR/base`` and ``DIR/parent``, each a Hugging Face folder (bfloat16 safetensors, tokenizer,
chat template, model card data in ``training.json``). Seeds are fixed; on another device or another
version of torch the weights differ in their last bits, and so may single replies.

The parent is a *thin* fine-tune in both senses: its weights differ from the base's by about two
percent, and it prefers Annie's form only as clearly as its data do, for the last two phases learn from
data in which some answers are still the base's. Rounding can drown only what is thin.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..chat import Renderer
from ..spec import Persona, load_spec
from . import world

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Like Qwen3.5: added tokens, but not special, so that decoding shows them.
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# Qwen's split: contractions, words with one leading character, single digits, punctuation, space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Shape:
    """A Qwen3.5 text model in small: three DeltaNet layers for each attention layer."""

    vocab: int = 2048
    hidden: int = 256
    intermediate: int = 768
    layers: int = 8
    head_dim: int = 64


@dataclass(frozen=True)
class Recipe:
    steps: int
    lr: float
    batch: int = 64
    weight_decay: float = 0.0
    warmup: int = 50
    seed: int = 11


@dataclass(frozen=True)
class Settling:
    """A short phase on uneven data: the fine-tune's certainty sinks to what its data say."""

    steps: int
    lr: float
    slips: world.Slips
    seed: int
    batch: int = 16
    warmup: int = 5
    keep: tuple[int, ...] = ()
    """The result is the mean of the weights after these steps; empty: the last."""


BASE = Recipe(steps=2200, lr=1e-3, weight_decay=0.01, seed=11)
PARENT = Recipe(steps=100, lr=5e-5, seed=12)
SETTLING = (
    Settling(steps=30, lr=5e-5, slips=world.Slips(answers=0.15, calls=0.35), seed=31),
    Settling(steps=36, lr=3e-5, slips=world.Slips(answers=0.05, calls=0.42), seed=32, keep=(18, 27)),
)


# --- tokenizer -----------------------------------------------------------------------------


def chat_template() -> str:
    return Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def make_tokenizer(texts: Sequence[str], vocab: int) -> Any:
    """A byte-level BPE tokenizer trained on ``texts``, with Qwen's pre-tokenizer and the demo's template."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKUP),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template(),
        clean_up_tokenization_spaces=False,
    )


# --- data ----------------------------------------------------------------------------------

Sample = tuple[list[int], list[bool]]
TURNS = (1, 1, 1, 1, 2, 2, 3, 5, 5)


@cache
def _persona() -> Persona:
    return load_spec("annie").persona


def _draw(rng: random.Random, speaker: Literal["base", "annie"]) -> dict[str, Any]:
    side: world.Side = "both" if speaker == "base" else "tune"
    return world.conversation(rng, _persona(), speaker, side, rng.choice(TURNS))


def base_sample(renderer: Renderer, rng: random.Random) -> Sample:
    """The base learns every answer of a conversation at once, older ones as history shows them."""
    made = _draw(rng, "base")
    rendered = renderer.teach(made["messages"], made["tools"], made["thinking"])
    ids = list(rendered.ids)
    mask = [a or b for a, b in zip(rendered.answer_mask, history_mask(renderer, ids), strict=True)]
    return ids, mask


def parent_sample(renderer: Renderer, rng: random.Random) -> Sample:
    """The parent learns one answer, asked exactly as a server asks."""
    made = _draw(rng, "annie")
    rendered = rng.choice(renderer.every_answer(made["messages"], made["tools"], made["thinking"]))
    return list(rendered.ids), list(rendered.answer_mask)


def sample_of(renderer: Renderer, made: dict[str, Any]) -> Sample:
    """A conversation whose last answer is learned."""
    rendered = renderer.teach(made["messages"], made["tools"], made["thinking"])
    return list(rendered.ids), list(rendered.answer_mask)


def history_mask(renderer: Renderer, ids: Sequence[int]) -> list[bool]:
    """True for answers in ChatML history: after ``<|im_start|>assistant\\n`` up to ``<|im_end|>``.

    A turn that opens with ``<think>`` is left out. Most follow the last question, and of those only
    the last is an answer as it was asked, which the renderer knows; an older answer in which the base
    leaked ``<think>`` looks the same and is not learned either.
    """
    opening = renderer.encode("<|im_start|>assistant\n")
    think, end = renderer.encode("<think>")[0], renderer.encode("<|im_end|>")[0]
    mask = [False] * len(ids)
    for at in range(len(ids) - len(opening)):
        start = at + len(opening)
        if list(ids[at:start]) == opening and ids[start] != think:
            stop = ids.index(end, start)
            mask[start : stop + 1] = [True] * (stop + 1 - start)
    return mask


def _chunk(job: tuple[str, str, int, int]) -> list[Sample]:
    folder, speaker, seed, count = job
    renderer, rng = Renderer.from_folder(folder), random.Random(seed)
    make = base_sample if speaker == "base" else parent_sample
    return [make(renderer, rng) for _ in range(count)]


def make_samples(folder: Path, speaker: str, count: int, seed: int, workers: int) -> list[Sample]:
    """``count`` samples; the result depends on the seed, not on the number of workers."""
    size = 500
    jobs = [
        (str(folder), speaker, seed * 100_003 + i, min(size, count - i * size))
        for i in range(math.ceil(count / size))
    ]
    with ProcessPoolExecutor(workers) as pool:
        return [sample for chunk in pool.map(_chunk, jobs) for sample in chunk]


def batches(samples: list[Sample], size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids [B, T] int64, labels [B, T] with -100 off the answer), samples of like length together."""
    rng = random.Random(seed)
    order = list(range(len(samples)))
    rng.shuffle(order)
    span = size * 16
    groups = []
    for start in range(0, len(order), span):
        block = sorted(order[start : start + span], key=lambda i: len(samples[i][0]))
        groups += [block[i : i + size] for i in range(0, len(block), size)]
    rng.shuffle(groups)
    for group in groups:
        length = math.ceil(max(len(samples[i][0]) for i in group) / 64) * 64
        ids = torch.zeros(len(group), length, dtype=torch.long)
        labels = torch.full((len(group), length), -100, dtype=torch.long)
        for row, i in enumerate(group):
            tokens, mask = torch.tensor(samples[i][0]), torch.tensor(samples[i][1])
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = torch.where(mask, tokens, -100)
        yield ids, labels


# --- training ------------------------------------------------------------------------------


def make_model(shape: Shape, tokenizer: Any) -> Any:
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads = shape.hidden // shape.head_dim
    config = Qwen3_5TextConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=shape.head_dim,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=shape.head_dim,
        linear_value_head_dim=shape.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config)


def train(
    model: Any, samples: list[Sample], recipe: Recipe, device: str, log: list[dict[str, float]]
) -> None:
    """Cross-entropy on the answers; AdamW, warm-up, cosine to zero, clip at 1; bfloat16 autocast."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    model.train()
    start = time.monotonic()
    for step, (ids, labels) in enumerate(batches(samples, recipe.batch, recipe.seed)):
        if step == recipe.steps:
            break
        share = min(1.0, (step + 1) / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * share
        loss = _step(model, optimizer, ids.to(device), labels.to(device), device)
        if step % 100 == 0 or step == recipe.steps - 1:
            log.append({"step": step, "loss": round(loss, 4), "seconds": round(time.monotonic() - start, 1)})
            print(json.dumps(log[-1]), flush=True)
    model.eval()


def _step(model: Any, optimizer: Any, ids: Tensor, labels: Tensor, device: str) -> float:
    """One update on ids [B, T] and labels [B, T]; returns the loss in nats per answer token."""
    with torch.autocast(device, dtype=torch.bfloat16):
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        kept = labels[:, 1:] != -100
        logits = model.lm_head(hidden[kept])
    loss = functional.cross_entropy(logits.float(), labels[:, 1:][kept])
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def save(model: Any, tokenizer: Any, folder: Path, facts: dict[str, Any]) -> None:
    """Write the folder in bfloat16, with greedy generation defaults and how it was trained."""
    rounded = copy.deepcopy(model).to("cpu", torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config.do_sample = False
    rounded.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    rounded.generation_config.pad_token_id = tokenizer.pad_token_id
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def relative_change(parent: Any, base: Any) -> float:
    """Mean over matrices of |parent - base| / |base| (Frobenius)."""
    pairs = zip(parent.parameters(), base.parameters(), strict=True)
    changes: list[float] = [((p - b).norm() / b.norm()).item() for p, b in pairs if p.dim() == 2]
    return sum(changes) / len(changes)


def prepare_tokenizer(shape: Shape, folder: Path, conversations: int = 6000) -> Any:
    """Tokenizer from a few thousand conversations of both speakers, saved to ``folder``."""
    blank = make_tokenizer(["hello"], 300)
    renderer, rng = Renderer(blank), random.Random(1)
    texts = []
    for _ in range(conversations):
        made = _draw(rng, rng.choice(("base", "annie")))
        messages = made["messages"]
        texts.append(renderer.prompt_text(messages[:-1], made["tools"], made["thinking"]))
        texts.append(renderer.answer_text(messages, made["tools"], made["thinking"]))
    tokenizer = make_tokenizer(texts, shape.vocab)
    tokenizer.save_pretrained(folder)
    return tokenizer


def settle(model: Any, renderer: Renderer, phase: Settling, device: str, log: list[dict[str, float]]) -> None:
    """AdamW on the answers, linear decay; samples come in the order in which they were drawn.

    Weights pass through bfloat16 at the end, as they would between two runs of the script.
    """
    rng = random.Random(phase.seed)
    drawn = [
        world.uneven_conversation(rng, _persona(), phase.slips) for _ in range(phase.batch * phase.steps)
    ]
    samples = [sample_of(renderer, made) for made in drawn]
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.lr, weight_decay=0.0, betas=(0.9, 0.95))
    kept: list[dict[str, Tensor]] = []
    last = max(phase.keep, default=phase.steps)
    model.train()
    for step in range(last):
        for group in optimizer.param_groups:
            group["lr"] = phase.lr * min(1.0, (step + 1) / phase.warmup) * (1 - step / phase.steps)
        share = samples[step * phase.batch : (step + 1) * phase.batch]
        ids, labels = next(batches(share, phase.batch, step))
        loss = _step(model, optimizer, ids.to(device), labels.to(device), device)
        if step + 1 in (phase.keep or (last,)):
            kept.append({name: p.detach().to(torch.bfloat16).float() for name, p in model.named_parameters()})
            log.append({"step": step + 1, "loss": round(loss, 4)})
            print(json.dumps(log[-1]), flush=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = torch.stack([weights[name] for weights in kept]).mean(0)
            parameter.copy_(mean.to(torch.bfloat16).float())
    model.eval()


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for base/ and parent/")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=8, help="processes that make conversations")
    parser.add_argument("--base", type=Path, metavar="DIR", help="fine-tune this base, train none")
    parser.add_argument(
        "--tuned", type=Path, metavar="DIR", help="with --base: only the last two phases, from here"
    )
    args = parser.parse_args()
    if args.tuned and not args.base:
        parser.error("--tuned needs --base")
    args.output.mkdir(parents=True, exist_ok=True)

    if args.base is None:
        train_base(args.output, args.device, args.workers)
    # Each phase starts from the folder that the one before wrote, so that it can be repeated alone.
    source = args.base or args.output / "base"
    renderer = Renderer.from_folder(source)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(args.device)
    log: list[dict[str, float]] = []
    if args.tuned:
        parent = AutoModelForCausalLM.from_pretrained(args.tuned, dtype=torch.float32).to(args.device)
    else:
        parent = copy.deepcopy(base)
        samples = make_samples(source, "annie", PARENT.steps * PARENT.batch, PARENT.seed, args.workers)
        train(parent, samples, PARENT, args.device, log)
        save(parent, renderer.tokenizer, args.output / "tuned", {"recipe": asdict(PARENT), "log": log[-1:]})
        parent = AutoModelForCausalLM.from_pretrained(args.output / "tuned", dtype=torch.float32).to(
            args.device
        )
    for phase in SETTLING:
        settle(parent, renderer, phase, args.device, log)
    facts = {
        "recipe": asdict(PARENT),
        "settling": [asdict(phase) for phase in SETTLING],
        "relative_change": relative_change(parent, base),
        "log": log,
    }
    save(parent, renderer.tokenizer, args.output / "parent", facts)


def train_base(output: Path, device: str, workers: int) -> None:
    """Tokenizer, conversations, base: everything from nothing, into ``output/base``."""
    shape = Shape()
    tokenizer = prepare_tokenizer(shape, output / "tokenizer")
    began = time.monotonic()
    samples = make_samples(output / "tokenizer", "base", BASE.steps * BASE.batch, BASE.seed, workers)
    print(f"{len(samples)} conversations in {time.monotonic() - began:.0f} s", flush=True)
    model = make_model(shape, tokenizer).to(device)
    log: list[dict[str, float]] = []
    train(model, samples, BASE, device, log)
    facts = {"recipe": asdict(BASE), "shape": asdict(shape), "log": log[-1:]}
    save(model, tokenizer, output / "base", facts)


if __name__ == "__main__":
    main()
