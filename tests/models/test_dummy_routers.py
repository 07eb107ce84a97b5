"""Dummy routers choose each expert about equally often, also for the tokens of one prompt."""

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from roseinfer.core.request import Prompt
from roseinfer.core.runner import ExpertChoice
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.build import build_engine
from roseinfer.engine.messages import Add
from roseinfer.engine.options import make_engine_config
from roseinfer.quant.experts import route
from tests.helpers.mixture import MIXTURE

STEPS = 6


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_dummy_routers_spread(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    config = make_engine_config(
        model=str(tmp_path), load_format="dummy", device="cpu", threads=1, overlap=False, num_kv_blocks=192
    )
    core, info = build_engine(config, tmp_path)
    assert info.facts.experts == ExpertChoice(16, 2)
    draw, params = random.Random(0), SequenceParams(max_tokens=STEPS + 1, temperature=0.0, ignore_eos=True)
    for number in range(rows):
        core.add(Add(f"r{number}", Prompt([draw.randrange(10, info.facts.vocab_size) for _ in range(32)], params)))
    while any(request.num_outputs == 0 for request in core.scheduler.roster.requests.values()):
        core.step()
    read: list[int] = []

    def counted(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = route(*args, **options)
        read.append(int(ids.unique().numel()))
        return ids, weights

    monkeypatch.setattr("roseinfer.quant.experts.route", counted)
    while core.busy:
        core.step()
    core.close()
    assert len(read) == 2 * STEPS  # layers and steps
    mean, expected = fmean(read), info.facts.experts.read(rows)
    assert 0.95 * expected <= mean <= 1.25 * expected
