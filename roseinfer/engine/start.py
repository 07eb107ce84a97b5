"""Bringing an asynchronous engine up from its options alone, or reaching one that somebody else has brought up."""

from pathlib import Path

from roseinfer.core.config import EngineConfig, ModelConfig
from roseinfer.engine.client import AsyncEngine, EngineWatch
from roseinfer.engine.live import Inflight
from roseinfer.engine.transport import ProcessTransport, SocketTransport, ThreadTransport, Transport
from roseinfer.hub import model_folder, tokenizer_folder
from roseinfer.text.tokenizer import Tokenizer


async def start_engine(config: EngineConfig, tokenizer: Tokenizer, *, in_process: bool = False) -> AsyncEngine:
    """An engine in its own process, or in a thread of this one. Raises what keeps it from starting."""
    folder = model_folder(config.model)
    transport: Transport
    if in_process:
        from roseinfer.engine.process import build_engine

        transport = ThreadTransport(lambda: build_engine(config, folder))
    else:
        transport = ProcessTransport(config, folder)
    return await AsyncEngine.start(transport, tokenizer, max_inflight_requests=config.scheduler.max_inflight_requests)


class OwnedEngine(EngineWatch):
    """An engine in its own process that this one owns and others use: `launch`, then `connect`, then `close`."""

    def __init__(self, config: EngineConfig) -> None:
        self._process = ProcessTransport(config, model_folder(config.model))
        super().__init__(self._process)

    @property
    def address(self) -> Path:
        """Where `shared_engine` finds it, once it is launched."""
        return self._process.address

    async def launch(self) -> None:
        """Start the process; `connect` waits until it has loaded its model. Raises `OSError` if it cannot."""
        await self._process.launch(self._on_message, self._on_death)


async def shared_engine(address: Path, tokenizer: Tokenizer, inflight: Inflight, prefix: str) -> AsyncEngine:
    """The engine at an address of somebody's `OwnedEngine`, once it is up. `prefix`: no other client's.

    Raises what keeps it from starting, `EngineDeadError` if it is gone.
    """
    return await AsyncEngine.start(SocketTransport(address), tokenizer, inflight=inflight, prefix=prefix)


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """The model's own tokenizer, or the one that `tokenizer` names."""
    return Tokenizer.from_folder(tokenizer_folder(config))
