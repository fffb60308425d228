"""Plain answers."""

from __future__ import annotations

import json

from tokenflow.http.answers import answer


async def test_what_is_no_text_is_answered_all_the_same() -> None:
    """Half of a surrogate pair, as a model may write it into a call's arguments: a stream says U+FFFD too."""
    assert json.loads(await answer({"name": "a\ud800b"}).get_data()) == {"name": "a\ufffdb"}
