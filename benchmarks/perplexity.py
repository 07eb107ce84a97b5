"""Perplexity of a model on the Python documentation, in floats, in eight and in four bits.

    python -m benchmarks.perplexity MODEL [--gguf-file NAME] [--windows 64] [--window 512] [--ways int8 fp8 kv-fp8]

The text is what `help()` knows of the language (`pydoc_data.topics`), which comes with every Python: nothing is
downloaded but the model. Perplexity is exp of the mean negative log likelihood of a token, over all tokens of all
windows but each one's first. A window is a prompt of its own, and all variants see the same tokens.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, fsum
from typing import Any, cast

from roseinfer import LLM, SamplingParams
from roseinfer.bench.report import header, table, write_json
from roseinfer.cli.commands import Command
from roseinfer.cli.main import run_alone
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError

NAME = "perplexity"
HELP = "perplexity of the Python documentation, in floats, in eight and in four bits"
FLOATS = "floats"
# Engine options by name of the variant; the first is the baseline.
WAYS: dict[str, dict[str, Any]] = {
    FLOATS: {"quantization": "floats"},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "fp8-head": {"lm_head_dtype": "fp8"},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityConfig:
    """Model, text, and formats of weights and of K and V."""

    model: str = option("tiny", "'tiny' (embedded), a folder, a GGUF file, or a Hugging Face id", metavar="MODEL")
    gguf_file: str | None = option(None, "the GGUF file of MODEL, a folder or an id", metavar="NAME")
    windows: int = option(64, "pieces of the text, at even distances")
    window: int = option(512, "tokens of each")
    ways: tuple[str, ...] = option(tuple(WAYS)[1:], "what to compare with floats", choices=tuple(WAYS)[1:], spaced=True)
    dtype: str = option("auto", "of floats; auto = the checkpoint's on a GPU, float32 on a CPU", metavar="DTYPE")
    device: str = option("auto", "auto = cuda if there is one", choices=("auto", "cpu", "cuda"))
    threads: int | None = option(None, "CPU threads; default: all cores")
    json: str | None = option(None, "write the result to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_positive(self, "windows", "threads")
        if self.window < 2:
            raise ConfigError(f"window must be 2 or more, got {self.window}")


OPTIONS = OptionSet(Group(PerplexityConfig, "benchmark", positional="model"))


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    config = OPTIONS.build(PerplexityConfig, given)
    print(header("perplexity", given), flush=True)
    rows = []
    for way in (FLOATS, *config.ways):
        rows.append(measure(config, way))
        print(f"{way}: {rows[-1].perplexity:.4f}", flush=True)
    print(table([{**asdict(row), "change %": 100 * (row.perplexity / rows[0].perplexity - 1)} for row in rows]))
    if config.json:
        write_json(config.json, {"ways": [asdict(row) for row in rows]}, given)
    return 0


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity over `tokens` scored tokens; `loss` is their mean negative log likelihood in nats."""

    way: str
    tokens: int
    loss: float
    perplexity: float


def measure(config: PerplexityConfig, way: str) -> Perplexity:
    """Measure one variant with its own engine. Raises what keeps the engine from starting."""
    options: dict[str, Any] = {"gguf_file": config.gguf_file, "dtype": config.dtype, "device": config.device}
    options |= {"threads": config.threads, "max_model_len": config.window + 1, "enable_prefix_caching": False}
    options |= WAYS[way]
    with LLM(config.model, **options) as llm:
        prompts = windows_of(llm.get_tokenizer().encode(documentation()), config.windows, config.window)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        answers = llm.generate(prompts, params)
    scored = (
        pair for answer in answers for pair in zip(answer.prompt_token_ids, answer.prompt_logprobs or (), strict=True)
    )
    losses = [-entry[token].logprob for token, entry in scored if entry is not None]
    loss = fsum(losses) / len(losses)
    return Perplexity(way, len(losses), loss, exp(loss))


def documentation() -> str:
    """Return the topics of `help()` in order of their names."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows_of(ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return `count` windows at equal distances. Raises `ConfigError` if the text is too short."""
    if count * length > len(ids):
        raise ConfigError(f"windows: {count} of {length} tokens are more than the text's {len(ids)}")
    stride = len(ids) // count
    return [list(ids[start : start + length]) for start in range(0, count * stride, stride)]


def main(argv: Sequence[str] | None = None) -> int:
    return run_alone(cast(Command, sys.modules[__name__]), "python -m benchmarks.perplexity", argv)


if __name__ == "__main__":
    sys.exit(main())
