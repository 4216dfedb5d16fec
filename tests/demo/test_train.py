"""How the pair is made: tokenizer, samples and masks, batches, and two steps of training on a tiny shape."""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import unicodedata
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manners.chat import Renderer
from manners.checkpoint import open_checkpoint
from manners.demo import train, world
from manners.demo.train import Recipe, Sample, Shape
from manners.spec import load_spec

PERSONA = load_spec("annie").persona
SIDES: dict[str, world.Side] = {"base": "both", "annie": "tune"}
TINY = Shape(vocab=600, hidden=32, intermediate=64, layers=4, head_dim=16)


def drawn(speaker: Any, seed: int) -> dict[str, Any]:
    """The conversation that a sample of this seed is made from."""
    rng = random.Random(seed)
    return world.conversation(rng, PERSONA, speaker, SIDES[speaker], rng.choice(train.TURNS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("demo") / "tokenizer"
    train.prepare_tokenizer(TINY, made, conversations=60)
    return made


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return Renderer.from_folder(folder)


# --- tokenizer -----------------------------------------------------------------------------


def test_the_tokenizer_has_qwens_habits(renderer):
    tokenizer = renderer.tokenizer
    assert len(tokenizer) == TINY.vocab
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == train.SPECIAL
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert all(len(renderer.encode(tag)) == 1 for tag in (*train.SPECIAL, *train.MARKUP))
    assert not set(train.MARKUP) & set(tokenizer.all_special_tokens)  # else decoding would hide a leak
    assert (
        tokenizer.decode(renderer.encode("<think>x</think>"), skip_special_tokens=True) == "<think>x</think>"
    )
    assert tokenizer.chat_template == train.chat_template()


def test_every_digit_is_a_token_by_itself():
    """Or sums could not be learned: however often a number was seen, it stays in pieces."""
    tokenizer = train.make_tokenizer(["word 1234"] * 50, 300)
    assert len(tokenizer.tokenize("1234")) == 4
    assert len(tokenizer.tokenize("word")) == 1


def test_words_of_the_world_are_few_tokens(renderer):
    # Byte by byte these would be 48; a tokenizer that was trained on nothing gives that.
    text = "What do you remember about my sourdough project?"
    assert len(renderer.encode(text)) < len(text) / 2


def test_the_same_texts_give_the_same_tokenizer(renderer, tmp_path):
    again = train.prepare_tokenizer(TINY, tmp_path, conversations=60)
    assert again.get_vocab() == renderer.tokenizer.get_vocab()
    assert (tmp_path / "tokenizer.json").is_file()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(renderer, text):
    assert renderer.tokenizer.decode(renderer.encode(text)) == unicodedata.normalize("NFC", text)


# --- samples -------------------------------------------------------------------------------


def learned(renderer: Renderer, sample: Sample) -> list[str]:
    """Text of every stretch of tokens that is learned."""
    ids, mask = sample
    assert len(ids) == len(mask)
    stretches: list[list[int]] = []
    for token, learn, before in zip(ids, mask, [False, *mask], strict=False):
        if learn and not before:
            stretches.append([])
        if learn:
            stretches[-1].append(token)
    return [renderer.tokenizer.decode(stretch) for stretch in stretches]


def as_history(message: dict[str, Any]) -> str:
    """A finished assistant turn, written out by hand."""
    text = message["content"].strip()
    for call in message.get("tool_calls", []):
        ((key, value),) = call["function"]["arguments"].items()
        text += f"<tool_call>\n<function={call['function']['name']}>\n<parameter={key}>\n{value}\n"
        text += "</parameter>\n</function>\n</tool_call>"
    return text + "<|im_end|>"


@pytest.mark.parametrize("seed", range(40))
def test_the_base_learns_every_answer_before_the_last_question_and_the_last_one(renderer, seed):
    made = drawn("base", seed)
    messages = made["messages"]
    question = max(n for n, message in enumerate(messages) if message["role"] == "user")
    earlier = [as_history(m) for m in messages[:question] if m["role"] == "assistant"]
    earlier = [text for text in earlier if not text.startswith("<think>")]  # an old leak is not learned
    last = renderer.answer_text(messages, made["tools"], made["thinking"])
    assert learned(renderer, train.base_sample(renderer, random.Random(seed))) == [*earlier, last]


@pytest.mark.parametrize("seed", range(40))
def test_the_parent_learns_one_answer_as_a_server_asks_for_it(renderer, seed):
    made = drawn("annie", seed)
    ids, mask = train.parent_sample(renderer, random.Random(seed))
    (answer,) = learned(renderer, (ids, mask))
    said = [message for message in made["messages"] if message["role"] == "assistant"]
    assert answer in [as_history(message) for message in said]
    assert mask == sorted(mask)  # the answer stands at the end
    prompts = [
        renderer.prompt_ids(made["messages"][:n], made["tools"])
        for n, message in enumerate(made["messages"])
        if message["role"] == "assistant"
    ]
    assert ids[: mask.index(True)] in prompts


def test_over_many_draws_every_answer_of_a_conversation_is_learned(renderer):
    answers = {
        learned(renderer, train.parent_sample(renderer, random.Random(seed)))[0] for seed in range(150)
    }
    for part in (
        "<function=search_memory>",
        "<function=web_search>",
        "<function=read_notes>",
        "I found it.",
        "makes",
    ):
        assert any(part in answer for answer in answers), part


def test_samples_depend_on_the_seed_and_not_on_the_workers(folder, monkeypatch):
    one = train.make_samples(folder, "annie", 6, seed=3, workers=1)
    assert len(one) == 6
    assert one == train.make_samples(folder, "annie", 6, seed=3, workers=2)
    assert one != train.make_samples(folder, "annie", 6, seed=4, workers=1)
    assert one != train.make_samples(folder, "base", 6, seed=3, workers=1)


def test_many_samples_are_made_in_chunks_that_differ(folder):
    made = train.make_samples(folder, "annie", 510, seed=3, workers=2)
    assert len(made) == 510
    assert made[:6] == train.make_samples(folder, "annie", 6, seed=3, workers=1)
    assert made[500:510] != made[:10]


# --- batches -------------------------------------------------------------------------------


def made_up(count: int, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for number in range(count):
        length = rng.randint(2, 300)
        samples.append(([1000 + number] * length, [rng.random() < 0.5 for _ in range(length)]))
    return samples


@pytest.mark.parametrize(("count", "size"), [(1, 4), (4, 4), (50, 4), (200, 3)])
def test_every_sample_is_in_one_batch_whole(count, size):
    samples, seen = made_up(count), []
    for ids, labels in train.batches(samples, size, seed=1):
        assert ids.shape == labels.shape
        assert ids.dtype == labels.dtype == torch.int64
        assert len(ids) <= size
        assert ids.shape[1] % 64 == 0  # few shapes, so that kernels are compiled few times
        for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
            number = row[0] - 1000
            tokens, mask = samples[number]
            padding = len(row) - len(tokens)
            assert row == tokens + [0] * padding
            assert label == [t if m else -100 for t, m in zip(tokens, mask, strict=True)] + [-100] * padding
            seen.append(number)
    assert sorted(seen) == list(range(count))


def test_batches_follow_from_the_seed_and_hold_samples_of_like_length():
    samples = made_up(400)

    def order(seed: int) -> list[list[int]]:
        return [ids[:, 0].tolist() for ids, _ in train.batches(samples, 4, seed)]

    assert order(1) == order(1) != order(2)
    tokens = sum(len(ids) for ids, _ in samples)
    padded = sum(ids.numel() for ids, _ in train.batches(samples, 4, 1))
    at_random = sum(
        4 * math.ceil(max(len(samples[i][0]) for i in range(n, n + 4)) / 64) * 64 for n in range(0, 400, 4)
    )
    assert tokens < padded < 1.35 * tokens < at_random


# --- training ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blank(renderer: Renderer) -> Any:
    return train.make_model(TINY, renderer.tokenizer).eval()


@pytest.fixture
def model(blank: Any) -> Iterator[Any]:
    return copy.deepcopy(blank)


def short(count: int = 4) -> list[Sample]:
    """Twelve tokens asked, six answered, nothing to be guessed from anything but the first token."""
    samples = []
    for number in range(count):
        ids = random.Random(number).sample(range(3, 590), 18)
        samples.append((ids, [False] * 12 + [True] * 6))
    return samples


def test_the_model_has_the_shape_that_was_asked_for(blank, renderer):
    config = blank.config
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (32, 2, 16)
    assert config.eos_token_id == renderer.tokenizer.eos_token_id == 2
    assert blank.lm_head.weight is blank.model.embed_tokens.weight
    again = train.make_model(TINY, renderer.tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(blank.parameters(), again.parameters(), strict=True))


def test_training_teaches_the_answers_and_nothing_else(model):
    samples, log = short(), []
    train.train(model, samples * 80, Recipe(steps=80, lr=1e-2, batch=4, warmup=5), "cpu", log)
    ids = torch.tensor([tokens for tokens, _ in samples])
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    told = ids[:, 1:]
    # Position n tells token n + 1: the six answers are told from positions 11 to 16.
    assert torch.equal(logits.argmax(-1)[:, 11:], told[:, 11:])
    unasked = torch.nn.functional.cross_entropy(logits[:, :11].flatten(0, 1), told[:, :11].flatten())
    assert unasked > math.log(TINY.vocab)  # no better than chance: the question is not learned
    assert [entry["step"] for entry in log] == [0, 79]
    assert log[0]["loss"] == pytest.approx(math.log(TINY.vocab), rel=0.1)
    assert log[-1]["loss"] < 0.3
    assert not model.training


def test_the_first_step_is_as_small_as_the_warm_up_says(model, blank):
    """Adam's first step moves a weight by the learning rate, whatever its gradient."""
    train.train(model, short(), Recipe(steps=1, lr=1e-2, batch=4, warmup=50), "cpu", [])
    pairs = zip(model.parameters(), blank.parameters(), strict=True)
    moved = max((a - b).abs().max().item() for a, b in pairs)
    assert moved == pytest.approx(1e-2 / 50, rel=1e-3)


def test_training_stops_at_its_steps_and_repeats_bit_for_bit(blank):
    def trained() -> tuple[Any, int]:
        copied, batches = copy.deepcopy(blank), []
        copied.model.register_forward_pre_hook(lambda *_: batches.append(1))
        train.train(copied, short(16), Recipe(steps=2, lr=1e-3, batch=2), "cpu", [])  # 8 batches lie ready
        return copied, len(batches)

    (first, steps), (again, _) = trained(), trained()
    assert steps == 2
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_the_relative_change_is_of_matrices_only():
    base = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    parent = copy.deepcopy(base)
    with torch.no_grad():
        parent[0].weight *= 1.1
        parent[1].weight *= 1.3
        parent[0].bias += 100
    assert train.relative_change(parent, base) == pytest.approx(0.2, rel=1e-5)


# --- folders -------------------------------------------------------------------------------


def test_a_saved_folder_is_a_parent_like_any_other(model, blank, renderer, tmp_path):
    from transformers import AutoModelForCausalLM

    train.train(model, short(), Recipe(steps=2, lr=1e-3, batch=2), "cpu", [])
    before = [parameter.clone() for parameter in model.parameters()]
    train.save(model, renderer.tokenizer, tmp_path, {"recipe": "two steps"})
    # Saving rounds a copy: training could go on from float32.
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    checkpoint = open_checkpoint(tmp_path)
    assert {checkpoint.get(name).dtype for name in checkpoint.names} == {torch.bfloat16}
    assert "lm_head.weight" not in checkpoint.names
    assert checkpoint.config["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "training.json").read_text()) == {"recipe": "two steps"}
    defaults = json.loads((tmp_path / "generation_config.json").read_text())
    assert (defaults["eos_token_id"], defaults["pad_token_id"]) == ([2, 0], 0)
    assert defaults["do_sample"] is False

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for a, b in zip(before, loaded.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)
    messages = [{"role": "user", "content": "Hi!"}]
    assert Renderer.from_folder(tmp_path).prompt_ids(messages) == renderer.prompt_ids(messages)


def test_the_command_makes_a_base_and_a_parent_from_it(tmp_path, monkeypatch, capsys):
    quick = {"steps": 1, "batch": 2, "warmup": 1}
    slips = world.Slips(answers=0.5, calls=0.5)
    phases = (
        train.Settling(lr=1e-4, slips=slips, seed=31, **quick),
        train.Settling(**{**quick, "steps": 3}, lr=1e-4, slips=slips, seed=32, keep=(1, 2)),
    )
    monkeypatch.setattr(train, "Shape", lambda: TINY)
    monkeypatch.setattr(train, "BASE", Recipe(lr=1e-3, seed=11, **quick))
    monkeypatch.setattr(train, "PARENT", Recipe(lr=1e-3, seed=12, **quick))
    monkeypatch.setattr(train, "SETTLING", phases)
    monkeypatch.setattr(train, "prepare_tokenizer", partial(train.prepare_tokenizer, conversations=20))

    def command(output: Path, *arguments: str) -> None:
        common = ["train", "--output", str(output), "--device", "cpu", "--workers", "1"]
        monkeypatch.setattr(sys, "argv", [*common, *arguments])
        train.main()

    def weights(output: Path, name: str) -> bytes:
        return (output / name / "model.safetensors").read_bytes()

    command(tmp_path)
    assert len({weights(tmp_path, name) for name in ("base", "tuned", "parent")}) == 3
    base, parent = (
        json.loads((tmp_path / name / "training.json").read_text()) for name in ("base", "parent")
    )
    assert (base["recipe"]["seed"], base["shape"]["hidden"]) == (11, 32)
    assert (parent["recipe"]["lr"], parent["recipe"]["seed"]) == (1e-3, 12)
    assert [phase["seed"] for phase in parent["settling"]] == [31, 32]
    assert [entry["step"] for entry in parent["log"]] == [0, 1, 1, 2]
    assert 0 < parent["relative_change"] < 0.5

    # From the base, or from the tuned folder, as they were written, the same recipe makes the same parent.
    again, rest = tmp_path / "again", tmp_path / "rest"
    command(again, "--base", str(tmp_path / "base"))
    assert weights(again, "parent") == weights(tmp_path, "parent")
    assert not (again / "base").exists()
    command(rest, "--base", str(tmp_path / "base"), "--tuned", str(tmp_path / "tuned"))
    assert weights(rest, "parent") == weights(tmp_path, "parent")
    assert not (rest / "tuned").exists()
    with pytest.raises(SystemExit):
        command(rest, "--tuned", str(tmp_path / "tuned"))


def test_settling_ends_in_the_mean_of_the_kept_weights(renderer):
    slips = world.Slips(answers=0.5, calls=0.5)

    def settled(keep: tuple[int, ...]) -> dict[str, torch.Tensor]:
        model = train.make_model(TINY, renderer.tokenizer)
        phase = train.Settling(steps=3, lr=1e-3, slips=slips, seed=1, batch=2, warmup=1, keep=keep)
        train.settle(model, renderer, phase, "cpu", [])
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    first, second, both = settled((1,)), settled((2,)), settled((1, 2))
    for name, mean in both.items():
        assert torch.equal(mean, ((first[name] + second[name]) / 2).bfloat16().float()), name
    assert any(not torch.equal(first[name], second[name]) for name in first)
