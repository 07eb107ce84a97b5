"""Write the folder of a model without weights: long context, ChatML and tools, for `--load-format dummy`."""

import glob
import json
import sysconfig
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_COUNT = 8000
CONTEXT_TOKENS = 131072
END, START, CALL_START, CALL_END = "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"
PAD = "<|endoftext|>"


def write_folder(folder: Path) -> Path:
    """Write config.json and the tokenizer's files. A folder that is complete stays as it is."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": END, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps(_config(tokenizer)))
    return folder


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on Python's standard library, which is on every machine."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_COUNT,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(sorted(glob.glob(f"{sysconfig.get_paths()['stdlib']}/*.py")), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (CALL_START, CALL_END)])
    return tokenizer


def _config(tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
    }
