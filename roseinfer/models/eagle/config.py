"""Reader of an EAGLE-3 head's config.json, as SpecForge and EAGLE write it, or as speculators does; without torch.

Every field is read, listed as harmless, or refused by name, as in `models/config.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.json_file import shortened
from roseinfer.models.decoder_config import ACTIVATIONS, read_heads
from roseinfer.models.documents import CONFIG, read_config
from roseinfer.models.eagle.spec import EagleSpec
from roseinfer.models.fields import ConfigFields
from roseinfer.models.harmless import HARMLESS, HARMLESS_PREFIXES
from roseinfer.models.layer_types import FULL
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import LayerSpec, ModelSpec, NormSpec

FLAT = "LlamaForCausalLMEagle3"
NESTED = ("Eagle3Speculator", "Eagle3DraftModel")

# Meaning of a listed layer number j -> boundary: the stream entering layer j, or the result of layer j.
_SHIFTS = {"inputs": 0, "outputs": 1}
_IDS = "eagle_aux_hidden_state_layer_ids"
_TRAINING = frozenset(("embed_requires_grad", "enable_sp_ulysses", "speculators_version", "auto_map"))
_PICKLES = ("*.bin", "*.pt", "*.pth")


def read_eagle_spec(folder: Path, target: ModelSpec, aux: str = "auto") -> EagleSpec:
    """Return the spec of the head in `folder` for the target model.

    aux: meaning of the listed layers, "inputs" or "outputs"; "auto" to infer it. Raise `ModelNotFoundError` without a
    config.json, and `UnsupportedModelError` naming the field that is not supported or does not fit the target.
    """
    data = read_config(folder)
    architecture = _architecture(data, folder)
    _refuse_pickles(folder)
    outer = ConfigFields(data, f"{folder / CONFIG} ({architecture})")
    inner = outer
    if architecture in NESTED:
        outer.only("speculators_model_type", "eagle3")
        outer.need("norm_before_residual")  # its absence means true to some programs, false to others
        _check_algorithm(outer)
        nested = outer.inner("transformer_layer_config")
        if nested is None:
            raise UnsupportedModelError(f"{outer.where}: transformer_layer_config is missing")
        inner = nested
    spec = _read(outer, inner, target, aux, inner is not outer)
    for fields in {id(outer): outer, id(inner): inner}.values():
        fields.refuse_unread(HARMLESS | _TRAINING, HARMLESS_PREFIXES)
    return spec


def _read(outer: ConfigFields, inner: ConfigFields, target: ModelSpec, aux: str, nested: bool) -> EagleSpec:
    options = outer.inner("eagle_config") or ConfigFields({}, outer.where)
    if not options.flag("use_aux_hidden_state", True):
        options.refuse("use_aux_hidden_state", False, "EAGLE-3 reads several states of the model")
    inner.only("model_type", "llama")
    inner.only("num_hidden_layers", 1, hint="only heads of one layer are supported")
    inner.only("bias", False, hint="fc has no bias")
    _refuse_windows(inner)
    heads, bias = read_heads(inner), inner.flag("attention_bias", False)
    width, vocabulary = _read_target_sizes(outer, inner, target)
    drafted = outer.integer("draft_vocab_size", vocabulary)
    if drafted > vocabulary:
        outer.refuse("draft_vocab_size", drafted, f"the vocabulary has {vocabulary} tokens")
    inner.integer("max_position_embeddings", target.max_position)  # rotation has no end
    outer.flag("tie_word_embeddings", False)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    spec = EagleSpec(
        layer=LayerSpec(attention=replace(heads, skips_first=True), rope=read_rope(inner, heads.head_dim)),
        hidden_size=inner.integer("hidden_size"),
        intermediate_size=inner.integer("intermediate_size"),
        vocab_size=vocabulary,
        draft_vocab_size=drafted,
        norm=NormSpec(eps=inner.number("rms_norm_eps", 1e-6)),
        activation=inner.choice("hidden_act", ACTIVATIONS, "silu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=inner.flag("mlp_bias", False),
        tied=inner.flag("tie_word_embeddings", False),
        boundaries=_read_boundaries(outer, options, target.num_layers, aux, nested),
        state_width=width,
        # NVIDIA's heads have flags in `eagle_config`.
        **{name: outer.flag(name, options.flag(name, False)) for name in flags},
    )
    if spec.fc_norm and spec.norm_before_fc:
        outer.refuse("fc_norm", True, "norm_before_fc is set too")
    options.refuse_unread()
    return spec


def _read_target_sizes(outer: ConfigFields, inner: ConfigFields, target: ModelSpec) -> tuple[int, int]:
    """Return the target's hidden size and vocabulary. Raise `UnsupportedModelError` if the head's target has others."""
    key = "hidden_size" if outer.get("target_hidden_size") is None else "target_hidden_size"
    holder = inner if key == "hidden_size" else outer
    for name, fields, wanted in ((key, holder, target.hidden_size), ("vocab_size", inner, target.vocab_size)):
        if fields.integer(name) != wanted:
            fields.refuse(name, fields.integer(name), f"the model that it would draft for has {wanted}")
    return target.hidden_size, target.vocab_size


def _architecture(data: dict[str, Any], folder: Path) -> str:
    names = data.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in (FLAT, *NESTED):
        return str(names[0])
    known = ", ".join((FLAT, *NESTED))
    where = folder / CONFIG
    raise UnsupportedModelError(f"{where}: architectures = {shortened(names)} is no EAGLE-3 head; known: {known}")


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles and not any(folder.glob("*.safetensors")):
        raise UnsupportedModelError(
            f"{folder} holds weights as {pickles[0]} only, a pickle, which may run code when it is read; convert it by "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        )


def _check_algorithm(outer: ConfigFields) -> None:
    # The rest says how the head was trained and what is recommended.
    found = outer.get("speculators_config") or {}
    if not isinstance(found, dict) or found.get("algorithm", "eagle3") != "eagle3":
        outer.refuse("speculators_config", found, "algorithm eagle3 is needed")


def _refuse_windows(inner: ConfigFields) -> None:
    inner.only("use_sliding_window", False)
    if inner.get("use_sliding_window") is None:
        inner.only("sliding_window")
    inner.ignore("sliding_window", "max_window_layers")
    types = inner.get("layer_types") or []
    if not isinstance(types, list) or any(kind != FULL for kind in types):
        inner.refuse("layer_types", types, f"{FULL} is needed")


# --- target layers ---------------------------------------------------------------------------------------------------
def _read_boundaries(
    outer: ConfigFields, options: ConfigFields, layers: int, aux: str, nested: bool
) -> tuple[int, ...]:
    """Return `EagleSpec.boundaries`. Without a list they are those that EAGLE-3's authors chose."""
    found, other = outer.get(_IDS), options.get(_IDS)
    if found and other and found != other:
        outer.refuse(_IDS, found, f"eagle_config has {shortened(other)}")
    ids = found or other
    if not ids:
        boundaries = (2, layers // 2, layers - 3)
        if list(boundaries) != sorted(set(boundaries)):
            raise UnsupportedModelError(f"{outer.where}: {_IDS} is missing, and the model's {layers} layers are few")
        return boundaries
    if not isinstance(ids, list) or any(type(number) is not int for number in ids):
        outer.refuse(_IDS, ids, "a list of layer numbers is needed")
    shift = _SHIFTS[_meaning(outer, ids, nested) if aux == "auto" else aux]
    boundaries = tuple(number + shift for number in ids)
    if list(boundaries) != sorted(set(boundaries)):
        outer.refuse(_IDS, ids, "ascending numbers are needed")
    if boundaries[0] < 0 or boundaries[-1] > layers:
        outer.refuse(_IDS, ids, f"the model has {layers} layers")
    return boundaries


def _meaning(outer: ConfigFields, ids: list[int], nested: bool) -> str:
    """Infer the meaning of listed layers, which no field says.

    speculators counts inputs. Other programs list the authors' choice as [2, ...] if they count inputs, and as [1, ...]
    if they count outputs (SGLang tells them apart so: sgl-project/sglang#25454).
    """
    if nested or ids[0] == 2:
        return "inputs"
    if ids[0] != 1:
        outer.refuse(_IDS, ids, "whether these are inputs or outputs is unclear; add aux=inputs or aux=outputs")
    return "outputs"
