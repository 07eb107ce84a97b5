"""roseinfer, an LLM inference engine: `from roseinfer import LLM, SequenceParams`.

Importing the package loads nothing else: each name below is fetched from its module when it is first used, so that the
scheduler stays usable where neither PyTorch nor any other library is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roseinfer.core.guide import GuideSpec
    from roseinfer.core.outputs import FinishReason
    from roseinfer.core.sampling import SequenceParams
    from roseinfer.core.slo import Slo
    from roseinfer.engine.api import SequenceChunk
    from roseinfer.engine.llm import LLM, Completion, Sample

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "FinishReason",
    "GuideSpec",
    "LLM",
    "Sample",
    "SamplingParams",
    "SequenceChunk",
    "Slo",
    "__version__",
]

_HOMES = {
    "Completion": "roseinfer.engine.llm",
    "FinishReason": "roseinfer.core.outputs",
    "GuideSpec": "roseinfer.core.guide",
    "LLM": "roseinfer.engine.llm",
    "Sample": "roseinfer.engine.llm",
    "SamplingParams": "roseinfer.core.sampling",
    "SequenceChunk": "roseinfer.engine.api",
    "Slo": "roseinfer.core.slo",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
