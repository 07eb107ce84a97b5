"""Factors of products in registers.

Hopper's matrix units read a factor from registers after the product was issued. Triton 3.6 lets products of a loop run
on into its next turn, and waits for each one just before its registers get the next turn's factor. That holds where
they are loaded piece by piece between the products. A factor that is computed, such as a widened weight, is computed as
a whole before the first product, and overwrites registers that are still being read: results are then wrong, and differ
from run to run.
"""

from roseinfer.kernels.common.triton_support import tl, triton


@triton.jit
def end_products():
    """Wait until all products so far are done. Begin each turn of a loop that computes a factor with it.

    What the turn loads by the copy engine stays behind it, and so does what is computed from that. Only for compiled
    kernels: without a GPU, to look for one takes milliseconds a call.
    """
    if tl.target_info.cuda_capability_geq(9) and not tl.target_info.cuda_capability_geq(10):
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
