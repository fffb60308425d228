"""What serving streams costs: tokenflow, as `tokenflow serve` runs it, against every way to do it in Python.

Every contestant (`bench/peers` says exactly what each does) runs alone, in its own process on core 0, and is started
anew for each measurement; the load client (`load.c`) is on core 1. Each round measures all of them at each load, in an
order that turns from round to round; a figure is the median over rounds, and a ratio the median of the ratios within a
round. tokenflow's synthetic engine steps in a thread of the same process, so its cost is in every figure; all it does
in earnest is on: validation, template, waiting room, deadlines, replay log, accounts, metrics, ledger.

paced      every stream gets 50 tokens a second: is it held, how even is it, what CPU does a token cost
flood      tokens as fast as they can be taken
idle       5,000 open streams in which nothing happens yet: KiB each (PSS over an empty server's), openings a second
websocket  the same as paced over WebSocket, in frames of tokenflow's dialect
ttft       one client on one connection, no prefill: from the request to the first token, all added by the server;
           and tokenflow's answer to `GET /health/live`, which is what HTTP and the framework take of that

    python -m bench.serving [--loads paced_500,idle] [--peers fastapi,granian] [--rounds 5] [--seconds 4]
                            [--out bench/results/serving.json] [--plot bench/results/serving.svg]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from bench.contestants import PEERS, PEERS_PYTHON, ROOT, WITH_WEBSOCKET, running
from bench.load import build, load

SERVER_CORE, CLIENT_CORE = 0, 1
BATCH = 64
"""Streams that wait for their first event at a time, while they are opened."""
PATIENCE_S = 40
HELD = 0.99
"""A pace is held if this share of its tokens has come, and every stream is still there."""

Figures = dict[str, float]
Round = dict[str, dict[str, Figures]]
"""By load, by contestant."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A load. `tokens_per_s` is each stream's."""

    streams: int
    tokens_per_s: float
    max_tokens: int = 10**8
    websocket: bool = False
    repeat: bool = False
    """Each connection asks again when its answer has ended."""
    at_once: bool = False
    """All are opened at once: one after another they would wait behind the flood of those that are open."""

    @property
    def path(self) -> str:
        return "/v1/ws" if self.websocket else "/v1/chat/completions"

    @property
    def body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Which words mean a place where ships are safe?"}]
        return {
            "model": "words",
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stream": True,
            "ignore_eos": True,
        }

    @property
    def options(self) -> list[str]:
        batch = self.streams if self.at_once else BATCH
        flags = ["--websocket"] * self.websocket + ["--repeat"] * self.repeat
        return [*flags, "--batch", str(batch), "--patience", str(PATIENCE_S)]


LOADS = {
    "paced_500": Shape(streams=500, tokens_per_s=50),
    "paced_1000": Shape(streams=1000, tokens_per_s=50),
    "flood_16": Shape(streams=16, tokens_per_s=inf),
    "flood_1000": Shape(streams=1000, tokens_per_s=inf, at_once=True),
    "idle_5000": Shape(streams=5000, tokens_per_s=0),
    "websocket_300": Shape(streams=300, tokens_per_s=50, websocket=True),
    "ttft": Shape(streams=1, tokens_per_s=inf, max_tokens=4, repeat=True),
}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on one of tokenflow's figures, or on its ratio to a peer's."""

    loads: tuple[str, ...]
    figure: str
    over: str | None = None
    at_most: float = inf
    at_least: float = 0.0


GOALS = (
    Goal(loads=("paced_500", "paced_1000", "websocket_300"), figure="held", at_least=1),
    Goal(loads=("paced_500", "paced_1000"), figure="gap_p99_ms", over="uvicorn", at_most=1),
    Goal(loads=("paced_500", "paced_1000"), figure="cpu_us_per_token", over="fastapi", at_most=0.6),
    Goal(loads=("paced_500", "paced_1000"), figure="cpu_us_per_token", over="granian", at_most=0.8),
    Goal(loads=("flood_16", "flood_1000"), figure="tokens_per_s", over="fastapi", at_least=1),
    Goal(loads=("idle_5000",), figure="kib_each", over="fastapi", at_most=1.1),
    Goal(loads=("idle_5000",), figure="openings_per_s", over="fastapi", at_least=0.8),
    Goal(loads=("websocket_300",), figure="cpu_us_per_token", over="fastapi", at_most=1),
    Goal(loads=("ttft",), figure="ttft_p50_ms", at_most=1),
    Goal(loads=("ttft",), figure="ttft_p99_ms", at_most=3),
    Goal(loads=("ttft",), figure="ttft_p50_ms", over="fastapi", at_most=1),
    Goal(loads=("ttft",), figure="ttft_p99_ms", over="fastapi", at_most=1),
)


# --- one measurement ------------------------------------------------------------------------------------------------


def measure(name: str, shape: Shape, seconds: float) -> Figures:
    """One contestant under one load, in a process that has only answered once before."""
    with running(name, shape.tokens_per_s, shape.streams, core=SERVER_CORE) as server:
        with load(server.port, shape.path, shape.body, *shape.options, "--warm", "0", "--seconds", "0") as client:
            client.phase("open")
        time.sleep(0.3)  # it has seen the client leave
        empty, opening_cpu = server.memory, server.cpu_s
        options = [*shape.options, "--streams", str(shape.streams), "--seconds", str(seconds)]
        with load(server.port, shape.path, shape.body, *options) as client:
            said = client.phase("open")
            opening_cpu = server.cpu_s - opening_cpu
            client.phase("measuring")
            cpu = server.cpu_s
            said |= client.phase("measured")
            cpu = server.cpu_s - cpu
            full = server.memory
        answered = {"health_p50_ms": _health_ms(server.port)} if shape.repeat and name == "tokenflow" else {}
    figures = _figures(shape, said, cpu) | answered
    if not shape.tokens_per_s:
        figures["kib_each"] = (full.pss - empty.pss) / said["opened"]
        figures["rss_kib_each"] = (full.rss - empty.rss) / said["opened"]
        figures["cpu_us_per_opening"] = opening_cpu / said["opened"] * 1e6
    return figures


def _health_ms(port: int) -> float:
    """From a request that needs no thought to its answer, on one connection: the median."""
    times = []
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2000):
            began = time.perf_counter()
            client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = client.recv(4096)
            times.append(time.perf_counter() - began)
            head, _, body = answer.partition(b"\r\n\r\n")
            [length] = re.findall(rb"content-length: (\d+)", head, re.IGNORECASE)
            while len(body) < int(length):
                body += client.recv(4096)
    return median(times) * 1000


def _figures(shape: Shape, said: dict[str, Any], cpu_s: float) -> Figures:
    figures: Figures = {
        "opened": said["opened"],
        "openings_per_s": said["openings_per_s"],
        "closed": said["closed"],
        "errors": said["errors"],
        "client_cpu": said["client_cpu"],
        "server_cpu": cpu_s / said["seconds"],
    }
    if said["tokens"]:
        figures["tokens_per_s"] = said["tokens"] / said["seconds"]
        figures["cpu_us_per_token"] = cpu_s / said["tokens"] * 1e6
        figures["bytes_per_token"] = said["bytes"] / said["tokens"]
    if shape.tokens_per_s and shape.tokens_per_s != inf:
        due = shape.tokens_per_s * said["seconds"]
        figures["delivered"] = said["tokens"] / due / shape.streams
        figures["delivered_least"] = said["tokens_least"] / due
        figures["held"] = figures["delivered"] >= HELD and not said["closed"] and not said["errors"]
    if shape.repeat:
        figures["requests_per_s"] = said["requests"] / said["seconds"]
    for kind in ("gap_ms", "ttft_ms"):
        if said[kind]:
            figures |= {kind.replace("_", f"_{part}_"): value for part, value in said[kind].items()}
    return figures


# --- the run --------------------------------------------------------------------------------------------------------


def measure_round(number: int, loads: list[str], names: list[str], seconds: float) -> Round:
    measured: Round = {}
    for load_name in loads:
        shape = LOADS[load_name]
        order = names[number % len(names) :] + names[: number % len(names)]
        measured[load_name] = {}
        for name in order:
            if not shape.websocket or name == "tokenflow" or name in WITH_WEBSOCKET:
                figures = measured[load_name][name] = measure(name, shape, seconds)
                shown = {key: round(value, 2) for key, value in figures.items()}
                print(f"round {number + 1}, {load_name}, {name}: {shown}", file=sys.stderr)
    return measured


def summary(rounds: list[Round]) -> dict[str, dict[str, Figures]]:
    """The median of every figure."""
    return {
        load_name: {
            name: {
                key: round(median(r[load_name][name][key] for r in rounds), 3)
                for key in figures
                if all(key in r[load_name][name] for r in rounds)  # who was not opened in time has told no time
            }
            for name, figures in sorted(contestants.items())
        }
        for load_name, contestants in rounds[0].items()
    }


def judged(rounds: list[Round]) -> list[dict[str, Any]]:
    """Each goal whose load and peer were measured, and whether it holds."""
    found = []
    for goal in GOALS:
        for name in goal.loads:
            if name in rounds[0] and (goal.over is None or goal.over in rounds[0][name]):
                value = median(_value(goal, measured[name]) for measured in rounds)
                bound = {"at_least": goal.at_least} if goal.at_least else {"at_most": goal.at_most}
                named = {"load": name, "figure": goal.figure} | ({"over": goal.over} if goal.over else {})
                found.append(
                    named | {"is": round(value, 3)} | bound | {"holds": goal.at_least <= value <= goal.at_most}
                )
    return found


def _value(goal: Goal, measured: dict[str, Figures]) -> float:
    value = measured["tokenflow"][goal.figure]
    return value / measured[goal.over][goal.figure] if goal.over else value


def prepare(streams: int) -> None:
    """Room for the sockets, a core for each side, and everything built before the first measurement."""
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this needs two cores: one for the server, one for the client")
    os.sched_setaffinity(0, {CLIENT_CORE})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < streams + 256:
        raise SystemExit(f"{streams} streams need more open files than the {hard} allowed here (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if not PEERS_PYTHON.exists():
        raise SystemExit("the peers are not installed; run: make .venv-bench/.installed")
    build()


def run(loads: list[str], peers: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    prepare(max(LOADS[name].streams for name in loads))
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    measured = [measure_round(number, loads, ["tokenflow", *peers], seconds) for number in range(rounds)]
    return {
        "bench": "serving",
        "when": began,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": _versions(),
        "rounds": rounds,
        "seconds": seconds,
        "goals": judged(measured),
        "loads": summary(measured),
    }


def _versions() -> dict[str, str]:
    """What the peers are made of."""
    listed = subprocess.run([PEERS_PYTHON, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True)
    wanted = {"fastapi", "starlette", "sse-starlette", "uvicorn", "uvloop", "httptools", "granian", "quart"}
    wanted |= {"quart-trio", "hypercorn", "trio", "orjson"}
    installed = {package["name"].lower(): package["version"] for package in json.loads(listed.stdout)}
    return {name: installed[name] for name in sorted(wanted & installed.keys())}


def _names(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=_names(tuple(LOADS)), default=list(LOADS))
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=None, help="write the JSON here too")
    parser.add_argument("--plot", type=Path, default=None, help="draw the figures here, as SVG")
    arguments = parser.parse_args()
    text = json.dumps(run(arguments.loads, arguments.peers, arguments.rounds, arguments.seconds), indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    if arguments.plot:
        command = [PEERS_PYTHON, "-m", "bench.plot", arguments.plot.resolve()]
        subprocess.run(command, input=text, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


if __name__ == "__main__":
    main()
