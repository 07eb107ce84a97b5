"""Invalid request bodies, the same for the same seed."""

import copy
import json
import random
from typing import Any

BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "def f(x):\n", "max_tokens": 3, "temperature": 0.5, "stop": ["a", "b"], "n": 1}),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8]], "max_tokens": 2, "logprobs": 2, "echo": True, "seed": 1}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "t"}]},
            ],
            "max_tokens": 2,
            "logit_bias": {"5": 1.5},
            "top_logprobs": 1,
            "logprobs": True,
            "slo": {"ttft_ms": 500},
        },
    ),
    ("/tokenize", {"prompt": "def", "add_special_tokens": True, "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 129, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.1, -0.5, 1e308, 1e-320, "", " ", "x",
    "\0", "\ud800", "<|im_end|>", "a" * 5000, "é" * 100, [], [[]], [[[]]], {}, {"": 0}, {"type": "json_object"}, ["a"],
    [1, "a"], [-1], [4095], [4096], [2**40], {"a": {"b": [1]}}, "none", "auto", "user", "assistant",
)  # fmt: skip
FIELDS = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "seed", "logprobs", "prompt_logprobs", "echo", "logit_bias", "stream", "stream_options", "slo", "tenant",
    "priority", "tools", "response_format", "bad_words", "allowed_token_ids", "cache_salt", "request_id",
    "timeout_s", "user", "model", "suffix", "chat_template_kwargs", "truncate_prompt_tokens", "pred_output_len",
    "messages", "prompt", "tokens",
)  # fmt: skip


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """Return path and body."""
    path, base = rng.choice(BASES)
    body = json.loads(json.dumps(base))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, body)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        data = _damage(rng, data)
    return path, data


def _odd(rng: random.Random) -> Any:
    """Return a copy, since later changes must not reach the list."""
    return copy.deepcopy(rng.choice(ODD))


def _change(rng: random.Random, body: dict[str, Any]) -> None:
    """Change one value somewhere in the body, or add or remove a field."""
    kind = rng.randrange(4)
    if kind == 0:
        body[rng.choice(FIELDS)] = _odd(rng)
    elif kind == 1 and body:
        del body[rng.choice(list(body))]
    else:
        place, key = _somewhere(rng, body)
        if place is not None:
            place[key] = _odd(rng)


def _somewhere(rng: random.Random, value: Any) -> tuple[Any, Any]:
    place, key = None, None
    while isinstance(value, dict | list) and value:
        place, key = value, rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value = value[key]
        if rng.random() < 0.5:
            break
    return place, key


def _damage(rng: random.Random, data: bytes) -> bytes:
    """Remove, add or change bytes."""
    at = rng.randrange(len(data))
    kind = rng.randrange(5)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9))) + data[at:]
    if kind == 2:
        return data[:at] + data[at + 1 + rng.randrange(8) :]
    if kind == 3:
        return data * rng.randrange(2, 4)
    return data[:at] + b"[" * rng.choice((10, 2000)) + data[at:]
