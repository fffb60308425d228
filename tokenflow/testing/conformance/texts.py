"""Text: tokens and back, stop strings, whole characters, seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenflow.api import Engine, Finished, Sampling
from tokenflow.testing.conformance.base import Kit, live, need
from tokenflow.testing.fakes import record

HARD_TEXTS = (
    "plain words, and punctuation!",
    " two  spaces\tand\ttabs \n\n newlines\r\n ",
    "naïve café, größer, Ελληνικά, русский",
    "日本語の文章、中文，한국어",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈 and e\u0301 beside é",
    "<s>[INST] <|im_start|>system<|im_end|> </s> <|endoftext|>",
    "{'json': [1, 2.5e-3, null]} \\ \"quoted\" `code`",
    "\u0000\u0007\u200b\u2028",
)


class Texts(Kit):
    @live
    async def test_tokens_and_back(self, engine: Engine) -> None:
        """Any text comes back from its tokens as it was; control tokens' texts stay text."""
        for text in (*HARD_TEXTS, *sorted(engine.info.special_tokens)[:8]):
            tokens = await engine.tokenize(text)
            assert await engine.detokenize(tokens) == text
        assert await engine.tokenize("") == []

    @live
    async def test_control_tokens_only_where_asked(self, engine: Engine) -> None:
        """`special=True` makes control tokens of their texts, `special=False` does not."""
        for text in sorted(engine.info.special_tokens)[:8]:
            control = await engine.tokenize(text, special=True)
            assert await engine.tokenize(text) != control
            assert len(control) == 1
            assert await engine.detokenize(control) == text

    @live
    async def test_control_tokens_have_a_text_only_where_they_are_shown(self, engine: Engine) -> None:
        """One that the model makes is left out of the text, unless the request wants to see it."""
        need(engine, "logit_bias")
        for name in sorted(engine.info.special_tokens):
            [token] = await engine.tokenize(name, special=True)
            always = Sampling(logit_bias={token: 100.0})
            request = await self.request(engine, sampling=always, max_tokens=2, ignore_eos=False)
            left_out = await record(engine, request)
            if left_out.finished == Finished("stop"):
                continue  # it ends the sequence
            shown = await record(engine, replace(request, shown=frozenset({name, "none of it"})))
            assert (left_out.text, shown.text) == ("", 2 * name)
            return
        pytest.skip("every control token of this engine ends the sequence")

    @live
    async def test_an_unknown_token_is_a_value_error(self, engine: Engine) -> None:
        """detokenize refuses an id outside the vocabulary."""
        for token in (-1, 2**31 - 1):
            with pytest.raises(ValueError):
                await engine.detokenize([token])

    @live
    async def test_stop_strings_are_never_sent(self, engine: Engine) -> None:
        """The text ends before the stop string, wherever its parts fall."""
        whole = (await record(engine, await self.request(engine))).text
        for start, size in ((len(whole) // 2, 1), (len(whole) // 3, 3), (len(whole) // 2, 9)):
            stop = whole[start : start + size]
            recorder = await record(engine, await self.request(engine, stop=("never in it\u0000", stop)))
            assert recorder.text == whole[: whole.index(stop)]
            assert recorder.finished == Finished("stop")

    @live
    async def test_a_near_miss_is_sent(self, engine: Engine) -> None:
        """What could have become a stop string and did not is sent, in order, to the last character."""
        whole = (await record(engine, await self.request(engine))).text
        stops = (whole[3:9] + "\u0000", whole[-3:] + "\u0000")
        recorder = await record(engine, await self.request(engine, stop=stops))
        assert recorder.text == whole

    @live
    async def test_text_is_whole(self, engine: Engine) -> None:
        """No character is cut by the end of a token: U+FFFD is only where the model's bytes are none."""
        request = await self.request(engine, HARD_TEXTS[4])
        text = (await record(engine, request)).text
        if "logprobs" in engine.info.capabilities:
            scored = await record(engine, replace(request, logprobs=0))
            said = b"".join(logprob.bytes for delta in scored.deltas for logprob in delta.logprobs)
            assert said.decode(errors="replace").startswith(text)
        else:
            assert "\ufffd" not in text[:-1], "only max_tokens may cut one"

    @live
    async def test_seed(self, engine: Engine) -> None:
        """The same seed gives the same text at temperature 1; of several seeds, not all do."""
        need(engine, "seed", "temperature")

        async def text(seed: int) -> str:
            sampling = Sampling(temperature=1.0, seed=seed)
            return (await record(engine, await self.request(engine, sampling=sampling))).text

        assert await text(7) == await text(7)
        assert len({await text(seed) for seed in range(4)}) > 1
