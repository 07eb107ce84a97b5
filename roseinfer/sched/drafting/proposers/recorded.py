"""Recorded outputs as guesses, some of them wrong on purpose: for benchmarks with random weights, which repeat nothing.

The file has a JSON object per line: `request` (see `request_key`) and `token_ids`. One run writes it (`record:FILE`),
and others read it (`recorded:FILE,wrong=0.2`).
"""

import json
import logging
import struct
from collections.abc import Sequence
from hashlib import blake2b, shake_128
from pathlib import Path
from typing import NamedTuple

from roseinfer.core.config.speculation import RecordedValues
from roseinfer.core.errors import ConfigError
from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposer import Proposal

NAME = "recorded"
_DRAW_BYTES = 4
log = logging.getLogger("roseinfer.engine")


def request_key(request: Request) -> str:
    """Return what requests with the same output have in common: the prompt and, if it is drawn, the seed."""
    digest = blake2b(struct.pack(f"<{request.prompt_len}i", *request.tokens[: request.prompt_len]), digest_size=16)
    if not request.params.greedy:
        digest.update(request.seed.to_bytes(8, "little", signed=True))
    return digest.hexdigest()


class OutputRecorder:
    """Proposer that guesses nothing and appends each output to a file. Raise `ConfigError` if that is impossible."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            self._path.open("a").close()
        except OSError as error:
            raise ConfigError(f"speculation: cannot write {path!r}: {error.strerror}") from error

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        return None

    def ended(self, request: Request) -> None:
        if request.num_outputs:
            line = {"request": request_key(request), "token_ids": request.tokens[request.prompt_len :]}
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


class _Recording(NamedTuple):
    """Recorded output and as many random numbers below 2 ** 32."""

    token_ids: Sequence[int]
    draws: Sequence[int]


class RecordedProposer:
    """Proposer of the same request's recorded output. Each guess is wrong with the probability `values.wrong`.

    Raise `ConfigError` for a file that is missing or invalid.
    """

    def __init__(self, values: RecordedValues, vocab_size: int) -> None:
        self._outputs = _read(values.path, vocab_size)
        self._wrong = values.wrong
        self._seed = values.seed
        self._vocab_size = vocab_size
        self._recordings: dict[str, _Recording] = {}  # by request

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        recording = self._recordings.get(request.request_id)
        if recording is None:
            recording = self._recordings[request.request_id] = self._recording(request_key(request))
        first = request.num_outputs + len(after)
        found = tuple(map(self._guess, *(numbers[first : first + limit] for numbers in recording)))
        return Proposal(NAME, found, (1 - self._wrong,) * len(found)) if found else None

    def _recording(self, key: str) -> _Recording:
        """Return the recording of a request. Cheap, since under load many requests first ask in the same step."""
        tokens = self._outputs.get(key, ())
        noise = shake_128(f"{self._seed} {key}".encode()).digest(_DRAW_BYTES * len(tokens))
        return _Recording(tokens, struct.unpack(f"<{len(tokens)}I", noise))

    def _guess(self, token: int, draw: int) -> int:
        wrong = draw < self._wrong * 256**_DRAW_BYTES
        return (token + 1 + draw % (self._vocab_size - 1)) % self._vocab_size if wrong else token

    def ended(self, request: Request) -> None:
        """Forget a request. Log a warning if its output is not the recorded one, so that later guesses were wrong."""
        recording = self._recordings.pop(request.request_id, None)
        if recording is not None:
            output = request.tokens[request.prompt_len :]
            differs = next(
                (i for i, pair in enumerate(zip(output, recording.token_ids, strict=False)) if pair[0] != pair[1]), None
            )
            if differs is not None:
                log.warning("%s: the output differs from the recorded one at token %d", request.request_id, differs)


def _read(path: str, vocab_size: int) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    number = 0
    try:
        with Path(path).open() as file:
            for line in file:
                number += 1
                found = json.loads(line)
                outputs[str(found["request"])] = tokens = [int(token) for token in found["token_ids"]]
                if not all(0 <= token < vocab_size for token in tokens):
                    raise ValueError("a token id is outside the vocabulary")
    except OSError as error:
        raise ConfigError(f"speculation: cannot read {path!r}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"speculation: {path!r}, line {number}: not a recorded output") from error
    return outputs
