"""From the name of a model to the folder that holds its files."""

import sys
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path

from roseinfer.core.config import PRICED, ModelConfig
from roseinfer.core.errors import ModelNotFoundError
from roseinfer.core.progress import stage

EMBEDDED = "tiny"
SHAPES = "shapes"
TEXT_FILES = ("config*.json", "hf_quant_config.json", "generation_config.json", "tokenizer*", "chat_template*")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Folders hold other formats of the same weights, and consolidated.* a second copy of them.
NEVER = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth")


def resolve_model(
    name: str, revision: str | None = None, download_dir: str | None = None, *, weights: bool = True
) -> Path:
    """The folder of model `name`: 'tiny' (embedded in the package), an existing folder, or a Hugging Face id.

    A Hugging Face id is downloaded as far as `download_dir` (default: the hub's own cache) does not hold it, config,
    tokenizer and, if `weights`, safetensors only. Without a network, what the cache holds is used.
    Raises `ModelNotFoundError` with the reason in one line.
    """
    folder = _local(name)
    patterns = TEXT_FILES + (WEIGHT_FILES if weights else ())
    return _from_hub(name, revision, download_dir, patterns) if folder is None else folder


def cached_model(name: str) -> Path | None:
    """The folder of a model that is here, None for one that would have to be downloaded. Raises `ModelNotFoundError`
    for what is neither a folder nor a Hugging Face id.
    """
    folder = _local(name)
    if folder is not None:
        return folder
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{name}: {_reason(error, None)}") from error
    except errors.LocalEntryNotFoundError:
        return None


def _local(name: str) -> Path | None:
    """The folder of what cannot be on the hub, None for what may be. Raises `ModelNotFoundError`."""
    if name == EMBEDDED:
        return _embedded()
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"{name}: the folder has no config.json")
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelNotFoundError(f"{name}: no such folder")
    return None


def model_folder(config: ModelConfig) -> Path:
    """The folder that the engine loads its model from.

    The configs of a few well-known models come with the package (`assets/shapes`): with dummy weights, or with none
    (`device` priced), these need no network. Raises like `resolve_model`.
    """
    dummy = config.load_format == "dummy" or config.device == PRICED
    shape = _shape(config.model)
    if dummy and shape is not None:
        return shape
    return resolve_model(config.model, config.revision, config.download_dir, weights=not dummy)


def tokenizer_folder(config: ModelConfig) -> Path:
    """The folder that the tokenizer is read from: `tokenizer`'s, else the model's.

    A packaged shape has none of its own and gets the embedded model's, whose ids are within any of their vocabularies.
    Raises like `resolve_model`.
    """
    if config.tokenizer is not None:
        return resolve_model(config.tokenizer, config.revision, config.download_dir, weights=False)
    folder = model_folder(config)
    return _embedded() if folder == _shape(config.model) else folder


def _shape(name: str) -> Path | None:
    """The packaged config of a Hugging Face model, unless a folder of the user's has that name."""
    folder = _assets() / SHAPES / name.replace("/", "--")
    return folder if not Path(name).exists() and (folder / "config.json").is_file() else None


def _assets() -> Path:
    return Path(str(files("roseinfer") / "assets"))


def _embedded() -> Path:
    folder = _assets() / EMBEDDED
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{EMBEDDED}: this installation came without the embedded model")
    return folder


def _from_hub(name: str, revision: str | None, download_dir: str | None, patterns: tuple[str, ...]) -> Path:
    import huggingface_hub

    # On a terminal the hub shows bars of its own.
    telling = nullcontext() if sys.stderr.isatty() else stage(f"downloading {name}")
    try:
        with telling:
            folder = huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(NEVER),
            )
    except Exception as error:  # beside its own, the library lets through those of its HTTP client and of the disk
        raise ModelNotFoundError(f"{name}: {_reason(error, revision)}") from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelNotFoundError(f"{name}: the repository has no config.json, so it holds no model for roseinfer")
    return Path(folder)


def _reason(error: Exception, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "access is restricted; accept the terms on its hub page, then log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such folder, and no such model on the hub (or it is private: log in with `hf auth login`)"
    if isinstance(error, errors.HFValidationError):
        return "neither a folder nor a Hugging Face id"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "no such folder, the hub cannot be reached (is there a network?), and its cache does not hold the model"
    lines = str(error).strip().splitlines() or [""]
    return f"the download failed: {type(error).__name__}: {lines[0][:300]}"
