"""A client that comes back: streamed answers on Trio that survive a lost connection, each token exactly once.

    async with Client("http://127.0.0.1:8000") as client:
        async with client.chat([{"role": "user", "content": "Hello"}]) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.finish_reason, stream.usage)

It asks the server to pause the generation when the connection is lost, and takes it up again by itself, within its
patience. A block that ends well has seen the server's own end; anything else is an exception of `client.errors`.
"""

from tokenflow.client.client import Client
from tokenflow.client.errors import (
    BadAnswer,
    ClientError,
    CutOff,
    ResumeWindowLost,
    ServerError,
    Unreachable,
)
from tokenflow.client.records import Delta
from tokenflow.client.stream import Stream

__all__ = [
    "BadAnswer",
    "Client",
    "ClientError",
    "CutOff",
    "Delta",
    "ResumeWindowLost",
    "ServerError",
    "Stream",
    "Unreachable",
]
