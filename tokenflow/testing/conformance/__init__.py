"""The engine contract in executable form. An engine's test file is one class and one fixture:

    from tokenflow.testing.conformance import EngineConformance

    class TestMyEngine(EngineConformance):
        @pytest.fixture
        def open_engine(self):
            return lambda: open_my_engine(MyConfig())

Each test opens the engine anew, in `trio.run` and on real time, so that engines with threads and real models pass the
same tests as synthetic ones. Nothing in it sleeps: it waits for events, or for a number in `stats`. What mock time
alone would miss is counted: tokens made after a cancel, and how long a task step holds the event loop.
"""

from tokenflow.testing.conformance.base import Kit, OpenEngine
from tokenflow.testing.conformance.cancelling import Cancelling
from tokenflow.testing.conformance.credit import Credit
from tokenflow.testing.conformance.events import Events
from tokenflow.testing.conformance.structured import Structured
from tokenflow.testing.conformance.texts import Texts

__all__ = ["EngineConformance", "Kit", "OpenEngine", "Structured"]


class EngineConformance(Events, Credit, Cancelling, Texts, Structured):
    """Subclass it; see the module. The attributes of `Kit` fit it to a slow or odd engine."""
