"""What `tokenflow.api` promises to export is there."""

import tokenflow.api


def test_every_promised_name_is_there() -> None:
    assert [name for name in tokenflow.api.__all__ if not hasattr(tokenflow.api, name)] == []
