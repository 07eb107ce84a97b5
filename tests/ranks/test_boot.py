"""What is told of a rank that has ended with an error."""

import msgspec
import pytest

from roseinfer.core.errors import ConfigError, EngineDeadError, EngineUnavailableError, OutputTextError, RoseinferError
from roseinfer.ranks.boot import RankSays, as_error, last_words


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ConfigError("too long"), ConfigError, "^too long$"),
        (EngineDeadError("no sign"), EngineDeadError, "^rank 1 failed: no sign$"),
        (KeyError("x"), EngineDeadError, "^rank 1 failed: KeyError: 'x'$"),
        (RuntimeError("\udcff"), EngineDeadError, r"^rank 1 failed: RuntimeError: \?$"),
        (RuntimeError(open), EngineDeadError, "built-in function open"),
        (Mute(), EngineDeadError, "^rank 1 failed: Mute: what it says cannot be had$"),
        (EngineUnavailableError("later", 1.0), EngineDeadError, "^rank 1 failed: later$"),
        (OutputTextError(ValueError("x")), RoseinferError, "x"),
    ],
)
def test_any_error_arrives(error: Exception, kind: type[Exception], said: str) -> None:
    line = msgspec.json.encode(last_words(error))
    with pytest.raises(kind, match=said):
        raise as_error(1, msgspec.json.decode(line, type=RankSays))
