"""The one error of this room. ``checkpoint`` and ``quantize`` catch it and add the tensor's name."""

from __future__ import annotations

from typing import Literal

FormatCode = Literal["block-shape", "not-finite", "bad-scale", "code-range"]


class FormatError(ValueError):
    """Numbers that NVFP4 cannot hold.

    ``code`` is stable:

    * ``block-shape``: a width that is no multiple of 16, or scales that do not fit the matrix.
    * ``not-finite``: NaN or Inf where a number must stand.
    * ``bad-scale``: a scale that is negative, NaN, Inf or of the wrong type, or a rule that does not exist.
    * ``code-range``: a code outside 0..15, or codes that are not uint8.
    """

    def __init__(self, code: FormatCode, found: str) -> None:
        self.code = code
        self.found = found
        super().__init__(f"{code}: {found}")
