"""Structured output for every engine that draws its tokens one by one: a `Grammars` for its vocabulary, and for each
constrained sequence a `Matcher` that says which tokens may come next. llguidance does the work.

    request -- Grammar: plain data --> Grammars.compile   in a process of its own, within a budget: see grammar_worker
                                       Grammars.matcher   compiled once more, here, and kept; each sequence has a copy
    step ----- Sequence.matcher -----> mask() before a draw, accept(token) after it, forced(): what needs no draw

A grammar that has passed the process compiles here too, and as quickly: it is the same work. What a step may cost is
bounded by llguidance, and once more by `MAX_STEP_S`: a grammar that has been that slow ends its sequence, and no other.
"""

from __future__ import annotations

import marshal
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE
from time import thread_time
from types import TracebackType
from typing import Any

import trio

from tokenflow.api import grammar_worker
from tokenflow.core.types import Grammar
from tokenflow.errors import EngineError, InvalidRequest, Overloaded

BUDGET_S = 3.0
"""For compiling one grammar, where nobody says otherwise."""
TURNS = 2
"""Budgets that one waits for its turn to compile."""
KEPT = 64
"""Compiled grammars that are kept, those used last."""
MAX_STEP_S = 0.5
"""Processor time for one token of one sequence; others wait for it. A usual one takes 0.1 ms."""
WORKER_START_S = 30.0
KILL_S = 5.0


class Matcher:
    """One sequence's place in its grammar. For the thread that draws its tokens."""

    __slots__ = ("_inner", "_param")

    def __init__(self, inner: Any, param: str) -> None:
        self._inner = inner
        self._param = param

    @property
    def ended(self) -> bool:
        """The text is complete, and nothing can follow it."""
        return bool(self._inner.is_stopped())

    def mask(self) -> bytes:
        """A byte for each token of the vocabulary: 0 where it may not come next. Tokens that end are among them."""
        return bytes(self._bounded(self._inner.compute_logit_bias))

    def accept(self, *tokens: int) -> None:
        """These come next. EngineError if they may not."""
        if self._bounded(self._inner.try_consume_tokens, list(tokens)) != len(tokens):
            raise EngineError(f"Of the tokens {tokens} not all can follow here: the grammar's mask was not applied.")

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever the model thinks; often none."""
        return list(self._bounded(self._inner.compute_ff_tokens))

    def _bounded(self, work: Callable[..., Any], *args: Any) -> Any:
        began = thread_time()
        result = work(*args)
        took = thread_time() - began
        if self._inner.is_error():
            raise self._too_complex(self._inner.get_error().splitlines()[0])
        if took > MAX_STEP_S:
            raise self._too_complex(f"{took:.1f} s for one token, of {MAX_STEP_S:g} at most")
        return result

    def _too_complex(self, why: str) -> InvalidRequest:
        return InvalidRequest(
            f"'{self._param}' became too complex in the middle of the text: {why}.", param=self._param
        )


class Grammars:
    """Compiles grammars for one vocabulary. Use it as an async context manager, on Trio's side.

    Making one takes some tenths of a second, during which no other thread of Python runs: do it while the model loads.

    Args:
        tokens: each token's bytes; of a control token its name.
        ends: tokens that end a text.
        specials: control tokens, which no grammar can ask for by their texts.
        tokenize: plain text to tokens, as the model would have it; called in any thread.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        ends: Sequence[int],
        specials: Sequence[int],
        tokenize: Callable[[str], list[int]],
    ) -> None:
        self._vocabulary = (list(tokens), sorted(ends), sorted(specials))
        self._tokenizer = grammar_worker.make_tokenizer(*self._vocabulary, tokenize)
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        self._worker: _Worker | None = None
        self._turn = trio.Lock()
        self._budget_s = BUDGET_S
        """The longest that anybody gave."""

    async def __aenter__(self) -> Grammars:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._dismiss()

    async def compile(self, grammar: Grammar, *, budget_s: float = BUDGET_S) -> None:
        """Make sure of `grammar`, within `budget_s` from its turn. One at a time: the others' tokens need the cores.

        Raises:
            InvalidRequest: what is wrong with it, and where.
            Overloaded: its turn has not come.
        """
        self._budget_s = max(self._budget_s, budget_s)
        await self._compiled(grammar, budget_s, TURNS * budget_s)

    async def matcher(self, grammar: Grammar) -> Matcher:
        """For one new sequence. InvalidRequest as in `compile`.

        What `compile` accepted and others drove out since is compiled again, with as much time; and for its turn it
        waits as long as its sequence may.
        """
        return Matcher((await self._compiled(grammar, self._budget_s, math.inf)).deep_copy(), grammar.param)

    async def _compiled(self, grammar: Grammar, budget_s: float, wait_s: float) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        if grammar not in self._kept:
            await self._take_turn(wait_s)
            try:
                if grammar not in self._kept:
                    self._kept[grammar] = await self._compile(grammar, budget_s)
                    while len(self._kept) > KEPT:
                        self._kept.popitem(last=False)
            finally:
                self._turn.release()
        self._kept.move_to_end(grammar)
        return self._kept[grammar]

    async def _take_turn(self, wait_s: float) -> None:
        with trio.move_on_after(wait_s) as wait:
            await self._turn.acquire()
        if wait.cancelled_caught:
            raise Overloaded("Too many grammars are waiting to be compiled. Try again later.", retry_after_s=1.0)

    async def _compile(self, grammar: Grammar, budget_s: float) -> Any:
        source, error, place = await self._ask_worker(grammar, budget_s)
        if source is None:
            where = grammar.param + place
            raise InvalidRequest(f"'{where}' cannot be used: {error}", param=where)
        return await trio.to_thread.run_sync(grammar_worker.make_matcher, self._tokenizer, source)

    async def _ask_worker(self, grammar: Grammar, budget_s: float) -> tuple[str | None, str, str]:
        if self._worker is None or self._worker.has_ended:
            await self._dismiss()
            self._worker = await _start_worker(self._vocabulary)
        try:
            with trio.fail_after(budget_s):
                source, error, place = await self._worker.ask((grammar.kind, grammar.source, budget_s + 1))
                return source, error, place
        except trio.TooSlowError:
            await self._dismiss()
            return None, f"It takes more than {budget_s:g} s to compile.", ""
        except EOFError:
            await self._dismiss()
            return None, "It takes too much memory, or its references lead too deep.", ""
        except BaseException:
            await self._dismiss()  # an answer that nobody has taken would be the next one's
            raise

    async def _dismiss(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()


async def _start_worker(vocabulary: tuple[list[bytes], list[int], list[int]]) -> _Worker:
    worker = _Worker(
        await trio.lowlevel.open_process(
            [sys.executable, "-P", str(Path(grammar_worker.__file__))], stdin=PIPE, stdout=PIPE
        )
    )
    try:
        with trio.fail_after(WORKER_START_S):
            await worker.ask(vocabulary)
    except BaseException as exc:
        await worker.kill()
        if isinstance(exc, trio.TooSlowError | EOFError):
            raise EngineError("The process that compiles grammars does not start.") from exc
        raise
    return worker


class _Worker:
    """The other end of `grammar_worker`'s messages."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, message: Any) -> Any:
        """Send and receive. EOFError: the process has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        data = marshal.dumps(message)
        received = b""
        try:
            await stdin.send_all(len(data).to_bytes(4, "big") + data)
            while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "big"):
                more = await stdout.receive_some()
                if not more:
                    raise EOFError
                received += more
        except trio.BrokenResourceError:
            raise EOFError from None
        return marshal.loads(received[4:])

    async def kill(self) -> None:
        """Cancelled or not. It is gone at once, but for one that hangs in the kernel: nobody waits for that."""
        self._process.kill()
        with trio.move_on_after(KILL_S, shield=True):
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    await stream.aclose()
            await self._process.wait()
