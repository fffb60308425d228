"""One command for a machine with an NVIDIA card and the CUDA toolkit: is what this server promises true on it?

    python -m bench.gpu_check [--model DIRECTORY] [--out FILE] [--tokens 256] [--rounds 5] [--trials 50]

Without a model it makes one: FP16 of the small GGUF file (see `bench.small_model`), and an EXL2 quantization of that by
exllamav2's own converter. Of each model:

    kit       the engine's conformance kit, as `tokenflow engine check` runs it
    rates     tokens/s through HTTP over tokens/s of the library's bare generator, at 1, 4 and 16 streams
    leaving   who leaves while waiting, in prefill and while decoding: how long until the slot is free, and how many
              tokens were made for nobody
    pausing   200 steps of somebody else in between: is the text the same, and how many tokens were evaluated again

The bare generator and the server hold the model at the same time, so there must be room for it twice. Without network,
have the GGUF file in $TOKENFLOW_CACHE before (`tokenflow pull`), or name a model. Exit code: 0 if every promise is
kept, 1 if one is not, 3 if there is no GPU to check it on, or no flash-attn: then there is one slot, and no company.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import trio

from bench.client import stream
from bench.serving_cost import prompt, served_by
from tokenflow.api import Engine, Sampling, SequenceRequest, StartupError
from tokenflow.testing.fakes import Recorder, company

STREAMS = (1, 4, 16)
SLOTS = 16
CONTEXT = 4096
NO_GPU = 3
PHASES = ("waiting", "prefill", "decoding")
PAGE = 256


# --- models ---------------------------------------------------------------------------------------------------------


def small_models(folder: Path) -> list[Path]:
    """The small model in FP16, and in EXL2."""
    from tokenflow_llamacpp import SMOLLM2

    from bench.small_model import write

    plain, quantized, work = folder / "small-fp16", folder / "small-exl2", folder / "work"
    subprocess.run([sys.executable, "-m", "tokenflow", "pull", SMOLLM2.name], check=True)
    write(SMOLLM2.path, plain)
    work.mkdir(exist_ok=True)
    convert = [sys.executable, "-m", "exllamav2.conversion.convert_exl2", "-i", str(plain), "-o", str(work)]
    subprocess.run([*convert, "-cf", str(quantized), "-b", "5.0", "-r", "16", "-mr", "4"], check=True)
    return [plain, quantized]


def options(model: Path) -> dict[str, Any]:
    return {"model": str(model), "slots": SLOTS, "context_length": CONTEXT, "cache_tokens": SLOTS * CONTEXT // 2}


def write_config(model: Path, folder: Path) -> Path:
    path = folder / "tokenflow.toml"
    keys = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options(model).items())
    path.write_text(f'[models.m]\nengine = "exllamav2"\n{keys}\n')
    return path


# --- the kit --------------------------------------------------------------------------------------------------------


def kit(config: Path) -> dict[str, int]:
    """How many promises are kept, broken and not tried."""
    done = subprocess.run(
        [sys.executable, "-m", "tokenflow", "engine", "check", "m", "-c", str(config)], capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("kept ", "broken ", "not tried "))]
    for line in lines or done.stderr.splitlines()[-20:]:
        if not line.startswith(("kept ", "not tried ")):
            print(line, file=sys.stderr)
    return {kind: sum(line.startswith(kind) for line in lines) for kind in ("kept", "broken", "not tried")}


# --- rates ----------------------------------------------------------------------------------------------------------


def bare_rate(generator: Any, tokens: int, prompts: list[list[int]]) -> float:
    """Tokens/s of the library's generator with nothing around it, from the first job to the end of the last."""
    import torch
    from exllamav2.generator import ExLlamaV2DynamicJob, ExLlamaV2Sampler

    began = time.perf_counter()
    for ids in prompts:
        settings = ExLlamaV2Sampler.Settings.greedy()
        job = ExLlamaV2DynamicJob(input_ids=torch.tensor([ids]), max_new_tokens=tokens, gen_settings=settings)
        generator.enqueue(job)
    while generator.num_remaining_jobs():
        generator.iterate()
    return len(prompts) * tokens / (time.perf_counter() - began)


def run_bare(model: Path) -> None:
    """A process of its own: a line of JSON with the seeds and the number of tokens in, a rate out."""
    from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
    from exllamav2.generator import ExLlamaV2DynamicGenerator

    config = ExLlamaV2Config(str(model))
    config.arch_compat_overrides(quiet=True)
    config.max_seq_len = CONTEXT
    library = ExLlamaV2(config)
    cache = ExLlamaV2Cache(library, max_seq_len=SLOTS * CONTEXT // 2, lazy=True)
    library.load_autosplit(cache)
    tokenizer = ExLlamaV2Tokenizer(config)
    generator = ExLlamaV2DynamicGenerator(library, cache, tokenizer, max_batch_size=SLOTS)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        ids = [tokenizer.encode(prompt(seed, 8))[0].tolist() for seed in order["seeds"]]
        print(bare_rate(generator, order["tokens"], ids), flush=True)


@contextmanager
def bare(model: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.gpu_check", "--role", "bare", "--model", str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        while (line := process.stdout.readline()) and line.strip() != "ready":
            pass
        yield process
        process.stdin.close()


def served_rate(port: int, tokens: int, seeds: list[int]) -> float:
    body = {"model": "m", "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    results = stream(port, "/v1/completions", [body | {"prompt": prompt(seed, 8)} for seed in seeds])
    for result in results:
        if b"[DONE]" not in result.raw or b'"error"' in result.raw:
            raise SystemExit(f"a stream failed: {bytes(result.raw[-300:])!r}")
    return len(seeds) * tokens / max(result.last_s for result in results)


def rates(model: Path, config: Path, tokens: int, rounds: int) -> dict[int, dict[str, float]]:
    """Both in turn, in every round; a figure is the median over the rounds."""
    found: dict[int, list[tuple[float, float]]] = {n: [] for n in STREAMS}
    serve = [sys.executable, "-m", "tokenflow", "serve", "-c", str(config), "--port", "0", "--log-level", "error"]
    with bare(model) as process, served_by(serve, None) as port:
        assert process.stdin is not None and process.stdout is not None
        for n in (0, *range(1, rounds + 1)):
            for streams in STREAMS:
                seeds = [1000 * n + 100 * streams + i for i in range(streams)]
                print(json.dumps({"seeds": seeds, "tokens": tokens}), file=process.stdin, flush=True)
                pair = float(process.stdout.readline()), served_rate(port, tokens, seeds)
                if n:  # the first round warms up
                    found[streams].append(pair)
    return {
        streams: {
            "bare": round(median(one for one, _ in pairs), 1),
            "http": round(median(other for _, other in pairs), 1),
            "ratio": round(median(other / one for one, other in pairs), 3),
        }
        for streams, pairs in found.items()
    }


# --- leaving and pausing, on the engine itself ------------------------------------------------------------------------


async def request(engine: Engine, seed: int, tokens: int, words: int = 8) -> SequenceRequest:
    ids = await engine.tokenize(prompt(seed, words))
    return SequenceRequest(prompt=tuple(ids), max_tokens=tokens, sampling=Sampling(temperature=0), ignore_eos=True)


async def leavings(engine: Engine, trials: int, seed: int = 1) -> dict[str, dict[str, float]]:
    """Of each phase: milliseconds from the cancel to the free slot, and tokens made after it for nobody."""
    return {phase: _summary([await _leave(engine, phase, seed + n) for n in range(trials)]) for phase in PHASES}


def _summary(trials: list[tuple[float, int]]) -> dict[str, float]:
    times = sorted(1000 * seconds for seconds, _ in trials)
    return {
        "median_ms": round(median(times), 2),
        "p99_ms": round(quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0], 2),
        "worst_ms": round(times[-1], 2),
        "tokens_after": max(tokens for _, tokens in trials),
    }


async def _leave(engine: Engine, phase: str, seed: int) -> tuple[float, int]:
    drawn = random.Random(seed)
    long = await request(engine, seed, 400, words=600 if phase == "prefill" else 8)
    async with company(engine) as group:
        if phase == "waiting":
            hogs = [
                group.start(await request(engine, seed + n, 400), Recorder(window=1, follow=False))
                for n in range(SLOTS)
            ]
            for hog in hogs[: engine.info.slots]:
                await hog.wait_started()
        victim = group.start(long)
        if phase == "prefill":
            await victim.wait_started()
            await trio.sleep(drawn.random() * 0.02)
        elif phase == "decoding":
            await victim.wait_deltas(drawn.randrange(1, 40))
        else:
            await trio.sleep(drawn.random() * 0.02)
        victim.scope.cancel()
        left = trio.current_time()
        await victim.returned.wait()
        return trio.current_time() - left, victim.send.dropped


async def pausings(engine: Engine, seed: int = 500) -> dict[str, dict[str, Any]]:
    """One sequence pauses for 200 steps of another one, with its slot and without."""
    return {how: await _pause(engine, seed, how) for how in ("parked", "released")}


async def _pause(engine: Engine, seed: int, how: str) -> dict[str, Any]:
    wanted = await _play(engine, await request(engine, seed, 300))
    async with company(engine) as group:
        paused = group.start(await request(engine, seed, 300))
        await paused.wait_deltas(40)
        paused.send.pause()
        if how == "released":
            paused.send.give_up_slot()
        other = group.start(await request(engine, seed + 1, 200))
        await other.returned.wait()
        before = (await engine.stats()).prompt_tokens
        paused.send.take_slot()
        paused.send.resume()
        await paused.returned.wait()
        again = (await engine.stats()).prompt_tokens - before
    return {"same_text": paused.text == wanted.text, "evaluated_again": again, "whole": paused.tokens == wanted.tokens}


async def _play(engine: Engine, what: SequenceRequest) -> Recorder:
    recorder = Recorder()
    await recorder.play(engine, what)
    return recorder


async def contract(model: Path, trials: int) -> tuple[dict[str, Any], dict[str, Any]]:
    from tokenflow_exllamav2 import Exl2Config, open_exllamav2

    async with open_exllamav2(Exl2Config(**options(model))) as engine:
        return await leavings(engine, trials), await pausings(engine)


# --- the whole --------------------------------------------------------------------------------------------------------


def check(model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    config = write_config(model, folder)
    leaving, pausing = trio.run(contract, model, arguments.trials)
    return {
        "model": model.name,
        "kit": kit(config),
        "rates": rates(model, config, arguments.tokens, arguments.rounds),
        "leaving": leaving,
        "pausing": pausing,
    }


def holds(result: dict[str, Any]) -> bool:
    """Every promise is kept. The texts of pauses are only shown: a GPU's sums depend on the batch's shape."""
    again = {how: pause["evaluated_again"] for how, pause in result["pausing"].items()}
    return (
        result["kit"]["broken"] == 0
        and result["kit"]["kept"] > 0
        and all(phase["tokens_after"] <= 2 for phase in result["leaving"].values())
        and all(pause["whole"] for pause in result["pausing"].values())
        and again["parked"] == 0
        and again["released"] <= PAGE
    )


def table(result: dict[str, Any]) -> str:
    rows = [f"{result['model']}: " + ", ".join(f"{count} {kind}" for kind, count in result["kit"].items())]
    for streams, one in result["rates"].items():
        rate = f"{one['http']:>9.1f} tokens/s through HTTP, {one['ratio']:.3f} of the bare {one['bare']:.1f}"
        rows.append(f"  {streams:>2} streams   {rate}")
    for phase, one in result["leaving"].items():
        times = f"slot free after {one['median_ms']:.2f} ms, p99 {one['p99_ms']:.2f}, worst {one['worst_ms']:.2f}"
        rows.append(f"  {phase:<10}   {times}; at most {one['tokens_after']} tokens after leaving")
    for how, one in result["pausing"].items():
        text = "the same text" if one["same_text"] else "another text"
        rows.append(f"  {how:<10}   {text}, {one['evaluated_again']} tokens evaluated again")
    return "\n".join(rows)


def _check_flash_attn() -> None:
    from exllamav2 import attn

    if not attn.has_flash_attn_with_paged:
        raise StartupError("exllamav2 finds no flash-attn 2.5.7 or newer; without it there is only one slot.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="check this one instead of the small ones")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--role", choices=["bare"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "bare":
        run_bare(arguments.model)
        return 0
    from tokenflow_exllama.gpus import import_on_gpu
    from tokenflow_exllamav2.loading import VERSION

    try:
        import_on_gpu("exllamav2", VERSION)
        _check_flash_attn()
    except StartupError as exc:
        print(f"Nothing was checked: {exc.message}", file=sys.stderr)
        return NO_GPU
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = [arguments.model.absolute()] if arguments.model else small_models(folder)
        results = [check(model, folder, arguments) for model in models]
    print("\n".join(map(table, results)))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(map(holds, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
