"""Loaders of weights: from safetensors, from a GGUF file, or random.

A model is built from its spec alone. Its layers allocate memory only while they load, one tensor at a time from the
mapped file, so the checkpoint is never in memory twice.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from roseinfer.core.json_file import field_name, read_object
from roseinfer.core.progress import report
from roseinfer.gguf.files import is_gguf
from roseinfer.models.decoder import Decoder
from roseinfer.models.gguf_weights import GgufWeights
from roseinfer.models.registry import build_model
from roseinfer.models.spec import ModelSpec
from roseinfer.parallel.group import RankGroup, Share, SingleRank
from roseinfer.quant.base import Build, LayerAdapting, TensorMetadata, WeightFormat, WeightSource
from roseinfer.quant.finite import FiniteCheck
from roseinfer.quant.int4_stored import Int4Source
from roseinfer.quant.select import choose_format, widening_source, with_head_dtype

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Tensors in these formats are converted to any other. A weight format reads quantised tensors itself.
_FLOATS = ("F64", "F32", "BF16", "F16")
_QUANTISED = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8}
_QUANTISED |= {"I32": torch.int32, "I64": torch.int64}
# Standard deviation of the initial weights of GPT-2 and its successors.
_DEFAULT_STD = 0.02
# With small random weights attention averages tokens until they are alike, and all choose the same experts. Trained
# routers spread tokens over all experts. Large embeddings and small attention outputs have the same effect here.
_STD_WITH_EXPERTS = {"embed_tokens.weight": 1.0, "o_proj.weight": _DEFAULT_STD / 10}
# What blocks of most families add to the residual stream, and a standard deviation that leaves it as it is in 16 bits.
_BLOCK_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "c_proj.weight")
_MIN_STD = 1e-9
_HEAD = "lm_head.weight"
_TOKEN_MATRICES = ("embed_tokens.weight", _HEAD)


def resolve_dtype(spec: ModelSpec, dtype: str, device: torch.device) -> torch.dtype:
    """Resolve the option `dtype` of `ModelConfig`: "auto" is the checkpoint's on a GPU and float32 on a CPU.

    Raise `ConfigError` for float16 if the model needs a wider range.
    """
    if dtype == "auto":
        stored = "bfloat16" if spec.dtype == "float16" and spec.overflows_float16 else spec.dtype
        dtype = stored if device.type == "cuda" else "float32"
    if dtype == "float16" and spec.overflows_float16:
        raise ConfigError(f"dtype: {spec.architecture} computes numbers beyond float16 (use bfloat16 or float32)")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]


def load_model(
    folder: Path,
    spec: ModelSpec,
    options: ModelConfig,
    device: torch.device,
    group: RankGroup | None = None,
    *,
    weight_format: WeightFormat | None = None,
    steady_text: bool = False,
    adapting: LayerAdapting | None = None,
) -> Decoder:
    """Return a model that is ready to run, or this process's part of a model that `group` shares.

    Read the safetensors of `folder`, or the GGUF file at that path. Dummy weights are the same on the same kind of
    device. `weight_format`: format of the linear layers, by default chosen from the options and the checkpoint.
    `steady_text`: as in `DummyWeights`. `adapting`: extends the linear layers. Weights never require gradients; run
    forward passes in `torch.inference_mode`.

    Raise `ModelNotFoundError` without weights, and `UnsupportedModelError` naming a tensor that is missing, misshaped,
    unexpected or not finite. Raise `ConfigError` for a group that cannot share the model, or a format that the device
    does not support.
    """
    dummy = options.load_format == "dummy"
    computed = resolve_dtype(spec, options.dtype, device)
    chosen = weight_format or choose_format(options.quantization, spec.quantization, device, computed, dummy=dummy)
    chosen = with_head_dtype(chosen, options.lm_head_dtype, device, computed)
    build = Build(computed, device, group or SingleRank(), chosen, adapting)
    model = build_model(spec, build)
    if dummy:
        spreads = spec.experts is not None and not spec.tied_embeddings
        model.load(DummyWeights(options.seed, build, spreads=spreads, steady=steady_text))
        return model
    if is_gguf(folder):
        with GgufWeights(folder, spec, build) as file:
            model.load(file)
            file.refuse_unread()
            file.finite.refuse_wrong(folder)
        return model
    with Checkpoint(folder, build) as checkpoint:
        source = widening_source(checkpoint, spec.quantization)
        model.load(source)
        check_rest(checkpoint, source, model.ignored)
    return model


class Checkpoint:
    """Tensors of a folder's model.safetensors or its shards. Files are mapped; a tensor is read when requested."""

    def __init__(self, folder: Path, build: Build) -> None:
        self.build = build
        self._folder = folder
        self._read: set[str] = set()
        self.finite = FiniteCheck()
        self._files: list[Any] = []
        self._holder: dict[str, Any] = {}
        for path in weight_files(folder):
            file = _open(path)
            self._files.append(file)
            self._holder.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for file in self._files:
            file.__exit__(*exc_info)

    def __contains__(self, name: str) -> bool:
        return name in self._holder

    def stored(self, name: str) -> TensorMetadata | None:
        if name not in self._holder:
            return None
        view = self._holder[name].get_slice(name)
        return TensorMetadata(view.get_dtype(), tuple(view.get_shape()))

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        self.skip(name)
        report("reading weights", len(self._read), len(self._holder))
        view = self._holder[name].get_slice(name)
        parts = list(shard) if shard is not None else [Share(0, width, width) for width in into.shape]
        assert tuple(part.width for part in parts) == tuple(into.shape), f"{name}: {parts} into {list(into.shape)}"
        if transposed:
            parts.reverse()
        found, wanted = list(view.get_shape()), [part.whole for part in parts]
        if found != wanted:
            raise UnsupportedModelError(f"{self._folder}: tensor {name} is {found}, config.json says {wanted}")
        stored = view.get_dtype()
        codes = _QUANTISED.get(stored)
        if (stored not in _FLOATS or into.dtype in _QUANTISED.values()) and codes is not into.dtype:
            raise UnsupportedModelError(f"{self._folder}: tensor {name} has dtype {stored}")
        if all(part.is_all for part in parts):
            tensor = self._holder[name].get_tensor(name)
        else:
            tensor = view[tuple(slice(part.start, part.start + part.width) for part in parts)]
        into.copy_(tensor.T if transposed else tensor)
        self.finite.add(name, into)

    def skip(self, name: str) -> None:
        if name not in self._holder:
            raise UnsupportedModelError(f"{self._folder}: tensor {name} is missing")
        self._read.add(name)

    def refuse_not_finite(self) -> None:
        """Raise `UnsupportedModelError` naming a tensor that was read and holds NaN or infinity."""
        self.finite.refuse_wrong(self._folder)

    def refuse_unread(self, ignored: tuple[str, ...]) -> None:
        """Raise `UnsupportedModelError` if the checkpoint holds tensors that were not read and match no pattern in
        `ignored`.
        """
        unread = [name for name in self._holder if name not in self._read]
        unexpected = sorted(name for name in unread if not any(re.fullmatch(p, name) for p in ignored))
        if unexpected:
            more = f" and {len(unexpected) - 5} more" if len(unexpected) > 5 else ""
            names = ", ".join(unexpected[:5])
            raise UnsupportedModelError(f"{self._folder}: unexpected tensor {names}{more}")


def check_rest(checkpoint: Checkpoint, source: WeightSource, ignored: tuple[str, ...]) -> None:
    """Raise `UnsupportedModelError` if something is wrong with tensors of a checkpoint that `source` has read: some are
    left, and match no pattern in `ignored`, or are not finite.
    """
    if isinstance(source, Int4Source):
        source.skip_zero_biases()
    checkpoint.refuse_unread(ignored)
    checkpoint.refuse_not_finite()


class DummyWeights:
    """Random weights: normal matrices, zero biases, norms of one. The same seed and device give the same weights.

    Each process of a group draws the whole model's weights and keeps its part. `spreads`: scale the matrices so that
    the routers of a model with experts choose each expert about equally often. `steady`: the likeliest token is
    clear and depends on the last one only, for blocks add almost nothing and the head is the embedding, a row further.
    Other random weights find many tokens equally likely, so that a text changes with every rounding in 16 bits.
    """

    def __init__(self, seed: int, build: Build, *, spreads: bool = False, steady: bool = False) -> None:
        self.build = build
        self.finite = FiniteCheck()
        self._steady = steady
        self._seed = seed
        self._spreads = spreads
        self._generator = torch.Generator(build.device).manual_seed(seed)
        self._drawn: tuple[str, torch.Tensor] | None = None  # the matrix that was last read in parts

    def __contains__(self, name: str) -> bool:
        return True

    def stored(self, name: str) -> TensorMetadata | None:
        return None

    def read(
        self, name: str, into: torch.Tensor, *, shard: Sequence[Share] | None = None, transposed: bool = False
    ) -> None:
        if into.ndim == 1:
            into.fill_(0.0 if name.endswith(".bias") else 1.0)
        elif shard is None or all(part.is_all for part in shard):
            self._draw(name, into)
        else:
            whole = self._whole(name, [part.whole for part in shard], into.dtype)
            into.copy_(whole[tuple(slice(part.start, part.start + part.width) for part in shard)])

    def _whole(self, name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        if self._drawn is None or self._drawn[0] != name:
            whole = torch.empty(shape, dtype=dtype, device=self.build.device)
            self._draw(name, whole)
            self._drawn = (name, whole)
        return self._drawn[1]

    def _draw(self, name: str, into: torch.Tensor) -> None:
        if not self._steady or not name.endswith(_TOKEN_MATRICES):
            into.normal_(0.0, self._std(name), generator=self._generator)
            return
        into.normal_(0.0, self._std(name), generator=torch.Generator(self.build.device).manual_seed(self._seed))
        if name.endswith(_HEAD):
            into.copy_(into.roll(1, 0))

    def _std(self, name: str) -> float:
        if self._steady and name.endswith(_BLOCK_OUTPUTS):
            return _MIN_STD
        if not self._spreads:
            return _DEFAULT_STD
        return next((std for end, std in _STD_WITH_EXPERTS.items() if name.endswith(end)), _DEFAULT_STD)

    def skip(self, name: str) -> None:
        pass


def weight_files(folder: Path) -> list[Path]:
    """Return model.safetensors, or the shards that an index names.

    Raise `ModelNotFoundError` if a file is missing, `UnsupportedModelError` for an invalid index.
    """
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _WEIGHTS).is_file():
            raise ModelNotFoundError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}")
        return [folder / _WEIGHTS]
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModelError(f"{index} is not an index of safetensors: it has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            message = f"the file name of {field_name(tensor)} is not a string"
            raise UnsupportedModelError(f"{index} is not an index of safetensors: {message}")
    names = sorted(set(weight_map.values()))
    held = {path.name for path in folder.iterdir() if path.is_file()}
    for name in names:
        if name not in held:
            raise ModelNotFoundError(f"{index} names {name[:200]!r}, which is not in the folder")
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    try:
        path.open("rb").close()  # safe_open says of any failure that there is no such file
        return safe_open(path, framework="pt", device="cpu").__enter__()
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UnsupportedModelError(f"{path} is not a safetensors file: {error}") from error
