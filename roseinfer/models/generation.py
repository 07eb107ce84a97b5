"""Generation defaults of a model: sampling parameters, and the ids that end an answer. Read without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roseinfer.core.errors import InvalidRequestError, UnsupportedModelError
from roseinfer.core.generation_config import AUTO, NONE, given_document, given_override, sampling_defaults
from roseinfer.core.json_file import shortened
from roseinfer.models.documents import CONFIG, GENERATION, document_path, read_config, read_generation, text_fields
from roseinfer.models.fields import MAX_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Defaults of generation_config.json; None where it has none. `eos_token_ids` are in the order found."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_config(folder: Path, choice: str = AUTO, override: str | None = None) -> GenerationDefaults:
    """Return the EOS ids of generation_config.json and config.json, its text model's too, and the sampling defaults.

    `choice`: the option `generation_config`. The model's own defaults count only if it samples. The document of a path
    replaces the model's, whose EOS ids stay if the document has none. `override`: the option
    `override_generation_config`, whose fields replace those of either. Raise `UnsupportedModelError` for a default that
    no request could use, `ConfigError` for an unusable path or override.
    """
    own, given = read_generation(folder), given_document(choice)
    has_config = document_path(folder, CONFIG).is_file()
    config = read_config(folder) if has_config else {}
    ends = _eos_ids(given or {}, Path(choice)) or _eos_ids(own, document_path(folder, GENERATION))
    for fields in (config, text_fields(config)):
        ends += _eos_ids(fields, document_path(folder, CONFIG))
    eos = tuple(dict.fromkeys(ends))
    if given is not None:
        sampled = sampling_defaults(given) if given.get("do_sample", True) else {}
    else:
        sampled = _own_defaults(own, folder) if own.get("do_sample") and choice not in NONE else {}
    return GenerationDefaults(eos_token_ids=eos, **{**sampled, **given_override(override)})


def _own_defaults(generation: dict[str, Any], folder: Path) -> dict[str, Any]:
    try:
        return sampling_defaults(generation)
    except InvalidRequestError as error:
        raise UnsupportedModelError(f"{document_path(folder, GENERATION)}: {error}") from error


def _eos_ids(data: dict[str, Any], where: Path) -> list[int]:
    value = data.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for id in ids:
        if type(id) is not int or id >= MAX_SIZE:
            expected = f"expected an integer below {MAX_SIZE}"
            raise UnsupportedModelError(f"{where}: invalid token id in eos_token_id: {shortened(id)} ({expected})")
    return [id for id in ids if id >= 0]  # -1 means none
