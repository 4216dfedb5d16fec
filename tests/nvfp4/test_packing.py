"""Bytes are golden: the even column sits in the low nibble."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

from manners.nvfp4 import FormatError, decode, pack, unpack

ALL_BYTES = torch.arange(256, dtype=torch.uint8).reshape(4, 64)


def test_the_even_column_is_the_low_nibble() -> None:
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[0x21, 0x0F]]


def test_every_byte_survives() -> None:
    assert torch.equal(pack(unpack(ALL_BYTES)), ALL_BYTES)


def test_every_byte_means_what_compressed_tensors_reads_and_writes() -> None:
    values = decode(unpack(ALL_BYTES), torch.ones(4, 8))
    assert torch.equal(values, unpack_fp4_from_uint8(ALL_BYTES, 4, 128, dtype=torch.float32))
    assert torch.equal(pack_fp4_to_uint8(values), ALL_BYTES)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.full((1, 16), 16, dtype=torch.uint8), "code-range.*16"),
        (torch.ones(1, 16, dtype=torch.int8), "code-range.*int8"),
        (torch.ones(1, 17, dtype=torch.uint8), "block-shape.*17"),
    ],
)
def test_pack_refuses(codes: torch.Tensor, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        pack(codes)


def test_unpack_refuses_other_types() -> None:
    with pytest.raises(FormatError, match=r"code-range.*int8"):
        unpack(torch.ones(1, 8, dtype=torch.int8))
