"""Fields of weights in four bits that several methods share."""

from roseinfer.models.fields import ConfigFields
from roseinfer.models.quantization.common import HARMLESS

CODE_BITS = 4
_SIZES = (32, 64, 128)
_ALL_COLUMNS = -1
# Choices of kernels, and how the weights were rounded. The tensors of a layer show the order of its columns, and
# whether the output head is quantised.
HARMLESS_RECIPE = HARMLESS | frozenset(
    """desc_act static_groups act_group_aware true_sequential damp_percent damp_auto_increment damp_step mse meta
    lm_head model_name_or_path model_file_base_name tokenizer dataset use_exllama disable_exllama exllama_config
    use_cuda_fp16 max_input_length model_seqlen batch_size pad_token_id cache_block_outputs block_name_to_quantize
    module_name_preceding_first_block modules_in_block_to_quantize hyb_act pack_impl parallel_packing device
    offload_to_disk offload_to_disk_path do_fuse fuse_max_seq_len modules_to_fuse export_compatible""".split()  # noqa: SIM905
)


def check_bits(fields: ConfigFields, key: str = "bits") -> None:
    """Raise `UnsupportedModelError` unless the field is present and 4."""
    bits = fields.get(key)
    if bits != CODE_BITS:
        fields.refuse(key, bits, f"known: {CODE_BITS}")


def group_size(fields: ConfigFields, key: str = "group_size") -> int | None:
    """Return the number of columns that share a scale; None for all of a row's."""
    size = fields.get(key)
    if isinstance(size, bool) or size not in (*_SIZES, _ALL_COLUMNS):
        fields.refuse(key, size, f"known: {', '.join(map(str, _SIZES))}, {_ALL_COLUMNS}")
    return None if size == _ALL_COLUMNS else int(size)
