"""What a line says."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenflow_ledger.line import line

from tokenflow.api import Ended
from tokenflow.core.lifecycle import Gaps

Make = Callable[..., Ended]


def test_a_line_to_the_letter(ended: Make) -> None:
    assert line(ended()) == (
        b'{"at":"2023-11-14T22:13:20.250000Z","id":"s1","key":"alice","model":"small","engine":"synthetic",'
        b'"route":"/v1/chat/completions","stream":true,"choices":1,"prompt_tokens":12,"cached_tokens":4,'
        b'"generated_tokens":9,"delivered_tokens":7,"after_leaving_tokens":2,"queue_s":0.125,"prefill_s":0.25,'
        b'"ttft_s":0.375,"tbt_mean_s":0.125,"duration_s":1.5,"release_s":0.010123,"reason":"disconnected",'
        b'"code":null,"by":"client","phase":"decode"}\n'
    )


def test_what_never_was_is_null(ended: Make) -> None:
    nothing = ended(prefill_s=None, ttft_s=None, release_s=None, gaps=Gaps(counts=(0, 0), sum_s=0.0))
    said = json.loads(line(nothing))
    assert [said[key] for key in ("prefill_s", "ttft_s", "release_s", "tbt_mean_s")] == [None] * 4


def test_every_field_of_the_record_is_there(ended: Make) -> None:
    assert set(json.loads(line(ended()))) == set(Ended.__dataclass_fields__) - {"gaps"} | {"tbt_mean_s"}


def test_no_text_can_end_the_line_or_fail_to_encode(ended: Make) -> None:
    for text in ("a\nb", "a\u2028b\x85", "\ud800", "ключ"):
        made = line(ended(key=text))
        assert len(made.splitlines()) == 1
        assert json.loads(made)["key"] == text
