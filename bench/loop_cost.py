"""What the StepLoop itself costs per token, and what a busy event loop does to it: one interpreter lock serves both.

cost   The synthetic engine as fast as it can, at 1, 8 and 32 sequences. `bare` calls its stepper in a plain loop;
       `loop` runs the same stepper in a StepLoop's thread, events handed out on Trio's side, a reader that takes each
       at once. The difference is the loop's: two threads, one lock, commands, credit, text assembly, hand-out.
load   A step of 5 ms that holds no lock (as a decode does not), while a Trio task computes in Python for a share of
       the time, in slices of 1 ms. The ratio is tokens/s over the same without load, for the interpreter's own switch
       interval (5 ms) and a shorter one. What is lost is the wait for the lock after each step.

    python -m bench.loop_cost [--tokens 20000] [--seconds 3] [--out bench/results/loop_cost.json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import trio
from tokenflow_synthetic.config import SyntheticConfig
from tokenflow_synthetic.stepper import SyntheticStepper

from tokenflow.api import Delta, Event, Send, Sequence, SequenceRequest, Step, StepLoop

SEQUENCES = (1, 8, 32)
STEP_S = 0.005
SLICE_S = 0.001
LOADS = (0.0, 0.25, 0.5, 0.75, 0.95)
INTERVALS_S = (0.005, 0.0005)
ROUNDS = 5


class DecodeLike(SyntheticStepper):
    """A step takes `STEP_S` without the interpreter's lock, and every sequence gets its token."""

    def step(self, run: list[Sequence]) -> Iterator[tuple[Sequence, Step]]:
        time.sleep(STEP_S)
        yield from super().step(run)


def request(i: int, tokens: int) -> SequenceRequest:
    return SequenceRequest(prompt=(65 + i,), max_tokens=tokens, ignore_eos=True)


# --- cost -----------------------------------------------------------------------------------------------------------


def bare(n: int, tokens: int) -> float:
    """Seconds per token of the stepper alone."""
    stepper = SyntheticStepper(SyntheticConfig(slots=n, context_length=10**9))
    sequences = [Sequence(request(i, tokens), None) for i in range(n)]  # type: ignore[arg-type]  # nothing is sent
    for seq in sequences:
        stepper.add(seq)
    began = time.perf_counter()
    for _ in range(tokens):
        for _pair in stepper.step(sequences):
            pass
    return (time.perf_counter() - began) / (n * tokens)


async def generate(loop: StepLoop, i: int, tokens: int) -> None:
    """One sequence whose reader takes each delta at once."""

    def take(event: Event) -> None:
        if isinstance(event, Delta):
            send.accept(1)

    send = Send(take, window=64)
    await loop.generate(request(i, tokens), send)


def looped(n: int, tokens: int) -> float:
    """Seconds per token through the StepLoop."""

    async def main() -> float:
        loop = StepLoop(SyntheticStepper(SyntheticConfig(slots=n, context_length=10**9)))
        async with trio.open_nursery() as nursery:
            await nursery.start(loop.serve)
            began = time.perf_counter()
            async with trio.open_nursery() as sequences:
                for i in range(n):
                    sequences.start_soon(generate, loop, i, tokens)
            took = time.perf_counter() - began
            nursery.cancel_scope.cancel()
        return took / (n * tokens)

    return trio.run(main)


def cost(tokens: int) -> dict[str, Any]:
    figures = {}
    for n in SEQUENCES:
        pairs = [(bare(n, tokens // n), looped(n, tokens // n)) for _ in range(ROUNDS)]
        figures[str(n)] = {
            "bare_us": round(median(b for b, _ in pairs) * 1e6, 2),
            "loop_us": round(median(w for _, w in pairs) * 1e6, 2),
            "loop_own_us": round(median(w - b for b, w in pairs) * 1e6, 2),
            "share_of_a_100_tokens_per_s_sequence": round(median(w - b for b, w in pairs) * 100, 6),
        }
    return figures


# --- load -----------------------------------------------------------------------------------------------------------


async def burn(share: float) -> None:
    """Compute for `share` of the time, in slices."""
    while True:
        until = time.perf_counter() + SLICE_S
        while time.perf_counter() < until:
            pass
        await trio.sleep(SLICE_S * (1 - share) / share)


def under_load(n: int, share: float, seconds: float) -> float:
    """Steps per second, with a Trio task that computes for `share` of the time."""

    async def main() -> float:
        loop = StepLoop(DecodeLike(SyntheticConfig(slots=n, context_length=10**9)))
        async with trio.open_nursery() as nursery:
            await nursery.start(loop.serve)
            if share:
                nursery.start_soon(burn, share)
            for i in range(n):
                nursery.start_soon(generate, loop, i, 10**8)
            await trio.sleep(0.2)
            began, steps = time.perf_counter(), loop.steps
            await trio.sleep(seconds)
            rate = (loop.steps - steps) / (time.perf_counter() - began)
            nursery.cancel_scope.cancel()
        return rate

    return trio.run(main)


def load(seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    usual = sys.getswitchinterval()
    try:
        for interval in INTERVALS_S:
            sys.setswitchinterval(interval)
            for n in SEQUENCES:
                rates = {share: under_load(n, share, seconds) for share in LOADS}
                figures.setdefault(f"switch_interval_{interval * 1000:g}_ms", {})[str(n)] = {
                    f"{share:.0%}": round(rates[share] / rates[0.0], 3) for share in LOADS if share
                } | {"unloaded_steps_per_s": round(rates[0.0], 1)}
    finally:
        sys.setswitchinterval(usual)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=None, help="write the JSON here too")
    arguments = parser.parse_args()
    result = {
        "bench": "loop_cost",
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "step_ms": STEP_S * 1000,
        "cost": cost(arguments.tokens),
        "tokens_per_s_under_event_loop_load": load(arguments.seconds),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
