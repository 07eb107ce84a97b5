"""Log formats: text for people, or one JSON object per line for programs."""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s{which} %(levelname)s %(name)s: %(message)s"


def configure(*, as_json: bool, level: str | None = None, engine: int | None = None, rank: int | None = None) -> None:
    """Log to standard error. Existing handlers stay unchanged.

    `engine`: number of the logging engine, if there are several. `rank`: rank of its process, if not the first.
    `level`: level of all loggers; None = each logger's own.
    """
    handler = logging.StreamHandler()
    numbers = {name: number for name, number in (("engine", engine), ("rank", rank)) if number is not None}
    which = "".join(f" {name} {number}" for name, number in numbers.items())
    handler.setFormatter(JsonFormatter(numbers) if as_json else logging.Formatter(TEXT.format(which=which)))
    logging.basicConfig(handlers=[handler], level=level)


def logs_json() -> bool:
    """True if this process logs JSON, so that its child processes should do so, too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class JsonFormatter(logging.Formatter):
    """Formatter with the fields `time` (UTC, ISO 8601), `level`, `logger`, `process` and `message`.

    `engine`, `rank` and `exception` are added where they apply. A message object with an attribute `fields` adds these.
    """

    def __init__(self, numbers: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._numbers = dict(numbers or {})

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time.replace("+00:00", "Z"), "level": record.levelname, "logger": record.name}
        line |= {"process": record.process, **self._numbers}
        message: Any = record.msg
        fields = getattr(message, "fields", None)
        if fields is None:
            line["message"] = record.getMessage()
        else:
            line["message"] = message.event
            line |= {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
