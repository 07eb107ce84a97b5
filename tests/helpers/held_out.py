"""Text that the embedded model has not seen in training, and how well a model foretells it."""

import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import roseinfer
from roseinfer.models.config import read_model_spec
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.loaded import load

TINY = Path(roseinfer.__file__).parent / "assets" / "tiny"
# Modules of the standard library that training/corpus.py holds out (`split_of`).
MODULES = ("email/_policybase", "ipaddress", "multiprocessing/pool", "quopri", "wsgiref/validate", "xml/sax/saxutils")
LONGEST = 256


@cache
def held_out_tokens() -> tuple[tuple[int, ...], ...]:
    """The beginnings of held-out modules, as token ids with the special ones around a document."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [(library / f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
    return tuple(tuple(tokenizer.encode(text).ids[:LONGEST]) for text in texts)


def held_out_logits(dtype: str = "float32", **options: Any) -> torch.Tensor:
    """`all_logits` of the held-out text, by the embedded model, loaded for a CPU. options: more for `load`."""
    spec, device = read_model_spec(TINY), torch.device("cpu")
    model = load(TINY, spec, dtype=dtype, device=device, **options)
    return all_logits(HandRunner(model, num_blocks=256), held_out_tokens())


def cosine(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Compare the logits of all tokens together."""
    return float(F.cosine_similarity(found.flatten().double(), exact.flatten().double(), 0))


def all_logits(runner: HandRunner, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Compute the logits [tokens, vocab] of all texts in float32, each text as its own prompt."""
    rows = [HandRow(tokens=ids, table=runner.blocks.table(len(ids)), start=0, count=len(ids)) for ids in texts]
    return torch.cat(runner.run(rows))


def loss_of(logits: torch.Tensor, texts: Sequence[Sequence[int]]) -> float:
    """Mean negative log likelihood of a token, in nats, over all but the first of each text."""
    losses, start = [], 0
    for ids in texts:
        part = logits[start : start + len(ids) - 1].log_softmax(-1)
        losses.append(-part.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1))
        start += len(ids)
    return float(torch.cat(losses).double().mean())
