"""Numbers never round to a better story, and strangers' text never becomes markup."""

from __future__ import annotations

import re

import pytest

from manners.report import text

THIN = "\u202f"


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (1.0, "100"),
        (0.0, "0"),
        (4999 / 5000, "99.9"),
        (1 / 5000, "0.1"),
        (0.437, "43.7"),
        (399 / 400, "99.8"),
    ],
)
def test_only_all_is_100_percent(share: float, shown: str) -> None:
    assert text.percent(share) == f"{shown}{THIN}%"


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "±0"), (-0.02, "−0.1"), (0.02, "+0.1"), (-27.04, "−27.0"), (1.25, "+1.2")]
)
def test_a_small_loss_is_still_a_loss(value: float, shown: str) -> None:
    assert text.points(value) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (15_634_112, "15.6 MB"), (7_400_000_000, "7.4 GB")],
)
def test_size(count: int, shown: str) -> None:
    assert text.size(count) == shown.replace(" ", THIN)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0 s"), (0.21, "13 s"), (2.41, "2.4 min"), (186, "3.1 h")]
)
def test_minutes(value: float, shown: str) -> None:
    assert text.minutes(value) == shown.replace(" ", THIN)


def test_other_numbers() -> None:
    assert text.small(3.8e-6) == "3.8e−6"
    assert text.small(1.2e-12) == "1.2e−12"
    assert text.small(0.0) == "0"
    assert text.rule(0.6) == f"60{THIN}%"
    assert text.rule(0.995) == f"99.5{THIN}%"
    assert text.margin(0.02) == "2 points"
    assert text.margin(0.01) == "1 point"
    assert text.interval((0.974, 1.0)) == "97.4–100"
    assert text.listed(["a"]) == "a"
    assert text.listed(["a", "b", "c"]) == "a, b and c"
    assert text.listed(["a", "b", "c", "d"], most=2) == "a, b and 2 more"


@pytest.mark.parametrize(
    ("hidden", "shown"),
    [
        ("\x1b[31m", "⟨U+001B⟩[31m"),
        ("a\rb", "a⟨U+000D⟩b"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("exe.\u202egnp", "exe.⟨U+202E⟩gnp"),
        ("\u2028", "⟨U+2028⟩"),
        ("\u200b\ufeff", "⟨U+200B⟩⟨U+FEFF⟩"),
        ("\x00\x85", "⟨U+0000⟩⟨U+0085⟩"),
        ("\ud800", "\ufffd"),
        ("नमस्ते 👩\u200d🚀", "नमस्ते 👩\u200d🚀"),
    ],
)
def test_what_cannot_be_seen_is_shown(hidden: str, shown: str) -> None:
    assert text.visible(hidden) == shown
    text.visible(hidden).encode("utf-8")


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("no_thinking_leak", "no_thinking_leak"),
        ("_emphasis_", r"\_emphasis\_"),
        ("a | b", r"a \| b"),
        ("<script>", r"\<script\>"),
        ("**x** `y` [z](w)", r"\*\*x\*\* \`y\` \[z\](w)"),
        ("two\n# lines", "two # lines"),
        ("&lt; \\ $x$ ~~y~~", r"\&lt; \\ \$x\$ \~\~y\~\~"),
        ("see https://evil.test and www.evil.test", r"see https\://evil.test and www\.evil.test"),
        (12.5, "12.5"),
    ],
)
def test_markdown_inline(value: object, line: str) -> None:
    assert text.markdown_inline(value) == line


@pytest.mark.parametrize("reply", ["", "`", "```", "a\n````\n# b", "`" * 40, "~~~"])
def test_nothing_closes_its_fence(reply: str) -> None:
    block = text.fenced(reply)
    opening, *body, closing = block.split("\n")
    fence = opening.removesuffix("text")
    assert re.fullmatch("`{3,}", fence)
    assert closing == fence
    assert "\n".join(body) == reply
    assert all(len(run) < len(fence) for run in re.findall("`+", reply))
    # A block is markup of ours: the template must not escape it again.
    assert text.markdown_inline(block) == block
