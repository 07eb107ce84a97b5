"""Log formats: text for people, or one JSON object per line for programs."""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from roseinfer.core.log_stream import log_stream


def configure(*, as_json: bool, level: str | None = None, engine: int | None = None, rank: int | None = None) -> None:
    """Log to standard error. Existing handlers stay unchanged.

    `engine`: number of the logging engine, if there are several. `rank`: rank of its process, if not the first.
    `level`: level of all loggers; None = each logger's own.
    """
    handler = _Handler(log_stream(sys.stderr))
    numbers = {name: number for name, number in (("engine", engine), ("rank", rank)) if number is not None}
    handler.setFormatter(JsonFormatter(numbers) if as_json else TextFormatter(numbers))
    logging.basicConfig(handlers=[handler], level=level)


def logs_json() -> bool:
    """True if this process logs JSON, so that its child processes should do so, too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class _Handler(logging.StreamHandler[TextIO]):
    """Handler of standard error that needs fewer calls per line than its base class.

    In a server, whose other work empties the caches between two lines, each call costs up to a microsecond. Lines do
    not wait in memory: collecting them costs a single request more, and a crash would lose them.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        if self.filters or self.lock is None:
            return super().handle(record)
        with self.lock:
            self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.stream.write(self.format(record) + "\n")
            self.stream.flush()
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)


class _Seconds:
    """Text of a time's whole second, kept for the next line: bursts log many lines within one."""

    def __init__(self, format: str, convert: Callable[[float], time.struct_time]) -> None:
        self._format = format
        self._convert = convert
        self._second = -1
        self._text = ""

    def text(self, created: float) -> str:
        second = int(created)
        if second != self._second:
            self._second, self._text = second, time.strftime(self._format, self._convert(second))
        return self._text


class TextFormatter(logging.Formatter):
    """Formatter of lines for people: local time, `numbers`, level, logger, message.

    Faster than a format string, because requests of a burst are logged one by one.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        super().__init__()
        self._which = "".join(f" {name} {number}" for name, number in numbers.items())
        self._seconds = _Seconds("%Y-%m-%d %H:%M:%S", time.localtime)

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        record.message = record.getMessage()
        return self.formatMessage(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        second = self._seconds.text(record.created)
        return f"{second},{int(record.msecs):03d}{self._which} {record.levelname} {record.name}: {record.message}"


class JsonFormatter(logging.Formatter):
    """Formatter with the fields `time` (UTC, ISO 8601), `level`, `logger`, `process` and `message`.

    `numbers` and `exception` are added where they apply. A message object with a method `json_members` gives
    `message` and further members as JSON.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        super().__init__()
        self._numbers = numbers
        self._seconds = _Seconds("%Y-%m-%dT%H:%M:%S", time.gmtime)
        self._encode = json.JSONEncoder(default=str).encode
        self._sources: dict[tuple[str, str, int | None], str] = {}

    def format(self, record: logging.LogRecord) -> str:
        members = getattr(record.msg, "json_members", None)
        rest = self._encode({"message": record.getMessage()})[1:-1] if members is None else members()
        if record.exc_info:
            rest += ", " + self._encode({"exception": self.formatException(record.exc_info)})[1:-1]
        second = self._seconds.text(record.created)
        return f'{{"time": "{second}.{int(record.msecs):03d}Z", {self._source(record)}, {rest}}}'

    def _source(self, record: logging.LogRecord) -> str:
        """Return the members that all lines of a logger and level have, encoded once."""
        source = record.levelname, record.name, record.process
        text = self._sources.get(source)
        if text is None:
            members = {"level": source[0], "logger": source[1], "process": source[2], **self._numbers}
            text = self._sources[source] = self._encode(members)[1:-1]
        return text
