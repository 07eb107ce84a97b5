"""Window groups: which blocks a prefix finds in them."""

from roseinfer.core.runner import WindowPool
from roseinfer.kv.manager import KvManager
from tests.helpers.kv_managers import kv_manager

SIZE, WINDOW, STEP = 4, 8, 60


def compute(kv: KvManager, name: str, tokens: list[int], prompt_len: int) -> int:
    """Compute all tokens of a new sequence in one step. Return how many of them it found."""
    kv.open(name)
    hit = kv.match(name, tokens)
    kv.attach(name, hit)
    assert kv.grow(name, len(tokens)) is not None
    kv.register(name, tokens, len(tokens), prompt_len)
    return hit.tokens


def test_a_prompt_whose_last_block_left_the_window_does_not_become_a_prefix_again() -> None:
    kv = kv_manager(100, SIZE, windows=(WindowPool(WINDOW, 20),), step_tokens=STEP)
    known, prompt_len = list(range(100, 160)), 3
    compute(kv, "a", known, prompt_len)
    kv.release("a")
    left = kv.windows[0].pool.num_free - WINDOW // SIZE  # all but the last window
    compute(kv, "b", list(range(4 * left)), 1)
    kv.close("b")
    assert compute(kv, "c", [*known, 1], prompt_len) == 60
    kv.open("d")
    assert kv.match("d", known[:prompt_len]).tokens == 0
    kv.check_integrity()
