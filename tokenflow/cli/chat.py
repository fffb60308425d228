"""`tokenflow chat`: one answer, or a conversation."""

from __future__ import annotations

import io
import os
import re
import select
import stat
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click
import trio

from tokenflow.cli.group import INTERRUPTED

if TYPE_CHECKING:
    from tokenflow.cli.talk import Message, Reply, Talk

USUAL = {"max_tokens": 1024, "temperature": 0.3}
"""Where neither the command line nor the model's defaults say it. Small models talk nonsense at 1."""
NEW = "/new"
LEAVE = ("/bye", "/exit", "/quit")
HELP = "/help"
COMMAND = re.compile(r"/[A-Za-z?]+(?!\S)")
"""What a line begins with that is not sent: a word, and no path like /etc/hosts."""
SAYS_MORE = f"""\
{NEW}   begins a new conversation
{LEAVE[0]}   leaves; so do {", ".join(LEAVE[1:])} and Ctrl-D
{HELP}  says this
Ctrl-C ends an answer. {{paste}}
What holds for the whole conversation is an option: tokenflow chat --help"""


@click.command("chat")
@click.argument("message", required=False)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, envvar="TOKENFLOW_URL", show_envvar=True)
@click.option("--model", help="The model's id; the server's first otherwise.")
@click.option("--key", envvar="TOKENFLOW_KEY", show_envvar=True, help="API key.")
@click.option("--system", help="A system message in front.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Left out: the model's own default, else {USUAL['max_tokens']}.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    metavar="N",
    help=f"Left out: the model's own default, else {USUAL['temperature']}, where its engine has one.",
)
@click.pass_context
def chat_command(
    ctx: click.Context,
    message: str | None,
    url: str,
    model: str | None,
    key: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> None:
    """Ask a server and show the answer as it comes.

    What comes through a pipe, or out of a file, stands before MESSAGE; without MESSAGE it is the message. In a terminal
    and without MESSAGE it is a conversation.

    Standard input that is no terminal is read to its end: where it is meant for something else, in a loop or a script,
    give `< /dev/null`. Only a socket, which ssh without -n leaves there, is not waited for beside a MESSAGE.

    Ctrl-C ends the answer: the server stops generating. In a conversation you are back at the prompt; there a line
    /new begins a new conversation, with the same --system, /bye or Ctrl-D leaves, and /help has the rest.
    """
    from tokenflow.cli.talk import ChatError, Talk  # here, for the HTTP client is slow to import

    options = {"max_tokens": max_tokens, "temperature": temperature}
    given = {name: value for name, value in options.items() if value is not None}
    usual = {name: value for name, value in USUAL.items() if name not in given}
    url = url.rstrip("/").removesuffix("/v1")  # as it is given to an SDK
    talk = Talk(url=url, key=key, model=model, options=given, usual=usual)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    if message is None and _is_terminal():
        talk = trio.run(talk.meet)
        click.echo(
            f"Talking to {printable(talk.model or '')} on {url}; /help says more, /bye or Ctrl-D leaves.", err=True
        )
        converse(talk, opening)
        return
    if message is None:
        text = _piped()
    else:
        before = "" if _is_terminal() or not _to_come() else _piped().rstrip()
        text = "\n\n".join(part for part in (before, message) if part.strip())
    if not text.strip():
        raise ChatError("the message is empty; write one as an argument, or send one through a pipe")
    reply = say(talk, [*opening, {"role": "user", "content": text}])
    if reply.interrupted:
        ctx.exit(INTERRUPTED)


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # there is none where the shell has closed it: `<&-`


SOON_S = 2.0
"""Standard input may be silent for so long before that is said."""


def _to_come() -> bool:
    """Whether to read standard input to its end, beside a message.

    A pipe's writer may take its time, so it is waited for; one that nobody closes looks the same, so that is said. A
    socket is what ssh without -n and Node's child processes have there, and mostly for nothing.
    """
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError):
        return sys.stdin is not None
    if select.select([number], [], [], SOON_S)[0]:
        return True
    if stat.S_ISSOCK(os.fstat(number).st_mode):
        click.echo("(nothing comes through standard input: asked without it)", err=True)
        return False
    click.echo("(waiting for standard input to end; give `< /dev/null` where nothing is to come)", err=True)
    return True


def _piped() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as an argument comes: what cannot be sent is told there
    return "" if sys.stdin is None else sys.stdin.read()


def converse(talk: Talk, opening: list[Message], ask_for: Callable[[str], str] = input) -> None:
    """Prompt, answer, and again, until the end of input; `opening` is in front of every conversation.

    The prompt is the terminal's own, outside of Trio: line editing works, and Ctrl-C there is an ordinary
    KeyboardInterrupt. Only the answer runs in Trio.
    """
    pasted = _edited()
    said: list[Message] = []
    while True:
        try:
            text = ask_for("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D leaves)")
            continue
        line = text.strip()
        if line in LEAVE:
            return
        if line == NEW:
            said.clear()
            click.echo("(a new conversation)", err=True)
        elif line == HELP:
            paste = "A pasted text of several lines is one message." if pasted else "Each line is a message of its own."
            click.echo(SAYS_MORE.format(paste=paste), err=True)
        elif word := COMMAND.match(text):
            why = "stands alone on its line" if word[0] in (NEW, HELP, *LEAVE) else f"is none of {HELP}'s"
            click.echo(f"(not sent: {word[0]} {why}; with a blank before it the line is sent)", err=True)
        elif line:
            said += _turn(talk, opening, said, text)


def _edited() -> bool:
    """Give input() arrow keys and history; whether a pasted text of several lines is one message."""
    try:
        import readline
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return True


def _turn(talk: Talk, opening: list[Message], said: list[Message], text: str) -> list[Message]:
    """What was asked and answered, to remember; nothing if it failed, so that it can be asked again."""
    from tokenflow.cli.talk import ChatError, is_too_long

    asked: Message = {"role": "user", "content": text}
    try:
        reply = say(talk, [*opening, *said, asked])
    except ChatError as exc:
        way_out = f"; {NEW} begins a new conversation" if said and is_too_long(exc) else ""
        click.echo(f"tokenflow: {exc.message}{way_out}", err=True)
        return []
    # An answer that was cut short was still said; without any, two user messages would follow each other.
    return [asked, {"role": "assistant", "content": reply.text}] if reply.text else []


def say(talk: Talk, messages: list[Message]) -> Reply:
    """One answer to the terminal, with a line end after it, however it ends.

    Reasoning is shown beside it, on standard error, and so is that an answer was cut: they are no part of what is
    piped on.
    """
    begun = thinking = False

    def end_thinking() -> None:
        nonlocal thinking
        if thinking:
            click.echo("\n", err=True)
        thinking = False

    def think(text: str) -> None:
        nonlocal thinking
        thinking = True
        click.secho(printable(text), nl=False, err=True, dim=True)

    def show(text: str) -> None:
        nonlocal begun
        end_thinking()
        begun = True
        click.echo(printable(text), nl=False)

    try:
        reply = trio.run(talk.ask, messages, show, think)
    finally:
        end_thinking()
        if begun:
            click.echo()
    if reply.finish_reason == "length":
        click.echo(f"(cut short: {reply.why_cut})", err=True)
    return reply


def printable(text: str) -> str:
    """Without control characters: a model must not be able to drive the reader's terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t " or ord(c) >= 0xA0)
