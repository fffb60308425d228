"""The one writer of a connection: whoever has bytes for it goes through here, so frames are never torn or reordered.

    OPEN    everything that was written is the kernel's; `write_nowait` may be called
    HELD    the kernel took a part, and the rest is here: it goes first, and whoever writes next waits for it
    CLOSED  nothing is written any more

A write that the kernel takes at once costs one system call and no wake-up. The rest is waited for under a deadline that
moves with whatever the client takes, shielded, since half a frame would corrupt the connection; without a limit a
shield outlives every timeout, and SIGTERM too.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from enum import Enum

import trio

from tokenflow.core.states import move

_TLS_PIECE = 16 * 1024
_NOTHING = memoryview(b"")


class WriterState(Enum):
    OPEN = "open"
    HELD = "held"
    CLOSED = "closed"


_MOVES: dict[WriterState, frozenset[WriterState]] = {
    WriterState.OPEN: frozenset({WriterState.HELD, WriterState.CLOSED}),
    WriterState.HELD: frozenset({WriterState.OPEN, WriterState.CLOSED}),
    WriterState.CLOSED: frozenset({WriterState.CLOSED}),
}


class Writer:
    """Writes to one socket.

    Args:
        sock: non-blocking.
        tls: what encrypts for it, if anything: then everything is waited for.
        stall_s: how long the client may take nothing.
    """

    def __init__(self, sock: socket.socket, tls: trio.SSLStream[trio.SocketStream] | None, stall_s: float) -> None:
        self._sock = sock
        self._tls = tls
        self._stall_s = stall_s
        self._state = WriterState.OPEN
        self._rest = _NOTHING
        self._turn = trio.Lock()
        self._in_line = 0
        self.ready = tls is None
        """Nobody writes or waits to: what is written now goes out now."""

    def write_nowait(self, data: bytes) -> bool:
        """Hand `data` to the kernel; only while `ready`. False: a part of it is held, and `flush` sends it.

        Raises:
            OSError: the connection is broken.
        """
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return True
        self._hold(memoryview(data)[sent:])
        return False

    async def write(self, data: bytes) -> None:
        """Return when the kernel has all of `data`. No checkpoint if it takes it at once.

        Raises:
            OSError: the connection is broken, or the client took nothing for `stall_s`.
            trio.BrokenResourceError, trio.ClosedResourceError: the same, from TLS, or by `close`.
        """
        if not self.ready:
            await self._in_turn(data)
        elif not self.write_nowait(data):
            await self._in_turn()

    async def flush(self) -> None:
        """Return when the kernel has everything. Raises as `write` does."""
        await self._in_turn()

    def close(self) -> None:
        """Nothing goes out any more; the socket is its owner's to close, which wakes whoever waits here. Repeatable."""
        self._state = move(_MOVES, self._state, WriterState.CLOSED)
        self.ready = False

    async def _in_turn(self, data: bytes = b"") -> None:
        """First come, first served: send what is held, then `data`."""
        self._in_line += 1
        self.ready = False
        try:
            with trio.CancelScope(shield=True) as patience:
                async with self._turn:
                    await self._send_held(patience)
                    if data:
                        self._hold(memoryview(data))
                        await self._send_held(patience)
        finally:
            self._in_line -= 1
            self.ready = self._state is WriterState.OPEN and self._tls is None and not self._in_line
        if patience.cancelled_caught:
            raise TimeoutError(f"took nothing for {self._stall_s} s")

    def _hold(self, rest: memoryview) -> None:
        self._rest = rest
        self._state = move(_MOVES, self._state, WriterState.HELD)
        self.ready = False

    async def _send_held(self, patience: trio.CancelScope) -> None:
        while self._state is WriterState.HELD:
            patience.deadline = trio.current_time() + self._stall_s
            await self._send_some()
            if not self._rest and self._state is WriterState.HELD:
                self._state = move(_MOVES, self._state, WriterState.OPEN)
        if self._state is WriterState.CLOSED:  # by another task, while this one was being woken
            raise trio.ClosedResourceError

    async def _send_some(self) -> None:
        if self._tls is not None:
            await self._tls.send_all(self._rest[:_TLS_PIECE])
            self._rest = self._rest[_TLS_PIECE:]
            return
        await trio.lowlevel.wait_writable(self._sock)
        with suppress(BlockingIOError):
            sent = self._sock.send(self._rest)
            self._rest = self._rest[sent:]
