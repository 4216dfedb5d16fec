"""Every refusal says what was found, where, what follows from it and how to mend it.

The tree: ``MannersError`` is the root (exit code 3, bad input or environment); each room adds a
branch below it, so that a caller can catch one room's refusals. ``nvfp4`` stands alone and has
its own ``FormatError``; ``checkpoint`` and ``quantize`` turn it into a ``CheckpointError`` that
names the tensor. ``code`` is stable: scripts and the documentation refer to it.

Exit codes of every command: 0 pass, 2 usage, 3 bad input or environment, 4 a gate fails,
5 inconclusive. 1 is left to crashes, so that a crash is never read as a verdict. 130, as shells have it
for SIGINT, is Ctrl-C: no verdict either, and the same command continues.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_PASS = 0
EXIT_USAGE = 2
EXIT_BAD_INPUT = 3
EXIT_GATE_FAILS = 4
EXIT_INCONCLUSIVE = 5
EXIT_INTERRUPTED = 130


class MannersError(Exception):
    """A refusal with a stable code.

    Args:
        code: stable kebab-case identifier, e.g. ``fused-scale``.
        where: file, tensor, field or address that the refusal is about.
        found: what was found there, with both values where two disagree.
        consequence: what would follow if it were let through (may be empty).
        fix: what the reader can do about it.
    """

    exit_code: ClassVar[int] = EXIT_BAD_INPUT

    def __init__(self, code: str, *, where: str, found: str, consequence: str = "", fix: str) -> None:
        self.code = code
        self.where = where
        self.found = found
        self.consequence = consequence
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"error[{self.code}] {self.where}: {self.found}"]
        if self.consequence:
            lines.append(f"  {self.consequence}")
        lines.append(f"  Fix: {self.fix}")
        return "\n".join(lines)


class UsageError(MannersError):
    """The command line asks for something that does not exist. Exit code 2."""

    exit_code: ClassVar[int] = EXIT_USAGE


class SpecError(MannersError):
    """A spec or probe file that cannot be used."""


class ChatError(MannersError):
    """A conversation that the chat template cannot render, or a tokenizer without a template."""


class CheckpointError(MannersError):
    """A model folder that is refused: unreadable, unsafe, or against a rule of the format."""


class QuantizeError(MannersError):
    """A parent that cannot be rounded as asked."""


class EngineError(MannersError):
    """A server that did not start, or died."""


class AskError(MannersError):
    """A server that could not be asked at all (single failed replies are recorded, not raised)."""


class JudgeError(MannersError):
    """Transcripts that cannot be judged: other probes, another spec, a file cut short."""


class RunError(MannersError):
    """A run folder that belongs to another run, or cannot be resumed."""
