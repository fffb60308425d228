"""Grammars: the text is of the grammar, whatever happens on the way; a grammar that is none is refused beforehand."""

from __future__ import annotations

import json
import re

import pytest

from tokenflow.api import Engine, Finished, Grammar, InvalidRequest, Sampling, SequenceRequest, StructuredEngine
from tokenflow.testing.conformance.base import Kit, live, need
from tokenflow.testing.fakes import Recorder, company, record

CODE = Grammar(kind="regex", source="[a-c]{2} is number [0-9]{2}")
OBJECT = Grammar(
    kind="json_schema",
    source=json.dumps(
        {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "blue"]},
                "size": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["colour", "size"],
            "additionalProperties": False,
        }
    ),
)
CHOICE = Grammar(kind="grammar", source='start: "yes" | "no"')
BAD = (
    Grammar(kind="regex", source="a(b", param="guided_regex"),
    Grammar(kind="json_schema", source='{"properties": {"a": {"type": "colour"}}}', param="json_schema"),
    Grammar(kind="grammar", source="start: nowhere", param="grammar"),
)


class Structured(Kit):
    async def structured(self, engine: Engine, grammar: Grammar = CODE, seed: int = 1) -> SequenceRequest:
        """Drawn by chance, where the engine can: a grammar must hold whatever is drawn."""
        need(engine, "grammar")
        can = engine.info.capabilities
        sampling = Sampling(seed=seed if "seed" in can else None, temperature=1.0 if "temperature" in can else None)
        return await self.request(engine, grammar=grammar, sampling=sampling, max_tokens=64, ignore_eos=False)

    @live
    async def test_the_text_is_of_the_grammar(self, engine: Engine) -> None:
        """Each kind of grammar holds, and the sequence ends where nothing can follow."""
        for seed in range(3):
            code = await record(engine, await self.structured(engine, CODE, seed))
            assert re.fullmatch(CODE.source, code.text)
            assert code.finished == Finished("stop")
        found = json.loads((await record(engine, await self.structured(engine, OBJECT))).text)
        assert found["colour"] in ("red", "blue")
        assert 1 <= found["size"] <= 9
        assert (await record(engine, await self.structured(engine, CHOICE))).text in ("yes", "no")

    @live
    async def test_every_token_counts(self, engine: Engine) -> None:
        """Tokens that leave the model no choice are counted and limited like all others."""
        request = await self.structured(engine)
        whole = await record(engine, request)
        assert (await engine.stats()).generated_tokens == whole.tokens
        for most in range(1, min(whole.tokens, 6)):
            cut = await record(engine, await self.request(engine, grammar=CODE, max_tokens=most, ignore_eos=False))
            assert cut.tokens == most
            assert cut.finished == Finished("length")

    @live
    async def test_a_stop_string_ends_what_is_certain(self, engine: Engine) -> None:
        """A stop string that the grammar demands is found all the same, wherever its tokens come from."""
        need(engine, "grammar")
        request = await self.request(engine, grammar=CODE, stop=("number",), max_tokens=64, ignore_eos=False)
        stopped = await record(engine, request)
        assert re.fullmatch("[a-c]{2} is ", stopped.text)
        assert stopped.finished == Finished("stop")

    @live
    async def test_a_stall_changes_nothing_of_it(self, engine: Engine) -> None:
        """One event at a time: no more comes than was asked for, and the whole is of the grammar."""
        need(engine, "pause")
        request = await self.structured(engine)
        async with company(engine) as group:
            slow = group.start(request, Recorder(window=1, follow=False))
            while slow.finished is None:
                await slow.until(lambda recorder: recorder.send.stalled or recorder.finished)
                assert slow.send.sent <= slow.send.limit
                slow.accept(1)
            await slow.returned.wait()
        assert re.fullmatch(CODE.source, slow.text)

    @live
    async def test_neighbours_say_what_they_say(self, engine: Engine) -> None:
        """A grammar is one sequence's affair: the others are not held to it, nor does their number of tokens change."""
        need(engine, "grammar")
        if engine.info.slots < 2:
            pytest.skip("the engine has one slot")
        undisturbed = await record(engine, await self.request(engine))
        async with company(engine) as group:
            other = group.start(await self.request(engine))
            await other.wait_deltas(1)
            structured = [await record(engine, await self.structured(engine, CODE, seed)) for seed in range(2)]
            await other.returned.wait()
        assert other.tokens == undisturbed.tokens
        if self.exact_in_company:
            assert other.text == undisturbed.text
        assert all(re.fullmatch(CODE.source, recorder.text) for recorder in structured)

    @live
    async def test_a_cancel_frees_it(self, engine: Engine) -> None:
        """Cancelled in the middle, it leaves nothing behind, and the next with the same grammar begins at its start."""
        request = await self.structured(engine)
        async with company(engine) as group:
            victim = group.start(request, Recorder(window=2, follow=False))
            await victim.wait_deltas(2)
            victim.scope.cancel()
            await victim.returned.wait()
        assert (await engine.stats()).slots_used == 0
        assert re.fullmatch(CODE.source, (await record(engine, request)).text)

    @live
    async def test_what_is_no_grammar_is_refused(self, engine: Engine) -> None:
        """By `compile`, which is asked before anything is promised, naming the field; `generate` would say the same."""
        need(engine, "grammar")
        assert isinstance(engine, StructuredEngine)
        for grammar in BAD:
            with pytest.raises(InvalidRequest) as caught:
                await engine.compile(grammar, budget_s=self.timeout_s)
            assert caught.value.param is not None
            assert caught.value.param.startswith(grammar.param)
        with pytest.raises(InvalidRequest):
            await record(engine, await self.request(engine, grammar=BAD[0]))
        assert (await engine.stats()).slots_used == 0
