"""Numbers and strangers' words as text that a reader sees.

Everything a model says is untrusted: :func:`visible` makes characters that act on a reader's screen
(control codes, reversed writing, nothing-wide spaces) into characters that can be seen, and
:class:`Markdown` is the only text that ``report.md`` takes unescaped. HTML is escaped by the
template engine, in one place, for every value.
"""

from __future__ import annotations

import re
import unicodedata

THIN = "\u202f"  # narrow no-break space, between a number and its unit
MINUS = "\u2212"

# Format characters that emoji and Indic scripts need; alone they show nothing and move nothing.
_HARMLESS_FORMAT = frozenset("\u200c\u200d")


def visible(text: str) -> str:
    """The text with every invisible or unprintable character shown as a sign of its own.

    Newlines and tabs stay. Control and format characters (escape, bidirectional overrides,
    zero-width spaces) become ``⟨U+202E⟩``, and half of a surrogate pair, which no file can hold,
    becomes ``�``.
    """
    return "".join(_shown(character) for character in text.replace("\r\n", "\n"))


def _shown(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or character in _HARMLESS_FORMAT:
        return character
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return character


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters, and how many were left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit].rstrip()} … ({len(text) - limit} more characters)"


def percent(share: float) -> str:
    """``98.7 %``; only a whole 1 is written ``100 %`` and only 0 is ``0 %``."""
    return f"{percent_number(share)}{THIN}%"


def percent_number(share: float) -> str:
    """:func:`percent` without its sign."""
    if share in (0.0, 1.0):
        return f"{share * 100:.0f}"
    # 399.9 of 400 is not all of them, whatever one decimal would say.
    return f"{min(max(share * 100, 0.1), 99.9):.1f}"


def interval(bounds: tuple[float, float]) -> str:
    """``97.4–99.4``, in percent."""
    return f"{percent_number(bounds[0])}–{percent_number(bounds[1])}"


def points(value: float) -> str:
    """A difference in percentage points with its sign: ``−0.3``, ``+1.2``, ``±0``."""
    if value == 0:
        return "±0"
    # A loss that rounds to nothing is still a loss.
    size = max(abs(value), 0.1)
    return f"{MINUS if value < 0 else '+'}{size:.1f}"


def rule(share: float) -> str:
    """A share that someone chose, as they wrote it: ``60 %``, ``99.5 %``."""
    return f"{round(100 * share, 6):g}{THIN}%"


def margin(share: float) -> str:
    """``2 points``, ``0.5 points``, ``1 point``."""
    value = f"{round(100 * share, 1):g}"
    return f"{value} point{'' if value == '1' else 's'}"


def size(count: int) -> str:
    """Bytes in decimal units: ``4.9 MB``."""
    power = min(max(len(str(count)) - 1, 0) // 3, 4)
    value = count / 1000**power
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{value:.0f}{THIN}B" if power == 0 else f"{value:.3g}{THIN}{unit}"


def minutes(value: float) -> str:
    """``8 s``, ``2.4 min`` or ``3.1 h``."""
    if value < 1:
        return f"{value * 60:.0f}{THIN}s"
    return f"{value:.1f}{THIN}min" if value < 120 else f"{value / 60:.1f}{THIN}h"


def small(value: float) -> str:
    """A figure that may be tiny: ``0``, ``0.012``, ``3.1e−6``."""
    return re.sub(r"e-0*", f"e{MINUS}", f"{value:.2g}")


def p_value(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


def listed(items: tuple[str, ...] | list[str], most: int = 4) -> str:
    """``a``, ``a and b``, ``a, b and c``; beyond ``most``, how many more there are."""
    shown = list(items[:most])
    if len(items) > most:
        shown.append(f"{len(items) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


class Markdown(str):
    """Text that is Markdown already; anything else is escaped on its way into ``report.md``."""

    __slots__ = ()


_MARKUP = re.compile(r"[\\`*\[\]<>|~&$]|(?<![^\W_])_|_(?![^\W_])")
_LINK = re.compile(r"(?<=[a-zA-Z]):(?=//)|(?<=\bwww)\.", re.IGNORECASE)


def markdown_inline(value: object) -> str:
    """One line of Markdown that shows ``value`` as it is. Underscores within words need no escape."""
    if isinstance(value, Markdown):
        return str(value)
    line = " ".join(visible(str(value)).split())
    return _LINK.sub(lambda found: "\\" + found[0], _MARKUP.sub(lambda found: "\\" + found[0], line))


def fenced(text: str) -> Markdown:
    """A code block that nothing in ``text`` can close: its fence is longer than any run of backticks."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markdown(f"{fence}text\n{visible(text)}\n{fence}")
