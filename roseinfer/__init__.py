"""roseinfer, an LLM inference engine: `from roseinfer import LLM, SamplingParams`.

Importing the package loads nothing else: each name below is fetched from its module when it is first used, so that the
scheduler stays usable where neither PyTorch nor any other library is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roseinfer.core.outputs import FinishReason
    from roseinfer.core.slo import Slo
    from roseinfer.engine.api import SequenceChunk
    from roseinfer.llm.llm import LLM
    from roseinfer.llm.lora import LoRARequest
    from roseinfer.llm.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
        ScoreOutput,
    )
    from roseinfer.llm.prompts import TextPrompt, TokensPrompt
    from roseinfer.llm.sampling_params import SamplingParams
    from roseinfer.llm.structured_outputs import StructuredOutputsParams

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "FinishReason",
    "LoRARequest",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "SequenceChunk",
    "Slo",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "CompletionOutput": "roseinfer.llm.outputs",
    "EmbeddingOutput": "roseinfer.llm.outputs",
    "FinishReason": "roseinfer.core.outputs",
    "LLM": "roseinfer.llm.llm",
    "LoRARequest": "roseinfer.llm.lora",
    "Logprob": "roseinfer.llm.outputs",
    "RequestMetrics": "roseinfer.llm.outputs",
    "RequestOutput": "roseinfer.llm.outputs",
    "SamplingParams": "roseinfer.llm.sampling_params",
    "ScoreOutput": "roseinfer.llm.outputs",
    "SequenceChunk": "roseinfer.engine.api",
    "Slo": "roseinfer.core.slo",
    "StructuredOutputsParams": "roseinfer.llm.structured_outputs",
    "TextPrompt": "roseinfer.llm.prompts",
    "TokensPrompt": "roseinfer.llm.prompts",
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
