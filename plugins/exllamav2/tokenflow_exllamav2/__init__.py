"""EXL2, GPTQ and FP16 models on a GPU, through exllamav2.

config      the options
loading     a directory into GPU memory, or one line that says why not
sampling    how a token is drawn
job         one sequence in the library's hands: its failures are its own, and it can give its pages up
batch       the library's generator, with sequences that pause
stepper     both under the shared StepLoop
engine      all of it as an `Engine`
"""

from tokenflow.api import EnginePlugin, hookimpl
from tokenflow_exllamav2.config import Exl2Config
from tokenflow_exllamav2.engine import open_exllamav2
from tokenflow_exllamav2.loading import missing

__all__ = ["Exl2Config", "open_exllamav2"]


@hookimpl
def register_engines() -> list[EnginePlugin[Exl2Config]]:
    return [EnginePlugin(name="exllamav2", config=Exl2Config, open=open_exllamav2, missing=missing)]
