"""Train a LoRA adapter for the embedded model: `terse`, which answers with code alone, without docstrings or comments.

    python -m training.adapter --out roseinfer/assets/terse

Takes about five minutes on two CPU cores, four of them for the training. Writes a folder in PEFT's format, and prints
what share of answers to held-out requests has a docstring or a comment, with and without the adapter.
"""

import argparse
import ast
import io
import json
import random
import time
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from training.chat import Conversation, functions, request, summary, without_docstring
from training.corpus import Module, read_modules, split_of
from training.model import ModelConfig, TinyLlama
from training.prepare import render
from training.tokenizer import END_OF_TURN, SPECIAL_TOKENS

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_CODE_BYTES = 1200
MAX_LENGTH_TOKENS = 384
MAX_ANSWER_TOKENS = 96


@dataclass(frozen=True)
class AdapterConfig:
    rank: int = 8
    alpha: int = 16
    steps: int = 160
    batch: int = 16
    learning_rate: float = 2e-3
    seed: int = 2


class LoraLinear(nn.Module):
    """base(x) + alpha / rank * B @ A @ x, of which only A and B are trained (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, config: AdapterConfig) -> None:
        super().__init__()
        self.base = base
        self.scale = config.alpha / config.rank
        self.lora_A = nn.Parameter(torch.randn(config.rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, config.rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


def adapted(model: TinyLlama, config: AdapterConfig) -> dict[str, LoraLinear]:
    """Freeze a model, give its linear layers adapters, and return these by the names of the layers."""
    model.requires_grad_(False)
    found: dict[str, LoraLinear] = {}
    for number, layer in enumerate(model.model.layers):
        for part in ("self_attn", "mlp"):
            block = getattr(layer, part)
            for target in (name for name in TARGETS if hasattr(block, name)):
                made = LoraLinear(getattr(block, target), config)
                setattr(block, target, made)
                found[f"model.layers.{number}.{part}.{target}"] = made
    return found


# --- data -----------------------------------------------------------------------------------------------------------
def without_comments(code: str) -> str:
    """Return code without comments and blank lines; '' if it cannot be read alone."""
    lines = code.split("\n")
    try:
        for token in reversed(list(tokenize.generate_tokens(io.StringIO(code).readline))):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column].rstrip()
        kept = "\n".join(line for line in lines if line.strip())
        ast.parse(kept)
    except (tokenize.TokenError, SyntaxError):
        return ""
    return kept


def terse_turns(module: Module, rng: random.Random) -> Iterator[Conversation]:
    """Yield requests for a module's functions, with terse answers."""
    lines = module.source.expandtabs(8).split("\n")
    for node in functions(module):
        text, code = summary(node), without_comments(without_docstring(lines, node))
        if text and code and len(code.encode()) <= MAX_CODE_BYTES:
            question = {"role": "user", "content": request(rng, node.name, text)}
            yield [question, {"role": "assistant", "content": code}]


def batches(tokenizer: Tokenizer, modules: list[Module], config: AdapterConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets [batch, length] without end; a target of -100 does not count: questions and padding."""
    rng = random.Random(config.seed)
    texts = [(render(turns[:1]) + "<|assistant|>", render(turns)) for m in modules for turns in terse_turns(m, rng)]
    asked, whole = (tokenizer.encode_batch([pair[part] for pair in texts]) for part in (0, 1))
    pairs = [(len(a.ids), w.ids[:MAX_LENGTH_TOKENS]) for a, w in zip(asked, whole, strict=True)]
    while True:
        chosen = rng.sample(pairs, config.batch)
        length = max(len(ids) for _, ids in chosen)
        inputs = torch.zeros(config.batch, length, dtype=torch.int64)
        targets = torch.full((config.batch, length), -100)
        for row, (before, ids) in enumerate(chosen):
            inputs[row, : len(ids)] = torch.tensor(ids)
            targets[row, before - 1 : len(ids) - 1] = torch.tensor(ids[before:])
        yield inputs, targets


# --- training and judging ---------------------------------------------------------------------------------------------
def train(
    model: TinyLlama, layers: dict[str, LoraLinear], config: AdapterConfig, source: Iterator[tuple[Tensor, Tensor]]
) -> None:
    parameters = [parameter for layer in layers.values() for parameter in (layer.lora_A, layer.lora_B)]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=config.steps)
    for step in range(config.steps):
        inputs, targets = next(source)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step + 1 == config.steps:
            print(f"step {step + 1} of {config.steps}: loss {loss.item():.3f}", flush=True)


@torch.inference_mode()
def answer(model: TinyLlama, tokenizer: Tokenizer, question: Conversation) -> str:
    """Return the likeliest answer, up to MAX_ANSWER_TOKENS."""
    ids = tokenizer.encode(render(question) + "<|assistant|>").ids
    end, new = SPECIAL_TOKENS.index(END_OF_TURN), list[int]()
    while len(new) < MAX_ANSWER_TOKENS and (not new or new[-1] != end):
        new.append(int(model(torch.tensor([ids + new]))[0, -1].argmax()))
    return str(tokenizer.decode(new, skip_special_tokens=True))


def share_with_words(model: TinyLlama, tokenizer: Tokenizer, questions: list[Conversation]) -> float:
    """Return the share of answers that have a docstring or a comment."""
    answers = [answer(model, tokenizer, question) for question in questions]
    return sum('"""' in text or "'''" in text or "#" in text for text in answers) / len(answers)


def save(layers: dict[str, LoraLinear], config: AdapterConfig, folder: Path) -> None:
    """Write the adapter in PEFT's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part).detach().bfloat16()
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("roseinfer/assets/tiny"))
    parser.add_argument("--out", type=Path, default=Path("training/out/terse"))
    parser.add_argument("--questions", type=int, default=12, help="held-out requests to answer")
    arguments = parser.parse_args()
    config = AdapterConfig()
    torch.manual_seed(config.seed)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    model = TinyLlama(ModelConfig())
    weights = load_file(arguments.model / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    modules = [module for module in read_modules() if not module.is_test]
    held = [module for module in modules if split_of(module.name) == "heldout"]
    rng = random.Random(config.seed)
    questions = [turns[:1] for module in held for turns in terse_turns(module, rng)][: arguments.questions]
    before = share_with_words(model, tokenizer, questions)
    layers = adapted(model, config)
    began = time.perf_counter()
    train(model, layers, config, batches(tokenizer, [m for m in modules if split_of(m.name) == "train"], config))
    seconds = time.perf_counter() - began
    after = share_with_words(model, tokenizer, questions)
    print(
        f"{seconds:.0f} s; docstring or comment in {before:.0%} of {len(questions)} answers before, {after:.0%} after"
    )
    save(layers, config, arguments.out)


if __name__ == "__main__":
    main()
