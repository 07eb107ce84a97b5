"""Start a single engine from its options."""

from roseinfer.config.hub import model_folder
from roseinfer.core.config.engine import EngineConfig
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.process_transport import ProcessTransport
from roseinfer.engine.thread_transport import ThreadTransport
from roseinfer.engine.transport import Transport
from roseinfer.text.tokenizer import Tokenizer


async def start_engine(config: EngineConfig, tokenizer: Tokenizer, *, in_process: bool = False) -> AsyncEngine:
    """Start an engine in its own process, or in a thread of this one. Raises the error that keeps it from starting."""
    folder = model_folder(config.model)
    transport: Transport
    if in_process:
        from roseinfer.engine.build import build_engine

        transport = ThreadTransport(lambda: build_engine(config, folder))
    else:
        transport = ProcessTransport(config, folder)
    return await AsyncEngine.start(transport, tokenizer, max_inflight_requests=config.scheduler.max_inflight_requests)
