"""Conversations that a model is calibrated or trained on: JSONL, one a line.

{"id": "…", "category": "…", "messages": [OpenAI messages], "tools": […], "split": "train"}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .chat import Renderer
from .errors import ChatError, SpecError


class Conversation(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    category: str = ""
    messages: tuple[dict[str, Any], ...] = Field(min_length=2)
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    split: Literal["train", "held-out"] = "train"


def load_conversations(path: Path) -> tuple[Conversation, ...]:
    """Raises SpecError ``conversations-missing``, ``conversations-syntax`` or ``conversations-empty``."""
    if not path.is_file():
        raise SpecError(
            "conversations-missing",
            where=str(path),
            found="no such file",
            fix="give a JSONL file of conversations",
        )
    found = []
    # Bytes, because text would also be split at U+2028 and its like, which may stand inside a message.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(Conversation.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "(line)"
            raise SpecError(
                "conversations-syntax",
                where=f"{path}:{number}: {field}",
                found=first["msg"],
                fix="one JSON object a line, with id and messages in OpenAI's form",
            ) from None
    if not found:
        raise SpecError(
            "conversations-empty",
            where=str(path),
            found="no conversation",
            consequence="Activation scales would be guessed.",
            fix="give a few dozen conversations like those that the model will have",
        )
    return tuple(found)


def dump_conversations(conversations: Iterable[Conversation]) -> str:
    """As JSONL, the inverse of :func:`load_conversations`."""
    return "".join(
        json.dumps(made.model_dump(exclude_defaults=True), ensure_ascii=False) + "\n"
        for made in conversations
    )


def render_all(renderer: Renderer, conversations: Sequence[Conversation], max_tokens: int) -> list[list[int]]:
    """Token ids of every conversation, as it was asked and answered; none is cut.

    Raises:
        ChatError: ``too-long`` for a conversation of more than ``max_tokens`` tokens, and those of
            :meth:`Renderer.teach`.
    """
    rows = []
    for made in conversations:
        ids = list(renderer.teach(made.messages, made.tools, made.thinking).ids)
        if len(ids) > max_tokens:
            raise ChatError(
                "too-long",
                where=f"conversation {made.id}",
                found=f"{len(ids)} tokens, the model takes {max_tokens}",
                consequence="Cutting it could cut a tool call in half.",
                fix="shorten it or leave it out",
            )
        rows.append(ids)
    return rows
