"""Mistral Small 3.1 and later, and Ministral 3 with its vision tower, which is left out."""

from roseinfer.models.families.family import ModelFamily
from roseinfer.models.families.ministral3 import read_ministral3
from roseinfer.models.families.mistral import read_mistral
from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import VISION_TOWER, ModelSpec
from roseinfer.models.text_config import read_text_config

_TEXT_READERS = {"mistral": read_mistral, "ministral3": read_ministral3}
_VISION = (
    "vision_config",
    "image_token_id",
    "image_token_index",
    "multimodal_projector_bias",
    "projector_hidden_act",
    "spatial_merge_size",
    "vision_feature_layer",
)


def read_mistral3(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.ignore(*_VISION)
    # Configs disagree with themselves and with their checkpoints about ties, so that the checkpoint decides.
    fields.ignore("tie_word_embeddings")
    return read_text_config(
        fields,
        architecture,
        readers=_TEXT_READERS,
        default="mistral",
        tied_embeddings=None,
        left_out=(VISION_TOWER,),
    )


FAMILIES = (
    ModelFamily(
        architectures=("Mistral3ForConditionalGeneration",),
        read=read_mistral3,
        prefixes=("model.language_model.", "language_model.model."),
        heads=("lm_head", "language_model.lm_head"),
        ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    ),
)
