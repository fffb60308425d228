"""What serving costs: the real model through HTTP, against the same step loop without it, and against llama-server.

    decode        llama.cpp's decode alone, of the same batches, and nobody draws a token: no server can do more
    direct        the llamacpp plugin's engine, its sequences driven in the same process: no HTTP, no service
    tokenflow     `tokenflow serve`, streaming over HTTP
    llama-server  llama.cpp's own server out of `xllamacpp`: same file, same threads, same slots

Each round measures all four at each number of streams, in an order that turns from round to round; a figure is the
median over rounds of the ratio within a round, so that a machine that drifts drifts for all four. Two rates come of
each measurement: `whole` counts all tokens over the time from the requests to the last end, prompts included; `decode`
sums each stream's tokens after its first over the time that they took, which is what a reader sees once it has begun.
TTFT is measured in alternating pairs, one stream at a time. Tokens are greedy and end-of-sequence is ignored, so that
all do the same work.

    python -m bench.serving_cost [--rounds 7] [--tokens 64] [--pairs 30] [--out bench/results/serving_cost.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.client import stream

STREAMS = (1, 2, 4, 8)
SLOTS = 8
CONTEXT = 2048
THREADS = len(os.sched_getaffinity(0))
WORDS = ["river", "stone", "lamp", "music", "winter", "garden", "silver", "road", "paper", "cloud", "engine", "harbor"]
COMPLETIONS = "/v1/completions"


def prompt(seed: int, words: int) -> str:
    """A prompt that no other seed shares a beginning with."""
    return f"Number {seed}. Tell a story about: " + " ".join(WORDS[(seed * 7 + i * i) % 12] for i in range(words)) + "."


def body(seed: int, tokens: int, words: int) -> dict[str, Any]:
    """The same request for both servers; each ignores the other's extensions."""
    return {
        "model": "m",
        "prompt": prompt(seed, words),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": False,
    }


class Rate(NamedTuple):
    """Tokens per second, all streams together."""

    whole: float
    decode: float


def _rate(times: list[tuple[float, float]], tokens: int) -> Rate:
    """From each stream's (first token, last token), in seconds since the requests."""
    whole = len(times) * tokens / max(last for _, last in times)
    return Rate(whole, sum((tokens - 1) / (last - first) for first, last in times))


# --- the four contestants -------------------------------------------------------------------------------------------


class Told:
    """A process of its own, told by lines of JSON what to run."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def rate(self, streams: int, tokens: int, seed: int) -> Rate:
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"prompts": [prompt(seed + i, 8) for i in range(streams)], "tokens": tokens}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return _rate(json.loads(self._process.stdout.readline()), tokens)


class Served:
    """A server on a port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def rate(self, streams: int, tokens: int, seed: int) -> Rate:
        results = stream(self._port, COMPLETIONS, [body(seed + i, tokens, 8) for i in range(streams)])
        for result in results:
            assert b"[DONE]" in result.raw, bytes(result.raw[-500:])
        return _rate([(result.first_s, result.last_s) for result in results], tokens)

    def ttft(self, seed: int, words: int) -> float:
        [result] = stream(self._port, COMPLETIONS, [body(seed, 2, words)])
        return result.first_s


@contextmanager
def told(role: str) -> Iterator[Told]:
    command = [sys.executable, "-m", "bench.serving_cost", "--role", role]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        yield Told(process)
        process.stdin.close()


@contextmanager
def tokenflow() -> Iterator[Served]:
    config = (
        f'[models.m]\nengine = "llamacpp"\nslots = {SLOTS}\ncontext_length = {CONTEXT}\nthreads = {THREADS}\n'
        'prefix_cache = false\n[sinks.prometheus]\n[sinks.ledger]\npath = "ledger.jsonl"\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenflow.toml").write_text(config)
        command = [
            sys.executable,
            "-m",
            "tokenflow",
            "serve",
            "-c",
            "tokenflow.toml",
            "--port",
            "0",
            "--log-level",
            "error",
        ]
        with served_by(command, folder) as port:
            yield Served(port)


@contextmanager
def llama_server() -> Iterator[Served]:
    with served_by([sys.executable, "-m", "bench.serving_cost", "--role", "llama-server"], None) as port:
        yield Served(port)


@contextmanager
def served_by(command: list[str], folder: str | None) -> Iterator[int]:
    """Run a server until the block ends; its port, from the first URL that it prints."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                yield int(found[1])
                return
        raise SystemExit(f"{command[2:5]} ended before it answered")
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def run_decode() -> None:
    """The `decode` process: as `run_direct`, with any token for the next one."""
    from tokenflow_llamacpp import LlamaConfig
    from tokenflow_llamacpp.loading import load

    loaded = load(LlamaConfig(slots=SLOTS, context_length=CONTEXT, threads=THREADS))
    context, batch = loaded.context, loaded.batch
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        began = time.perf_counter()
        rows = [loaded.vocabulary.tokenize(text, False) for text in order["prompts"]]
        ends = [0] * len(rows)
        seen = []
        for _ in range(order["tokens"]):
            for row, tokens in enumerate(rows):
                last = ends[row] + len(tokens) - 1
                for place, token in enumerate(tokens, ends[row]):
                    batch.add(token, place, [row], place == last)
                ends[row] = last + 1
            context.decode(batch)
            batch.reset()
            seen.append(time.perf_counter() - began)
            rows = [tokens[-1:] for tokens in rows]
        context.kv_cache_clear()
        print(json.dumps([(seen[0], seen[-1])] * len(rows)), flush=True)


def run_direct() -> None:
    """The `direct` process: one batch of sequences per line, its duration in seconds back."""
    import trio
    from tokenflow_llamacpp import LlamaConfig, open_llama

    from tokenflow.api import Delta, Event, Sampling, Send, SequenceRequest

    async def one(engine: Any, text: str, tokens: int, began: float, times: list[tuple[float, float]]) -> None:
        seen: list[float] = []

        def take(event: Event) -> None:
            if isinstance(event, Delta) and event.has_content:
                seen.append(time.perf_counter() - began)
                send.accept(1)

        send = Send(take, window=64)
        ids = tuple(await engine.tokenize(text))
        sampling = Sampling(temperature=0)
        await engine.generate(SequenceRequest(prompt=ids, max_tokens=tokens, sampling=sampling, ignore_eos=True), send)
        times.append((seen[0], seen[-1]))

    async def main() -> None:
        config = LlamaConfig(slots=SLOTS, context_length=CONTEXT, threads=THREADS, prefix_cache=False)
        async with open_llama(config) as engine:
            print("ready", flush=True)
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                order, times = json.loads(line), list[tuple[float, float]]()
                began = time.perf_counter()
                async with trio.open_nursery() as nursery:
                    for text in order["prompts"]:
                        nursery.start_soon(one, engine, text, order["tokens"], began, times)
                print(json.dumps(times), flush=True)

    trio.run(main)


def run_llama_server() -> None:
    """The `llama-server` process."""
    import xllamacpp
    from tokenflow_llamacpp import SMOLLM2

    params = xllamacpp.CommonParams()
    params.model.path = str(SMOLLM2.path)
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs a page per request
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    time.sleep(10**9)


# --- the measurement ------------------------------------------------------------------------------------------------


def measure(rounds: int, tokens: int, pairs: int) -> dict[str, Any]:
    with told("decode") as bare, told("direct") as engine, tokenflow() as ours, llama_server() as theirs:
        contestants = {"decode": bare, "direct": engine, "tokenflow": ours, "llama_server": theirs}
        for contestant in contestants.values():
            contestant.rate(2, 8, 1)  # warm
        rates = _rates(contestants, rounds, tokens)
        ttft = {f"{words}_words": _ttft(ours, theirs, pairs, words) for words in (8, 200)}
    by_n = {n: {kind: _summary(rates[n], kind) for kind in Rate._fields} for n in STREAMS}
    return {
        "bench": "serving_cost",
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {THREADS} cores",
        "model": "SmolLM2-135M-Instruct Q4_1",
        "rounds": rounds,
        "tokens_per_stream": tokens,
        "streams": by_n,
        "geometric_mean_over_llama_server": {
            name: {kind: round(_mean(by_n, kind, f"{name}_over_llama_server"), 3) for kind in Rate._fields}
            for name in ("decode", "tokenflow")
        },
        "ttft": ttft,
        "holds": {
            kind: {
                "http_at_least_0.97_of_direct": min(_ratios(by_n, kind, "tokenflow_over_direct")) >= 0.97,
                "at_least_0.97_of_llama_server": min(_ratios(by_n, kind, "tokenflow_over_llama_server")) >= 0.97,
                "geometric_mean_over_1.1": _mean(by_n, kind, "tokenflow_over_llama_server") > 1.1,
            }
            for kind in Rate._fields
        }
        | {"ttft_ratio_at_most_1.05": all(t["median_ratio"] <= 1.05 for t in ttft.values())},
    }


def _ratios(by_n: dict[int, Any], kind: str, ratio: str) -> list[float]:
    """At each number of streams."""
    return [by_n[n][kind][ratio] for n in STREAMS]


def _mean(by_n: dict[int, Any], kind: str, ratio: str) -> float:
    """The geometric mean over all numbers of streams."""
    return prod(_ratios(by_n, kind, ratio)) ** (1 / len(STREAMS))


def _rates(contestants: dict[str, Any], rounds: int, tokens: int) -> dict[int, list[dict[str, Rate]]]:
    rates: dict[int, list[dict[str, Rate]]] = {n: [] for n in STREAMS}
    names = list(contestants)
    for i in range(rounds):
        for n in STREAMS:
            order = names[i % len(names) :] + names[: i % len(names)]
            seed = 1000 * (i + 1) + 100 * n
            rates[n].append({name: contestants[name].rate(n, tokens, seed) for name in order})
            print(f"round {i + 1}, {n} streams: " + str(rates[n][-1]), file=sys.stderr)
    return rates


def _summary(rounds: list[dict[str, Rate]], kind: str) -> dict[str, Any]:
    rates = [{name: getattr(rate, kind) for name, rate in measured.items()} for measured in rounds]
    return {
        "tokens_per_s": {name: round(median(r[name] for r in rates), 1) for name in sorted(rates[0])},
        "tokenflow_over_direct": _ratio(rates, "tokenflow", "direct"),
        "tokenflow_over_llama_server": _ratio(rates, "tokenflow", "llama_server"),
        "decode_over_llama_server": _ratio(rates, "decode", "llama_server"),
    }


def _ratio(rates: list[dict[str, float]], name: str, over: str) -> float:
    return round(median(rate[name] / rate[over] for rate in rates), 3)


def _ttft(ours: Served, theirs: Served, pairs: int, words: int) -> dict[str, float]:
    ratios, mine, peers = [], [], []
    for i in range(pairs):
        order = (ours, theirs) if i % 2 else (theirs, ours)
        times = {contestant: contestant.ttft(50_000 + i * 10 + words, words) for contestant in order}
        mine.append(times[ours])
        peers.append(times[theirs])
        ratios.append(times[ours] / times[theirs])
    return {
        "median_ratio": round(median(ratios), 3),
        "tokenflow_ms": round(median(mine) * 1000, 1),
        "llama_server_ms": round(median(peers) * 1000, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=None, help="write the JSON here too")
    parser.add_argument("--role", choices=["decode", "direct", "llama-server"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "decode":
        run_decode()
    elif arguments.role == "direct":
        run_direct()
    elif arguments.role == "llama-server":
        run_llama_server()
    else:
        result = json.dumps(measure(arguments.rounds, arguments.tokens, arguments.pairs), indent=2)
        print(result)
        if arguments.out:
            arguments.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
