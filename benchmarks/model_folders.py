"""Model folders without weights, for runs with `--load-format dummy`: config.json and a tokenizer.

    python -m benchmarks.model_folders gpt2 qwen3-8b --out DIR

Speed does not depend on the values of weights and tokens, but every token id must be some text: with fewer ids than the
model, the server would have nothing to send. This byte-level tokenizer, like GPT-2's and Qwen's, has a made-up word for
every id of the model.
"""

import argparse
import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu_rows import MODELS
from roseinfer.config.hub import model_folder
from roseinfer.core.config.engine import ModelConfig
from roseinfer.models.config import read_model_spec

END = "<|endoftext|>"
# As in the config.json of Qwen/Qwen3-8B-FP8.
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# As in the config.json of Qwen/Qwen3-8B-AWQ.
INT4_GROUPS = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
# As in config.json of compressed-tensors' weights-only checkpoints.
NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
NVFP4_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4_ARGS, "input_activations": None}},
    "ignore": ["lm_head"],
}
SPACE = "Ġ"  # a space in byte-level vocabularies


def words() -> Iterator[str]:
    """Yield words; every other one starts with a space."""
    for length in itertools.count(3):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            word = "".join(letters)
            yield word
            yield SPACE + word


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Make ids 0 to vocab_size - 1: the end token, the 256 bytes, words."""
    tokens = itertools.chain([END], sorted(pre_tokenizers.ByteLevel.alphabet()), words())
    vocab = {token: id for id, token in enumerate(itertools.islice(tokens, vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_folder(name: str, out: Path) -> Path:
    """Write the folder of the table's model `name` to `out`: packaged config, in bfloat16, FP8, int4 or NVFP4, and a
    tokenizer.

    An existing folder is left as it is.
    """
    folder = out / MODELS[name].folder
    if (folder / "tokenizer_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    packaged = model_folder(ModelConfig(model=MODELS[name].hub_id, load_format="dummy"))
    config: dict[str, Any] = json.loads((packaged / "config.json").read_text())
    config["torch_dtype"] = "bfloat16"
    if MODELS[name].fp8_blocks:
        config["quantization_config"] = FP8_BLOCKS
    if MODELS[name].int4:
        config["quantization_config"] = INT4_GROUPS
    if MODELS[name].nvfp4:
        config["quantization_config"] = NVFP4_GROUPS
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    make_tokenizer(read_model_spec(folder).vocab_size).save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(named) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("models"))
    args = parser.parse_args()
    for name in args.names:
        print(write_folder(name, args.out))


if __name__ == "__main__":
    main()
