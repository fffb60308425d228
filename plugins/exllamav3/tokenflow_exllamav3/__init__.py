"""EXL3 models on a GPU, through exllamav3.

config      the options
loading     a directory into GPU memory, or one line that says why not
sampling    how a token is drawn
guide       a grammar's matcher, as the library's filter
job         one sequence in the library's hands: its failures are its own, its steps can be taken back
batch       the library's generator, with sequences that pause
results     what the generator says, as steps
stepper     all of them under the shared StepLoop
engine      all of it as an `Engine`
"""

from tokenflow.api import EnginePlugin, hookimpl
from tokenflow_exllamav3.config import Exl3Config
from tokenflow_exllamav3.engine import open_exllamav3
from tokenflow_exllamav3.loading import missing

__all__ = ["Exl3Config", "open_exllamav3"]


@hookimpl
def register_engines() -> list[EnginePlugin[Exl3Config]]:
    return [EnginePlugin(name="exllamav3", config=Exl3Config, open=open_exllamav3, missing=missing)]
