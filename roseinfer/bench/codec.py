"""Texts and token ids for prompts: by a tokenizer of our own, or by asking the server."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from roseinfer.bench.arrivals import Sample
from roseinfer.bench.requests import authorization
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.errors import ConfigError

AT_ONCE = 64  # requests to the server
TRIES = 12
# Of which the server's tokens are taken that prompts are drawn from: text that any tokenizer knows.
STOCK = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs; how vexingly quick daft "
    "zebras jump! In 1492 some 90 men and three ships left for what they thought was near. def add(a, b):\n    return "
    "a + b\nWater, fire, earth and air were once held to be all that there is. import os, sys\nfor line in sys.stdin: "
    "print(line.strip())\nShe sells sea shells by the shore, and 1024 or 4096 of them make a good price in June. "
)


class Codec(Protocol):
    """`name`: what is kept with the result. `pool`: ids that may be drawn. `added`: special tokens of a prompt."""

    name: str
    pool: Sequence[int]
    added: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Without special tokens."""
        ...

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]: ...

    def chat(self, texts: Sequence[str]) -> list[list[int]]:
        """Each as the one message of a user, by the chat template. Raises `ConfigError` if there is none."""
        ...


class OwnCodec:
    """A tokenizer of a folder or of the hub."""

    def __init__(self, model: str) -> None:
        from roseinfer.engine.start import load_tokenizer

        self._tokenizer = tokenizer = load_tokenizer(ModelConfig(tokenizer=model))
        self.name = model
        self.added = len(tokenizer.encode("a")) - len(tokenizer.encode("a", add_special_tokens=False))
        self.pool: Sequence[int] = [id for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return [self._tokenizer.decode(each, skip_special_tokens=False) for each in ids]

    def chat(self, texts: Sequence[str]) -> list[list[int]]:
        from roseinfer.text.template_check import trusted_template

        template = trusted_template(self._tokenizer)
        if template is None:
            raise ConfigError(
                f"tokenizer {self.name} has no chat template: skip_chat_template sends prompts as they are"
            )
        return [template.encode([{"role": "user", "content": text}]) for text in texts]


class ServerCodec:
    """The server's own tokenizer, by /tokenize and /detokenize. Raises `ConfigError` where it has none."""

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        self.name = model
        self._url = url.rstrip("/")
        self._model = model
        self._headers = authorization(api_key)
        (stock,) = self.encode([STOCK])
        self.pool: Sequence[int] = sorted(set(stock))
        (with_added,) = self._ask("/tokenize", "tokens", [{"prompt": STOCK, "add_special_tokens": True}])
        self.added = len(with_added) - len(stock)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._ask("/tokenize", "tokens", [{"prompt": text, "add_special_tokens": False} for text in texts])

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self._ask("/detokenize", "prompt", [{"tokens": list(each)} for each in ids])

    def chat(self, texts: Sequence[str]) -> list[list[int]]:
        said = [{"messages": [{"role": "user", "content": text}], "add_generation_prompt": True} for text in texts]
        return self._ask("/tokenize", "tokens", said)

    def _ask(self, path: str, key: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        return asyncio.run(self._ask_all(path, key, bodies))

    async def _ask_all(self, path: str, key: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        import aiohttp

        gate = asyncio.Semaphore(AT_ONCE)

        async def ask(body: dict[str, Any]) -> Any:
            named = {"model": self._model, **body}
            async with gate, session.post(self._url + path, json=named, headers=self._headers) as response:
                if response.status != 200:
                    told = (await response.text())[:200]
                    if response.status == 404 and "does not exist" in told:  # ours and vLLM's words
                        raise ConfigError(f"model: the server has none of the name {self._model!r}")
                    raise ConfigError(f"tokenizer: the server answers {path} with {response.status} ({told}); name one")
                return (await response.json())[key]

        try:
            async with aiohttp.ClientSession() as session:
                return list(await asyncio.gather(*map(ask, bodies)))
        except ConfigError:
            raise
        except (aiohttp.ClientError, LookupError, ValueError) as error:
            raise ConfigError(f"tokenizer: {self._url}{path} is of no use ({error!r}); name one") from None


def find_codec(tokenizer: str | None, url: str, model: str, api_key: str | None) -> Codec:
    """The tokenizer that is named, else the server's. Raises `ConfigError`."""
    return OwnCodec(tokenizer) if tokenizer else ServerCodec(url, model, api_key)


def texts_of(codec: Codec, wanted: Sequence[Sequence[int]], rng: random.Random) -> list[tuple[str, list[int]]]:
    """Texts whose tokens are as many as those of `wanted` and begin like them, with their ids.

    Ids that are drawn one by one do not always come back from the text that they make: what is too long is cut at its
    end, what is too short gets more. What is still not right after a few rounds stays as it is.
    """
    ids = [list(each) for each in wanted]
    found: list[tuple[str, list[int]]] = [("", [])] * len(ids)
    left = list(range(len(ids)))
    for _ in range(TRIES):
        texts = codec.decode([ids[i] for i in left])
        again = []
        for i, text, back in zip(left, texts, codec.encode(texts), strict=True):
            found[i] = (text, back)
            missing = len(wanted[i]) - len(back)
            if missing:
                again.append(i)
                ids[i] = back[: len(wanted[i])] + [rng.choice(codec.pool) for _ in range(max(0, missing))]
        left = again
        if not left:
            break
    return found


def aligned(samples: Sequence[Sample], url: str, model: str, api_key: str | None) -> list[Sample]:
    """Prompts of another tokenizer cut to their numbers of tokens by the server's count, if the first differs by it.

    As they are if the server has no /tokenize.
    """
    try:
        server = ServerCodec(url, model, api_key)
    except ConfigError:
        return list(samples)
    texts = [sample.text or "" for sample in samples]
    if len(server.encode(texts[:1])[0]) == len(samples[0].prompt_ids):
        return list(samples)
    counted = zip(server.encode(texts), samples, strict=True)
    cut = [ids[: len(sample.prompt_ids)] for ids, sample in counted]
    made = zip(samples, cut, server.decode(cut), strict=True)
    return [replace(sample, prompt_ids=ids, text=text) for sample, ids, text in made]
