"""Compile forms of kernels for a Hopper GPU, without having one: each kernel in one form, or `everything`.

For a process that does not interpret kernels: the compiler rejects some code that the interpreter
accepts, such as a variable that changes its type within a loop. Gluon has no interpreter.
"""

import itertools
import re
from collections import defaultdict

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import target_info

from roseinfer.kernels.attention import prefill_bulk
from roseinfer.kernels.attention.decode_few_kernel import few_kernel, merge_kernel
from roseinfer.kernels.comm.pieces import add_piece_kernel, meet_kernel
from roseinfer.kernels.comm.push_blocks import push_blocks_kernel
from roseinfer.kernels.comm.push_words import push_words_kernel
from roseinfer.kernels.delta import chunks, scan, scan_bulk, solve, windows
from roseinfer.kernels.delta.decode import delta_decode_kernel
from roseinfer.kernels.experts import pair_order, route, tile_kernels
from roseinfer.kernels.experts.few_tokens_kernel import down_kernel, gate_up_kernel
from roseinfer.kernels.experts.route_many import route_choice_kernel, route_products_kernel
from roseinfer.kernels.linear import int4_bulk
from roseinfer.kernels.linear.int4_tiles import int4_tile_kernel, int4_widening_kernel
from roseinfer.kernels.linear.normed_product import normed_product_kernel
from roseinfer.kernels.linear.skinny_direct import skinny_direct_kernel
from roseinfer.kernels.linear.skinny_fp8_configs import slices
from roseinfer.kernels.linear.skinny_int4 import skinny_int4_kernel
from roseinfer.kernels.linear.skinny_kernel import skinny_kernel
from roseinfer.kernels.linear.skinny_pairs import skinny_pairs_kernel
from roseinfer.kernels.lora.expand_tiles import lora_expand_kernel, lora_gated_kernel
from roseinfer.kernels.lora.shrink_tiles import lora_tiles_kernel
from roseinfer.kernels.sampling import draft_chains
from tests.helpers.skinny import CONFIGS

NVFP4 = "nvfp4"
SCALE_TYPES = {"int4": "*i32", NVFP4: "*i16", "mxfp4": "*u8"}  # of weights in four bits
FACTORED = ("channel", NVFP4)
TARGET = GPUTarget("cuda", 90, 32)


def _target() -> GPUTarget:
    return TARGET


# Some kernels ask for the present GPU while they are compiled.
_target.__triton_builtin__ = True
target_info.current_target = _target
NUMBERS = ("rows", "tokens", "width", "stride_x", "stride_residual", "stride_out")
SCALARS = dict.fromkeys(NUMBERS, "i32") | {"eps": "fp32"}
SCALARS |= dict.fromkeys(
    ("pairs", "count", "chunk", "rounds", "out_stride", "blocks", "flags", "meetings", "piece"), "i32"
)
SCALARS |= dict.fromkeys(("places", "stride", "x_stride", "scale_stride", "x_scale_stride", "h_scale_stride"), "i32")
SCALARS |= {"out_scale_stride": "i32"}
INTEGERS = ("ids_ptr", "pairs_ptr", "tiles_ptr")
DELTA_TENSORS = (
    "mixed_ptr",
    "z_ptr",
    "gates_ptr",
    "window_ptr",
    "kept_ptr",
    "out_ptr",
    "heads_ptr",
    "own_ptr",
    "read_ptr",
)
DELTA_STRIDES = (
    "mixed_stride",
    "z_stride",
    "gates_stride",
    "memory_stride",
    "window_stride",
    "kept_stride",
    "num_rows",
)
# What a product of few rows adds for adapters.
DELTA = dict.fromkeys(("slots_ptr", "ranks_ptr", "starts_ptr", "arrived_ptr"), "*i32")
DELTA |= {"sums_ptr": "*fp32", "lead_x_ptr": "*bf16", "a_ptr": "*bf16", "b_ptr": "*bf16"}
SLOT_SIZES = {"RANK": 32, "R": 32, "PLACES": 32, "COLUMNS": 96, "LEAD": 2, "CHUNK": 64}
# Matrices of which a program cannot hold its part.
MANY_PLACES = SLOT_SIZES | {"ROWS": 16, "RANK": 512, "PLACES": 512, "COLUMNS": 1536}
BETWEEN = {"bases_ptr": "*i64", "calls_ptr": "*i32", "patience_ptr": "*i64", "lost_ptr": "*i32", "missed_ptr": "*i32"}


# Each form that is asked for, by kernel: constants, types of pointers, and how many products a Gluon kernel has.
wanted = defaultdict(list)
# Names of the compiled kernels that end products.
ended = []


def read(kernel, constants, pointers, products=None) -> None:
    """Add a form to those that are wanted. The last one of a kernel has most of what it can do."""
    wanted[kernel].append((constants, pointers, products))


def compiled(kernel, constants, pointers, products, *, everything: bool) -> None:
    """Compile to Triton's intermediate form, and if `everything` to products of matrix units. Raises the compiler's
    errors.
    """
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    absent = {param.name: param.default for param in kernel.params if param.has_default and param.name not in pointers}
    constants = absent | constants
    kinds = {name: pointers.get(name, SCALARS.get(name, "*bf16")) for name in kernel.arg_names}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind[0] == "*" or (kind == "i32" and "stride" in name)]
    multiples = {places[name]: [["tt.divisibility", 16]] for name in aligned}  # as of tensors
    source = make(kernel, signature, {places[name]: value for name, value in constants.items()}, multiples)
    backend = make_backend(TARGET)
    options = backend.parse_options({"num_warps": 4})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    tools = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(TARGET, options, *tools, context)
    assert module.verify()
    assert products in (None, str(module).count("warp_group_dot ")), (kernel, str(module).count("warp_group_dot "))
    if everything and "tt.dot " in str(module):
        stages, metadata = {}, {}
        backend.add_stages(stages, options, Language.TRITON)
        for stage in ("ttir", "ttgir"):
            module = stages[stage](module, metadata)
        check_that_products_end(kernel.__name__, str(module))


def check_that_products_end(name: str, module: str) -> None:
    """Check that a kernel whose products read registers, and run on into a loop's next turn, ends them there.

    See `kernels.common.matrix_units`. A wait that leaves some pending shows such products.
    """
    from_registers = re.search(r"warp_group_dot [^\n]*isAsync = true[^\n]* : tensor<[^*\n]*opIdx = 0", module)
    run_on = re.search(r"warp_group_dot_wait [^\n]*pendings = [1-9]", module)
    if from_registers and run_on:
        ended.append(name)
        assert "wgmma.wait_group.sync.aligned 0" in module, f"{name}: begin each turn by `end_products`"


def forms(everything: bool, *axes):
    """Return the product of some axes; unless `everything`, a part that contains each value."""
    if everything:
        return list(itertools.product(*axes))
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]


def main(*, everything: bool) -> None:
    for config, scales, gated in forms(everything, list(CONFIGS.values()), ("none", "channel", "block"), (False, True)):
        constants = {
            "ROWS": 2,
            "K": 96,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "STAGES": config.stages,
            "PREFETCH": 2,
            "EVICTION": "",
            "NORM": "layer" if gated else "rms",
            "ACTIVATION": "silu",
            "GATED": gated,
            "HAS_BIAS": True,
            "HAS_RESIDUAL": not gated,
            "OVERLAP": True,
            "SCALES": scales,
            "DOT": config.dot,
            "SLICES": slices(config, blocks=scales == "block"),
            "PRELOAD": config.preload,
        }
        pointers = {} if scales == "none" else {"w_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
        read(skinny_kernel, constants, pointers)
        slots = MANY_PLACES if gated else SLOT_SIZES
        read(skinny_kernel, constants | slots, pointers | DELTA)
        if scales != "none":
            pairs = {"K": 256, "BLOCK_N": 4, "BLOCK_K": 128, "NORM": "rms", "STAY": True, "COMPILED": True}
            small = {"SMALL_PROGRAMS": 3, "SMALL_ROWS": 2, "SMALL_COLUMNS": 128}
            taken = {"small_w_ptr": "*bf16", "small_out_ptr": "*bf16", "small_width": "i32"}
            read(skinny_pairs_kernel, constants | pairs | small, pointers | taken)
            read(skinny_pairs_kernel, constants | pairs | slots | {"ROWS": 2}, pointers | DELTA)
    read_direct(False)
    read_direct(True)
    read_normed_product()
    for group in (32, 128):
        read_int4(group)
    read_int4(64, nvfp4=True)
    for many, fp8 in itertools.product((False, True), (False, True)):
        read_few(many, fp8)
    read_chains()
    for dtype, aligned in forms(everything, ("*bf16", "*fp32"), (False, True)):
        read_lora(dtype, aligned)
    read_lora("*bf16", False, codes=True)
    for dtype, gathers in forms(everything, ("*bf16", "*fp32"), (False, True)):
        pointers = BETWEEN | dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr"), dtype)
        constants = {"RANK": 1, "SIZE": 3, "BLOCK": 512, "HAS_RESIDUAL": True, "OVERLAP": True, "COMPILED": True}
        read(push_words_kernel, constants | {"ROOM": 1024}, pointers)
        read(push_blocks_kernel, constants | {"REGION": 8192, "PROGRAMS": 4, "GATHERS": gathers}, pointers)
    read(meet_kernel, {"RANK": 1, "SIZE": 2, "COMPILED": True}, BETWEEN)
    pointers = BETWEEN | dict.fromkeys(("x_ptr", "residual_ptr", "out_ptr"), "*bf16")
    read(add_piece_kernel, {"RANK": 1, "SIZE": 2, "BLOCK": 4096, "HAS_RESIDUAL": True}, pointers)
    for scales, (hidden, top_k) in forms(everything, ("none", "channel", "block", "none"), ((256, 4), (384, 3))):
        read_experts(scales, hidden, top_k)
    for scales, weight_first, gathers in (("none", False, True), ("none", True, False), ("channel", False, False)):
        read_tiles(scales, weight_first, gathers)
    read_tiles("block", True, True)
    for scales in SCALE_TYPES:
        read_tiles(scales, False, False)
        read_tiles(scales, True, False)
        read_tiles(scales, True, True)  # the last form is compiled by default: it waits for products
    read_experts("mxfp4", 256, 4)
    read_experts("int4", 256, 4)
    read_experts("nvfp4", 256, 4)
    for padded, count in ((32, 128), (256, 64)):
        read_order(padded, count)
    read_delta("*bf16", "tf32")
    read_delta("*fp32", "tf32x3")
    read_bulk()
    for kernel, known in wanted.items():
        for form in known if everything else known[-1:]:
            compiled(kernel, *form, everything=everything)
    assert not everything or {"gate_up_kernel", "down_kernel", "int4_tile_kernel", "lora_tiles_kernel"} == {*ended}, (
        "the check finds none"
    )


def read_bulk() -> None:
    """Compile prompt attention and products by four bits whose blocks are copied in bulk."""
    for group, head_dim, block_size, in_order, sinks in (
        (4, 128, 16, False, False),
        (1, 64, prefill_bulk.BLOCK_N, True, True),
    ):
        page = f"tensordesc<bf16[{block_size}, 64],{prefill_bulk._TILE!r}>"
        queries = f"tensordesc<bf16[{64 // group}, {group}, 64],{prefill_bulk._QUERIES!r}>"
        types = {"queries": queries, "k_pages": page, "v_pages": page, "scale": "fp32"}
        types |= {"sinks": "*fp32" if sinks else "*bf16"}
        types |= dict.fromkeys(("items", "table_stride", "block_rows"), "i32")
        types |= dict.fromkeys(("tables", "table_rows", "query_start", "context_len", "block_map"), "*i32")
        sizes = {"KV_HEADS": 2, "GROUP": group, "D": head_dim, "BLOCK_SIZE": block_size, "IN_ORDER": in_order}
        sizes |= {"BLOCK_M": prefill_bulk.BLOCK_M, "BLOCK_N": prefill_bulk.BLOCK_N, "STAGES": prefill_bulk.STAGES}
        # Scores and sums: of the first tile and the last, of masked tiles and of others; for both groups of warps.
        read(prefill_bulk._bulk_kernel, sizes | {"SINKS": sinks}, types, products=12)
    for group, dtype, rows, outs, turns, shares, products in (
        (32, "fp16", 16, 1, 1, 2, 2),
        (128, "bf16", 64, 2, 1, 1, 4),
        (64, "bf16", 16, 1, 4, 2, 4),
        (512, "bf16", 128, 3, 1, 2, 6),
        (NVFP4, "fp16", 16, 1, 2, 2, 4),
        (NVFP4, "bf16", 128, 3, 1, 2, 6),
    ):
        types = {"x_blocks": f"tensordesc<{dtype}[{rows}, 128],{int4_bulk._X_LAYOUT!r}>"}
        types |= {"w_blocks": f"tensordesc<u8[64, 64],{int4_bulk._W_LAYOUT!r}>"}
        types |= {"s_blocks": f"tensordesc<i32[1, 64],{int4_bulk._SCALES_LAYOUT!r}>"}
        types |= {"bias_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "parts_ptr": "*fp32", "arrived_ptr": "*i32"}
        types |= {"factors_ptr": "*fp32"}
        sizes = {"N": 200, "K": 1024, "GROUP": 64 if group == NVFP4 else group, "E2M1": group == NVFP4, "ROWS": rows}
        sizes |= {"OUT_GROUPS": outs, "COLUMN_GROUPS": turns, "SHARES": shares, "X_STAGES": 3, "W_STAGES": 4}
        sizes |= {"REGISTERS": 160, "HAS_BIAS": True, "ADD": True, "OVERLAP": True}
        read(int4_bulk.int4_bulk_kernel, sizes, types | {"out_stride": "i32"}, products)


def read_delta(dtype, precision) -> None:
    """Compile gated DeltaNet of a token, and in pieces."""
    numbers = ("conv_ptr", "decay_ptr", "dt_bias_ptr", "norm_ptr", "memory_ptr", "decays_ptr")
    pointers = dict.fromkeys(numbers, "*fp32") | dict.fromkeys(("rows_ptr", "pieces_ptr"), "*i32")
    pointers |= dict.fromkeys(DELTA_TENSORS, dtype) | dict.fromkeys(DELTA_STRIDES, "i32")
    constants = {
        "HK": 2,
        "HV": 6,
        "D": 128,
        "TAPS": 4,
        "RING": 10,
        "DRAFTS": True,
        "SHARES_PROGRAMS": True,
        "SIZE": 64,
        "WIDTH": 32,
        "C": 1280,
        "BLOCK": 256,
    }
    constants |= {"PRECISION": precision, "OVERLAP": True}
    kernels = (chunks.prepare_kernel, scan.scan_kernel, chunks.gated_norm_kernel, windows.window_kernel)
    for kernel in (delta_decode_kernel, *kernels):
        read(kernel, constants, pointers)
    blocks = constants | {"BLOCK": solve.INVERTED_BLOCK_ROWS}
    matrix = pointers | {"lower_ptr": "*fp32"}
    read(solve.invert_kernel, blocks, matrix)
    for kernel in (solve.pairs_kernel, solve.solve_kernel):
        read(kernel, blocks, matrix)
        if dtype == "*bf16":
            read(kernel, blocks | {"PRECISION": "parts"}, matrix)
    read(delta_decode_kernel, constants | {"DRAFTS": False, "SHARES_PROGRAMS": False}, pointers)
    tile = f"tensordesc<bf16[64, 64],{scan_bulk._TILE!r}>"
    gates = f"tensordesc<fp32[64, 4],{scan_bulk._DECAY_TILE!r}>"
    blocks = dict.fromkeys(("heads", "reads", "owns", "withins"), tile) | {"decays": gates}
    types = {name: pointers[name] for name in ("memory_ptr", "rows_ptr", "pieces_ptr", "memory_stride", "num_rows")}
    types |= blocks | {"out_ptr": "*bf16"}
    for width in (64, 128):
        sizes = constants | {"D": width, "STAGES": scan_bulk.STAGE_COUNT}
        read(scan_bulk.scan_bulk_kernel, sizes, types, products=8)


def read_direct(gated) -> None:
    """Compile products of 8 or 16 rows whose weight goes to registers, with blocks loaded ahead or not."""
    constants = {
        "ROWS": 16 if gated else 8,
        "K": 1024,
        "GROUP": 0,
        "scales_ptr": None,
        "BLOCK_N": 16,
        "BLOCK_K": 512,
        "AHEAD": not gated,
        "ACTIVATION": "silu",
        "GATED": gated,
        "HAS_BIAS": True,
        "HAS_RESIDUAL": not gated,
        "OVERLAP": True,
        "WARPS": 4,
    }
    read(skinny_direct_kernel, constants, {})
    read(skinny_direct_kernel, constants | SLOT_SIZES, DELTA)


def read_normed_product() -> None:
    """Compile a small product, with columns that end within a share."""
    sizes = {"N": 40, "K": 700, "TILE": 16, "SHARE": 256, "SHARES": 3, "OVERLAP": True}
    pointers = {"norm_ptr": "*fp32", "parts_ptr": "*fp32", "arrived_ptr": "*i32"}
    read(normed_product_kernel, sizes, pointers)


def read_int4(group, *, nvfp4=False) -> None:
    """Compile products by codes of four bits, with columns that end within a block."""
    pointers = dict.fromkeys(("w_ptr", "scales_ptr"), "*i32") | ({"factors_ptr": "*fp32"} if nvfp4 else {})
    constants = {
        "ROWS": 2,
        "K": 480,
        "GROUP": group,
        "BLOCK_N": 8,
        "BLOCK_K": 256,
        "STAGES": 2,
        "EVICTION": "",
        "NORM": group == 32,
        "ACTIVATION": "silu",
        "GATED": group == 32,
        "HAS_BIAS": True,
        "HAS_RESIDUAL": group != 32,
        "OVERLAP": True,
        "STAY": True,
        "COMPILED": True,
    }
    read(skinny_int4_kernel, constants | ({} if group == 32 else {"norm_weight_ptr": None}), pointers)
    for slots in (SLOT_SIZES, MANY_PLACES | {"ROWS": constants["ROWS"]}):
        read(skinny_int4_kernel, constants | slots, pointers | DELTA)
    pointers |= {"w_ptr": "*u8", "columns": "i32", "N": "i32", "outs": "i32"}
    direct = {"ROWS": 8, "BLOCK_N": 16, "BLOCK_K": 512, "AHEAD": True, "WARPS": 4}
    read(skinny_direct_kernel, constants | direct, pointers)
    read(skinny_direct_kernel, constants | direct | SLOT_SIZES, pointers | DELTA)
    read(int4_widening_kernel, constants | {"K": 512, "BLOCK_K": 512}, pointers)
    tiles = {"N": 200, "K": 512, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "SHARES": 2, "ADD": group == 32}
    tiles |= {"WEIGHT_FIRST": group == 32, "PREFETCH": 256}
    blocks = {"x_blocks": "tensordesc<bf16[16, 128]>", "w_blocks": "tensordesc<u8[64, 64]>", "parts_ptr": "*fp32"}
    if group != 32:
        tiles["BLOCK_M"], blocks["x_blocks"] = 64, "tensordesc<bf16[64, 128]>"
    read(int4_tile_kernel, constants | tiles, pointers | blocks | {"arrived_ptr": "*i32"})


def read_lora(dtype, aligned, *, codes=False) -> None:
    """Compile what adapters add in kernels of their own, for a width that ends within a block. codes: inputs of many
    rows are in FP8, and outputs of gates.
    """
    sizes = SLOT_SIZES | {"K": 200, "OUT": 400, "SLOTS": 3, "SHARES": 2, "PARTS": 2, "AT_ONCE": 2, "GROUPED": codes}
    sizes |= {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 128, "BLOCK_R": 16, "BLOCK_C": 64, "STAGES": 3}
    sizes |= {"ALIGNED": aligned, "ACTIVATION": "silu", "PRECISION": "ieee", "COMPILED": True}
    sizes |= {"OVERLAP": True}
    pointers = DELTA | dict.fromkeys(("x_ptr", "a_ptr", "b_ptr", "y_ptr", "sums_ptr"), dtype)
    pointers |= {"stride_y": "i32", "parts_ptr": "*fp32", "scales_ptr": "*fp32"}
    read(lora_expand_kernel, sizes, pointers)
    sizes |= {} if codes else {"scales_ptr": None}
    of_codes = {"x_ptr": "*fp8e4nv"} if codes else {}
    if codes:
        by_rows = sizes | {"GROUPED": False, "BLOCK_M": 64, "K": 1024}
        read(lora_tiles_kernel, by_rows, pointers | {"out_ptr": dtype} | of_codes)
    read(lora_tiles_kernel, sizes, pointers | {"out_ptr": dtype} | of_codes)
    read(lora_gated_kernel, sizes, pointers | {"out_ptr": "*fp8e4nv" if codes else dtype})


def read_few(many, fp8) -> None:
    """Compile attention of few rows with one query or several, and windows with several."""
    constants = {
        "KV_HEADS": 2,
        "GROUP": 4,
        "MANY": many,
        "QUERIES": 4 if many else 1,
        "D": 80,
        "D_PAD": 128,
        "BLOCK_SIZE": 16,
        "TILE": 32,
        "WINDOW": 40 if many or fp8 else 0,
        "SKIPS_FIRST": fp8 and not many,
        "STAGES": 3,
        "NORM": 1,
        "ROTATE": True,
        "ROTATED": 80,
        "INTERLEAVED": fp8,
        "FP8": fp8,
        "SINKS": fp8,
        "COMPILED": True,
        "OVERLAP": True,
    }
    tables = ("queries_cos_sin", "keys_cos_sin", "k_scales", "v_scales", "sinks", "sums", "peaks")
    pointers = dict.fromkeys(tables, "*fp32") | {"slots": "*i64", "scale": "fp32"}
    pointers |= dict.fromkeys(("tables", "table_rows", "context_len", "query_start", "arrived"), "*i32")
    pointers |= dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv" if fp8 else "*bf16")
    pointers |= dict.fromkeys(("parts", "rows", "budget", "qkv_stride", "block_stride", "table_stride"), "i32")
    read(few_kernel, constants if fp8 else constants | dict.fromkeys(("k_scales", "v_scales", "sinks")), pointers)
    if many:
        sizes = ("HEADS", "QUERIES", "D", "D_PAD", "TILE", "WINDOW", "OVERLAP")
        read(merge_kernel, {name: constants.get(name, 8) for name in sizes}, pointers)


def read_chains() -> None:
    """Compile chains of drafts, with a vocabulary that takes several blocks."""
    constants = {"DRAFTS": 4, "HIDDEN": 96, "BLOCK": 128, "BLOCK_SIZE": 16, "MOST": 7}
    numbers = (
        "columns",
        "num_samples",
        "count",
        "spare",
        "group_stride",
        "tables_stride",
        "slots_stride",
        "width",
        "logits_stride",
    )
    pointers = dict.fromkeys(("sampled", "tokens", "positions", "slots", "ends", "drafts"), "*i64")
    pointers |= dict.fromkeys(("drafted", "target_ids"), "*i64") | {"settings": "*fp64", "chances": "*fp32"}
    pointers |= dict.fromkeys(("layout", "seats", "ahead", "made", "next_position", "tables", "rows"), "*i32")
    pointers |= {"context_len": "*i32", "logits_stride": "i32"} | dict.fromkeys(numbers, "i32")
    for kernel in (
        draft_chains.begin_chains_kernel,
        draft_chains.prepare_chains_kernel,
        draft_chains.end_chains_kernel,
    ):
        read(kernel, constants, pointers)


def read_order(padded, chunks) -> None:
    """Compile the sorting of pairs, for slightly fewer experts than a power of two."""
    constants = {"E": padded - 3, "E_PAD": padded, "TILE": 16, "BLOCK": 64, "PLACES": 32, "CHUNKS": chunks}
    pointers = dict.fromkeys(INTEGERS, "*i32") | {"counts_ptr": "*i16"}
    for kernel in (pair_order.order_kernel, pair_order.count_kernel, pair_order.place_kernel):
        read(kernel, constants | {"OVERLAP": True}, pointers)


def read_tiles(scales, weight_first, gathers) -> None:
    """Compile experts in tiles of 64 rows, with widths that end within a block unless they have codes."""
    four_bits = scales in SCALE_TYPES
    codes = "*bf16" if four_bits or scales == "none" else "*fp8e4nv"
    width = {"none": 200, "mxfp4": 224, "nvfp4": 224}.get(scales, 256)
    constants = {
        "TOP_K": 3,
        "N": width,
        "K": width,
        "BLOCK_M": 64,
        "BLOCK_N": 128,
        "BLOCK_K": 128,
        "STAGES": 3,
        "SCALES": scales,
        "ACTIVATION": "clamped_swish" if scales == "mxfp4" else "silu",
        "HAS_BIAS": scales == "mxfp4",
        "COMPILED": True,
        "WEIGHT_FIRST": weight_first,
        "GATHER": gathers,
        "HALVES": gathers,
        "EARLY": weight_first,
        "OVERLAP": True,
    }
    block = f"tensordesc<{codes[1:]}[64, 128]>"
    pointers = dict.fromkeys(INTEGERS, "*i32") | {"weights_ptr": "*fp32", "w_blocks": block.replace("64", "128")}
    constants["GROUP"] = 32 if four_bits else 0
    if four_bits:
        pointers["w_blocks"] = "tensordesc<i32[128, 16]>"
    if scales != "mxfp4":
        constants["bias_ptr"] = None
    pointers |= {"x": codes if gathers else block, "x_blocks": block, "h_ptr": codes}
    if gathers:
        pointers["half_blocks"] = block.replace("64", "32")
    else:
        constants["half_blocks"] = None
    scaled = ("x_scales_ptr", "w_scales_ptr", "h_scales_ptr")
    if scales == "none":
        constants |= dict.fromkeys(scaled)
    elif four_bits:
        constants |= dict.fromkeys(("x_scales_ptr", "h_scales_ptr"))
        pointers["w_scales_ptr"] = SCALE_TYPES[scales]
    else:
        pointers |= dict.fromkeys(scaled, "*fp32")
    if scales in FACTORED:
        pointers["factors_ptr"] = "*fp32"
    read(tile_kernels.gate_up_kernel, constants, pointers)
    read(tile_kernels.down_kernel, constants, pointers)
    if gathers and not four_bits:
        scaled = dict.fromkeys(("scales_ptr", "out_scales_ptr"), "*fp32")
        groups = {"BLOCK": 128, "GROUPS": 0 if scales == "none" else 2}
        read(tile_kernels.spread_kernel, constants | groups, dict.fromkeys(INTEGERS, "*i32") | scaled)
        read(tile_kernels.sum_kernel, constants | groups | {"HAS_RESIDUAL": True}, {})


def read_experts(scales, hidden, top_k) -> None:
    constants = {
        "E": 20 if top_k == 4 else 200,
        "E_PAD": 32 if top_k == 4 else 256,
        "TOP_K": top_k,
        "SHARED": top_k == 3,
        "K_PAD": 4,
        "H": hidden,
        "WIDTH": hidden,
        "BLOCK_N": 4,
        "BLOCK_K": 128 if hidden == 384 else 512,
        "SHARED_BLOCK_K": 256,
        "BLOCK_E": 16,
        "TOKENS": 16 if top_k == 4 else 64,
        "LANES": 8,
        "SPLITS": 2,
        "SPAN": 128 if hidden == 256 else 256,
        "ROWS": 2,
        "GROUPS": 2 if hidden == 256 else 4,
        "CHOSEN": 16,
        "TILES": 2,
        "STAGES": 2,
        "AHEAD": 1,
        "EVICTION": "",
        "ACTIVATION": "silu",
        "RENORMALISE": top_k == 3,
        "HAS_BIAS": top_k == 4,
        "NORMED": "codes" if hidden == 256 else "plain",
        "HAS_RESIDUAL": True,
        "SCALES": scales,
        "GROUP": 32 if scales in SCALE_TYPES else 16 if scales != "none" else 8,
        "SCALE_COLUMNS": 32,
        "COMPILED": True,
        "OVERLAP": True,
    }
    pointers = dict.fromkeys(("logits_ptr", "rstd_ptr", "weights_ptr", "scales_ptr"), "*fp32")
    pointers |= dict.fromkeys(("sums_ptr", "factors_ptr", "scale_ptr"), "*fp32")
    if top_k != 4:
        constants["bias_ptr"] = None
    pointers |= dict.fromkeys(("arrived_ptr", "ids_ptr"), "*i32")
    if scales in SCALE_TYPES:
        pointers |= {"w_ptr": "*u8", "scales_ptr": SCALE_TYPES[scales]}
    elif scales != "none":
        pointers["w_ptr"] = "*fp8e4nv"
    elif constants["NORMED"] == "codes":
        pointers["normed_ptr"] = "*fp8e4nv"
    routers = (route.logits_kernel, route.route_kernel, route_products_kernel, route_choice_kernel)
    if scales == "none":
        for kernel in routers:
            read(kernel, constants, pointers)
        constants = constants | {"scales_ptr": None}
    if scales not in FACTORED:
        pointers = {name: kind for name, kind in pointers.items() if name != "factors_ptr"}
    for kernel in (gate_up_kernel, down_kernel):
        read(kernel, constants, pointers)
