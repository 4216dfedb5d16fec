"""A token is chosen from its own logits and seed alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from manners.engines.embedded.sampling import Sampling, make_generator, pick

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.1, 2.0, 1.5, -1.0, 1.9])


def draw(sampling: Sampling, times: int) -> Counter[int]:
    generator = make_generator(sampling, CPU)
    return Counter(pick(LOGITS, sampling, generator) for _ in range(times))


def test_temperature_zero_takes_the_largest() -> None:
    assert draw(Sampling(temperature=0), 5) == {1: 5}


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 2, 4}),
        ({"top_p": 0.3}, {1}),  # softmax: .35 .31 .21 .05 .. for 1, 4, 2, 0
        ({"top_p": 0.5}, {1, 4}),  # the token that crosses the limit stays
        ({"top_k": 2, "top_p": 0.99}, {1, 4}),
        ({}, {0, 1, 2, 3, 4}),
    ],
)
def test_limits(limits: dict[str, float], allowed: set[int]) -> None:
    assert set(draw(Sampling(temperature=1.0, seed=0, **limits), 600)) == allowed  # type: ignore[arg-type]


def test_frequencies_follow_the_softmax() -> None:
    counts = draw(Sampling(temperature=0.5, seed=1), 4000)
    expected = (LOGITS / 0.5).softmax(0)
    for token, share in enumerate(expected.tolist()):
        assert abs(counts[token] / 4000 - share) < 0.03


def test_the_seed_repeats_and_its_absence_does_not() -> None:
    def path(seed: int | None) -> list[int]:
        sampling = Sampling(temperature=2.0, seed=seed)
        generator = make_generator(sampling, CPU)
        return [pick(torch.zeros(1000), sampling, generator) for _ in range(8)]

    assert path(5) == path(5)
    assert path(5) != path(6)
    assert path(None) != path(None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float) -> None:
    logits = LOGITS.clone()
    logits[3] = bad
    sampling = Sampling(temperature=temperature, seed=0)
    with pytest.raises(ArithmeticError, match=r"nan|inf"):
        pick(logits, sampling, make_generator(sampling, CPU))
