"""Costs of drafts in the file of a cost model."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.file import DRAFT_FIELDS, HEAD_FIELDS, cost_as_json, read_cost
from roseinfer.sched.cost.params import CostParams

PARAMS = CostParams(drafts=DraftCost(1e-3, 1e-5, 2e-5, 3e-5, 1e-9, 2e-4, 3e-6))


def written(folder: Path, *, without: tuple[str, ...] = ()) -> str:
    cost: dict[str, Any] = {name: value for name, value in cost_as_json(PARAMS)["cost"].items() if name not in without}
    path = folder / "cost.json"
    path.write_text(json.dumps({"cost": cost}))
    return str(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_cost(written(tmp_path)) == PARAMS


def test_costs_of_a_head_may_be_missing_and_are_guessed(tmp_path: Path) -> None:
    found = read_cost(written(tmp_path, without=HEAD_FIELDS)).drafts
    assert found is not None and found[: len(DRAFT_FIELDS)] == PARAMS.draft_cost[: len(DRAFT_FIELDS)]
    assert found.head_step_s == CostParams().draft_cost.head_step_s > 0


@pytest.mark.parametrize("without", [DRAFT_FIELDS, HEAD_FIELDS[:1], DRAFT_FIELDS[1:2]])
def test_others_may_not(without: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a cost model needs .*few_draft_s"):
        read_cost(written(tmp_path, without=without))
