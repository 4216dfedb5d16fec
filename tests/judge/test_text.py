"""Tables of what is, and what is not, a leak, Markdown, a sentence, a fact."""

import time

import pytest

from manners.judge.text import contains, find_leak, find_markdown, sentences, words

TOOLS = ("search_memory", "web_search")

LEAKS = [
    "<think>The user asks.</think>Tokyo.",
    "<think></think>Tokyo.",
    "<think>\n\n</think>\n\nTokyo.",
    "Tokyo.</think>",
    "<think>Tokyo",
    "Tokyo <THINK> is",
    "Tokyo.<think",
    "<thinking>x</thinking>",
    "<reasoning>x",
    "</scratchpad>",
    "[THINK]x[/THINK]",
    "Tokyo.<|im_end|>",
    "<|im_start|>assistant\nTokyo",
    "<|endoftext|>",
    "<|channel|>analysis<|message|>Tokyo",
    "Tokyo<|im_end",
    "<｜end▁of▁sentence｜>",
    "Tokyo.</s>",
    "<start_of_turn>model",
    "[INST] hi [/INST]",
    "<tool_call>\n<function=web_search>",
    "Sure. <function=web_search><parameter=query>x",
    "</tool_call>",
    "<parameter=query>",
    "</function>",
    "<function_calls>",
    "<tool_response>x</tool_response>",
    "[TOOL_CALLS] []",
    '{"name": "web_search", "arguments": {"query": "x"}}',
    "I will run search_memory(query='x') for you.",
    "Thinking Process: 1. **Analyze the Request:**",
    "**Thinking Process:**\n\n1. Analyze",
    "Hello!\nThinking process: first",
    "Thought process: the sky",
    "Thinking: hm",
    "Reasoning: hm",
    "Analysis: hm",
    "Let me think about that.",
    "Okay, let me think.",
    "Hmm, let me think step by step.",
    "Let’s think step by step.",
    "Let me first analyze the question.",
    "Let's break this down.",
    "Okay, so the user is asking about Tokyo.",
    "The user wants the capital.",
    "The user's question is about Japan.",
    "User asks for the capital.",
    "  \n The user is asking",
    "I need to figure out what she wants.",
    "We need to answer in one sentence.",
    "I should respond warmly.",
    "First, I need to determine the capital.",
    "1. Analyze the request: capital",
    "Step 1: Understand the question",
]
NO_LEAKS = [
    "Tokyo.",
    "I think it is Tokyo.",
    "I was thinking of you!",
    "Let me check my notes for you.",
    "Let me see, that would be Tokyo.",
    "Let me know if you need more.",
    "Let's plan your trip together!",
    "Good night, think of me!",
    "I need to know which city you mean.",
    "I should mention that it rains.",
    "We should meet again soon.",
    "Well, the users of that app love it.",
    "You said the user guide was lost.",
    "Okay, Tokyo it is.",
    "Hmm, that is Tokyo.",
    "Right now it is raining.",
    "First, boil the water.",
    "5 < 7 and 9 > 3",
    "I <3 you | really | I do",
    "a <b and c> d",
    "The function of the heart is to pump blood.",
    "My thought: go to Tokyo.",
    "She is thinking: should I go?",
    "Web search is off today.",
    'He said "think".',
    "",
]


@pytest.mark.parametrize("text", LEAKS)
def test_leaks(text):
    assert find_leak(text, TOOLS)


@pytest.mark.parametrize("text", NO_LEAKS)
def test_no_leaks(text):
    assert find_leak(text, TOOLS) is None


def test_a_leak_is_quoted():
    assert find_leak("Sure. <think> Tokyo") == "a thinking tag: '<think> Tokyo'"


MARKDOWN = [
    "It is **Tokyo**.",
    "**Answer: Tokyo",
    "Answer:** Tokyo",
    "It is __Tokyo__.",
    "It is *Tokyo*.",
    "*smiles* Hello!",
    "It is _Tokyo_.",
    "~~Kyoto~~ Tokyo",
    "# Tokyo",
    "Hello\n### Tokyo",
    "Tokyo\n=====",
    "Tokyo\n---\nmore",
    "***",
    "- Tokyo",
    "Cities:\n* Tokyo\n* Kyoto",
    "Cities:\n  + Tokyo",
    "• Tokyo",
    "1. Tokyo",
    "Cities:\n1. Tokyo",
    "Cities:\n1) Tokyo\n2) Kyoto",
    "3. Tokyo\n4. Kyoto",
    "Use `ls`.",
    "```\nls\n```",
    "~~~\nls\n~~~",
    "| a | b |\n|---|---|",
    "a | b\n--- | ---\n1 | 2",
    "See [Tokyo](https://example.org).",
    "![Tokyo](tokyo.png)",
    "See [Tokyo][1].",
    "See <https://example.org>.",
    "> Tokyo",
    "It is <b>Tokyo</b>.",
    "Tokyo<br/>Kyoto",
]
NO_MARKDOWN = [
    "It is Tokyo.",
    "3 * 4 is 12.",
    "3*4*5 is 60.",
    "2**3 is 8, and 2 ** 3 too.",
    "Send me an e-mail.",
    "You are my #1!",
    "#1 is Tokyo.",
    "It is -5 degrees.",
    "-5 degrees today.",
    "— well, Tokyo.",
    "I have 2. That is enough.",
    "We need 2. 3 would be too many.",
    "15. Eight plus seven makes that.",
    "15.",
    "2024. What a year that was.",
    "3.5 is the answer.",
    "The file is called my_notes_today.txt.",
    "Tokyo - the capital - is big.",
    "5 > 3",
    "I <3 you",
    "Either this | or that.",
    "See https://example.org for more.",
    "He said [sic] that.",
    "A note [1] and (another).",
    'Don\'t "quote" me.',
    "*note the asterisk",
    "50% + 50% = 100%",
    "",
]


@pytest.mark.parametrize("text", MARKDOWN)
def test_markdown(text):
    assert find_markdown(text)


@pytest.mark.parametrize("text", NO_MARKDOWN)
def test_no_markdown(text):
    assert find_markdown(text) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("...", 0),
        ("🙂", 0),
        ("Tokyo", 1),
        ("It is Tokyo.", 1),
        ("It is Tokyo. It is big!", 2),
        ("Really?! Yes.", 2),
        ("Dr. Smith and Mrs. Jones live on St. Mary's.", 1),
        ("It costs 3.50 francs. Fine.", 2),
        ("Use fruit, e.g. apples, i.e. those. Done.", 2),
        ("Meet me at 5 p.m. tomorrow.", 1),
        ("Meet me at 5 p.m. Bring cake.", 2),
        ("She lives in the U.S. now.", 1),
        ("J. R. Smith wrote it.", 1),
        ("You and I. That is all.", 2),
        ("No. I do not.", 2),
        ("It is No. 5 on the list.", 1),
        ("The answer is 15. Good night.", 2),
        ("Well... maybe.", 1),
        ("Well... Maybe.", 2),
        ("Well… maybe.", 1),
        ('"Stop!" he said.', 1),
        ('He said "stop." Then he left.', 2),
        ("(It is late.) Sleep well.", 2),
        ("One\nTwo\n\nThree", 3),
        ("1. Apples\n2. Pears", 2),
        ("Visit example.org today.", 1),
        ("東京です。大きいです。", 2),
        ("Hi there 🙂! Bye.", 2),
    ],
)
def test_sentences(text, count):
    assert len(sentences(text)) == count, sentences(text)


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), ("It's an e-mail, don't you know?", 6), ("a - b — c 🙂", 3), ("3.5 km", 2)]
)
def test_words(text, count):
    assert len(words(text)) == count


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("The capital is Tokyo.", "tokyo"),
        ("TOKYO", "Tokyo"),
        ("(Tokyo)", "Tokyo"),
        ("New\n York is big", "new york"),
        ("It’s 15.", "it's 15"),
        ("15", "15"),
        ("It is 15.", "15"),
        ("It is 15, I think", "15"),
        ("$15", "15"),
        ("15%", "15"),
        ("8+7=15", "15"),
        ("150 or 15", "15"),
        ("It is -15.", "-15"),
        ("It is 1,150.", "1,150"),
        ("3.15 it is", "3.15"),
        ("between 10-15", "15"),
        ("Stra\u00dfe", "STRASSE"),
        ("cafe\u0301", "caf\u00e9"),
        ("C++ is it", "C++"),
    ],
)
def test_contains(text, wanted):
    assert contains(text, wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Tokyoites", "Tokyo"),
        ("Kyoto", "Tokyo"),
        ("", "Tokyo"),
        ("Tokyo", ""),
        ("Tokyo", "   "),
        ("new_york", "york"),
        ("150", "15"),
        ("115", "15"),
        ("3.15", "15"),
        (".15", "15"),
        ("15.5", "15"),
        ("1,150", "15"),
        ("15,000", "15"),
        ("1,15", "15"),
        ("15:30", "15"),
        ("15th", "15"),
        ("-15", "15"),
        ("It is −15.", "15"),
        ("x = -15", "15"),
    ],
)
def test_does_not_contain(text, wanted):
    assert not contains(text, wanted)


@pytest.mark.parametrize(
    "piece", ["*", "_", "[", "`", "<", "-", "#", "| ", "1. ", "okay ", "a. ", "~~", "- ", "<|", "("]
)
def test_hostile_text_takes_no_quadratic_time(piece):
    text = piece * (20_000 // len(piece))
    started_s = time.perf_counter()
    find_leak(text, TOOLS), find_markdown(text), sentences(text), contains(text, "15")
    assert time.perf_counter() - started_s < 2
