"""Event streams: literal bytes out, the standard's own examples in, and any split of the bytes makes no difference."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenflow.core import sse
from tokenflow.core.sse import Event, Parser


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (dict(data="x"), b"data: x\n\n"),
        (dict(data=b"x"), b"data: x\n\n"),
        (dict(data=""), b"data: \n\n"),
        (dict(data=" é"), b"data:  \xc3\xa9\n\n"),
        (dict(data="a\nb\r\nc\rd"), b"data: a\ndata: b\ndata: c\ndata: d\n\n"),
        (dict(data=b"a\n"), b"data: a\ndata: \n\n"),
        (
            dict(data="x", event="done", id="tf-1:2", retry=1500),
            b"id: tf-1:2\nevent: done\nretry: 1500\ndata: x\n\n",
        ),
        (dict(data="x", id=""), b"id: \ndata: x\n\n"),
        (dict(data="x", retry=0), b"retry: 0\ndata: x\n\n"),
    ],
)
def test_an_event_is_these_bytes(args, expected):
    assert sse.event(**args) == expected


def test_pings_are_these_bytes():
    assert sse.PING == b": ping\n\n"
    assert sse.PING_LINE == b": ping\n"


@pytest.mark.parametrize(
    "args",
    [
        dict(id="a\n"),
        dict(id="a\r"),
        dict(id="a\0"),
        dict(event="a\nb"),
        dict(id="x" * 2000),
        dict(retry=-1),
    ],
)
def test_what_a_reader_would_not_get_back_is_refused(args):
    with pytest.raises(ValueError):
        sse.event("x", **args)


def test_a_line_over_64_kB_is_refused():
    assert len(sse.event("x" * 63_994)) == 64_002
    with pytest.raises(ValueError, match="64000"):
        sse.event("x" * 63_995)
    assert sse.event("\n".join(["x" * 60_000] * 3)).count(b"data: ") == 3


def parse(stream: bytes) -> list[Event]:
    """The same three ways: whole, byte by byte, and with more behind it."""
    whole = Parser().feed(stream)
    parser = Parser()
    assert [e for at in range(len(stream)) for e in parser.feed(stream[at : at + 1])] == whole
    behind = Parser().feed(stream + b"\n: more\n\nid: 7\n")
    assert behind[: len(whole)] == whole
    return whole


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        # The examples of section 9.2.6.
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [Event("YHOO\n+2\n10")]),
        (
            b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
            [Event("first event", id="1"), Event("second event"), Event(" third event")],
        ),
        (b"data\n\ndata\ndata\n\ndata:", [Event(""), Event("\n")]),
        (b"data:test\n\ndata: test\n\n", [Event("test"), Event("test")]),
        # Line ends.
        (b"data: a\r\rdata: b\r\n\r\ndata: c\r\n\n", [Event("a"), Event("b"), Event("c")]),
        (b"data: a\r\ndata: b\n\r", [Event("a\nb")]),
        (b"data: a\xe2\x80\xa8b\x0b\x0c\xc2\x85c\n\n", [Event("a\u2028b\x0b\x0c\x85c")]),
        # Byte order marks: the first one is none of the text.
        (b"\xef\xbb\xbfdata: a\n\n", [Event("a")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [Event("b")]),
        (b"data: \xef\xbb\xbfa\n\n", [Event("\ufeffa")]),
        # Types.
        (b"event: x\ndata: a\n\ndata: b\n\n", [Event("a", "x"), Event("b")]),
        (b"event: x\nevent\ndata: a\n\n", [Event("a")]),
        (b"event: x\n\ndata: a\n\n", [Event("a")]),
        # Ids stay, also over a block without data.
        (b"id: 1\ndata: a\n\ndata: b\n\n", [Event("a", id="1"), Event("b", id="1")]),
        (b"id: 1\n\ndata: b\n\n", [Event("b", id="1")]),
        (b"id: 1\nid: 2\x003\ndata: b\n\n", [Event("b", id="1")]),
        (b"id: 1\nid:\ndata: b\n\n", [Event("b")]),
        # What is no field.
        (b"Data: a\n data: b\nfoo: c\n:data: d\ndata : e\n\n", []),
        # Not UTF-8.
        (b"data: a\xffb\xe2\x82\n\n", [Event("a\ufffdb\ufffd")]),
        # Without its blank line, an event is none.
        (b"data: a\n\ndata: b\n", [Event("a")]),
        (b"", []),
    ],
)
def test_a_stream_is_these_events(stream, expected):
    assert parse(stream) == expected


# The kinds of browsers' own tests (web-platform-tests, eventsource/format-*), each with streams of ours.
FORMATS: dict[str, tuple[bytes, list[Event]]] = {
    "bom": (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\ndata: c\n\n", [Event("a"), Event("c")]),
    "bom, two of them": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\ndata: c\n\n", [Event("b"), Event("c")]),
    "bom before a blank line": (b"\xef\xbb\xbf\ndata: a\n\n", [Event("a")]),
    "bom within a value": (b"data:\xef\xbb\xbf\nevent:\xef\xbb\xbfe\ndata: a\n\n", [Event("\ufeff\na", "\ufeffe")]),
    "comments": (
        b"data:a\r:\0\n:\r\ndata:b\n:" + b"long" * 2000 + b"\rdata:c\n:data:no\r: :\ndata:d\n\n",
        [Event("a\nb\nc\nd")],
    ),
    "comments alone": (b":\n\n: a\r\r:\r\n\r\n", []),
    "data before the last blank line": (b"retry:1000\ndata:a\n\nid:7\ndata:b\n", [Event("a")]),
    "data": (b"data:\n\ndata\ndata\n\ndata:a\n\n", [Event(""), Event("\n"), Event("a")]),
    "data of blank lines": (b"data\ndata:\ndata: \ndata:  \n\n", [Event("\n\n\n ")]),
    "data that ends in blank lines": (b"data: a\ndata:\ndata\n\n", [Event("a\n\n")]),
    "data with colons": (b"data:a:b\ndata::\ndata: : a\n\n", [Event("a:b\n:\n: a")]),
    "event": (b"event:e\ndata:a\n\ndata:b\n\n", [Event("a", "e"), Event("b")]),
    "event, the last one counts": (b"event: d\nevent: e\ndata: a\n\n", [Event("a", "e")]),
    "event after its data": (b"data: a\nevent: e\n\n", [Event("a", "e")]),
    "event, empty": (b"event: \ndata: a\n\nevent:e\nevent\ndata: b\n\n", [Event("a"), Event("b")]),
    "event of a space": (b"event:  \ndata: a\n\n", [Event("a", " ")]),
    "event without data": (b"event: e\n\nevent: f\n\ndata: a\n\n", [Event("a")]),
    "event with a null": (b"event: a\0b\ndata: a\n\n", [Event("a", "a\0b")]),
    "event called message": (b"event: message\ndata: a\n\n", [Event("a")]),
    "id": (b"id: 1\ndata: a\n\n", [Event("a", id="1")]),
    "id stays": (b"id:1\n\ndata:a\n\ndata:b\n\nid:2\ndata:c\n\n", [Event(t, id=i) for t, i in ("a1", "b1", "c2")]),
    "id, empty": (b"id: 1\ndata: a\n\nid\ndata: b\n\ndata: c\n\n", [Event("a", id="1"), Event("b"), Event("c")]),
    "id, the last one counts": (b"id: 1\nid: 2\ndata: a\n\n", [Event("a", id="2")]),
    "id after its data": (b"data: a\nid: 1\n\n", [Event("a", id="1")]),
    "id of any characters": ("id: … é:\t \ndata: a\n\n".encode(), [Event("a", id="… é:\t ")]),
    **{
        f"id with a null {where}": (b"id: 1\n\nid: %b\ndata: a\n\n" % id, [Event("a", id="1")])
        for where, id in {"alone": b"\0", "first": b"\x002", "last": b"2\0", "within": b"2\x003"}.items()
    },
    "names": (
        b"data:\0\ndata:  b\rData:no\ndata\0:no\ndata:c\r\0data:no\nda-ta:no\rdata_no\n"
        b"data:d\rdata:\r\n data:no\ndata:e\n\n",
        [Event("\0\n b\nc\nd\n\ne")],
    ),
    "names unknown": (b"data:a\n data\ndata\nfoo:x\nwords\n:c\nDATA: no\nID: 1\ndata:b\n\n", [Event("a\n\nb")]),
    "names with spaces": (b"data : a\n\n data: b\n\n\tdata: c\n\n", []),
    "names of methods": (b"constructor: a\n__proto__: b\n_take: c\ndata: d\n\n", [Event("d")]),
    "leading space": (b"data:\ta\rdata: \ndata:  b\ndata:c \n\n", [Event("\ta\n\n b\nc ")]),
    "leading spaces of others": ("data:\u00a0a\ndata:\u3000b\n\n".encode(), [Event("\u00a0a\n\u3000b")]),
    "line ends": (b"data:a\r\ndata\ndata:b\r\n\r", [Event("a\n\nb")]),
    "line ends, CR LF after CR": (b"data:a\r\r\ndata:b\r\r\n\n", [Event("a"), Event("b")]),
    "line ends, LF CR": (b"data:a\n\rdata:b\n\r", [Event("a"), Event("b")]),
    "line ends of others": (
        "data:a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g\n\n".encode(),
        [Event("a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g")],
    ),
    "null": (b"data:\0\n\n\n\n", [Event("\0")]),
    "utf-8": ("data:ok…\n\ndata:🦆é\n\n".encode(), [Event("ok…"), Event("🦆é")]),
    "utf-8 that is wrong": (
        b"data:\xff\n\ndata:\xf0\x9f\x92\n\ndata:\xed\xa0\x80\n\n",
        [Event("\ufffd"), Event("\ufffd"), Event("\ufffd" * 3)],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_as_browsers_read_them(name):
    stream, expected = FORMATS[name]
    assert parse(stream) == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"retry: 100\n", 100),
        (b"retry:03000\n", 3000),
        (b"retry:3000\nretry:1000x\ndata:x\n", 3000),
        (b"retry:3000\nretry\n", 3000),
        (b"retry: 1\0\nretry:  1\nretry:1 \nretry:0x1\nretry:1e3\nretry:1_0\n", None),
        (b"retry: 0\n", 0),
        (b"retry: 1\nretry: 2\n", 2),
        (b"retry:100\nretry: 1x\nretry: -1\nretry: +1\nretry:\nretry: 1.5\n", 100),
        ("retry: ١٠\n".encode(), None),
        (b"retry: 007\n", 7),
        (b"retry: " + b"9" * 5000 + b"\n", 999_999_999_999),
    ],
)
def test_retry_takes_digits_alone(stream, expected):
    parser = Parser()
    assert parser.feed(stream) == []
    assert parser.retry_ms == expected


def test_last_event_id_is_set_when_its_block_ends():
    parser = Parser()
    parser.feed(b"id: 5\n")
    assert parser.last_event_id == ""
    parser.feed(b"\n")
    assert parser.last_event_id == "5"


def test_an_unfinished_event_is_bounded():
    for stream in (b"data: " + b"x" * 200, b"data: xxxx\n" * 30, b"x" * 101):
        with pytest.raises(ValueError, match="100"):
            Parser(limit_chars=100).feed(stream)
    parser = Parser(limit_chars=100)
    for _ in range(50):
        assert len(parser.feed(b"data: x\ndata: y\n\n")) == 1
    for _ in range(1000):
        assert parser.feed(b": a comment, byte by byte\n") == []
        for byte in b": ping\n":
            parser.feed(bytes([byte]))


lines = st.sampled_from(
    [
        "data",
        "data:",
        "data: ",
        "data: a",
        "data:b:",
        "id: 1",
        "id",
        "id: \0",
        "event: e",
        "event",
        "retry: 9",
        ": c",
        "",
    ]
)
ends = st.sampled_from(["\r\n", "\r", "\n"])
written = st.lists(st.tuples(lines | st.text(max_size=8), ends), max_size=12).map(
    lambda pairs: "".join(line + end for line, end in pairs)
)
streams = st.tuples(st.sampled_from([b"", b"\xef\xbb\xbf"]), written.map(str.encode) | st.binary(max_size=60)).map(
    b"".join
)


@given(streams, st.lists(st.integers(0, 200)))
@example(b"\xef\xbb\xbfdata: \xf0\x9f\x98\x80\r\n\r\n", [1, 2, 10, 11, 12, 13, 14, 15, 16])
def test_any_split_gives_the_same_events(stream, cuts):
    whole = Parser()
    expected = whole.feed(stream)
    parser, events, last = Parser(), [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]:
        events += parser.feed(stream[last:cut])
        last = cut
    assert events == expected
    assert (parser.last_event_id, parser.retry_ms) == (whole.last_event_id, whole.retry_ms)


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0"), max_size=20)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
            plain.filter(bool) | st.none(),
            plain | st.none(),
        )
    )
)
def test_what_is_encoded_is_parsed_back(events):
    stream = b"".join(sse.event(data, event=kind, id=id) for data, kind, id in events)
    expected, last = [], ""
    for data, kind, id in events:
        last = last if id is None else id
        expected.append(Event(re.sub("\r\n|\r", "\n", data), kind or "message", last))
    assert Parser().feed(stream) == expected
