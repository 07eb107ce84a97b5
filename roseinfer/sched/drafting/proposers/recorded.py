"""Recorded outputs as guesses, some of them wrong on purpose: for benchmarks with random weights, which repeat nothing.

The file has a JSON object per line: `request` (see `request_key`) and `token_ids`. One run writes it (`record:FILE`),
and others read it (`recorded:FILE,wrong=0.2`).
"""

import json
import logging
import random
from array import array
from hashlib import blake2b
from pathlib import Path

from roseinfer.core.config.speculation import RecordedValues
from roseinfer.core.errors import ConfigError
from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposer import Proposal

NAME = "recorded"
log = logging.getLogger("roseinfer.engine")


def request_key(request: Request) -> str:
    """Return what requests with the same output have in common: the prompt and, if it is drawn, the seed."""
    digest = blake2b(array("q", request.tokens[: request.prompt_len]).tobytes(), digest_size=16)
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


class RecordedProposer:
    """Proposer of the same request's recorded output. Each guess is wrong with the probability `values.wrong`.

    Raise `ConfigError` for a file that is missing or invalid.
    """

    def __init__(self, values: RecordedValues, vocab_size: int) -> None:
        self._outputs = _read(values.path, vocab_size)
        self._wrong = values.wrong
        self._seed = values.seed
        self._vocab_size = vocab_size
        self._guesses: dict[str, list[int]] = {}  # by request

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        guesses = self._guesses.get(request.request_id)
        if guesses is None:
            guesses = self._guesses[request.request_id] = self._some_wrong(request_key(request))
        first = request.num_outputs + len(after)
        found = tuple(guesses[first : first + limit])
        return Proposal(NAME, found, (1 - self._wrong,) * len(found)) if found else None

    def _some_wrong(self, key: str) -> list[int]:
        rng = random.Random(f"{self._seed} {key}")
        others = self._vocab_size - 1
        return [
            (token + 1 + rng.randrange(others)) % self._vocab_size if rng.random() < self._wrong else token
            for token in self._outputs.get(key, ())
        ]

    def ended(self, request: Request) -> None:
        """Forget a request. Log a warning if its output is not the recorded one, so that later guesses were wrong."""
        if self._guesses.pop(request.request_id, None):
            recorded = self._outputs[request_key(request)]
            output = request.tokens[request.prompt_len :]
            differs = next(
                (i for i, pair in enumerate(zip(output, recorded, strict=False)) if pair[0] != pair[1]), None
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
