"""Find the folder or GGUF file of a model by its name, downloading it if necessary."""

import glob
import sys
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path

from roseinfer.core.config.engine import PRICED, ModelConfig
from roseinfer.core.errors import ModelNotFoundError
from roseinfer.core.progress import stage
from roseinfer.gguf.files import SUFFIX, part_names
from roseinfer.text.tokenizer import Tokenizer

EMBEDDED = "tiny"
SHAPES = "shapes"
TEXT_FILES = ("config*.json", "hf_quant_config.json", "generation_config.json", "tokenizer*", "chat_template*")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Subfolders hold other formats of the same weights; consolidated.* is a second copy.
NEVER = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth")


def resolve_model(
    name: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    gguf_file: str | None = None,
    weights: bool = True,
) -> Path:
    """Return the path of model `name`: 'tiny' (embedded), an existing folder or GGUF file, or a Hugging Face id.

    A Hugging Face id is downloaded unless `download_dir` (default: the hub's cache) holds it: config, tokenizer and, if
    `weights`, safetensors. Without a network the cache is used. `gguf_file` names a file in the folder or on the hub;
    later parts of a split file are downloaded too, and the path of the first is returned. Raises `ModelNotFoundError`
    with the reason in one line, and `UnsupportedModelError` for a later part of a split file.
    """
    found = _local(name, gguf_file)
    if found is not None:
        return found
    if gguf_file is not None:
        patterns = [glob.escape(part) for part in part_names(gguf_file)]
        return _file_in(_from_hub(name, revision, download_dir, patterns, []), name, gguf_file)
    patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    folder = _from_hub(name, revision, download_dir, patterns, list(NEVER))
    if not (folder / "config.json").is_file():
        hint = "the repository has no config.json"
        raise ModelNotFoundError(f"{name}: {hint}; if it has GGUF files, choose one with --gguf-file")
    return folder


def cached_model(
    name: str, gguf_file: str | None = None, *, revision: str | None = None, download_dir: str | None = None
) -> Path | None:
    """Return the path of a model that is on this machine; None if it must be downloaded. Raises `ModelNotFoundError`
    for a name that is neither a folder, a GGUF file nor a Hugging Face id.
    """
    found = _local(name, gguf_file)
    if found is not None:
        return found
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = Path(
            huggingface_hub.snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True)
        )
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{name}: {_reason(error, None)}") from error
    except errors.LocalEntryNotFoundError:
        return None
    if gguf_file is None:
        return folder
    return folder / gguf_file if (folder / gguf_file).is_file() else None


def _local(name: str, gguf_file: str | None) -> Path | None:
    """Return the path of a model that is not on the hub; None if it may be. Raises `ModelNotFoundError`."""
    path = Path(name)
    if path.is_dir() and name != EMBEDDED:
        return _in_folder(path, name, gguf_file)
    if gguf_file is not None and (name == EMBEDDED or path.is_file()):
        raise ModelNotFoundError(f"{name}: --gguf-file requires a folder or a Hugging Face id as model")
    if name == EMBEDDED:
        return _embedded()
    may_be_id = not name.startswith((".", "/", "~")) and name.count("/") <= 1 and "\\" not in name
    if path.suffix == SUFFIX and gguf_file is None:
        if not path.is_file():
            hint = "; if this is a repository, choose a file with --gguf-file" if may_be_id else ""
            raise ModelNotFoundError(f"{name}: no such file{hint}")
        return path
    if path.is_file():
        raise ModelNotFoundError(f"{name}: not a model (expected a folder, a {SUFFIX} file or a Hugging Face id)")
    if not may_be_id:
        raise ModelNotFoundError(f"{name}: no such folder")
    return None


def _in_folder(folder: Path, name: str, gguf_file: str | None) -> Path:
    if gguf_file is not None:
        return _file_in(folder, name, gguf_file)
    if not (folder / "config.json").is_file():
        files = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
        hint = f"; choose one of its GGUF files, for example --gguf-file {files[0]}" if files else ""
        raise ModelNotFoundError(f"{name}: the folder has no config.json{hint}")
    return folder


def _file_in(folder: Path, name: str, gguf_file: str) -> Path:
    if not (folder / gguf_file).is_file():
        raise ModelNotFoundError(f"{name}: no file {gguf_file!r}")
    return folder / gguf_file


def model_folder(config: ModelConfig) -> Path:
    """Return the folder or GGUF file that the engine loads its model from.

    The package contains the configs of a few well-known models (`assets/shapes`), so that dummy weights and priced
    engines need no network. Raises like `resolve_model`.
    """
    dummy = config.load_format == "dummy" or config.device == PRICED
    shape = _shape(config.model)
    if dummy and shape is not None and config.gguf_file is None:
        return shape
    return resolve_model(
        config.model, config.revision, config.download_dir, gguf_file=config.gguf_file, weights=not dummy
    )


def tokenizer_folder(config: ModelConfig) -> Path:
    """Return the folder or GGUF file of the tokenizer: the one of `config.tokenizer`, else the model's.

    A packaged shape uses the embedded model's tokenizer, whose ids fit any of their vocabularies. Raises like
    `resolve_model`.
    """
    if config.tokenizer is not None:
        return resolve_model(config.tokenizer, config.revision, config.download_dir, weights=False)
    folder = model_folder(config)
    return _embedded() if folder == _shape(config.model) else folder


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """Return the model's own tokenizer, or the one that the option `tokenizer` names."""
    return Tokenizer.from_folder(tokenizer_folder(config))


def _shape(name: str) -> Path | None:
    """Return the packaged config of a Hugging Face model; None if there is none or a folder of that name exists."""
    folder = _assets() / SHAPES / name.replace("/", "--")
    return folder if not Path(name).exists() and (folder / "config.json").is_file() else None


def _assets() -> Path:
    return Path(str(files("roseinfer") / "assets"))


def _embedded() -> Path:
    folder = _assets() / EMBEDDED
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{EMBEDDED}: this installation does not contain the embedded model")
    return folder


def _from_hub(name: str, revision: str | None, download_dir: str | None, patterns: list[str], never: list[str]) -> Path:
    """Download the files that match `patterns` but none of `never`, and return their folder."""
    import huggingface_hub

    # On a terminal the hub library shows its own progress bars.
    telling = nullcontext() if sys.stderr.isatty() else stage(f"downloading {name}")
    try:
        with telling:
            folder = huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=patterns,
                ignore_patterns=never,
            )
    except Exception as error:  # the library also raises errors of its HTTP client and of the disk
        raise ModelNotFoundError(f"{name}: {_reason(error, revision)}") from error
    return Path(folder)


def _reason(error: Exception, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "access is restricted; accept the terms on its hub page, then log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such folder, and no such model on the hub (or it is private: log in with `hf auth login`)"
    if isinstance(error, errors.HFValidationError):
        return "neither a folder nor a Hugging Face id"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "no such folder, the model is not in the hub's cache, and the hub cannot be reached (check the network)"
    lines = str(error).strip().splitlines() or [""]
    return f"the download failed: {type(error).__name__}: {lines[0][:300]}"
