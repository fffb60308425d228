"""Serves an ASGI application on Trio: Hypercorn's protocols, with what is wrong in its worker put right.

`serve` and `bind` are the whole interface; `direct`, `when_left`, `take_body` and `host_name` are for applications.
Inside, each file corrects one layer of Hypercorn 0.18, by subclassing or in its place, and never by patching:
`serve.py` its worker, `connection.py` its `TCPServer`, `h11.py` its `H11Protocol`, `h2.py` its `H2Protocol`, `ws.py`
its `WSStream`, `asgi.py` its `TaskGroup`, which is the one place where HTTP/1.1, HTTP/2 and WebSocket all meet the
application. `refusals.py` says which requests no application should see, `limits.py` how much clients may take;
`writer.py` is what everything that is sent goes through, and `at_once.py` the way to it from other tasks.
"""

from .asgi import ClientDisconnected, direct, take_body, when_left
from .at_once import Direct
from .limits import Limits, Traffic
from .refusals import host_name
from .serve import bind, serve

__all__ = [
    "ClientDisconnected",
    "Direct",
    "Limits",
    "Traffic",
    "bind",
    "direct",
    "host_name",
    "serve",
    "take_body",
    "when_left",
]
