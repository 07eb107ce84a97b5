"""Step 3: put the trained model together in Hugging Face format.

python -m training.export --run training/out/run --out roseinfer/assets/tiny
"""

import argparse
import json
import shutil
import sysconfig
from dataclasses import asdict
from pathlib import Path

from training.model import ModelConfig
from training.tokenizer import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS


def model_config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(ModelConfig()),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **token_ids(),
    }


def token_ids() -> dict[str, object]:
    """A text ends by END_OF_TEXT, an assistant's turn by END_OF_TURN."""
    end_of_text = SPECIAL_TOKENS.index(END_OF_TEXT)
    return {
        "bos_token_id": end_of_text,
        "eos_token_id": [end_of_text, SPECIAL_TOKENS.index(END_OF_TURN)],
        "pad_token_id": end_of_text,
    }


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("training/out/data"))
    parser.add_argument("--run", type=Path, default=Path("training/out/run"))
    parser.add_argument("--out", type=Path, default=Path("roseinfer/assets/tiny"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "config.json", model_config())
    write_json(arguments.out / "generation_config.json", token_ids())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(arguments.data / name, arguments.out / name)
    shutil.copyfile(arguments.run / "model.safetensors", arguments.out / "model.safetensors")
    license_text = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    shutil.copyfile(license_text, arguments.out / "LICENSE.python.txt")


if __name__ == "__main__":
    main()
