"""Kinds of kernels by name; each of our own kernels has one."""

import re
from pathlib import Path

import pytest

import roseinfer
from benchmarks.breakdown.kernel_kinds import KINDS, OTHER, by_kind, kind_of

KERNELS = Path(roseinfer.__file__).parent / "kernels"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x64_64x8_4x1_v_bz_TNT", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>", "GEMM"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<>", "attention"),
        ("mkldnn::_linear_pointwise", "GEMM"),
        ("aten::mm", "GEMM"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::index_copy_", "K/V write"),
        ("void at::native::vectorized_layer_norm_kernel<c10::BFloat16>", "norm and activation"),
        ("aten::silu", "norm and activation"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
            "sampling",
        ),
        ("aten::index_select", "inputs"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memcpy PtoP (Device -> Device)", "between GPUs"),
        ("void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda>", "copies"),
        ("aten::mul", OTHER),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def launched() -> list[str]:
    """Return the names of the kernels that roseinfer's own code launches."""
    source = "\n".join(path.read_text() for path in sorted(KERNELS.rglob("*.py")))
    defined = set(re.findall(r"@(?:triton|gluon)\.jit.*?\ndef (\w+)", source, re.DOTALL))
    return sorted(defined & set(re.findall(r"\b(\w+)\[", source)))


OURS = {
    "choice of experts": {
        "count_kernel",
        "logits_kernel",
        "order_kernel",
        "place_kernel",
        "route_kernel",
        "route_choice_kernel",
        "route_products_kernel",
    },
    "experts": {"down_kernel", "gate_up_kernel"},
    "rows of experts": {"spread_kernel", "sum_kernel"},
    "states": {
        "delta_decode_kernel",
        "invert_kernel",
        "pairs_kernel",
        "prepare_kernel",
        "scan_bulk_kernel",
        "scan_kernel",
        "solve_kernel",
        "window_kernel",
    },
    "adapters": {"lora_expand_kernel", "lora_gated_kernel", "lora_tiles_kernel"},
    "between GPUs": {"add_piece_kernel", "meet_kernel", "push_blocks_kernel", "push_words_kernel"},
    "attention": {
        "_bulk_kernel",
        "_decode_kernel",
        "_merge_kernel",
        "_plan_kernel",
        "_prefill_kernel",
        "_widen_kernel",
        "few_kernel",
        "merge_kernel",
    },
    "K/V write": {"_heads_kernel"},
    "GEMM": {
        "_tile_kernel",
        "int4_bulk_kernel",
        "int4_tile_kernel",
        "skinny_direct_kernel",
        "skinny_int4_kernel",
        "int4_widening_kernel",
        "normed_product_kernel",
        "skinny_kernel",
        "skinny_pairs_kernel",
    },
    "rounding to FP8": {"_normed_rows_kernel", "_rows_kernel"},
    "norm and activation": {
        "_add_kernel",
        "_gated_kernel",
        "_norm_kernel",
        "_pointwise_kernel",
        "_sigmoid_kernel",
        "gated_norm_kernel",
    },
    "sampling": {
        "_chunk_best_kernel",
        "_collect_kernel",
        "_mask_kernel",
        "_mass_kernel",
        "_narrow_kernel",
        "_pick_kernel",
        "_settle_kernel",
        "end_chains_kernel",
        "finish_kernel",
    },
    "inputs": {"_expand_kernel", "_vocab_embedding_kernel", "begin_chains_kernel", "prepare_chains_kernel"},
    "copies": {"_copy_kernel"},
}


def test_our_own_kernels_are_known():
    """Add a new kernel to this table and to its kind's pattern."""
    known = {name: kind for kind, names in OURS.items() for name in names}
    assert launched() == sorted(known)
    assert {name: kind_of(name) for name in known} == known


def test_sums():
    sums = by_kind([("aten::mm", 1.0), ("aten::addmm", 2.0), ("aten::mul", 0.5)])
    assert list(sums) == list(KINDS) and (sums["GEMM"], sums[OTHER], sums["attention"]) == (3.0, 0.5, 0.0)
