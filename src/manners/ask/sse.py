"""A reader of server-sent events: bytes in, the ``data`` of whole events out. No JSON, no clock.

Follows the event stream format of the WHATWG HTML standard, section 9.2: lines end in LF, CRLF or
CR; a line that starts with a colon is a comment (servers send such lines to keep a connection
alive); several ``data`` lines make one event, joined by LF; an empty line ends an event; what has
no empty line behind it when the stream ends was cut off, and is dropped.

Left out: ``id``, ``event`` and ``retry``, of which OpenAI's chat API uses none.
"""

from __future__ import annotations

import codecs


class SSEReader:
    """Feed it bytes as they arrive, split anywhere, even inside a character or a CRLF.

    Bytes that are no UTF-8 become U+FFFD, as the standard has it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line: list[str] = []
        self._data: list[str] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[str]:
        """The data of every event that this chunk completes, in order."""
        text = self._decoder.decode(chunk)
        if not text:
            return []
        if self._at_start:
            text = text.removeprefix("\ufeff")
            self._at_start = False
        if self._after_cr:
            # The CR before already ended the line; an LF that follows it belongs to it.
            text = text.removeprefix("\n")
        self._after_cr = text.endswith("\r")
        # Not str.splitlines(): it also splits at U+2028 and others, which JSON allows in strings.
        first, *rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._line.append(first)
        events = []
        for piece in rest:
            event = self._take_line("".join(self._line))
            if event is not None:
                events.append(event)
            self._line = [piece]
        return events

    def _take_line(self, line: str) -> str | None:
        if not line:
            if not self._data:
                return None
            event = "\n".join(self._data)
            self._data = []
            return event
        field, _, value = line.partition(":")  # a comment has an empty field, so it is ignored too
        if field == "data":
            self._data.append(value.removeprefix(" "))
        return None
