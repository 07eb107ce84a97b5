"""What log lines look like: as text for people, or one JSON object each for programs."""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s{which} %(levelname)s %(name)s: %(message)s"


def configure(*, as_json: bool, level: str | None = None, engine: int | None = None, rank: int | None = None) -> None:
    """Log to standard error. Nothing happens to handlers that exist already. `engine`: whose lines these are, if there
    are several, and `rank`, if it is not its first process; `level`: of all loggers, None = that of each.
    """
    handler = logging.StreamHandler()
    numbers = {name: number for name, number in (("engine", engine), ("rank", rank)) if number is not None}
    which = "".join(f" {name} {number}" for name, number in numbers.items())
    handler.setFormatter(JsonFormatter(numbers) if as_json else logging.Formatter(TEXT.format(which=which)))
    logging.basicConfig(handlers=[handler], level=level)


def logs_json() -> bool:
    """Whether this process logs JSON, and those that it starts should too."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class JsonFormatter(logging.Formatter):
    """`time` (UTC, ISO 8601), `level`, `logger`, `process`, `message`, of one of several engines `engine`, of another
    of its processes than the first `rank`, and `exception` if there is one. A message that has `fields` brings them
    along.
    """

    def __init__(self, numbers: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._numbers = dict(numbers or {})

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time.replace("+00:00", "Z"), "level": record.levelname, "logger": record.name}
        line |= {"process": record.process, **self._numbers}
        said: Any = record.msg
        fields = getattr(said, "fields", None)
        if fields is None:
            line["message"] = record.getMessage()
        else:
            line["message"] = said.event
            line |= {name: round(value, 3) if isinstance(value, float) else value for name, value in fields.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
