"""The server in front of the real engine, whose runner says what a script has for it."""

from typing import Any

from roseinfer.core.config.server import ServerConfig
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.thread_transport import ThreadTransport
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.scripted import Script, ScriptedRunner, scripted_engine
from tests.server.live import LiveServer


class ScriptedServer(LiveServer):
    """`runner`: what was said against the grammar is in its `forbidden`. `wrong_every`, `drafting`: see
    `scripted_engine`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        config: ServerConfig | None = None,
        wrong_every: int | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        super().__init__(tokenizer, config)
        self._script, self._wrong_every, self._drafting = script, wrong_every, drafting
        self.runner: ScriptedRunner

    async def _start_engine(self) -> Any:
        core, info, self.runner = scripted_engine(self.tokenizer, self._script, self._wrong_every, self._drafting)
        return await AsyncEngine.start(ThreadTransport(lambda: (core, info)), self.tokenizer)
