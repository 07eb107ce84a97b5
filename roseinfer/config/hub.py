"""Find the folder or GGUF file of a model by its name, downloading it if necessary."""

import difflib
import glob
import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from importlib.resources import files
from itertools import islice
from pathlib import Path

from roseinfer.core.config.engine import PRICED, ModelConfig
from roseinfer.core.errors import ModelNotFoundError
from roseinfer.core.progress import stage
from roseinfer.gguf.files import SUFFIX, begins_as_gguf, is_first_part, part_names
from roseinfer.text.tokenizer import Tokenizer

EMBEDDED = "tiny"
SHAPES = "shapes"
TEXT_FILES = (
    "config*.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "modules.json",  # of sentence-transformers, with these folders and limits
    "[0-9]*_*/config.json",
    "sentence_bert_config.json",
)
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_READ_SUFFIXES = {".json", ".jinja", ".safetensors"}
MAX_LISTED_COUNT = 12  # GGUF files that an error names
MAX_ENTRIES_COUNT = 1000  # files of a folder that are compared with a wrong name
MIN_SIMILARITY_SHARE = 0.75
# Subfolders hold other formats of the same weights, except modules such as 2_Dense; consolidated.* is a second copy.
NEVER = ("[!0-9]*/*", "consolidated*", "*.bin", "*.pt", "*.pth")


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
    it is not needed for a single file without safetensors. Later parts of a split file are downloaded too, and the path
    of the first is returned. Raises `ModelNotFoundError` with the reason in one line, and `UnsupportedModelError` for a
    later part of a split file.
    """
    found = _local(name, gguf_file, weights)
    if found is not None:
        return found
    if gguf_file is None:
        patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
        folder = _from_hub(name, revision, download_dir, patterns, list(NEVER))
        if _is_complete(folder, weights):
            return folder
        gguf_file = _only_file(_files_on_hub(name, revision, folder), name, "repository", folder)
        if gguf_file is None:
            return folder
    patterns = [glob.escape(part) for part in part_names(gguf_file)]
    return _file_in(_from_hub(name, revision, download_dir, patterns, []), name, gguf_file)


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
        raise ModelNotFoundError(f"{name}: {_reason(error, None)}{did_you_mean(name)}") from error
    except errors.LocalEntryNotFoundError:
        return None
    if gguf_file is None:
        files = [] if _is_complete(folder, True) else _first_parts(_below(folder))
        return folder / files[0] if len(files) == 1 else folder
    return folder / gguf_file if (folder / gguf_file).is_file() else None


def _local(name: str, gguf_file: str | None, weights: bool = True) -> Path | None:
    """Return the path of a model that is not on the hub; None if it may be. Raises `ModelNotFoundError`."""
    path = Path(name)
    if path.is_dir() and name != EMBEDDED:
        return _in_folder(path, name, gguf_file, weights)
    if gguf_file is not None and (name == EMBEDDED or path.is_file()):
        raise ModelNotFoundError(f"{name}: --gguf-file requires a folder or a Hugging Face id as model")
    if name == EMBEDDED:
        return _embedded()
    may_be_id = not name.startswith((".", "/", "~")) and name.count("/") <= 1 and "\\" not in name
    if path.suffix == SUFFIX and gguf_file is None:
        if not path.is_file():
            hint = "; if this is a repository, choose a file with --gguf-file" if may_be_id else ""
            raise ModelNotFoundError(f"{name}: no such file{did_you_mean(name) or hint}")
        return path
    if path.is_file():
        hint = f"; it is a GGUF file: link it under a name that ends in {SUFFIX}" if begins_as_gguf(path) else ""
        raise ModelNotFoundError(f"{name}: not a model (expected a folder, a {SUFFIX} file or a Hugging Face id){hint}")
    if not may_be_id:
        raise ModelNotFoundError(f"{name}: no such folder{did_you_mean(name)}")
    return None


def did_you_mean(name: str) -> str:
    """Return the end of a message that suggests the most similar model of this machine; empty if none is similar."""
    path, here = Path(name), []
    with suppress(OSError, ValueError):
        here = [str(entry) for entry in islice(path.parent.iterdir(), MAX_ENTRIES_COUNT) if _may_be_model(entry)]
    near = difflib.get_close_matches(str(path), [EMBEDDED, *here], 1, MIN_SIMILARITY_SHARE)
    if not near:
        return ""
    return f"; did you mean {near[0]!r}{', the embedded model' if near[0] == EMBEDDED else ''}?"


def _may_be_model(path: Path) -> bool:
    with suppress(OSError):  # of a folder that may not be read
        return path.suffix == SUFFIX or (path / "config.json").is_file() or any(path.glob(f"*{SUFFIX}"))
    return False


def _in_folder(folder: Path, name: str, gguf_file: str | None, weights: bool) -> Path:
    if gguf_file is None and not _is_complete(folder, weights):
        gguf_file = _only_file(_first_parts(path.name for path in folder.glob(f"*{SUFFIX}")), name, "folder", folder)
    return folder if gguf_file is None else _file_in(folder, name, gguf_file)


def _is_complete(folder: Path, weights: bool) -> bool:
    """Return True if a folder needs no GGUF file: it has a config and, if `weights`, safetensors."""
    return (folder / "config.json").is_file() and (not weights or any(folder.glob("*.safetensors")))


def _only_file(files: list[str], name: str, kind: str, folder: Path) -> str | None:
    """Return the only one of the GGUF `files` of a folder or repository without safetensors.

    None if there is a config.json but no GGUF file. Raises `ModelNotFoundError` if there is no model, or no choice.
    """
    if len(files) == 1:
        return files[0]
    if files:
        more = f" and {len(files) - MAX_LISTED_COUNT} more" if len(files) > MAX_LISTED_COUNT else ""
        listed = ", ".join(files[:MAX_LISTED_COUNT])
        raise ModelNotFoundError(
            f"{name}: the {kind} has {len(files)} GGUF models; choose one with --gguf-file: {listed}{more}"
        )
    if (folder / "config.json").is_file():
        return None
    raise ModelNotFoundError(f"{name}: the {kind} has neither a config.json nor a GGUF file, so it is no model")


def _first_parts(names: Iterable[str]) -> list[str]:
    """Return the GGUF models among files, each named by its first part."""
    return sorted(name for name in names if name.endswith(SUFFIX) and is_first_part(name))


def _files_on_hub(name: str, revision: str | None, folder: Path) -> list[str]:
    """Return the GGUF models of a repository; those in the cache if the hub cannot be reached."""
    import huggingface_hub

    try:
        return _first_parts(huggingface_hub.list_repo_files(name, revision=revision))
    except Exception:  # errors of the library, of its HTTP client, of the network
        return _first_parts(_below(folder))


def _below(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob(f"*{SUFFIX}"))


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


def states_of_files(model: Path) -> str:
    """Return a hash of names, sizes and times of a model's files; empty if they cannot be listed.

    `model`: its folder or GGUF file.
    """
    try:
        paths = [model] if model.is_file() else sorted(model.iterdir())
        read = [path for path in paths if path == model or path.suffix in _READ_SUFFIXES]
        stats = [(path.name, path.stat()) for path in read]
    except OSError:
        return ""
    states = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]
    return hashlib.sha256("\n".join(states).encode()).hexdigest()


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
        raise ModelNotFoundError(f"{name}: {_reason(error, revision)}{did_you_mean(name)}") from error
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
        return "no such folder; as a Hugging Face id, it is not in the cache, and the hub could not be reached"
    lines = str(error).strip().splitlines() or [""]
    return f"the download failed: {type(error).__name__}: {lines[0][:300]}"
