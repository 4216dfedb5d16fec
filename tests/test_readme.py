"""The README promises only what is there: its commands parse, its files exist, its targets are made."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from manners.errors import EXIT_BAD_INPUT
from manners.parser import make_parser
from manners.spec import GATE_NAMES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
COMMANDS = [shlex.split(line) for line in SHELL.splitlines() if line.strip()]
MANNERS = [words for words in COMMANDS if words[0] == ".venv/bin/manners"]


def test_there_is_something_to_check():
    assert len(MANNERS) >= 8


@pytest.mark.parametrize("words", MANNERS, ids=[words[1] for words in MANNERS])
def test_every_command_parses(words):
    arguments = words[1 : words.index(">")] if ">" in words else words[1:]
    chosen = make_parser().parse_args(arguments)
    assert chosen.command == words[1]


def test_a_wrong_command_would_be_noticed():
    with pytest.raises(SystemExit):
        make_parser().parse_args(["judge", "x.jsonl", "--no-such-option"])


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "make"], ids=lambda w: w[1])
def test_every_make_target_exists(words):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE)


def test_every_other_command_is_a_module_of_ours():
    others = [words for words in COMMANDS if words[0] not in (".venv/bin/manners", "make")]
    assert [words[:3] for words in others] == [[".venv/bin/python", "-m", "manners.demo.train"]]


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_every_link_leads_somewhere(target):
    assert (ROOT / target).exists()


def test_every_gate_is_explained_and_the_exit_codes_agree():
    assert all(f"`{gate}`" in README for gate in GATE_NAMES)
    assert f"{EXIT_BAD_INPUT} bad input or environment" in README
