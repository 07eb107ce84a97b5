"""Step 2: train. Writes model.safetensors (bf16) and train.json (settings, losses) to --out. Wants a GPU.

python -m training.train --out training/out/run
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from training import data
from training.model import ModelConfig, TinyLlama
from training.muon import Muon
from training.score import bits_per_byte

HELDOUT = ("heldout_library", "heldout_tests")
MUON_MOMENTUM = 0.95

Streams = dict[str, data.Stream]


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 4000
    batch: int = 32
    length: int = 2048
    lr: float = 6e-3
    warmup_steps: int = 200
    weight_decay: float = 0.5
    dropout: float = 0.15
    seed: int = 1
    eval_every: int = 500


@dataclass(frozen=True)
class Optimizers:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""

    muon: Muon
    adamw: torch.optim.AdamW

    def step(self, lr: float) -> None:
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def make_optimizers(model: TinyLlama, config: TrainConfig) -> Optimizers:
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": config.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
    return Optimizers(Muon(matrices, config.lr, config.weight_decay, MUON_MOMENTUM), adamw)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then linear decay to nothing."""
    warm = (step + 1) / config.warmup_steps
    decay = (config.steps - step) / max(1, config.steps - config.warmup_steps)
    return config.lr * min(1.0, warm, decay)


def evaluate(model: TinyLlama, stream: data.Stream, length: int) -> float:
    """Bits per byte without dropout, computed in bf16 as in training."""
    model.eval()
    with torch.autocast(stream.tokens.device.type, torch.bfloat16):
        result = bits_per_byte(model, stream, length)
    model.train()
    return result


def loss_function(model: TinyLlama, device: str) -> Callable[[Tensor], Tensor]:
    def loss(batch: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    return torch.compile(loss) if device == "cuda" else loss


def train(model: TinyLlama, streams: Streams, config: TrainConfig, device: str) -> dict[str, object]:
    """Train in place; returns the record of the run."""
    optimizers, loss_of = make_optimizers(model, config), loss_function(model, device)
    source = data.batches(streams["train"], config.length, config.batch, config.seed)
    history: list[dict[str, float]] = []
    started = time.perf_counter()
    for step in range(config.steps):
        loss = loss_of(next(source))
        loss.backward()
        optimizers.step(learning_rate(step, config))
        if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
            valid = evaluate(model, streams["valid"], config.length)
            seconds = round(time.perf_counter() - started, 1)
            history.append({"step": step + 1, "loss": loss.item(), "valid_bpb": valid, "seconds": seconds})
            print(history[-1], flush=True)
    tokens_seen = config.steps * config.batch * config.length
    heldout = {n: evaluate(model, streams[n], config.length) for n in HELDOUT}
    print(heldout, flush=True)
    return {
        "config": asdict(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_seen": tokens_seen,
        "epochs": round(tokens_seen / len(streams["train"].tokens), 1),
        "history": history,
        "heldout_bpb": heldout,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def parse_arguments() -> tuple[Path, Path, TrainConfig]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("training/out/data"))
    parser.add_argument("--out", type=Path, default=Path("training/out/run"))
    for name, value in asdict(TrainConfig()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    return arguments.pop("data"), arguments.pop("out"), TrainConfig(**arguments)


def main() -> None:
    folder, out, config = parse_arguments()
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")
    streams = {n: data.load(folder / f"{n}.npz").to(device) for n in ("train", "valid", *HELDOUT)}
    model = TinyLlama(ModelConfig(), config.dropout).to(device)
    record = train(model, streams, config, device)
    weights = {name: p.detach().to("cpu", torch.bfloat16) for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "train.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
