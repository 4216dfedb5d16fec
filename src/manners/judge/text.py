"""What gates look for in text: leaks, Markdown, sentences, words. Pure functions of strings.

Each ``find_*`` returns a few words on the first thing it found, or None.

Blind spots. They match patterns and understand nothing: a reply that explains what ``<think>``
means is called a leak; planning in words that are not listed is not noticed; a wrong answer that
mentions the right word ("not Tokyo but Kyoto") contains it. Sentences are split by English habits.
LaTeX is not taken for Markdown.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

Patterns = tuple[tuple[str, re.Pattern[str]], ...]


def _patterns(*rows: tuple[str, str], flags: int = re.IGNORECASE | re.MULTILINE) -> Patterns:
    return tuple((what, re.compile(pattern, flags)) for what, pattern in rows)


# --- leaks -----------------------------------------------------------------------------------

# Opening, closing and empty tags alike: an orphan of either kind is a leak, and so is an empty pair.
_LEAKS = _patterns(
    (
        "a thinking tag",
        r"</?\s*(?:\w+:)?(?:think|thinking|thoughts?|reasoning|reflection|analysis|scratch_?pad|inner_monologue)"
        r"\s*/?>|</?think\b|\[/?THINK\]",
    ),
    (
        "a chat template's token",
        # <|im_end|>, <|channel|>, also cut short at either end; DeepSeek writes a full-width bar.
        r"<[|｜][^<>|｜\n]{1,40}[|｜]?>|<\|(?:im_start|im_end|endoftext|channel|message|start|end)\b"
        r"|</?s>|<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk)>|\[/?INST\]|<</?SYS>>",
    ),
    (
        "tool markup",
        r"</?\s*(?:tool_calls?|tool_response|tools|function_calls?|invoke)\b[^<>\n]*>|</?(?:function|parameter)\s*[=>]"
        r"|\[/?TOOL_CALLS?\]",
    ),
    ("a heading of thoughts", r"^[\s*_#>]*(?:thinking|thought|reasoning)[ _](?:process|steps?)\b[\s*_]*:"),
)

# A spoken onset before the planning itself. "Let me check my notes" and "let me see" are manners.
_ONSET = r"^[\s*_#>\"'(-]*(?:(?:okay|ok|alright|all right|right|hm+|so|well|now|first|wait)\b[\s,.!:…]*)*"
_OPENINGS = _patterns(
    (
        "planning",
        _ONSET
        + r"(?:let me|let's|let us|i'll|i will|i need to|i should|i must|i have to|we need to|we should)"
        r"(?: first| now| carefully| just)*"
        r" (?:think|analy[sz]e|reason|break (?:this|it|that) down|work through|parse|understand what)\b",
    ),
    (
        "planning",
        _ONSET + r"(?:i|we) (?:need to|should|must|have to)(?: first| now| carefully| just| probably)*"
        r" (?:respond|reply|answer|call|use the|determine|decide|formulate|craft|consider|figure out)\b",
    ),
    (
        "talk about the user",
        _ONSET
        + r"(?:the user(?:'s)?|user) (?:is|was|wants?|asks?|asked|said|says|has|needs?|just|might|seems"
        r"|would|mentions?|request|question|message|query)\b",
    ),
    (
        "a heading of thoughts",
        r"^[\s*_#>]*(?:thinking|thoughts?|reasoning|analysis|plan|internal monologue)[\s*_]*:",
    ),
    (
        "a heading of thoughts",
        r"^[\s*_#>]*(?:step|\d+[.)])\s*\d*[\s:.*_]*(?:analy[sz]e|understand|identify|determine) the"
        r" (?:request|question|user|query|input|task)",
    ),
    flags=re.IGNORECASE,
)


def find_leak(content: str, tool_names: Iterable[str] = ()) -> str | None:
    """Thinking, template tokens or tool calls in what should be plain text for a user."""
    plain = content.replace("’", "'")
    found = _first(_LEAKS, plain) or _first(_OPENINGS, plain.lstrip(), only_at_start=True)
    return found or _find_bare_call(plain, tool_names)


def _find_bare_call(content: str, tool_names: Iterable[str]) -> str | None:
    """A call of a known tool, written as JSON or as code."""
    for name in tool_names:
        quoted = re.escape(name)
        as_json = re.compile(rf"""["'](?:name|function|tool)["']\s*:\s*["']{quoted}["']""")
        as_code = re.compile(rf"(?<!\w){quoted}\(")
        for pattern in (as_json, as_code):
            if match := pattern.search(content):
                return f"a call written as text: {_quote(match)}"
    return None


# --- Markdown --------------------------------------------------------------------------------

_MARKDOWN = _patterns(
    ("a code span or fence", r"`|^\s{0,3}~~~"),
    # `**` next to a word on one side only, so that 2**3 and 2 ** 3 are not bold.
    (
        "bold text",
        r"(?<![\w*\\])\*\*(?=[^\s*])|(?<=[^\s*\\])\*\*(?![\w*])|(?<![\w\\])__(?=[^\s_])[^\n]*?[^\s_]__(?!\w)",
    ),
    (
        "italic text",
        r"(?<![\w*\\])\*(?=[^\s*])[^*\n]*(?<!\s)\*(?![\w*])|(?<![\w\\])_(?=[^\s_])[^_\n]*(?<!\s)_(?!\w)",
    ),
    ("struck text", r"~~(?=\S)[^~\n]+~~"),
    ("a heading", r"^[ ]{0,3}#{1,6}[ \t]+\S"),
    ("a rule or underline", r"^[ ]{0,3}(?:=[= \t]{2,}|(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$"),
    ("a bullet", r"^[ \t]*[-*+•‣◦▪][ \t]+\S"),
    ("a quotation", r"^[ ]{0,3}>[ \t]+\S"),
    ("a table", r"^[ \t]*\|[^\n]*\|[ \t]*$|^[ \t]*:?-{2,}:?[ \t]*(?:\|[ \t]*:?-{2,}:?[ \t]*)+$"),
    ("a link", r"\[[^\[\]\n]+\](?:\([^()\s]+(?:\([^()\s]*\))?[^()\n]*\)|\[[^\[\]\n]*\])|<https?://[^\s<>]+>"),
    (
        "an HTML tag",
        r"</?(?:b|i|u|em|strong|ul|ol|li|p|br|hr|h[1-6]|code|pre|table|tr|t[dh]|a|span|div)(?:\s[^<>]*)?/?>",
    ),
)
_NUMBERED = re.compile(r"^[ \t]*(\d{1,3})[.)][ \t]+\S", re.MULTILINE)


def find_markdown(content: str) -> str | None:
    """Bold, italic, headings, lists, code, tables, links, quotations, rules, HTML.

    A single line that opens with a number ("15. Eight plus seven makes that.") is an answer; a line
    that opens with "1." or several numbered lines are a list.
    """
    found = _first(_MARKDOWN, content)
    if found:
        return found
    numbers = [int(match[1]) for match in _NUMBERED.finditer(content)]
    return f"a numbered list: {len(numbers)} lines" if len(numbers) > 1 or numbers == [1] else None


# --- length ----------------------------------------------------------------------------------

_NEVER_ENDS = re.compile(
    r"m(?:rs?|s|x|t)|dr|prof|st|[sj]r|vs|e\.g|i\.e|cf|ca|approx|dept|ft|fig|capt|gen|sen|rep|col|lt|sgt|rev|hon"
)
_MAY_END = re.compile(
    r"etc|[ap]\.m|u\.[skn]|e\.u|inc|ltd|co|corp|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
)
_END = re.compile(r"[.!?…。！？]+[\"'”’»)\]]*(?=\s|$)|(?<=[。！？])")


def words(text: str) -> list[str]:
    """Whitespace-separated pieces that hold a letter or a digit; "e-mail" and "don't" are one word."""
    return [piece for piece in text.split() if any(character.isalnum() for character in piece)]


def sentences(text: str) -> list[str]:
    """Split at sentence ends and at line breaks; a piece without any letter or digit is none."""
    found = []
    for line in text.splitlines():
        start = 0
        for match in _END.finditer(line):
            if _ends_sentence(line, start, match):
                found.append(line[start : match.end()])
                start = match.end()
        found.append(line[start:])
    return [piece.strip() for piece in found if words(piece)]


def _ends_sentence(line: str, start: int, end: re.Match[str]) -> bool:
    goes_on = line[end.end() :].lstrip()[:1].islower()
    if goes_on and (end[0].startswith(("..", "…")) or end[0][-1:] in "\"'”’»)]"):
        return False  # "well... maybe", '"Stop!" he said'
    if end[0] != ".":
        return True
    before = line[start : end.start()].split()
    last = before[-1].lstrip("\"'“‘([").casefold() if before else ""
    after = line[end.end() :].lstrip().lstrip("\"'“‘([")
    if _NEVER_ENDS.fullmatch(last):
        return False
    if last == "no":  # "No. 5" is a number, "No. I do not." is two sentences
        return not after[:1].isdigit()
    if _MAY_END.fullmatch(last):
        return after[:1].isupper() or not after
    # "J. Smith" and "1. Apples": an initial before a name, a number that opens a line.
    is_initial = (
        len(last) == 1 and last.isalpha() and last != "i" and before[-1].isupper() and after[:1].isupper()
    )
    opens_list = last.isdigit() and start == 0 and len(before) == 1 and bool(after)
    return not (is_initial or opens_list)


# --- facts -----------------------------------------------------------------------------------


def contains(text: str, wanted: str) -> bool:
    """Whether ``wanted`` stands in ``text`` as whole words; case, line breaks and quote style ignored.

    A number must be the whole number: "15" is not in "150", "3.15", "15.5", "1,150", "15:30", "-15".
    """
    haystack, needle = _plain(text), _plain(wanted)
    if not needle:
        return False
    pattern = r"\s+".join(re.escape(part) for part in needle.split())
    return any(
        _stands_alone(haystack, match.start(), match.end()) for match in re.finditer(pattern, haystack)
    )


def _stands_alone(text: str, start: int, end: int) -> bool:
    first, last = text[start], text[end - 1]
    before, after = text[max(start - 2, 0) : start], text[end : end + 2]
    if _is_word(first) and before and _is_word(before[-1]):
        return False
    if _is_word(last) and after and _is_word(after[0]):
        return False
    if first.isdigit() and re.search(r"\d[.,:]$|(?:^|[^\w)])[-−]$|(?:^|\s)[.]$", before):
        return False
    return not (last.isdigit() and re.match(r"[.,:]\d", after))


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFC", text).casefold().replace("’", "'").replace("‘", "'")
    return " ".join(text.split())


def _first(patterns: Patterns, text: str, *, only_at_start: bool = False) -> str | None:
    for what, pattern in patterns:
        match = pattern.match(text) if only_at_start else pattern.search(text)
        if match:
            return f"{what}: {_quote(match)}"
    return None


def _quote(match: re.Match[str]) -> str:
    """The match with a little of what follows, for a person to find it."""
    return repr(match.string[match.start() : match.end() + 20].strip())
