"""Generation defaults of a model: sampling parameters, and the ids that end an answer. Read without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roseinfer.core.errors import InvalidRequestError, UnsupportedModelError
from roseinfer.core.json_file import shortened
from roseinfer.core.sampling import SamplingParams
from roseinfer.models.documents import CONFIG, GENERATION, document_path, read_config, read_generation
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


def read_generation_config(folder: Path) -> GenerationDefaults:
    """Return the EOS ids of generation_config.json and config.json, and the sampling defaults if the model samples.

    Raise `UnsupportedModelError` for a default that no request could use.
    """
    generation = read_generation(folder)
    has_config = document_path(folder, CONFIG).is_file()
    config = read_config(folder) if has_config else {}
    ends = _eos_ids(generation, document_path(folder, GENERATION)) + _eos_ids(config, document_path(folder, CONFIG))
    eos = tuple(dict.fromkeys(ends))
    if not generation.get("do_sample"):
        return GenerationDefaults(eos_token_ids=eos)
    return GenerationDefaults(eos_token_ids=eos, **_sampling_defaults(generation, folder))


def _sampling_defaults(generation: dict[str, Any], folder: Path) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: generation[name] for name in names if generation.get(name) is not None}
    if values.get("top_k") == -1:  # some models write "off" as -1
        values["top_k"] = 0
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        raise UnsupportedModelError(f"{document_path(folder, GENERATION)}: {error}") from error
    return values


def _eos_ids(data: dict[str, Any], where: Path) -> list[int]:
    value = data.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for id in ids:
        if type(id) is not int or id >= MAX_SIZE:
            expected = f"expected an integer below {MAX_SIZE}"
            raise UnsupportedModelError(f"{where}: invalid token id in eos_token_id: {shortened(id)} ({expected})")
    return [id for id in ids if id >= 0]  # -1 means none
