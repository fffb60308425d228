"""What a client can meet. Everything is a `TokenflowError`: its message is one line for people.

Three questions tell them apart. Was there ever a server (`Unreachable`)? Did it say what is wrong (`ServerError`, and
`ResumeWindowLost` as the one that a resuming client must tell from the rest)? Or did it stop in the middle of an answer
(`CutOff`) or speak something else than this protocol (`BadAnswer`)?
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenflow.errors import TokenflowError


class ClientError(TokenflowError):
    """Base of all that the client raises."""

    code = "client_error"


class Unreachable(ClientError):
    """No request got through: a wrong URL, or nobody listens there. Mend the URL or start the server."""

    code = "unreachable"


class BadAnswer(ClientError):
    """The peer does not speak this protocol. Look at what stands behind the URL."""

    code = "bad_answer"


class CutOff(ClientError):
    """The answer broke off, and could not be taken up again within the patience.

    Args:
        message: how.
        received: the text that had come, by choice.
    """

    code = "cut_off"

    def __init__(self, message: str, *, received: Mapping[int, str]) -> None:
        super().__init__(message)
        self.received = dict(received)


class ServerError(ClientError):
    """The server said no, or that it failed; `code` and `message` are its own.

    Args:
        message: the server's.
        code: the server's; `http_<status>` where it gave none.
        status: the HTTP status; None for an error within a stream.
        kind: the envelope's `type`.
        param: the field at fault.
        retry_after_s: when it may be worth asking again.

    `details` has what the server said beside these.
    """

    code = "server_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        kind: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code, param=param, retry_after_s=retry_after_s)
        self.status, self.kind = status, kind


class ResumeWindowLost(ServerError):
    """The next event has left the server's replay log (410): the text has a gap that nobody can fill. Ask anew.

    `details`: the `oldest` and `last` records that are still held, and the stream's `state`.
    """

    code = "resume_window_lost"


_ENVELOPE = {"message", "type", "param", "code"}


def refusal(status: int, content: bytes, retry_after_s: float | None = None) -> ServerError:
    """The error that an answer with an error status stands for."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, LookupError, TypeError):
        message = f"the server answered {status}; is it tokenflow?"
        return _of(status)(message, code=f"http_{status}", status=status, retry_after_s=retry_after_s)
    return from_envelope(error, status=status, retry_after_s=retry_after_s)


def from_envelope(error: Any, *, status: int | None = None, retry_after_s: float | None = None) -> ServerError:
    """The error that an envelope's inside stands for; anything in its place is still an error."""
    if not isinstance(error, Mapping):
        error = {"message": error if isinstance(error, str) else None}
    code = _text(error.get("code")) or (f"http_{status}" if status is not None else None)
    found = (ResumeWindowLost if code == ResumeWindowLost.code else _of(status))(
        _text(error.get("message")) or "the server reports an error",
        code=code,
        status=status,
        kind=_text(error.get("type")),
        param=_text(error.get("param")),
        retry_after_s=retry_after_s,
    )
    found.details = {name: value for name, value in error.items() if name not in _ENVELOPE}
    return found


def _of(status: int | None) -> type[ServerError]:
    return ResumeWindowLost if status == 410 else ServerError


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
