"""The error tree: what went wrong, who caused it, and whether coming back later helps.

Every error that a client can meet carries four things: a stable `code` that programs may compare, a `type` (OpenAI's
coarse class of the same), a `status_hint` for transports that have statuses, and `retry_after_s` where waiting helps.
Nothing here knows HTTP: the hint is a number until a dialect makes an answer of it.
"""

from __future__ import annotations

from typing import ClassVar


class TokenflowError(Exception):
    """Base of all. Raised bare, it means a fault of ours; report it."""

    code: str = "internal_error"
    type: ClassVar[str] = "server_error"
    status_hint: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details: dict[str, int | str | None] = {}
        """Numbers and names that a program may want beside the message."""
        if code is not None:
            self.code = code


# --- the caller's ---------------------------------------------------------------------------------------------------


class InvalidRequest(TokenflowError):
    """The request is malformed or out of range. Mend `param` and ask again."""

    code = "invalid_value"
    type = "invalid_request_error"
    status_hint = 400


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested tokens do not fit the model. Shorten one of them."""

    code = "context_length_exceeded"

    def __init__(self, *, limit: int, prompt: int, requested: int | None, param: str | None = None) -> None:
        asked = f" and {requested} were requested" if requested is not None else ""
        super().__init__(
            f"This model's context holds {limit} tokens; the prompt has {prompt}{asked}. Shorten the prompt"
            + (" or max_tokens." if requested is not None and prompt < limit else "."),
            param=param,
        )
        self.details = {"limit": limit, "prompt": prompt, "requested": requested}


class IdempotencyConflict(InvalidRequest):
    """This Idempotency-Key was used with another body. Use a new key for a new request."""

    code = "idempotency_key_reused"
    status_hint = 422


class Unauthorized(TokenflowError):
    """No key, or one that nobody has. Send `Authorization: Bearer <key>`."""

    code = "invalid_api_key"
    type = "authentication_error"
    status_hint = 401


class Forbidden(TokenflowError):
    """Not for whoever asks, with any key."""

    code = "forbidden"
    type = "permission_error"
    status_hint = 403


class Misdirected(TokenflowError):
    """The request is for another server's name. Use one of this server's."""

    code = "host_not_allowed"
    type = "invalid_request_error"
    status_hint = 421


class NotFound(TokenflowError):
    """No such model, stream or route."""

    code = "not_found"
    type = "invalid_request_error"
    status_hint = 404


class StreamNotFound(NotFound):
    """There is no such stream, or it is somebody else's: the two are not told apart."""

    code = "stream_not_found"


class ResumeWindowLost(TokenflowError):
    """The record asked for has left the replay log. Start again, or read from `oldest` with a gap."""

    code = "resume_window_lost"
    type = "invalid_request_error"
    status_hint = 410

    def __init__(self, *, asked: int, oldest: int, last: int, sealed: bool) -> None:
        state = "finished" if sealed else "live"
        held = f"it holds {oldest} to {last}" if oldest <= last else "it holds none"
        super().__init__(f"Record {asked} has left the replay log; {held}, and the stream is {state}.")
        self.details = {"oldest": oldest, "last": last, "state": state}


class ModelNotFound(NotFound):
    """The model asked for is not one that is served here."""

    code = "model_not_found"


class Cancelled(TokenflowError):
    """The generation was cancelled through the API while somebody waited for it. Whoever did so knows why."""

    code = "cancelled"
    type = "invalid_request_error"
    status_hint = 409


# --- nobody's fault: come back later --------------------------------------------------------------------------------


class Overloaded(TokenflowError):
    """There is no room now. Come back after `retry_after_s`."""

    code = "overloaded"
    type = "overloaded_error"
    status_hint = 503


class QueueFull(Overloaded):
    """The waiting room has no place left."""

    code = "queue_full"


class QueueTimeout(Overloaded):
    """Waited `queue_timeout_s` and no slot came free."""

    code = "queue_timeout"


class ReplayFull(Overloaded):
    """The replay logs of live streams fill their memory."""

    code = "replay_full"


class Draining(Overloaded):
    """The server is going down. Another replica, or this one after its restart, will serve."""

    code = "draining"


# --- the engine's ---------------------------------------------------------------------------------------------------


class EngineError(TokenflowError):
    """An engine failed. The other streams go on; asking again may work."""

    code = "engine_error"
    status_hint = 502


class EngineClosed(EngineError):
    """The engine is not open: starting, restarting, or ended."""

    code = "engine_unavailable"
    status_hint = 503


class EngineStuck(EngineError):
    """A cancelled sequence was not let go within the grace; its slot is not trusted any more."""

    code = "engine_stuck"


class EngineTimeout(TokenflowError):
    """A deadline of the stream passed while the engine had it."""

    code = "timeout"
    type = "timeout_error"
    status_hint = 504


class PrefillTimeout(EngineTimeout):
    """No first token within `prefill_timeout_s` of the slot."""

    code = "prefill_timeout"


class IdleTimeout(EngineTimeout):
    """No token for `idle_timeout_s`, and the reader was not the reason."""

    code = "idle_timeout"


class TotalTimeout(EngineTimeout):
    """The stream did not end within `total_timeout_s` of its admission."""

    code = "total_timeout"


# --- the operator's -------------------------------------------------------------------------------------------------


class StartupError(TokenflowError):
    """Something the operator must mend before the server can run: shown as one line, exit code 1."""

    code = "startup_error"


class ConfigError(StartupError):
    """The configuration does not hold. `problems` has every fault, one line each."""

    code = "config_error"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PluginError(StartupError):
    """A plugin is missing, does not load, or breaks a promise."""

    code = "plugin_error"


class EngineLost(StartupError):
    """An engine cannot be opened again in this process, whatever is tried: a GPU has failed under it, for one.

    The server drains, and ends with exit code 1, so that its supervisor starts a new one.
    """

    code = "engine_lost"


def first_error(error: BaseException) -> BaseException:
    """The first error inside groups, however deep; `error` itself if it is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


SAID_CHARS = 1000
"""Of an error's own text: it may hold a whole prompt, or a compiler's output."""


def described(error: BaseException) -> str:
    """An error of somebody else's in words: its type, and what it says, if it can say anything."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be had"
    return f"{type(error).__name__}: {text[:SAID_CHARS]}"
