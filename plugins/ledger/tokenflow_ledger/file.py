"""An append-only file of whole lines: each line is one write with O_APPEND, and a line that was cut is made whole.

    fd, inode   what is open; each batch first asks whether `path` still means it (log rotation renames)
    left        the rest of a line that the disk cut off, and the size of the file at which it fits on

A disk that fills up cuts a line in the middle. Its rest is written later, onto the cut, so that readers never meet half
a line. Where it cannot be (the file was rotated, or somebody else appended), the line is written anew and whole: in an
unfinished file on a line of its own. So is the first line after a crash that left half a line behind.

Blocking; one thread at a time.

`why_not` says beforehand what opening would, without making anything.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("tokenflow.ledger")


class Appended(NamedTuple):
    """What came of a batch: how many of its lines are in the file, and why not all of them."""

    lines: int
    error: OSError | None


class LedgerFile:
    """One file. A line that was not counted as appended must come first in the next batch.

    Args:
        path: relative to the working directory; missing parent folders are made.
        fsync: wait for the disk after each batch.
    """

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self.path = path.absolute()  # once: the working directory may change
        self._fsync = fsync
        self._fd: int | None = None
        self._torn = False  # the file's last line has no newline
        self._left = b""
        self._left_at = 0

    def open(self) -> None:
        """Open for appending; raises OSError."""
        folder = self.path.parent
        if not folder.exists():
            with suppress(FileExistsError):  # a file in a folder's place: opening will say so better
                folder.mkdir(parents=True, exist_ok=True)
                log.info("ledger %s: made the folder %s", self.path, folder)
        # For reading too: to see how the last line ends, and since a pipe then opens at once.
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._torn = _ends_within_a_line(self._fd)
        self._left = b""

    def close(self) -> None:
        """Repeatable."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def append(self, lines: Sequence[bytes]) -> Appended:
        """Append in order, up to the first error."""
        done = 0
        try:
            fd = self._current()
            for line in lines:
                self._write(fd, self._next(fd, line))
                done += 1
            if self._fsync:
                os.fsync(fd)
        except OSError as exc:
            return Appended(done, exc)
        return Appended(done, None)

    def _current(self) -> int:
        """The open file, or after a rotation the new one."""
        if self._fd is not None and not _is_at(self._fd, self.path):
            self.close()
        if self._fd is None:
            self.open()
        assert self._fd is not None
        return self._fd

    def _next(self, fd: int, line: bytes) -> bytes:
        """What to write so that `line` is in the file, whole."""
        if self._left and os.fstat(fd).st_size == self._left_at:
            return self._left
        if self._left:
            self._torn, self._left = _ends_within_a_line(fd), b""
        return b"\n" + line if self._torn else line

    def _write(self, fd: int, data: bytes) -> None:
        while True:
            written = os.write(fd, data)
            if written == len(data):
                break
            data = data[written:]  # cut: the next write says why, and `left` lasts until it succeeds
            self._left, self._left_at = data, os.fstat(fd).st_size
        self._torn, self._left = False, b""


def why_not(path: Path) -> OSError | None:
    """What opening a file for appending would raise, as far as it can be told without making it; None: nothing."""
    if "\0" in str(path):
        return OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    real = Path(os.path.realpath(path))
    try:
        mode = real.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            os.close(os.open(real, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))
    except FileNotFoundError as exc:
        if not real.parent.exists() and any(part.is_symlink() and not part.exists() for part in (path, *path.parents)):
            return exc  # folders are made where the path says, and not where a link leads
        return _why_no_file_in(next(folder for folder in real.parents if folder.exists()))
    except OSError as exc:
        return exc
    return None


def _why_no_file_in(folder: Path) -> OSError | None:
    try:
        # A file that never has a name, and is gone with this line.
        os.close(os.open(folder, getattr(os, "O_TMPFILE", 0) | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        # Not every file system has such files; those that have no blocks, like /proc, have no new files at all.
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL) or not os.statvfs(folder).f_blocks:
            return exc
        if not os.access(folder, os.W_OK | os.X_OK):
            return PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return None


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _ends_within_a_line(fd: int) -> bool:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size == 0:
        return False
    return os.pread(fd, 1, about.st_size - 1) != b"\n"
