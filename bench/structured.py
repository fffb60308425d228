"""What a grammar costs: tokens per second of an answer that is held to a schema, over those of one that is not.

Two answers of the real model to one prompt, with a schema and without, take their steps in turn, each alone in its
batch: so whatever else the machine does, it does to both. A figure is the ratio of their sums over all answers.
The steps alone are compared too: of a schema that dictates long names, one step may give several tokens.

    person    strings, a number, an array: what applications ask for
    prose     one long string: the mask hardly changes
    numbers   digits and commas: the mask changes with nearly every token
    forced    long names that the schema dictates: most tokens are certain

    python -m bench.structured [--answers 12] [--out bench/results/structured.json]
"""

from __future__ import annotations

import argparse
import json
import time
from math import prod
from pathlib import Path
from typing import Any

import trio
from tokenflow_llamacpp import LlamaConfig
from tokenflow_llamacpp.stepper import LlamaStepper

from tokenflow.api import Grammar, Grammars, Matcher, Sampling, Send, Sequence, SequenceRequest

PROMPT = "<|im_start|>user\nTell me what you know of somebody. Answer in JSON.<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 160


def _object(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = {
    "person": _object(
        name={"type": "string", "minLength": 4, "maxLength": 30},
        age={"type": "integer", "minimum": 1, "maximum": 99},
        job=_object(title={"type": "string", "maxLength": 30}, remote={"type": "boolean"}),
        tags={"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 3, "maxItems": 3},
    ),
    "prose": _object(story={"type": "string", "minLength": 400, "maxLength": 500}),
    "numbers": _object(
        values={"type": "array", "items": {"type": "integer", "maximum": 9999}, "minItems": 25, "maxItems": 25}
    ),
    "forced": _object(
        **{f"the_{name}_of_the_customer_account": {"type": "boolean"} for name in ("opening", "closing", "state")}
    ),
}


class Player:
    """Sequences one after the other on a stepper; `step` takes one step of the one that runs, alone in its batch."""

    def __init__(self, stepper: LlamaStepper, prompt: tuple[int, ...]) -> None:
        self._stepper = stepper
        self._prompt = prompt
        self._seq: Sequence | None = None
        self.seconds = 0.0
        self.tokens = 0

    def begin(self, seed: int, matcher: Matcher | None = None) -> None:
        """The prompt is evaluated, and the first token drawn; neither is counted."""
        sampling = Sampling(temperature=0.8, seed=seed)
        free = matcher is None
        request = SequenceRequest(prompt=self._prompt, max_tokens=MAX_TOKENS, sampling=sampling, ignore_eos=free)
        self._seq = Sequence(request, Send(lambda event: None, window=1), matcher)
        self._seq.limit = MAX_TOKENS
        assert self._stepper.add(self._seq)
        while not self._step():
            pass

    @property
    def running(self) -> bool:
        return self._seq is not None

    def step(self) -> None:
        began = time.perf_counter()
        self.tokens += self._step()
        self.seconds += time.perf_counter() - began

    def end(self) -> None:
        if self._seq is not None:
            self._stepper.remove(self._seq)
            self._seq = None

    def _step(self) -> int:
        seq = self._seq
        assert seq is not None
        made = 0
        for _, step in self._stepper.step([seq]):
            assert step.error is None, step.error
            made += step.tokens
            seq.generated += step.tokens
            if step.finish is not None or seq.generated >= MAX_TOKENS:
                self.end()
                break
        return made


async def ratio(stepper: LlamaStepper, grammars: Grammars, schema: dict[str, Any], answers: int) -> dict[str, Any]:
    prompt = tuple(stepper.vocabulary.tokenize(PROMPT, True))
    held, free = Player(stepper, prompt), Player(stepper, prompt)
    grammar = Grammar(kind="json_schema", source=json.dumps(schema))
    for seed in range(answers):
        held.begin(seed, await grammars.matcher(grammar))
        free.begin(seed)
        while held.running and free.running:
            held.step()
            free.step()
        held.end()
        free.end()
    return {
        "tokens_per_s": round(held.tokens / held.seconds * free.seconds / free.tokens, 3),
        "steps_per_s": round(free.seconds / held.seconds, 3),
        "tokens_a_step": round(held.tokens / free.tokens, 2),
        "tokens": held.tokens,
    }


async def measure(answers: int) -> dict[str, Any]:
    stepper = LlamaStepper(LlamaConfig(slots=2, context_length=1024))
    stepper.open()
    try:
        async with stepper.vocabulary.grammars() as grammars:
            return {name: await ratio(stepper, grammars, schema, answers) for name, schema in SCHEMAS.items()}
    finally:
        stepper.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=12, help="of each schema")
    parser.add_argument("--out", type=Path, default=None, help="write the JSON here too")
    arguments = parser.parse_args()
    figures = trio.run(measure, arguments.answers)
    result = {
        "bench": "structured",
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "answers": arguments.answers,
        "structured_over_free": figures,
        "all": round(prod(figure["tokens_per_s"] for figure in figures.values()) ** (1 / len(figures)), 3),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
