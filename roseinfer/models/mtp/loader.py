"""Loader of multi-token prediction heads: from the safetensors of their model, or with random weights."""

from pathlib import Path

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.files import is_gguf
from roseinfer.models.eagle.head import HeadTarget
from roseinfer.models.families import family_of
from roseinfer.models.loader import Checkpoint, DummyWeights, check_rest
from roseinfer.models.mtp.head import PREFIX, MtpHead
from roseinfer.models.mtp.spec import MtpSpec
from roseinfer.parallel.group import SingleRank
from roseinfer.quant.base import Build
from roseinfer.quant.plain import PlainFormat
from roseinfer.quant.select import widening_source

# Tensors of the model, which are loaded already.
_OTHERS = (rf"(?!{PREFIX}\.).*",)


def load_mtp_head(folder: Path, spec: MtpSpec, target: HeadTarget, *, load_format: str, seed: int) -> MtpHead:
    """Return the head in a model's `folder`, ready to run, in the target's dtype and on its device. Every rank holds
    all of it.

    `load_format`, `seed`: as for `load_model`. Raise `UnsupportedModelError` naming a tensor that is missing,
    misshaped, unexpected or not finite, or for a GGUF file.
    """
    build = Build(target.dtype, target.device, SingleRank(), PlainFormat())
    family = family_of(target.spec.architecture)
    assert family is not None
    head = MtpHead(spec, target, family.names, build)
    if load_format == "dummy":
        head.load(DummyWeights(seed, build))
        return head
    if is_gguf(folder):
        raise UnsupportedModelError(f"speculation 'mtp' is not supported with GGUF files such as {folder}")
    with Checkpoint(folder, build) as checkpoint:
        if f"{PREFIX}.fc.weight" not in checkpoint:
            raise UnsupportedModelError(
                f"speculation 'mtp' needs a multi-token prediction head, but {folder} has no tensor {PREFIX}.fc.weight"
            )
        source = widening_source(checkpoint, target.spec.quantization)
        head.load(source)
        check_rest(checkpoint, source, _OTHERS)
    return head
