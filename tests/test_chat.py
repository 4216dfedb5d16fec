"""The renderer against texts that are written out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from manners.chat import Renderer
from manners.errors import ChatError
from manners.replies import parse_reply
from tests.offered import TOOLS
from tests.tiny import chat_template, make_tokenizer

SYSTEM = {"role": "system", "content": "You are Annie."}
ASKS = {"role": "user", "content": "A table?"}
OPENED = "<|im_start|>assistant\n<think>\n"
NO_THOUGHT = OPENED + "\n</think>\n\n"


def with_template(template: str | None) -> Renderer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return with_template(chat_template())


def says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calls(*arguments: Any, content: str = "") -> dict[str, Any]:
    functions = [{"name": "book", "arguments": given} for given in arguments]
    return says(content, tool_calls=[{"id": "1", "type": "function", "function": f} for f in functions])


# --- prompts -------------------------------------------------------------------------------


def test_a_prompt_ends_where_the_model_goes_on(renderer):
    head = "<|im_start|>system\nYou are Annie.<|im_end|>\n<|im_start|>user\nA table?<|im_end|>\n"
    assert renderer.prompt_text([SYSTEM, ASKS]) == head + NO_THOUGHT
    assert renderer.prompt_text([SYSTEM, ASKS], thinking=True) == head + OPENED
    assert renderer.tokenizer.decode(renderer.prompt_ids([SYSTEM, ASKS])) == head + NO_THOUGHT


def test_tools_stand_before_the_system_prompt_as_json(renderer):
    text = renderer.prompt_text([SYSTEM, ASKS], TOOLS)
    start, rest = text.split("<tools>\n")
    line, rest = rest.split("\n</tools>", 1)
    assert start == "<|im_start|>system\n# Tools\n\n"
    assert json.loads(line) == TOOLS[0]
    assert (
        "<function=name>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call>\n\nYou are Annie."
        in rest
    )


def test_no_tools_and_an_empty_list_are_the_same(renderer):
    assert renderer.prompt_text([ASKS], []) == renderer.prompt_text([ASKS], None)
    assert "# Tools" not in renderer.prompt_text([ASKS], [])


def test_history_is_kept_without_its_reasoning(renderer):
    history = [ASKS, says("For two.", reasoning_content="Two guests."), {"role": "user", "content": "Four."}]
    text = renderer.prompt_text(history, thinking=True)
    assert "Two guests." not in text
    assert "<|im_start|>assistant\nFor two.<|im_end|>\n" in text
    assert text.count("<think>") == 1  # the one that the next answer is in


def test_tool_answers_follow_their_call_and_share_a_turn(renderer):
    answers = [{"role": "tool", "content": "done"}, {"role": "tool", "content": "noted"}]
    text = renderer.prompt_text([ASKS, calls({"place": "Bern"}), *answers], TOOLS)
    assert text.endswith(
        NO_THOUGHT + "<tool_call>\n<function=book>\n<parameter=place>\nBern\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<tool_response>\n"
        "noted\n</tool_response><|im_end|>\n" + NO_THOUGHT
    )


ARGUMENTS = {"place": "Café <b>", "seats": 4, "window": True, "guests": ["Ann", "Jo"]}


@pytest.mark.parametrize(
    "text", [json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, ensure_ascii=False, separators=(",", ":"))]
)
def test_arguments_as_json_or_as_mapping_render_equal(renderer, text):
    as_text = renderer.prompt_text([ASKS, calls(text), ASKS], TOOLS)
    assert as_text == renderer.prompt_text([ASKS, calls(ARGUMENTS), ASKS], TOOLS)
    assert "<parameter=place>\nCafé <b>\n</parameter>" in as_text
    assert '<parameter=guests>\n["Ann", "Jo"]\n</parameter>' in as_text


def test_a_call_of_nothing_and_a_bare_function_render(renderer):
    no_arguments = "<tool_call>\n<function=book>\n</function>\n</tool_call><|im_end|>"
    bare = says("", tool_calls=[{"name": "book", "arguments": {}}])
    for message in (calls(""), calls("{}"), calls({}), bare):
        assert no_arguments in renderer.prompt_text([ASKS, message, ASKS], TOOLS)


@pytest.mark.parametrize(
    "bad", ["{broken", "[1]", "null", '"x"', 3, None, ["a"], '{"a": NaN}', "[" * 100_000]
)
def test_arguments_that_are_no_object_are_refused(renderer, bad):
    with pytest.raises(ChatError, match=r"bad-arguments.*'book'"):
        renderer.prompt_text([ASKS, calls(bad), ASKS], TOOLS)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "Cannot apply chat template to an empty conversation"),
        ([SYSTEM], "No user query found"),
        ([ASKS, SYSTEM], "System message must be at the beginning"),
        ([ASKS, {"role": "narrator", "content": "x"}], "Unexpected message role"),
    ],
)
def test_a_template_refuses_in_its_own_words(renderer, messages, words):
    with pytest.raises(ChatError, match=f"template-refused.*{words}"):
        renderer.prompt_text(messages)


def test_a_template_that_breaks_on_a_message_is_a_refusal_too():
    adds = with_template("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}")
    with pytest.raises(ChatError, match=r"template-refused.*can only concatenate str"):
        adds.prompt_text([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])


def test_without_a_template_there_is_no_renderer():
    with pytest.raises(ChatError, match="no-chat-template"):
        with_template(None)


def test_from_folder_reads_tokenizer_and_template(tiny_parent, tmp_path, renderer):
    assert Renderer.from_folder(tiny_parent).prompt_ids([ASKS]) == renderer.prompt_ids([ASKS])
    with pytest.raises(ChatError, match="no-tokenizer"):
        Renderer.from_folder(tmp_path)


# --- answers -------------------------------------------------------------------------------

ANSWERS = {
    # the last message, thinking, and what the model must write
    "plain": (says("For two."), False, "For two.<|im_end|>"),
    "thought": (
        says("For two.", reasoning_content="Two guests."),
        True,
        "Two guests.\n</think>\n\nFor two.<|im_end|>",
    ),
    "no thought": (says("For two."), True, "\n</think>\n\nFor two.<|im_end|>"),
    "call": (
        calls({"place": "Bern"}),
        False,
        "<tool_call>\n<function=book>\n<parameter=place>\nBern\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    "words of the template": (says("Say <|im_end|> to end."), False, "Say <|im_end|> to end.<|im_end|>"),
    "another stop token": (says("Say <|endoftext|> to end."), False, "Say <|endoftext|> to end.<|im_end|>"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_what_the_model_writes_after_the_prompt(renderer, case):
    message, thinking, expected = ANSWERS[case]
    messages = [SYSTEM, ASKS, message]
    assert renderer.answer_text(messages, TOOLS, thinking) == expected
    made = renderer.teach(messages, TOOLS, thinking)
    prompt = renderer.prompt_ids(messages[:-1], TOOLS, thinking)
    assert list(made.ids) == prompt + renderer.tokenizer.encode(expected)
    # The mask is the answer with its end-of-turn token, and nothing of the prompt.
    assert list(made.answer_mask) == [False] * len(prompt) + [True] * (len(made.ids) - len(prompt))
    assert made.ids[-1] == renderer.tokenizer.eos_token_id
    assert renderer.decode(made.ids[len(prompt) :]) == expected.removesuffix("<|im_end|>")


def test_tokens_are_cut_where_generation_cuts_them(renderer):
    """The prompt ends in a line break, the answer begins with one: as one text they are one token."""
    messages = [ASKS, says("For two.")]
    made = renderer.teach(messages, thinking=True)
    prompt = renderer.prompt_text(messages[:-1], thinking=True)
    together = renderer.encode(prompt + renderer.answer_text(messages, thinking=True))
    assert renderer.tokenizer.decode(together) == renderer.tokenizer.decode(made.ids)
    assert together != list(made.ids)  # else this test shows nothing
    assert list(made.ids[: sum(not learned for learned in made.answer_mask)]) == renderer.encode(prompt)


def test_what_is_taught_parses_back(renderer):
    message = calls(ARGUMENTS)
    reply = parse_reply(
        renderer.answer_text([ASKS, message], TOOLS).removesuffix("<|im_end|>"), thinking=False, tools=TOOLS
    )
    assert [call.arguments for call in reply.tool_calls] == [ARGUMENTS]
    assert reply.content == ""


def test_every_answer_is_taught_in_the_context_in_which_it_was_asked(renderer):
    messages = [
        SYSTEM,
        ASKS,
        calls({"place": "Bern"}),
        {"role": "tool", "content": "done"},
        says("Done."),
        ASKS,
        says("Hm."),
    ]
    made = renderer.every_answer(messages, TOOLS)
    assert made == [renderer.teach(messages[:end], TOOLS) for end in (3, 5, 7)]
    assert [sum(sample.answer_mask) for sample in made] == [
        len(renderer.encode(renderer.answer_text(messages[:end], TOOLS))) for end in (3, 5, 7)
    ]


@pytest.mark.parametrize("messages", [[], [ASKS], [ASKS, says("x"), ASKS]])
def test_no_answer_at_the_end_is_refused(renderer, messages):
    with pytest.raises(ChatError, match="no-answer"):
        renderer.answer_text(messages)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opening }}{% endif %}"
)


def test_a_template_that_renders_the_turn_otherwise_is_refused():
    plain = with_template(CHATML.replace("{{ opening }}", ""))
    assert plain.answer_text([ASKS, says("Hm.")]) == "Hm.<|im_end|>"
    with pytest.raises(ChatError, match="mask-mismatch"):  # it opens <think> in prompts, but not in history
        with_template(CHATML.replace("{{ opening }}", "<think>\n")).answer_text([ASKS, says("Hm.")])


def test_reasoning_while_thinking_is_off_is_refused(renderer):
    with pytest.raises(ChatError, match="mask-mismatch"):
        renderer.answer_text([ASKS, says("Hm.", reasoning_content="Hm?")], thinking=False)


def test_a_template_without_end_of_turn_gets_one():
    bare = with_template("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert bare.answer_text([ASKS, says("Hm.")]) == "[Hm.]<|im_end|>"


def test_the_end_of_turn_is_the_templates_even_if_the_tokenizer_names_another():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template()
    tokenizer.eos_token = "<|endoftext|>"  # as Qwen's base models do
    assert Renderer(tokenizer).answer_text([ASKS, says("Hm.")]) == "Hm.<|im_end|>"


def test_decoding_keeps_tags_and_drops_only_the_stop_tokens_at_the_end(renderer):
    text = "<think>\nCafé\n</think>\n\n<tool_call>x</tool_call><|im_end|>y"
    ids = renderer.encode(text)
    assert renderer.decode(ids) == text
    assert renderer.decode([*ids, *renderer.encode("<|im_end|><|endoftext|>")]) == text
    assert renderer.stop_ids == {0, 2}
