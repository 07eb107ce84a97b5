"""Kinds of GPU kernels and of torch's CPU operators, recognised by name."""

import re
from collections.abc import Iterable

OTHER = "other"
# The first pattern found in the lower-case name decides. Order matters: flash attention is built on cutlass, and the
# copy of an index is no index.
_PATTERNS = (
    ("choice of experts", r"^_?(logits|route(_products|_choice)?|order|count|place)_kernel"),
    ("experts", r"experts|^_?(gate_up|down)_kernel"),
    ("rows of experts", r"^_?(spread|sum)_kernel"),
    ("states", r"^_?(delta_decode|invert|pairs|prepare|scan(_bulk)?|solve|window)_kernel"),
    ("between GPUs", r"push_(blocks|words)|^(meet|add_piece)_kernel|memcpy ptop|all_?reduce|nccl"),
    (
        "attention",
        r"attention|flash|fmha|mha_|(?<!int4_)(decode|few|bulk|widen)_kernel|prefill|paged|merge_(state|kernel)|plan_kernel",
    ),
    ("adapters", r"lora_"),
    ("K/V write", r"heads_kernel|reshape_and_cache|rotary|_rope|\brope|index_copy|index_put|scatter|store_kv"),
    (
        "GEMM",
        r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|split_k|skinny|tile_kernel|normed_product|int4|linear|addmm|matmul|aten::mm$|bmm|dot|onednn|mkldnn",
    ),
    ("rounding to FP8", r"^_?(normed_)?rows_kernel"),
    ("norm and activation", r"norm|silu|gelu|swiglu|(gated|pointwise|add)_kernel|activation|rsqrt|sigmoid|tanh"),
    (
        "sampling",
        r"sampl|argmax|arg_max|reduce_kernel.*max|chunk_best|settle|mass_kernel|pick_kernel|narrow|collect_kernel"
        r"|mask_kernel|finish_kernel|end_chains|draw|softmax|logsumexp|topk|sort|scan|cumsum|philox|random|isfinite|amax|aten::max$",
    ),
    (
        "inputs",
        r"expand|(begin|prepare)_chains|embedding|gather|index_?select|indexselect|take|arange|repeat_interleave|aten::index$",
    ),
    ("copies", r"memcpy|memset|copy|fill|cat\b|catarray|aten::to$|zero_"),
)
KINDS = (*(kind for kind, _ in _PATTERNS), OTHER)


def kind_of(name: str) -> str:
    """Return one of `KINDS`."""
    lowered = name.lower()
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, lowered)), OTHER)


def by_kind(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of times by kind; every kind is present."""
    sums = dict.fromkeys(KINDS, 0.0)
    for name, seconds in times:
        sums[kind_of(name)] += seconds
    return sums
