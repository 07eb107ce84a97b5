"""Reader of gpt-oss's experts in MXFP4."""

from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.common import HARMLESS, ignored
from roseinfer.quant.mxfp4_scheme import Mxfp4Scheme


def read_mxfp4_scheme(fields: ConfigFields) -> Mxfp4Scheme:
    names = ignored(fields, "modules_to_not_convert")
    fields.refuse_unread(HARMLESS)
    return Mxfp4Scheme(names)
