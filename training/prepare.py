"""Step 1: read the corpus, train the tokenizer and write token arrays to training/out/data.

python -m training.prepare
"""

import argparse
import hashlib
import json
import platform
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training import tokenizer as bpe
from training.chat import Conversation, conversations
from training.corpus import Corpus, build

CHAT_SEED = 0

Sizes = dict[str, dict[str, int]]


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    """Token ids of each document, with END_OF_TEXT in front and none behind."""
    for document in documents:
        if any(special in document for special in bpe.SPECIAL_TOKENS):
            raise ValueError(f"a document holds the text of a special token: {document[:80]!r}")
    return [encoding.ids for encoding in tokenizer.encode_batch(documents)]


def render(conversation: Conversation) -> str:
    """Return what the chat template writes, without its BOS, which encoding adds."""
    return "".join(f"<|{m['role']}|>{m['content']}{bpe.END_OF_TURN}" for m in conversation)


def save_split(folder: Path, name: str, documents: list[list[int]], n_bytes: int) -> dict[str, int]:
    """One stream `tokens` in which every document begins with END_OF_TEXT, and where each begins."""
    lengths = np.array([len(ids) for ids in documents])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    tokens = np.concatenate([np.array(ids, np.uint16) for ids in documents])
    np.savez(folder / f"{name}.npz", tokens=tokens, starts=starts, n_bytes=np.int64(n_bytes))
    return {"documents": len(documents), "tokens": len(tokens), "bytes": n_bytes}


def size(documents: list[str]) -> int:
    return sum(len(d.encode()) for d in documents)


def write_splits(corpus: Corpus, chats: list[str], tokenizer: Tokenizer, folder: Path) -> Sizes:
    train = corpus.train + corpus.scripts
    ids = encode_documents(tokenizer, train) + [e.ids for e in tokenizer.encode_batch(chats)]
    report: Sizes = {"train": save_split(folder, "train", ids, size(train) + size(chats))}
    for name in ("valid", "heldout_library", "heldout_tests"):
        documents = getattr(corpus, name)
        report[name] = save_split(folder, name, encode_documents(tokenizer, documents), size(documents))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("training/out/data"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    corpus = build()
    chats = [render(c) for c in conversations(corpus.train_modules, CHAT_SEED)]
    tokenizer = bpe.train(corpus.train + corpus.scripts + chats)
    bpe.save(tokenizer, out)
    report = {
        "python": platform.python_version(),
        "train_sha256": hashlib.sha256("\0".join(corpus.train).encode()).hexdigest(),
        "train_modules": len(corpus.train_modules),
        "heldout_modules": corpus.heldout_modules,
        "code": {"documents": len(corpus.train), "bytes": size(corpus.train)},
        "scripts": {"documents": len(corpus.scripts), "bytes": size(corpus.scripts)},
        "chats": {"documents": len(chats), "bytes": size(chats)},
        **write_splits(corpus, chats, tokenizer, out),
    }
    (out / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "heldout_modules"}, indent=2))


if __name__ == "__main__":
    main()
