"""Conversion between texts and token ids for prompts: by a local tokenizer or by the server's."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from roseinfer.bench.arrivals import DatasetSample
from roseinfer.bench.requests import authorization
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.errors import ConfigError

MAX_CONCURRENT_CALLS = 64
MAX_ATTEMPTS = 12
# Text whose tokens prompts are drawn from, if the server tokenises: any tokenizer knows it.
POOL_TEXT = (
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs; how vexingly quick daft "
    "zebras jump! In 1492 some 90 men and three ships left for what they thought was near. def add(a, b):\n    return "
    "a + b\nWater, fire, earth and air were once held to be all that there is. import os, sys\nfor line in sys.stdin: "
    "print(line.strip())\nShe sells sea shells by the shore, and 1024 or 4096 of them make a good price in June. "
)


class Codec(Protocol):
    """Tokenizer interface for prompts.

    `name`: stored with the result. `pool`: ids to draw from. `added`: number of special tokens that a prompt gets.
    """

    name: str
    pool: Sequence[int]
    added: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise without special tokens."""
        ...

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]: ...

    def chat(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise each text as the only user message of a chat. Raise `ConfigError` if there is no chat template."""
        ...


class LocalCodec:
    """Tokenizer from a folder or the hub."""

    def __init__(self, model: str) -> None:
        from roseinfer.config.hub import load_tokenizer

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
                f"tokenizer {self.name!r} has no chat template; use skip_chat_template to send prompts as they are"
            )
        return [template.encode([{"role": "user", "content": text}]) for text in texts]


class ServerCodec:
    """The server's tokenizer, by /tokenize and /detokenize. Raise `ConfigError` if the server has none."""

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        self.name = model
        self._url = url.rstrip("/")
        self._model = model
        self._headers = authorization(api_key)
        (pool_ids,) = self.encode([POOL_TEXT])
        self.pool: Sequence[int] = sorted(set(pool_ids))
        (with_added,) = self._ask("/tokenize", "tokens", [{"prompt": POOL_TEXT, "add_special_tokens": True}])
        self.added = len(with_added) - len(pool_ids)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._ask("/tokenize", "tokens", [{"prompt": text, "add_special_tokens": False} for text in texts])

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self._ask("/detokenize", "prompt", [{"tokens": list(each)} for each in ids])

    def chat(self, texts: Sequence[str]) -> list[list[int]]:
        bodies = [{"messages": [{"role": "user", "content": text}], "add_generation_prompt": True} for text in texts]
        return self._ask("/tokenize", "tokens", bodies)

    def _ask(self, path: str, key: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        return asyncio.run(self._ask_all(path, key, bodies))

    async def _ask_all(self, path: str, key: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        import aiohttp

        semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def ask(body: dict[str, Any]) -> Any:
            named = {"model": self._model, **body}
            async with semaphore, session.post(self._url + path, json=named, headers=self._headers) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    if response.status == 404 and "does not exist" in text:  # wording of roseinfer and vLLM
                        raise ConfigError(f"model: the server does not serve {self._model!r}")
                    raise ConfigError(
                        f"tokenizer: {path} failed with status {response.status} ({text}); set --tokenizer"
                    )
                return (await response.json())[key]

        try:
            async with aiohttp.ClientSession() as session:
                return list(await asyncio.gather(*map(ask, bodies)))
        except ConfigError:
            raise
        except (aiohttp.ClientError, LookupError, ValueError) as error:
            raise ConfigError(f"tokenizer: {self._url}{path} failed ({error!r}); set --tokenizer") from None


def find_codec(tokenizer: str | None, url: str, model: str, api_key: str | None) -> Codec:
    """Return the codec of the tokenizer with this name, else the server's. Raise `ConfigError`."""
    return LocalCodec(tokenizer) if tokenizer else ServerCodec(url, model, api_key)


def make_texts(codec: Codec, wanted: Sequence[Sequence[int]], rng: random.Random) -> list[tuple[str, list[int]]]:
    """Return texts with as many tokens as `wanted`, beginning like them, with their ids.

    Ids drawn one by one do not always survive decoding and encoding. Longer results are cut at the end, shorter ones
    are extended. What still differs after `MAX_ATTEMPTS` rounds stays as it is.
    """
    ids = [list(each) for each in wanted]
    found: list[tuple[str, list[int]]] = [("", [])] * len(ids)
    left = list(range(len(ids)))
    for _ in range(MAX_ATTEMPTS):
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


def align_to_server(samples: Sequence[DatasetSample], url: str, model: str, api_key: str | None) -> list[DatasetSample]:
    """Cut prompts to their token counts by the server's tokenizer, if its count differs for the first prompt.

    Return them unchanged if the server has no /tokenize.
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
