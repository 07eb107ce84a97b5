"""Files of a tokenizer, validated by field. An error names file and field."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import Any

import tokenizers

from roseinfer.core.errors import ConfigError, UnsupportedModelError, reason_of
from roseinfer.core.json_file import read_object, shortened

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# No model has more. Tables with an entry for each id are built from the vocabulary.
MAX_VOCABULARY_TOKENS = 2**24
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Any tokenizer must encode these. The second exceeds the limits of a regular expression that backtracks.
_SAMPLES = ("Hello, world! 1234\n  naïve 日本", "a" * 48 + "b")
# The process has one standard error.
_REDIRECTING = Lock()


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read tokenizer.json. Raise `UnsupportedModelError`, also for a tokenizer that fails on ordinary text."""
    with library_errors(f"{path}: "):
        backend = tokenizers.Tokenizer.from_file(str(path))
    check_backend(backend, path)
    return backend


def check_backend(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Raise `UnsupportedModelError` if the tokenizer of that file cannot encode and decode ordinary text."""
    backend.no_truncation()
    backend.no_padding()
    for sample in _SAMPLES:
        with library_errors(f"{path}: the tokenizer fails on {sample!r}: "), _without_panic_notes():
            backend.decode_batch([backend.encode_batch_fast([sample])[0].ids])


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Raise errors and panics of the `tokenizers` library as `UnsupportedModelError` that begins with `message`."""
    try:
        yield
    except (UnsupportedModelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises Exception itself, and a panic is no Exception
        raise UnsupportedModelError(f"{message}{str(error)[:500]}") from error


@contextmanager
def _without_panic_notes() -> Iterator[None]:
    """Withhold standard error and write it at the end, unless there was an error.

    Rust prints several lines for a panic, in addition to the error that we raise.
    """
    with _REDIRECTING, TemporaryFile() as kept:
        try:
            stderr = os.dup(2)
        except OSError:  # closed
            yield
            return
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.truncate(0)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            if text := kept.read():
                os.write(2, text)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, which may be missing. Raise `UnsupportedModelError` for a field of a wrong type."""
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return {}
    config = read_object(path)
    for name in _NAMED:
        if config.get(name) is not None and _content(config[name]) is None:
            raise _wrong_type(path, name, config[name], "a text or an object with one in `content`")
    _templates(config, path)
    return config


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the named tokens (bos_token, eos_token, ...) as chat templates refer to them."""
    texts = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _content(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def template_source(given: str | Path) -> str:
    """Return the source of a chat template, which is given as such or as the path of a file.

    Raise `ConfigError` if the file cannot be read.
    """
    if isinstance(given, str) and any(mark in given for mark in ("{", "\n")):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: cannot read {str(given)!r}: {reason_of(error)}") from error


def read_chat_template(folder: Path, config: dict[str, Any], given: str | Path | None) -> str | None:
    """Read `given`, else chat_template.jinja, else the config's template (of several: the one named default).

    Raise `ConfigError` if `given` cannot be read, `UnsupportedModelError` if the model's cannot.
    """
    if given is not None:
        return template_source(given)
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UnsupportedModelError(f"{file} cannot be read: {error}") from error
    return _templates(config, folder / TOKENIZER_CONFIG).get("default")


def _templates(config: dict[str, Any], path: Path) -> dict[str, str]:
    """Return the config's chat templates by name; a single one is named default."""
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = value
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        pairs = [(entry.get("name"), entry.get("template")) for entry in value]
        named = dict(pairs) if all(isinstance(name, str) for name, _ in pairs) else None
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise _wrong_type(path, "chat_template", value, "a text or a list of objects with `name` and `template`")
    return named


def _wrong_type(path: Path, name: str, value: Any, wanted: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path}: {name} = {shortened(value)} is not supported; expected {wanted}")
