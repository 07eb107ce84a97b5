"""Two processes that share a model compute with adapters what one does."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer.core.adapters import AdapterRead
from roseinfer.ranks.build import build_leader
from roseinfer.ranks.leader import LeadingRunner
from roseinfer.ranks.other_ranks import OtherRanks
from tests.adapters.driving import Driver, assert_close, build, config_of
from tests.adapters.test_equivalence import prompt
from tests.adapters.test_families import SUPPORTED
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.lora_folders import linear_shapes, write_adapter

TIMEOUT_S = 120.0
REQUESTS = [(prompt(9, 1), "one"), (prompt(17, 2), None), (prompt(6, 3), "two"), (prompt(5, 4), "one")]


class Pair:
    """Two ranks with adapter "one", which may read others."""

    def __init__(self, model: Path, folder: Path, modules: str) -> None:
        shapes = linear_shapes(model, modules=modules)
        write_adapter(folder / "one", shapes, rank=4, ranks={"k_proj": 9})
        write_adapter(folder / "two", shapes, rank=8, rslora=True, seed=1)
        named, options = f"one={folder / 'one'}", {"lora_dir": str(folder)}
        self.alone = Driver(build(model, named, f"two={folder / 'two'}", **options))
        self.others = OtherRanks(2)
        self.others.start()
        config = config_of(named, model={"tensor_parallel_size": 2}, **options)
        built, group = build_leader(config, model, self.others)
        self.runner = LeadingRunner(built.runner, group, self.others)
        self.driver = Driver(replace(built, runner=self.runner))

    def read(self, path: Path) -> AdapterRead:
        files = self.driver.built.adapters
        assert files is not None
        files.read("two", str(path))
        until_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until_s:
            for result in files.take_read():
                return result
            time.sleep(0.001)
        raise AssertionError("nothing was read")


@pytest.fixture(scope="module", params=["llama3", pytest.param("phi3", marks=pytest.mark.exhaustive), "qwen3.5"])
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    model = save_reference(make_reference(request.param), tmp_path_factory.mktemp("model"))
    pair = Pair(model, tmp_path_factory.mktemp("adapters"), SUPPORTED.get(request.param, ".*"))
    yield pair
    pair.runner.close()


def test_two_ranks_compute_as_one(pair, tmp_path) -> None:
    folder = Path(pair.alone.named["two"].path)
    result = pair.read(folder)
    assert result.error is None and result.adapter is not None
    assert result.adapter.digest == pair.alone.named["two"].digest
    pair.driver.load(1, result.adapter.digest)
    pair.driver.slots["two"] = 1
    for found, wanted in zip(pair.driver.run(REQUESTS), pair.alone.run(REQUESTS), strict=True):
        assert_close(found, wanted)
    missing = pair.read(tmp_path)
    assert missing.adapter is None and missing.error == f"{tmp_path} holds no adapter_config.json"
    for found, wanted in zip(pair.driver.run(REQUESTS, chunk=4), pair.alone.run(REQUESTS), strict=True):
        assert_close(found, wanted)
