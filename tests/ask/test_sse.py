"""The event stream reader against the standard's rules, and against every way to cut the bytes."""

import pytest

from manners.ask.sse import SSEReader


def read(*chunks: bytes) -> list[str]:
    reader = SSEReader()
    return [event for chunk in chunks for event in reader.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", ["a"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\r\rdata: b\r\r", ["a", "b"]),
        (b"data:a\n\n", ["a"]),  # the space is optional
        (b"data:  a\n\n", [" a"]),  # and only one is taken off
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"data\ndata: b\n\n", ["\nb"]),
        (b": ping\n\ndata: a\n\n: ping\n\n", ["a"]),
        (b"data: a\n: ping\ndata: b\n\n", ["a\nb"]),
        (b"event: message\nid: 7\nretry: 3\ndata: a\n\n", ["a"]),
        (b"\n\n\ndata: a\n\n\n\n", ["a"]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        (b'data: {"x": "a: b"}\n\n', ['{"x": "a: b"}']),
        ("data: a\u2028b\x0bc\x85d\n\n".encode(), ["a\u2028b\x0bc\x85d"]),  # no line ends in SSE
        (b"data: \xff\n\n", ["\ufffd"]),
        (b"data: a\n\ndata: cut off\n", ["a"]),
        (b"data: a\n\ndata: cut o", ["a"]),
        (b"data: a\n", []),
    ],
)
def test_rules_of_the_standard(stream, events):
    assert read(stream) == events
    assert read(*(stream[n : n + 1] for n in range(len(stream)))) == events


def test_any_cut_gives_the_same_events():
    stream = "data: Größe 🙂\r\n\r\n: ping\r\ndata: 東京\r\ndata: b\r\n\r\ndata: [DONE]\n\n".encode()
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            chunks = stream[:first], stream[first:second], stream[second:]
            assert read(*chunks) == ["Größe 🙂", "東京\nb", "[DONE]"], (first, second)


def test_an_event_comes_out_with_the_chunk_that_ends_it():
    reader = SSEReader()
    assert reader.feed(b"data: a\r\n\r") == ["a"]  # a lone CR ends a line too, no need to wait for its LF
    assert reader.feed(b"\ndata: b\n") == []
    assert reader.feed(b"\n") == ["b"]
