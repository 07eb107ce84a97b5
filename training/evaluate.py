"""Step 4: judge the exported model with `transformers`, in float32 on the CPU.

python -m training.evaluate --model roseinfer/assets/tiny

Prints held-out bits per byte beside those of `xz -9e`, how often and after how many tokens sampled text ends, and
completions as Markdown. The held-out text is read from the running interpreter: figures hold for its version.
"""

import argparse
import json
import lzma
import platform
import statistics
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from training import data
from training.corpus import Corpus, build
from training.score import bits_per_byte
from training.tokenizer import CONTEXT_TOKENS

PROMPTS = (
    "def fibonacci(",
    "import os\n",
    "class Stack:\n",
    'def read_lines(path):\n    """Return',
)
REQUESTS = (
    "Write a Python function that returns the sum of a list of numbers.",
    "Write a Python function that reads a file and returns its lines.",
    "Explain this function.\n\ndef close(self):\n    if self.fp is not None:\n        self.fp.close()",
)
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "top_k": 0}
GREEDY = {"do_sample": False}
MAX_NEW_TOKENS = 200
LENGTH_SAMPLES = 64
LENGTH_LIMIT = 512


def stream_of(tokenizer: Tokenizer, documents: list[str]) -> data.Stream:
    """Encode, checking that every document survives the way there and back."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch(documents)]
    for document, tokens in zip(documents, ids, strict=True):
        if tokenizer.decode(tokens) != document:
            raise ValueError(f"the tokenizer changes {document[:80]!r}")
    lengths = torch.tensor([len(tokens) for tokens in ids])
    n_bytes = sum(len(d.encode()) for d in documents)
    flat = torch.tensor([token for tokens in ids for token in tokens])
    return data.Stream(flat, lengths.cumsum(0) - lengths, n_bytes)


def xz_bytes(documents: list[str]) -> int:
    """Return the bytes that `xz -9e` needs for all documents in one file."""
    return len(lzma.compress("".join(documents).encode(), preset=9 | lzma.PRESET_EXTREME))


def compression(model: PreTrainedModel, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, dict[str, float]]:
    """Per held-out part: sizes, and bits per byte of the model, of xz, and of xz that has read the training text."""
    parts = {
        "library": corpus.heldout_library,
        "tests": corpus.heldout_tests,
        "all": corpus.heldout_library + corpus.heldout_tests,
    }
    primer = xz_bytes(corpus.train)
    report = {}
    for name, documents in parts.items():
        stream = stream_of(tokenizer, documents)
        report[name] = {
            "documents": len(documents),
            "bytes": stream.n_bytes,
            "tokens": len(stream.tokens),
            "model_bpb": bits_per_byte(lambda tokens: model(tokens).logits, stream, CONTEXT_TOKENS),
            "xz_bpb": 8 * xz_bytes(documents) / stream.n_bytes,
            "xz_after_train_bpb": 8 * (xz_bytes(corpus.train + documents) - primer) / stream.n_bytes,
        }
    return report


def complete(model: PreTrainedModel, ids: list[int], options: dict[str, object], seed: int) -> list[int]:
    """The new token ids, the one that ends the text included."""
    torch.manual_seed(seed)
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    limit = options.get("max_new_tokens", MAX_NEW_TOKENS)
    output = model.generate(prompt, attention_mask=mask, **{**options, "max_new_tokens": limit})
    return output[0, len(ids) :].tolist()


def endings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return the share of sampled texts that end within LENGTH_LIMIT, and their lengths."""
    ids = tokenizer("def ").input_ids
    prompt = torch.tensor([ids] * LENGTH_SAMPLES)
    torch.manual_seed(0)
    options = {**SAMPLED, "max_new_tokens": LENGTH_LIMIT}
    rows = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[:, len(ids) :].tolist()
    lengths = sorted(row.index(0) for row in rows if 0 in row)
    return {
        "ended": len(lengths) / len(rows),
        "shortest": lengths[0],
        "quartiles": statistics.quantiles(lengths, n=4),
        "longest": lengths[-1],
    }


def samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Completions as Markdown, greedy and sampled."""
    blocks = []
    for kind, options in (("greedy", GREEDY), ("sampled", SAMPLED)):
        for prompt in PROMPTS:
            ids = tokenizer(prompt).input_ids
            new = complete(model, ids, options, seed=0)
            blocks.append(block(f"{kind}, completion of `{prompt!r}`", prompt, new, tokenizer))
        for request in REQUESTS:
            messages = [{"role": "user", "content": request}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            new = complete(model, ids, options, seed=0)
            blocks.append(block(f"{kind}, chat: {request!r}", "", new, tokenizer))
    return "\n".join(blocks)


def block(title: str, prompt: str, new: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    how = "ended by itself" if new[-1] in (0, 1) else "cut"
    text = prompt + tokenizer.decode(new, skip_special_tokens=True)
    return f"{title} ({len(new)} tokens, {how}):\n\n```python\n{text.rstrip()}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("roseinfer/assets/tiny"))
    parser.add_argument("--out", type=Path, default=Path("training/out"))
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = samples(model, tokenizer)
    (arguments.out / "samples.md").write_text(text)
    print(text)
    report = {
        "python": platform.python_version(),
        "endings": endings(model, tokenizer),
        "heldout": compression(model, Tokenizer.from_file(str(arguments.model / "tokenizer.json")), build()),
    }
    (arguments.out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
