"""The engines of several models as one owner sees them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roseinfer.cluster.models import ModelSupervisors
from roseinfer.core.config.engine import EngineConfig, ModelConfig
from roseinfer.core.config.models import ServedModelConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError, EngineDeadError


class FakeSupervisor:
    """Supervisor whose engines only a test lets fail."""

    folder = Path("none")

    def __init__(self) -> None:
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls: list[str] = []

    def fail(self, reason: str) -> None:
        self.failure.set_exception(EngineDeadError(reason))

    async def connect(self) -> Any:
        raise ConfigError("too little memory")

    async def rolling_restart(self) -> None:
        self.calls.append("restart")

    async def close(self) -> None:
        self.calls.append("close")

    def reports(self) -> list[Any]:
        return [SimpleNamespace(engine=self)]


def two() -> tuple[ModelSupervisors, FakeSupervisor, FakeSupervisor]:
    models = [
        ServedModelConfig(
            engine=EngineConfig(model=ModelConfig(model=name)), replicas=ReplicasConfig(), server=ServerConfig()
        )
        for name in ("a", "b")
    ]
    one, other = FakeSupervisor(), FakeSupervisor()
    return ModelSupervisors(models, [one, other]), one, other  # type: ignore[list-item]


def test_the_server_fails_with_its_last_model(caplog: pytest.LogCaptureFixture) -> None:
    async def act() -> None:
        models, one, other = two()
        one.fail("one")
        await asyncio.sleep(0)
        assert not models.failure.done()
        assert "model 'a' has failed, the other models keep serving: one" in caplog.text
        other.fail("other")
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="other"):
            models.failure.result()

    asyncio.run(act())


def test_a_failed_start_names_its_model(caplog: pytest.LogCaptureFixture) -> None:
    async def act() -> None:
        models, *_ = two()
        with pytest.raises(ConfigError, match="too little memory"):
            await models.connect(1)
        assert "model 'b' cannot start: too little memory" in caplog.text

    asyncio.run(act())


def test_restarts_reports_and_the_end_are_of_all_models() -> None:
    async def act() -> None:
        models, one, other = two()
        await models.rolling_restart()
        assert [report.engine for report in models.reports()] == [one, other]
        await models.close()
        assert one.calls == other.calls == ["restart", "close"]

    asyncio.run(act())
