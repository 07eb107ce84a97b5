#!/usr/bin/env python3
"""llama.cpp on closed batches, as a child of benchmarks/cpu_int8.py: GPT-2 124M with random weights, greedy.

Needs llama-cpp-python, gguf and NumPy, but not roseinfer: it runs in its own environment. A line "N" on standard input
is a batch of N prompts; the answer is a line with tokens per second from when every sequence has its first token.
"""

import argparse
import ctypes
import resource
import sys
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp as ll
import numpy as np

LAYERS, WIDTH, HEADS, CONTEXT, VOCAB = 12, 768, 12, 1024, 50257
SPREAD = 0.02


def write_model(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write matrices of `kind`, the tied embedding included, as llama.cpp's own tool does."""
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(4 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)

    def matrix(name: str, outs: int, ins: int, kind: gguf.GGMLQuantizationType = kind) -> None:
        values = (random.standard_normal((outs, ins), np.float32) * SPREAD).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, width: int, value: float) -> None:
        writer.add_tensor(name, np.full(width, value, np.float32))

    def linear(name: str, outs: int, ins: int) -> None:
        matrix(f"{name}.weight", outs, ins)
        vector(f"{name}.bias", outs, 0.0)

    def norm(name: str) -> None:
        vector(f"{name}.weight", WIDTH, 1.0)
        vector(f"{name}.bias", WIDTH, 0.0)

    matrix("token_embd.weight", VOCAB, WIDTH)
    matrix("position_embd.weight", CONTEXT, WIDTH, gguf.GGMLQuantizationType.F32)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        linear(f"{block}.attn_qkv", 3 * WIDTH, WIDTH)
        linear(f"{block}.attn_output", WIDTH, WIDTH)
        norm(f"{block}.ffn_norm")
        linear(f"{block}.ffn_up", 4 * WIDTH, WIDTH)
        linear(f"{block}.ffn_down", WIDTH, 4 * WIDTH)
    norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Peer:
    """Model and context for up to `streams` sequences."""

    def __init__(self, path: Path, threads: int, streams: int, tokens: int) -> None:
        """tokens: maximum per sequence."""
        ll.llama_log_set(_QUIET, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self._model = ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx = streams * (-(-tokens // 256) * 256)
        params.n_batch = params.n_ubatch = 1024
        params.n_seq_max = streams
        params.n_threads = params.n_threads_batch = threads
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp makes no context")
        self._batch = ll.llama_batch_init(1024, 0, 1)

    def run(self, prompts: np.ndarray, output_len: int) -> float:
        """prompts: [n, length]. Return seconds from when every sequence has its first token to the last token."""
        streams, length = prompts.shape
        ll.llama_memory_clear(ll.llama_get_memory(self._context), True)
        self._decode([(prompts[i, p], p, i, p == length - 1) for i in range(streams) for p in range(length)])
        ends = [i * length + length - 1 for i in range(streams)]
        tokens = [self._likeliest(place) for place in ends]
        start = time.perf_counter()
        for step in range(output_len - 1):
            self._decode([(tokens[i], length + step, i, True) for i in range(streams)])
            tokens = [self._likeliest(i) for i in range(streams)]
        return time.perf_counter() - start

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: token, position, sequence, and whether its logits are needed."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = int(token), position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        if ll.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama_decode failed")

    def _likeliest(self, place: int) -> int:
        logits = np.ctypeslib.as_array(ll.llama_get_logits_ith(self._context, place), shape=(VOCAB,))
        return int(logits.argmax())


@ll.llama_log_callback
def _QUIET(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="Q8_0", help="type of the matrices, as the gguf package names it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32, help="sequences at once, at most")
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt2.gguf"
        write_model(path, gguf.GGMLQuantizationType[args.kind])
        peer = Peer(path, args.threads, args.streams, args.input_len + args.output_len)
        print(f"llama.cpp {args.kind} (llama-cpp-python {ll.__version__})", flush=True)
        random = np.random.default_rng(0)
        for line in sys.stdin:
            prompts = random.integers(10, VOCAB, (int(line), args.input_len))
            print(len(prompts) * (args.output_len - 1) / peer.run(prompts, args.output_len), flush=True)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most")


if __name__ == "__main__":
    main()
