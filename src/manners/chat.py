"""THE renderer: how a conversation becomes tokens, which tokens are the answer.

Teaching, calibration, training and asking all go through this module, so that a model is never
trained on one rendering and asked with another.

- A prompt is what a server would feed the model: chat template, tools, thinking switch, and the
  opening of the assistant's turn.
- An answer is what the model must produce after it, up to and including the end-of-turn token.
  It is tokenized apart from the prompt, because that is how generation sees it.

What a reply means is read by :mod:`manners.replies`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ChatError
from .replies import strict_json

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendered:
    """Token ids [T] and, for each, whether it belongs to the answer that is learned."""

    ids: tuple[int, ...]
    answer_mask: tuple[bool, ...]


class Renderer:
    """Renders conversations with one model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ChatError(
                "no-chat-template",
                where=str(getattr(tokenizer, "name_or_path", "tokenizer")),
                found="the tokenizer has no chat template",
                consequence="Every prompt would be guessed, and no two servers would guess the same.",
                fix="put the parent's chat_template.jinja into the folder",
            )
        self.tokenizer = tokenizer

    @classmethod
    def from_folder(cls, folder: str | Path) -> Renderer:
        """Read tokenizer and template from a model folder. Runs no code from the folder."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ChatError(
                "no-tokenizer",
                where=str(folder),
                found=str(error).splitlines()[0],
                fix="the folder needs tokenizer.json and tokenizer_config.json",
            ) from error
        return cls(tokenizer)

    def prompt_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> str:
        """The prompt up to the opening of the assistant's next turn.

        Raises:
            ChatError: ``template-refused`` with the template's own words, ``bad-arguments`` for a
                tool call in the history whose arguments are no JSON object.
        """
        return self._render(messages, tools, add_generation_prompt=True, enable_thinking=thinking)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> list[int]:
        """:meth:`prompt_text` as token ids."""
        return self.encode(self.prompt_text(messages, tools, thinking))

    def answer_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> str:
        """What the model must produce for the last message, end of turn included.

        Raises:
            ChatError: ``no-answer`` if the last message is not the assistant's, ``mask-mismatch``
                if the template renders the same turn differently as a prompt and as history, so
                that no split of the text is what the model was asked.
        """
        if not messages or messages[-1].get("role") != "assistant":
            raise ChatError(
                "no-answer",
                where="conversation",
                found=f"last message is {messages[-1].get('role') if messages else 'absent'}",
                fix="end the conversation with the assistant's message",
            )
        prompt = self.prompt_text(messages[:-1], tools, thinking)
        whole = self._render(messages, tools, add_generation_prompt=False, enable_thinking=thinking)
        if not whole.startswith(prompt):
            raise ChatError(
                "mask-mismatch",
                where="chat template",
                found="the rendered conversation does not begin with the prompt of its last turn",
                consequence="Training on it would teach tokens that the model is never asked for.",
                fix="use a template that renders the last assistant turn as it was asked (Qwen3.5's does)",
            )
        answer = whole[len(prompt) :]
        # What follows the end-of-turn token (a newline in ChatML) is never generated. A base model's
        # tokenizer may name another token its eos than the one that its template writes.
        ends = [answer.rindex(stop) + len(stop) for stop in self._stops() if stop in answer]
        return answer[: max(ends)] if ends else answer + self.tokenizer.eos_token

    def teach(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> Rendered:
        """One training sample: the conversation as it was asked, the last assistant message as answer."""
        answer = self.encode(self.answer_text(messages, tools, thinking))
        prompt = self.prompt_ids(messages[:-1], tools, thinking)
        return Rendered((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))

    def every_answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> list[Rendered]:
        """One sample per assistant message, each in the context in which it was asked."""
        ends = [i + 1 for i, message in enumerate(messages) if message.get("role") == "assistant"]
        return [self.teach(messages[:end], tools, thinking) for end in ends]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated tokens; think and tool tags stay, an end-of-turn token at the end goes."""
        kept = list(ids)
        while kept and kept[-1] in self.stop_ids:
            kept.pop()
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False)
        return text

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn: the tokenizer's eos, ``<|im_end|>`` and ``<|endoftext|>`` where known."""
        return frozenset(self._stops().values())

    def _stops(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        names = (self.tokenizer.eos_token, "<|im_end|>", "<|endoftext|>")
        return {name: vocabulary[name] for name in names if name in vocabulary}

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, **switches: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                [_with_mapping_arguments(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                **switches,
            )
        # ValueError: no messages at all; TypeError: a template for text, and content in parts.
        except (TemplateError, ValueError, TypeError) as error:
            raise ChatError(
                "template-refused",
                where="chat template",
                found=str(error),
                fix="correct the messages, or the template in chat_template.jinja",
            ) from error
        return text


def _with_mapping_arguments(message: Message) -> dict[str, Any]:
    """OpenAI sends tool arguments as a JSON string; templates iterate over a mapping."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = strict_json(arguments or "{}")
            except ValueError:
                arguments = None
        if not isinstance(arguments, Mapping):
            raise ChatError(
                "bad-arguments",
                where=f"tool call {function.get('name')!r} in the history",
                found=f"arguments {function.get('arguments')!r} are no JSON object",
                consequence="An empty call in its place would teach the model to call with nothing.",
                fix='send arguments as a JSON object, e.g. "{\\"query\\": \\"robot\\"}"',
            )
        calls.append({"type": "function", "function": {**function, "arguments": dict(arguments)}})
    return {**message, "tool_calls": calls}
