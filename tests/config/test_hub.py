"""Folder that a model name resolves to. The hub is replaced by a fake."""

import os
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from roseinfer.config import hub
from roseinfer.config.hub import cached_model, model_folder, resolve_model, states_of_files, tokenizer_folder
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.errors import ConfigError, ModelNotFoundError

REPOSITORY = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "model.pt",
    "onnx/model.onnx",
    "original/model.safetensors",
    "README.md",
    "modeling.py",
]


class Hub:
    """Fake of snapshot_download: records the call and creates the files that its patterns select."""

    def __init__(self, folder: Path, error: Exception | None = None, content: list[str] = REPOSITORY) -> None:
        self.folder, self.error, self.content = folder, error, content
        self.call: dict[str, Any] = {}

    def list_repo_files(self, repo_id: str, **options: Any) -> list[str]:
        return self.content

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.call = {"repo_id": repo_id, **options}
        if self.error is not None:
            raise self.error
        for name in self.selected():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text("{}")
        return str(self.folder)

    def selected(self) -> list[str]:
        return list(
            filter_repo_objects(
                self.content,
                allow_patterns=self.call["allow_patterns"],
                ignore_patterns=self.call["ignore_patterns"],
            )
        )


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> str:
        raise AssertionError("the hub must not be asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def use(monkeypatch, stand_in: Hub) -> Hub:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", stand_in.list_repo_files)
    return stand_in


def test_tiny_is_embedded(no_hub, monkeypatch, tmp_path):
    (tmp_path / "assets" / "tiny").mkdir(parents=True)
    monkeypatch.setattr(hub, "files", lambda package: tmp_path)
    with pytest.raises(ModelNotFoundError, match="does not contain the embedded model"):
        resolve_model("tiny")
    (tmp_path / "assets" / "tiny" / "config.json").write_text("{}")
    assert resolve_model("tiny") == tmp_path / "assets" / "tiny"


def test_tiny_is_in_this_package(no_hub):
    folder = resolve_model("tiny")
    assert folder == Path(str(files("roseinfer"))) / "assets" / "tiny"
    assert (folder / "tokenizer.json").is_file() and list(folder.glob("*.safetensors"))


def test_a_folder(no_hub, monkeypatch, tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"the folder has neither a config\.json nor a GGUF file"):
        resolve_model(str(tmp_path / "m"))
    (tmp_path / "m" / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path / "m")) == tmp_path / "m"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m") == Path("m")


@pytest.mark.parametrize("name", ["/no/such", "./no", "../no", "~/no", "a/b/c", "a\\b"])
def test_what_looks_like_a_folder_is_not_looked_up(no_hub, name):
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        resolve_model(name)


def test_a_file_that_is_no_model_is_not_looked_up(no_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("text")
    with pytest.raises(ModelNotFoundError, match=r"README\.md: not a model \(expected a folder, a \.gguf file"):
        resolve_model("README.md")


def test_a_gguf_file_without_its_suffix(no_hub, tmp_path):
    """Ollama stores models under such names."""
    (tmp_path / "sha256-1f").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ModelNotFoundError, match=r"it is a GGUF file: link it under a name that ends in \.gguf"):
        resolve_model(str(tmp_path / "sha256-1f"))


def test_downloads_only_what_is_needed(monkeypatch, tmp_path):
    stand_in = use(monkeypatch, Hub(tmp_path))
    assert resolve_model("org/model", revision="v1", download_dir="/downloads") == tmp_path
    assert stand_in.selected() == REPOSITORY[:7]
    given = {name: stand_in.call[name] for name in ("repo_id", "revision", "cache_dir")}
    assert given == {"repo_id": "org/model", "revision": "v1", "cache_dir": "/downloads"}


def test_without_weights(monkeypatch, tmp_path):
    stand_in = use(monkeypatch, Hub(tmp_path))
    resolve_model("gpt2", weights=False)
    assert stand_in.selected() == REPOSITORY[:5]
    assert not any(fnmatch(name, "*.safetensors*") for name in stand_in.selected())


def test_modules_of_sentence_transformers_are_downloaded(monkeypatch, tmp_path):
    modules = ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
    modules += ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    others = ["2_Dense/pytorch_model.bin", "onnx/config.json", "openvino/model.safetensors"]
    stand_in = use(monkeypatch, Hub(tmp_path, content=[*REPOSITORY, *modules, *others]))
    resolve_model("org/embedder")
    assert stand_in.selected() == [*REPOSITORY[:7], *modules]


def test_a_repository_without_a_model(monkeypatch, tmp_path):
    use(monkeypatch, Hub(tmp_path, content=["README.md", "tokenizer.json"]))
    with pytest.raises(ModelNotFoundError, match=r"the repository has neither a config\.json nor a GGUF file"):
        resolve_model("org/data")


GGUF_REPOSITORY = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "x[1].gguf", "big/m-00001-of-00002.gguf"]
GGUF_REPOSITORY += ["big/m-00002-of-00002.gguf"]


def test_a_gguf_file(no_hub, tmp_path):
    with pytest.raises(ModelNotFoundError, match="no such file"):
        resolve_model(str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    assert resolve_model(str(tmp_path), gguf_file="m.gguf") == tmp_path / "m.gguf"
    assert model_folder(ModelConfig(model=str(tmp_path / "m.gguf"))) == tmp_path / "m.gguf"
    assert tokenizer_folder(ModelConfig(model=str(tmp_path), gguf_file="m.gguf")) == tmp_path / "m.gguf"
    with pytest.raises(ModelNotFoundError, match=r"no file 'other\.gguf'"):
        resolve_model(str(tmp_path), gguf_file="other.gguf")
    for name in ("tiny", str(tmp_path / "m.gguf")):
        with pytest.raises(ModelNotFoundError, match="--gguf-file requires a folder or a Hugging Face id as model"):
            resolve_model(name, gguf_file="m.gguf")


def test_a_folder_whose_name_ends_as_a_gguf_files_does(no_hub, tmp_path):
    """Some name a folder of GGUF files so."""
    folder = tmp_path / "m.gguf"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(folder), gguf_file="a.gguf") == folder / "a.gguf"
    assert resolve_model(str(folder)) == folder / "a.gguf"
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    assert resolve_model(str(folder)) == cached_model(str(folder)) == folder


def test_the_only_gguf_file_of_a_folder_needs_no_name(no_hub, tmp_path):
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").touch()
    (tmp_path / "config.json").write_text("{}")
    first = tmp_path / "m-00001-of-00002.gguf"
    assert resolve_model(str(tmp_path)) == tokenizer_folder(ModelConfig(model=str(tmp_path))) == first
    assert cached_model(str(tmp_path)) == first
    assert resolve_model(str(tmp_path), weights=False) == tmp_path, "a folder may be a tokenizer only"
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"the folder has 2 GGUF models; .*--gguf-file: m-0.*, n\.gguf$"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("more", [[], ["config.json"]])
def test_the_only_gguf_file_of_a_repository_needs_no_name(monkeypatch, tmp_path, more):
    """Some repositories have a config.json beside GGUF files."""
    stand_in = use(monkeypatch, Hub(tmp_path, content=["README.md", "Q8/m.gguf", *more]))
    config = ModelConfig(model="org/model")
    assert model_folder(config) == tokenizer_folder(config) == tmp_path / "Q8" / "m.gguf"
    assert stand_in.selected() == ["Q8/m.gguf"]


def test_a_listing_of_many_gguf_files_is_short(monkeypatch, tmp_path):
    use(monkeypatch, Hub(tmp_path, content=[f"m-{number:02}.gguf" for number in range(30)]))
    with pytest.raises(ModelNotFoundError, match=r"30 GGUF models; .*m-11\.gguf and 18 more$"):
        resolve_model("org/model")


def test_a_repository_whose_name_ends_as_a_gguf_files_does(monkeypatch, tmp_path):
    stand_in = use(monkeypatch, Hub(tmp_path, content=GGUF_REPOSITORY))
    assert resolve_model("org/m.gguf", gguf_file="m-Q8_0.gguf") == tmp_path / "m-Q8_0.gguf"
    assert stand_in.call["repo_id"] == "org/m.gguf"
    with pytest.raises(ModelNotFoundError, match=r"org/m\.gguf: no such file; .*--gguf-file"):
        resolve_model("org/m.gguf")
    for name in ("/no/such/m.gguf", "a/b/m.gguf"):
        with pytest.raises(ModelNotFoundError, match="no such"):
            resolve_model(name, gguf_file="m-Q8_0.gguf")


@pytest.mark.parametrize(
    ("gguf_file", "downloaded"),
    [
        ("m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        ("x[1].gguf", ["x[1].gguf"]),
        ("big/m-00001-of-00002.gguf", ["big/m-00001-of-00002.gguf", "big/m-00002-of-00002.gguf"]),
    ],
)
def test_a_gguf_file_of_the_hub(monkeypatch, tmp_path, gguf_file, downloaded):
    """All parts of it, and nothing else."""
    stand_in = use(monkeypatch, Hub(tmp_path, content=GGUF_REPOSITORY))
    config = ModelConfig(model="org/model", revision="v1", gguf_file=gguf_file)
    assert model_folder(config) == tmp_path / gguf_file
    assert stand_in.selected() == downloaded
    assert stand_in.call["revision"] == "v1"


@pytest.mark.parametrize("option", [{"load_format": "dummy"}, {"device": "priced"}])
def test_a_gguf_file_comes_before_a_packaged_shape(monkeypatch, tmp_path, option):
    use(monkeypatch, Hub(tmp_path, content=GGUF_REPOSITORY))
    config = ModelConfig(model="Qwen/Qwen3-8B", gguf_file="m-Q8_0.gguf", **option)
    assert model_folder(config) == tokenizer_folder(config) == tmp_path / "m-Q8_0.gguf"


def test_a_gguf_file_that_the_hub_does_not_have(monkeypatch, tmp_path):
    use(monkeypatch, Hub(tmp_path, content=GGUF_REPOSITORY))
    with pytest.raises(ModelNotFoundError, match=r"org/model: no file 'm-Q2_K\.gguf'"):
        resolve_model("org/model", gguf_file="m-Q2_K.gguf")
    listed = r"4 GGUF models; choose one with --gguf-file: big/m-00001-of-00002\.gguf, m-Q4_K_M\.gguf, m-Q8_0\.gguf, x"
    with pytest.raises(ModelNotFoundError, match=f"org/model: the repository has {listed}"):
        resolve_model("org/model")


@pytest.mark.parametrize("name", ["m.safetensors", "/m.gguf", "../m.gguf", "a/../../m.gguf", ""])
def test_names_that_are_no_file_of_a_model(name):
    with pytest.raises(ConfigError, match="gguf_file must be the name of a"):
        ModelConfig(gguf_file=name)


def test_a_gguf_file_that_is_here(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    assert cached_model("org/model", "m.gguf") is None
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert cached_model("org/model", "m.gguf") == tmp_path / "m.gguf"


def hub_error(kind: type[Exception]) -> Exception:
    """Make an error without a response, which would need an HTTP library."""
    error = kind.__new__(kind)
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(errors.GatedRepoError), "access is restricted"),
        (hub_error(errors.RepositoryNotFoundError), "no such model on the hub"),
        (hub_error(errors.RevisionNotFoundError), "no revision 'v9'"),
        (errors.HFValidationError("bad id"), "neither a folder nor a Hugging Face id"),
        (errors.LocalEntryNotFoundError("offline"), "hub could not be reached"),
        (ConnectionError("reset\nby peer"), "download failed: ConnectionError: reset$"),
        (RuntimeError(), "download failed: RuntimeError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_are_one_clear_line(monkeypatch, tmp_path, error, message):
    use(monkeypatch, Hub(tmp_path, error))
    with pytest.raises(ModelNotFoundError, match=f"^org/model: .*{message}") as caught:
        resolve_model("org/model", revision="v9")
    assert "\n" not in str(caught.value) and caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tinny", "'tiny', the embedded model"),
        ("models/SmolML", "'models/SmolLM'"),
        ("./smollm.ggu", None),
        ("models/Smol-Q8.gguf", "'models/Smol-Q4.gguf'"),
        ("gpt3", None),
        ("a\0/b", None),
    ],
)
def test_a_near_name_is_suggested(monkeypatch, tmp_path, name, near):
    use(monkeypatch, Hub(tmp_path, errors.LocalEntryNotFoundError("offline")))
    monkeypatch.chdir(tmp_path)
    for folder in ("SmolLM", "unrelated"):
        (tmp_path / "models" / folder).mkdir(parents=True)
    (tmp_path / "models" / "SmolLM" / "config.json").write_text("{}")
    (tmp_path / "models" / "Smol-Q4.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=f"^{name}: no such ") as caught:
        resolve_model(name)
    assert str(caught.value).partition("; did you mean ")[2].rstrip("?") == (near or "")


def test_interrupting_a_download_is_no_error_of_the_model(monkeypatch, tmp_path):
    use(monkeypatch, Hub(tmp_path, KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        resolve_model("org/model")


def test_offline_the_cache_is_used(monkeypatch, tmp_path):
    """Through the real library, cut off from the network."""
    commit = "0" * 40
    snapshot = tmp_path / "models--org--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("org/model", download_dir=str(tmp_path)) == snapshot
    assert cached_model("org/model", download_dir=str(tmp_path)) == snapshot
    assert cached_model("org/model", download_dir=str(tmp_path), revision=commit) == snapshot
    assert cached_model("org/model", download_dir=str(tmp_path), revision="other") is None
    with pytest.raises(ModelNotFoundError, match="hub could not be reached"):
        resolve_model("org/other", download_dir=str(tmp_path))


def test_known_shapes_with_dummy_weights_need_no_network() -> None:
    config = ModelConfig(model="gpt2", load_format="dummy")
    assert (hub.model_folder(config) / "config.json").is_file()
    assert hub.tokenizer_folder(config) == resolve_model("tiny")


def test_a_folder_of_the_user_beats_a_packaged_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = ModelConfig(model="gpt2", load_format="dummy")
    assert hub.model_folder(config) == hub.tokenizer_folder(config) == Path("gpt2")


def test_files_of_a_model_that_are_replaced_have_another_state(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("first")
    first = states_of_files(tmp_path)
    (tmp_path / "notes.txt").write_text("no file of the model")
    assert states_of_files(tmp_path) == first
    os.utime(tmp_path / "model.safetensors", ns=(0, 0))
    assert states_of_files(tmp_path) != first
    assert states_of_files(tmp_path / "config.json") not in (first, states_of_files(tmp_path))  # as a GGUF file
    assert states_of_files(tmp_path / "gone") == ""
