"""How well the embedded model predicts text, for tests of what rounds its numbers."""

import pydoc
from functools import cache

from roseinfer.core.config import ModelConfig
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.llm import make_engine_config
from roseinfer.engine.messages import Add
from roseinfer.engine.process import build_engine
from roseinfer.engine.start import load_tokenizer
from roseinfer.hub import model_folder

# Of the standard library, whose documentation the model has learnt to continue.
MODULES = ("textwrap", "fractions", "shelve")
TOKENS = 500  # of each


@cache
def texts() -> tuple[list[int], ...]:
    """The token ids of some modules' documentation, as this Python has it."""
    tokenizer = load_tokenizer(ModelConfig(model="tiny"))
    pages = (pydoc.plain(pydoc.render_doc(name, renderer=pydoc.plaintext)) for name in MODULES)
    return tuple(tokenizer.encode(page)[:TOKENS] for page in pages)


@cache
def embedded_loss(**options: object) -> float:
    """Mean negative log likelihood of a token, in nats, by an engine with these options, in float32 on the CPU."""
    defaults = {"model": "tiny", "device": "cpu", "dtype": "float32", "max_model_len": 1024, "num_kv_blocks": 64}
    config = make_engine_config(**{**defaults, **options})
    core = build_engine(config, model_folder(config.model))[0]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for number, ids in enumerate(texts()):
        core.add(Add(str(number), ids, params))
    found: list[float] = []
    while core.busy:
        for output in core.step():
            assert output.end is None or output.end.error is None, output
            found += [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    core.close()
    assert len(found) == sum(len(ids) - 1 for ids in texts())
    return -sum(found) / len(found)
