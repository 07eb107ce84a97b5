"""Server that is started for one conversation."""

import codecs
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from roseinfer.cli.terminal.remote import KEY_VARIABLE, Remote, given_key
from roseinfer.core.errors import RoseinferError
from roseinfer.processes.launch import launch

_READY_LINE = re.compile(r" is served on (http://\S+);")
# How an engine process logs its current start-up stage.
_STAGE = " roseinfer.processes.start_log: "
_MAX_LOG_LINES = 40
_STOP_TIMEOUT_S = 10.0
_EXIT_WAIT_S = 1.0
_utf8 = codecs.getreader("utf-8")


class OwnServerError(RoseinferError):
    """The server did not start, or has exited."""


class OwnServer:
    """`roseinfer serve` on a loopback port. It exits with this process, however this one ends.

    Use it as a context manager: `remote` connects to the running server. `flags` may name a port; otherwise it is any
    free one. `keyed`: the server has a random API key, so that no other user of the machine can use it. `on_stage`
    reports start-up stages. Raises `OwnServerError` with the server's last error if it does not start.
    """

    def __init__(
        self, flags: Sequence[str], on_stage: Callable[[str], None] = lambda stage: None, *, keyed: bool = True
    ) -> None:
        self._key = secrets.token_hex(16) if keyed else given_key(None)
        self._arguments = ["serve", "--port=0", "--api-workers=1", "--shutdown-timeout=1", *flags]
        self._on_stage = on_stage
        self._lines: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._up = False

    def __enter__(self) -> Self:
        self.process = launch(
            "roseinfer.cli.terminal.child_server",
            arguments=self._arguments,
            environment={} if self._key is None else {KEY_VARIABLE: self._key},
            new_session=True,  # Ctrl+C stops an answer, not the server
            read_stdout=True,
            read_stderr=True,
        )
        self._listening = threading.Thread(target=self._listen, name="server-log", daemon=True)
        self._listening.start()
        try:
            self.remote = Remote(self._address(), self._key)
        except BaseException:
            self.close()
            raise
        self._up = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, lost: bool) -> None:
        """Raise `OwnServerError` if the server has exited. After a lost connection, wait briefly for its exit."""
        if lost:
            self.process.wait_in_thread(_EXIT_WAIT_S)
        code = self.process.exit_code
        if code is not None:
            self._listening.join(1.0)
            how = f" by signal {-code}" if code < 0 else ""
            raise OwnServerError(f"the server exited{how}: {self._last_error()}")

    def close(self) -> None:
        """Stop the server and wait until it has exited."""
        self.process.stdin.close()
        self.process.stop_in_thread(_STOP_TIMEOUT_S)
        self._listening.join(1.0)
        self.process.close()

    def _address(self) -> str:
        for line in _utf8(self.process.stdout, "replace"):
            match = _READY_LINE.search(line)
            if match:
                return match[1]
        self.process.wait_in_thread(_STOP_TIMEOUT_S)
        self._listening.join(1.0)
        raise OwnServerError(f"the server did not start: {self._last_error()}")

    def _listen(self) -> None:
        for line in _utf8(self.process.stderr, "replace"):
            self._lines.append(line.rstrip())
            _, said, stage = line.rstrip().partition(_STAGE)
            if said and not self._up:
                self._on_stage(stage)

    def _last_error(self) -> str:
        """Return the server's last error message."""
        lines = [line for line in self._lines if line]
        return lines[-1].removeprefix("roseinfer: error: ") if lines else "it said nothing"
