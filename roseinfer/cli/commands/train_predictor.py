"""roseinfer train-predictor: learn output lengths from past requests."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.progress import stage
from roseinfer.predictor.config import TrainConfig

NAME = "train-predictor"
HELP = "train a predictor of output lengths on past requests"
OPTIONS = OptionSet(Group(TrainConfig, "training", positional="data"))


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    config = OPTIONS.build(TrainConfig, given)
    if config.data is None:
        raise ConfigError("data is required: the file with past requests")
    if config.out is None:
        raise ConfigError("out is required: the file to write")

    from time import perf_counter

    from roseinfer.bench.report import header, table
    from roseinfer.config.hub import load_tokenizer
    from roseinfer.predictor.data import read_rows
    from roseinfer.predictor.train import train
    from roseinfer.predictor.vocabulary import fingerprint

    print(header("roseinfer train-predictor", given), flush=True)
    tokenizer = load_tokenizer(ModelConfig(model=config.model))
    with stage("reading rows"):
        rows = read_rows(config.data, tokenizer.encode, tokenizer.vocab_size)
    for remark in rows.remarks():
        print(remark)
    start = perf_counter()
    trained = train(rows, config, fingerprint(tokenizer.backend.get_vocab(with_added_tokens=True)))
    spent_s = perf_counter() - start
    trained.predictor.save(config.out)
    width = trained.predictor.settings.width
    shares = f"trained on {trained.train_rows} of {len(rows)} rows; the others chose the epoch and judge the result"
    print(f"{shares} ({spent_s:.1f} s, epoch {trained.best_epoch})")
    print(f"100 buckets of {width} tokens; results on held-out rows:")
    figures = {readout: asdict(found) for readout, found in trained.figures.items()}
    print(table([{"readout": readout, **found} for readout, found in figures.items()]))
    if config.json:
        Path(config.json).write_text(json.dumps({"figures": figures, "width": width, "args": given}, indent=2) + "\n")
    return 0
