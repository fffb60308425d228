"""Sharing out credit: how many records a client allows, among the sequences that may make them.

A client allows a stream so many records in all; an engine asks each sequence how many it may have sent. With one
sequence the two are the same number. With several, each gets a grant of its own, and no more is granted than there is:
so not one record can come that nobody allowed, whichever sequence is the fastest.

A grant that was given stays: its sequence may be using it at this moment, in another thread. What a sequence that has
ended did not use is there for the others.
"""

from __future__ import annotations

from typing import NamedTuple


class Grant(NamedTuple):
    """One sequence's share."""

    sent: int
    """Records that it has made."""
    most: int
    """Records that it may have made in all."""
    live: bool
    """It has not ended: it could make more."""


def share_out(budget: int, grants: list[Grant]) -> list[int]:
    """Each sequence's new `most`, for `budget` more records of all of them together."""
    most = [max(grant.most, grant.sent) if grant.live else grant.sent for grant in grants]
    spare = budget - sum(m - grant.sent for m, grant in zip(most, grants, strict=True))
    if spare < 0:  # a reader that allowed more has left
        return share_out(budget, [grant._replace(most=grant.sent) for grant in grants])
    live = sorted((i for i, grant in enumerate(grants) if grant.live), key=lambda i: most[i])
    for turn, i in enumerate(live):  # evenly, and the odd ones to those who had least
        most[i] += spare // len(live) + (turn < spare % len(live))
    return most
