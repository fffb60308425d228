"""Writing without a wait: a piece is framed and given to the kernel by whoever has it, with no task in between."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from .writer import Writer

_SIZE_LINES = [b"%x\r\n" % size for size in range(1024)]
"""The first line of a chunk (RFC 9112 section 7.1), by the chunk's size: that of a token is always among them."""


class Connectable(Protocol):
    """A WebSocket, as far as who writes to it needs to know."""

    @property
    def connected(self) -> bool:
        """Messages may be sent."""


def text_frame(text: str) -> bytes:
    """A whole message's frame, unmasked and not compressed, as all of ours are (RFC 6455 section 5.2)."""
    payload = text.encode()
    size = len(payload)
    if size < 126:
        return b"\x81%c%b" % (size, payload)
    length = b"\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x7f" + size.to_bytes(8)
    return b"\x81" + length + payload


class Direct:
    """Sends a piece of a streamed body, or WebSocket messages, at once, from any task, to a client that keeps up.

    On HTTP/1.1 without TLS. All else is never `ready`, and waits.

    Args:
        writer: the connection's.
        broken: called where the connection turns out to be.
        flush: returns when the kernel has what was held.
    """

    __slots__ = ("_broken", "_flush", "_writer", "open_ended", "websocket")

    def __init__(self, writer: Writer, broken: Callable[[], None], flush: Callable[[], Awaitable[None]]) -> None:
        self._writer = writer
        self._broken = broken
        self._flush = flush
        self.open_ended = False
        """In the middle of a response whose pieces have no end in sight."""
        self.websocket: Connectable | None = None

    @property
    def ready(self) -> bool:
        """It may be used now: the response is one that is streamed, and nothing waits to be sent before."""
        if not self._writer.ready:
            return False
        return self.open_ended or (self.websocket is not None and self.websocket.connected)

    def send_nowait(self, data: bytes | list[str]) -> bool:
        """Only while `ready`. True: the kernel has all of `data`. False: a part is held, and `flush` waits for it.

        Args:
            data: a chunk of the response (RFC 9112 section 7.1), or a WebSocket's messages.
        """
        if isinstance(data, bytes):
            size = len(data)
            size_line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
            framed = size_line + data + b"\r\n"
        else:
            framed = b"".join([text_frame(text) for text in data])
        try:
            return self._writer.write_nowait(framed)
        except OSError:
            self._broken()
            return False

    async def flush(self) -> None:
        """Return when the kernel has what was held. Raises ClientDisconnected."""
        await self._flush()

    def close(self) -> None:
        """Nothing is written any more, and nobody told."""
        self.open_ended, self.websocket = False, None
        self._broken = _nothing


def _nothing() -> None:
    pass
