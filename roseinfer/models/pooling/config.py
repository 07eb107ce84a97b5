"""Reader of what a model's folder says about embeddings and scores; without torch.

sentence-transformers stores it in `modules.json`, a list of modules with a folder each. Every module is one that
roseinfer computes, or it is refused by name, as is every setting that would change the result.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.core.json_file import read_json, read_object, shortened
from roseinfer.core.pooling import PairFormat, PoolingInfo, PoolingMethod, PoolingTask
from roseinfer.gguf.files import is_gguf
from roseinfer.models.encoders.spec import EncoderSpec
from roseinfer.models.fields import ConfigFields

MODULES = "modules.json"
YES_NO = "yes-no"  # value of the option `pooling`

# Names of the methods in 1_Pooling/config.json, and of the older flags there.
_METHODS = {"lasttoken": PoolingMethod.LAST, "mean": PoolingMethod.MEAN, "cls": PoolingMethod.CLS}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "Sigmoid": "sigmoid"}
_MODULES_READ = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
# Families whose models were trained so that the first numbers of an embedding are an embedding: name -> smallest width.
_ANY_DIMENSION_FROM = {"qwen3-embedding": 32}
_RERANKER_NAME = "qwen3-reranker"


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """Linear layer after pooling, whose weights are in `folder`: [width, inputs]."""

    folder: Path
    inputs: int
    width: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """Description of how vectors are made.

    `yes_no`: ids of the tokens whose logits at the last position make a score; None without. `max_tokens`: longest
    input, if the folder limits it. Other fields are those of `PoolingInfo`.
    """

    task: PoolingTask = PoolingTask.EMBED
    method: PoolingMethod = PoolingMethod.LAST
    dense: tuple[DenseSpec, ...] = ()
    normalized: bool = True
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dimensions: tuple[int, ...] = ()
    any_dimension_from: int = 0
    yes_no: tuple[int, int] | None = None
    pairs: PairFormat | None = None

    def info(self, width: int) -> PoolingInfo:
        """Return the properties of an engine with vectors of `width` numbers."""
        return PoolingInfo(
            task=self.task,
            method=self.method,
            width=width,
            dimensions=tuple(smaller for smaller in self.dimensions if smaller < width),
            any_dimension_from=self.any_dimension_from,
            prompts=self.prompts,
            default_prompt=self.default_prompt,
            pairs=self.pairs,
        )


def read_pooling_spec(folder: Path, model: str = "", runner: str = "auto", pooling: str = "auto") -> PoolingSpec | None:
    """Return how a decoder's vectors are made; None if it generates text.

    `runner`, `pooling`: the options of these names. "auto" chooses pooling for a folder of sentence-transformers, and
    for a Qwen3-Reranker, which only its name shows. `model`: name that the user gave. Raise `ConfigError` for
    contradicting options, `UnsupportedModelError` naming what is not supported.
    """
    if runner == "generate":
        return None
    names = f"{model} {folder}".lower()
    modules = () if is_gguf(folder) else _read_modules(folder)
    if pooling == YES_NO or (pooling == "auto" and not modules and _RERANKER_NAME in names):
        return _yes_no_spec(folder, None)
    if not modules:
        if runner == "auto" and pooling == "auto":
            return None
        spec = PoolingSpec()
    else:
        spec = _spec_of(folder, modules)
    if pooling != "auto":
        spec = _with_method(spec, PoolingMethod(pooling))
    return _with_dimensions(spec, folder, names)


def _yes_no_spec(folder: Path, ids: tuple[int, int] | None) -> PoolingSpec:
    found = ids or (_token_id(folder, "yes"), _token_id(folder, "no"))
    return PoolingSpec(task=PoolingTask.SCORE, normalized=False, yes_no=found, pairs=PairFormat.QWEN3_RERANKER)


def _token_id(folder: Path, token: str) -> int:
    """Return the id of a token that the vocabulary holds as it is."""
    path = folder / "tokenizer.json"
    if is_gguf(folder) or not path.is_file():
        raise UnsupportedModelError(f"{folder}: scores from {token!r} need a {path.name}")
    model = read_object(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = vocabulary.get(token) if isinstance(vocabulary, dict) else None
    if not isinstance(found, int):
        raise UnsupportedModelError(f"{path}: the vocabulary has no token {token!r}")
    return found


def _with_method(spec: PoolingSpec, method: PoolingMethod) -> PoolingSpec:
    if spec.task is PoolingTask.SCORE:
        raise ConfigError(f"pooling is {method.value!r}, but the model's folder describes scores")
    return replace(spec, method=method)


def _with_dimensions(spec: PoolingSpec, folder: Path, names: str) -> PoolingSpec:
    """Add the smaller widths for which the model was trained: those of config.json, or its family's."""
    if spec.task is PoolingTask.SCORE:
        return spec
    config = {} if is_gguf(folder) else read_object(folder / "config.json")
    listed = config.get("matryoshka_dimensions")
    if listed is not None:
        if not isinstance(listed, list) or not all(type(width) is int and width > 0 for width in listed):
            raise UnsupportedModelError(f"{folder}: matryoshka_dimensions = {shortened(listed)} is not supported")
        return replace(spec, dimensions=tuple(sorted(listed)))
    if config.get("is_matryoshka") is True:
        return replace(spec, any_dimension_from=1)
    return replace(spec, any_dimension_from=next((n for key, n in _ANY_DIMENSION_FROM.items() if key in names), 0))


# --- folders of sentence-transformers --------------------------------------------------------------------------------
def _read_modules(folder: Path) -> tuple[tuple[str, Path], ...]:
    """Return the kind and the folder of each module, in order; nothing without `modules.json`."""
    path = folder / MODULES
    if not path.is_file():
        return ()
    try:
        listed = read_json(path)
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    if not isinstance(listed, list) or not listed or not all(isinstance(module, dict) for module in listed):
        raise UnsupportedModelError(f"{path} is not a list of modules")
    return tuple(_module(path, folder, module) for module in listed)


def _module(path: Path, folder: Path, module: dict[str, Any]) -> tuple[str, Path]:
    name, place = module.get("type"), module.get("path", "")
    kind = name.rpartition(".")[2] if isinstance(name, str) and name.startswith("sentence_transformers.") else None
    if kind not in _MODULES_READ:
        known = ", ".join(_MODULES_READ)
        raise UnsupportedModelError(f"{path}: type = {shortened(name)} is not supported; known: {known}")
    if not isinstance(place, str) or place.startswith("/") or ".." in place.split("/"):
        raise UnsupportedModelError(f"{path}: path = {shortened(place)} is not a folder of the model")
    return kind, folder / place


def _spec_of(folder: Path, modules: tuple[tuple[str, Path], ...]) -> PoolingSpec:
    kinds = [kind for kind, _ in modules]
    if kinds[0] != "Transformer":
        raise UnsupportedModelError(f"{folder / MODULES}: the first module must be a Transformer, not {kinds[0]}")
    limit = _max_tokens(modules[0][1])
    if kinds == ["Transformer", "LogitScore"]:
        return replace(_logit_score(folder, modules[1][1]), max_tokens=limit)
    middle = kinds[2 : -1 if kinds[-1] == "Normalize" else None]
    if kinds[1:2] != ["Pooling"] or any(kind != "Dense" for kind in middle):
        expected = "Transformer, Pooling, any Dense, perhaps Normalize"
        raise UnsupportedModelError(f"{folder / MODULES}: modules {', '.join(kinds)} (expected {expected})")
    prompts, default = _prompts(folder)
    return PoolingSpec(
        method=_method(modules[1][1] / "config.json"),
        dense=tuple(_dense(place) for kind, place in modules if kind == "Dense"),
        normalized=kinds[-1] == "Normalize",
        max_tokens=limit,
        prompts=prompts,
        default_prompt=default,
    )


def _max_tokens(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return None
    data = read_object(path)
    for key in ("do_lower_case", "query_expansion"):
        if data.get(key):
            raise UnsupportedModelError(f"{path}: {key} is not supported")
    limit = data.get("max_seq_length")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UnsupportedModelError(f"{path}: max_seq_length = {shortened(limit)} is not a positive integer")
    return limit


def _method(path: Path) -> PoolingMethod:
    data = read_object(path)
    chosen = data.get("pooling_mode")
    if chosen is None:
        chosen = [name for flag, name in _FLAGS.items() if data.get(flag)] or ["mean"]
    names = chosen if isinstance(chosen, list) else [chosen]
    if len(names) != 1 or names[0] not in list(_METHODS):
        known = ", ".join(_METHODS)
        raise UnsupportedModelError(f"{path}: pooling_mode = {shortened(chosen)} is not supported; known: {known}")
    if data.get("include_prompt") is False:
        raise UnsupportedModelError(f"{path}: include_prompt = False is not supported")
    return _METHODS[names[0]]


def _dense(folder: Path) -> DenseSpec:
    path = folder / "config.json"
    data = read_object(path)
    name = data.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = _ACTIVATIONS.get(name.rpartition(".")[2]) if isinstance(name, str) else None
    if activation is None or not name.startswith("torch.nn."):
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"{path}: activation_function = {shortened(name)} is not supported; known: {known}")
    for key in ("module_input_name", "module_output_name"):
        if data.get(key) not in (None, "sentence_embedding"):
            raise UnsupportedModelError(f"{path}: {key} = {shortened(data[key])} is not supported")
    if data.get("use_residual"):
        raise UnsupportedModelError(f"{path}: use_residual is not supported")
    fields = ConfigFields(data, str(path))
    return DenseSpec(
        folder=folder,
        inputs=fields.integer("in_features"),
        width=fields.integer("out_features"),
        bias=fields.flag("bias", True),
        activation=activation,
    )


def _logit_score(folder: Path, module: Path) -> PoolingSpec:
    path = module / "config.json"
    data = read_object(path)
    yes, no = data.get("true_token_id"), data.get("false_token_id")
    if type(yes) is not int or type(no) is not int:
        raise UnsupportedModelError(f"{path}: true_token_id and false_token_id must be token ids")
    return _yes_no_spec(folder, (yes, no))


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    data = read_object(path)
    prompts, default = data.get("prompts") or {}, data.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | type(None)) for text in prompts.values()):
        raise UnsupportedModelError(f"{path}: prompts = {shortened(prompts)} is not supported")
    prompts = {name: text or "" for name, text in prompts.items()}
    if default is not None and default not in list(prompts):
        raise UnsupportedModelError(f"{path}: default_prompt_name = {shortened(default)} is not among the prompts")
    return prompts, default


# --- encoders --------------------------------------------------------------------------------------------------------
def read_encoder_pooling(folder: Path, spec: EncoderSpec, runner: str = "auto", pooling: str = "auto") -> PoolingSpec:
    """Return how an encoder's vectors are made. The options are those of `read_pooling_spec`.

    Raise `ConfigError` for options that do not fit an encoder, `UnsupportedModelError` naming what is not supported.
    """
    if runner == "generate":
        raise ConfigError(f"runner is generate, but {spec.architecture} generates no text (expected pooling)")
    if pooling == YES_NO:
        raise ConfigError(f"pooling is {YES_NO}, but {spec.architecture} has no next token")
    modules = _read_modules(folder)
    if spec.head is not None:
        return _classifier_spec(folder, spec, modules, pooling)
    found = _spec_of(folder, modules) if modules else PoolingSpec(method=PoolingMethod.MEAN)
    if pooling != "auto":
        found = _with_method(found, PoolingMethod(pooling))
    return _with_dimensions(found, folder, "")


def _classifier_spec(
    folder: Path, spec: EncoderSpec, modules: tuple[tuple[str, Path], ...], pooling: str
) -> PoolingSpec:
    """Return the description of a classifier with one score, whose pooling is the model's own."""
    assert spec.head is not None
    if spec.head.labels != 1:
        raise UnsupportedModelError(f"{folder}: {spec.head.labels} labels are not supported; a score is one number")
    if [kind for kind, _ in modules] not in ([], ["Transformer"]):
        raise UnsupportedModelError(f"{folder / MODULES}: a {spec.architecture} has no modules after the Transformer")
    found = PoolingSpec(
        task=PoolingTask.SCORE,
        method=PoolingMethod(spec.head.pooling),
        normalized=False,
        max_tokens=_max_tokens(folder),
        pairs=PairFormat.TOKENIZER,
    )
    return found if pooling == "auto" else _with_method(found, PoolingMethod(pooling))
