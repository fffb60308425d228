"""`Direct` on HTTP/1.1: a piece is framed and given to the kernel, with no task in between. All else waits."""

from collections.abc import Awaitable, Callable

from .writer import Writer
from .ws import CorrectedWSStream, text_frame


class DirectWriter:
    """What may be written at once to one connection, and how.

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
        self.websocket: CorrectedWSStream | None = None

    @property
    def ready(self) -> bool:
        if not self._writer.ready:
            return False
        return self.open_ended or (self.websocket is not None and self.websocket.connected)

    def send_nowait(self, data: bytes | list[str]) -> bool:
        """`data` as a chunk of the response (RFC 9112 section 7.1), or as a WebSocket's messages."""
        if isinstance(data, bytes):
            framed = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            framed = b"".join([text_frame(text) for text in data])
        try:
            return self._writer.write_nowait(framed)
        except OSError:
            self._broken()
            return False

    async def flush(self) -> None:
        await self._flush()

    def close(self) -> None:
        """Nothing is written any more, and nobody told."""
        self.open_ended, self.websocket = False, None
        self._broken = _nothing


def _nothing() -> None:
    pass
