"""Chromium, driven by its own protocol (DevTools): one process, and a browser of its own for each test.

    async with open_tab(chromium) as tab:
        await tab.visit(url)
        await tab.type("hello\\n")
        await tab.until("document.title === 'x'")

A tab remembers each address that it asked for and each complaint of its console. Waiting is the page's: it looks again
whenever something in it has changed.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from os import killpg
from pathlib import Path
from typing import Any

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Event, Message, Request

from tests.e2e.proxies import binary
from tests.e2e.wire import eventually

PATIENCE_S = 30.0
"""A browser takes some seconds to start on a busy machine."""
ALONE = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--host-resolver-rules=MAP *.test 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]
"""The page and nothing else."""
UNTIL = """new Promise((resolve) => {
  const look = () => { const found = %s; if (found) { watch.disconnect(); resolve(found); } };
  const watch = new MutationObserver(look);
  watch.observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
  look();
})"""
KEYS = {
    "Enter": {"windowsVirtualKeyCode": 13, "text": "\r"},
    "Escape": {"windowsVirtualKeyCode": 27},
    "Tab": {"windowsVirtualKeyCode": 9},
}
SHIFT = 8

Answers = trio.MemoryReceiveChannel[dict[str, Any]]


@contextmanager
def chromium(folder: Path) -> Iterator[Path]:
    """A running Chromium, until the block ends; the folder of its profile, by which it is found."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        binary("chromium"),
        *ALONE,
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}/profile",
        "about:blank",
    ]
    with (folder / "chromium.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            yield folder / "profile"
        finally:
            with suppress(ProcessLookupError):
                killpg(process.pid, signal.SIGKILL)  # all of its processes: it has many
            process.wait()


class Browser:
    """The connection to it: commands and their answers, and the events of every tab."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._frames = WSConnection(ConnectionType.CLIENT)
        self._answers: dict[int, trio.MemorySendChannel[dict[str, Any]]] = {}
        self.tabs: dict[str, Tab] = {}

    async def shake_hands(self, path: str) -> None:
        await self._stream.send_all(self._frames.send(Request(host="127.0.0.1", target=path)))
        assert isinstance((await self._received())[0], AcceptConnection)

    async def read(self) -> None:
        text = ""
        while True:
            for event in await self._received():
                assert isinstance(event, Message)
                text += str(event.data)
                if event.message_finished:
                    self._take(json.loads(text))
                    text = ""

    async def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        with trio.fail_after(PATIENCE_S):
            answer = await (await self.send(method, session, **params)).receive()
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    async def send(self, method: str, session: str | None = None, **params: Any) -> Answers:
        number = len(self._answers)
        self._answers[number], answer = trio.open_memory_channel[dict[str, Any]](1)
        said = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        await self._stream.send_all(self._frames.send(Message(json.dumps(said))))
        return answer

    async def _received(self) -> list[Event]:
        self._frames.receive_data(await self._stream.receive_some())
        return list(self._frames.events())

    def _take(self, said: dict[str, Any]) -> None:
        if "id" in said:
            self._answers[said["id"]].send_nowait(said)
        elif said.get("sessionId") in self.tabs:
            self.tabs[said["sessionId"]].take(said["method"], said["params"])


class Tab:
    """One page. `asked` are the addresses that it asked for, `complaints` what its console says is wrong."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self.asked: list[str] = []
        self.complaints: list[str] = []

    def take(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(params["entry"]["text"])
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params))

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.ask(method, self._session, **params)

    async def visit(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of `script`, which may be a promise."""
        answer = await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until `condition` is something; what it is."""
        return await self.run(UNTIL % condition)

    async def type(self, text: str) -> None:
        """As on a keyboard, into whatever has the focus; a line's end is the Enter key."""
        for part in text.splitlines(keepends=True):
            await self.ask("Input.insertText", text=part.rstrip("\n"))
            if part.endswith("\n"):
                await self.press("Enter")

    async def press(self, key: str, *, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            held = SHIFT if shift else 0
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=held, **KEYS[key])

    async def close(self) -> None:
        """As somebody who clicks on its cross."""
        await self._browser.ask("Target.closeTarget", targetId=self._target)

    async def crash(self) -> None:
        """Its process ends, with nothing said to anybody."""
        await self._browser.send("Page.crash", self._session)


@asynccontextmanager
async def open_tab(profile: Path) -> AsyncIterator[Tab]:
    """A tab of a browser that knows nothing of the others."""
    port, path = await eventually(lambda: _where(profile), PATIENCE_S)
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream, trio.open_nursery() as nursery:
        browser = Browser(stream)
        await browser.shake_hands(path)
        nursery.start_soon(browser.read)
        context = (await browser.ask("Target.createBrowserContext"))["browserContextId"]
        made = await browser.ask("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await browser.ask("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        tab = browser.tabs[attached["sessionId"]] = Tab(browser, made["targetId"], attached["sessionId"])
        for domain in ("Page", "Network", "Log", "Runtime"):
            await tab.ask(f"{domain}.enable")
        yield tab
        await browser.ask("Target.disposeBrowserContext", browserContextId=context)
        nursery.cancel_scope.cancel()


def _where(profile: Path) -> tuple[int, str] | None:
    """The port and the path that it chose, once it listens."""
    with suppress(FileNotFoundError, ValueError):
        port, path = (profile / "DevToolsActivePort").read_text().split("\n")
        return int(port), path
    return None
