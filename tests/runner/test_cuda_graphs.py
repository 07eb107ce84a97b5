"""CUDA graphs, padding and fused inputs, compared with plain execution of the same steps."""

import json
from pathlib import Path

import pytest
import torch

from roseinfer.attention.kv_store import KVStore
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.plan import Admission, BlockCopy, Row, StepPlan
from roseinfer.core.sampling import SequenceParams
from roseinfer.runner import assembly
from roseinfer.runner.build import BuiltRunner, build_runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 3001,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 3001,
    "n_embd": 256,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 512,
    "activation_function": "gelu_new",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
# Shorter than most contexts here, and not a multiple of a block or a tile.
MISTRAL = {**QWEN3, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 41}
MIXED_WINDOWS = {**QWEN3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
MIXTURE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
SEATS, BLOCK, BLOCKS = 12, 16, 160


def build(folder: Path, shape: dict, *, dtype: str = "float32", **model: object) -> BuiltRunner:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    config = EngineConfig(
        model=ModelConfig(load_format="dummy", device="cuda", dtype=dtype, max_model_len=256, **model),
        # The script's plans have one block table for each request.
        cache=CacheConfig(block_size=BLOCK, num_kv_blocks=BLOCKS, enable_window_groups=False),
        scheduler=SchedulerConfig(max_num_seqs=SEATS, max_num_batched_tokens=128),
    )
    return build_runner(config, folder)


class Script:
    """The same work for any runner: prompts of odd lengths that join in chunks while others decode."""

    def __init__(self, built: BuiltRunner, depth: int, params: SequenceParams) -> None:
        self.runner = built.runner
        self.depth = depth
        self.params = params
        self.step = 0
        self.pending: list = []
        self.texts: dict[int, list[int]] = {}

    def run(self, chunk: int = 48) -> dict[int, list[int]]:
        lengths = {seat: 1 + (seat * 37) % 90 for seat in range(SEATS)}
        at: dict[int, int] = {}
        for turn in range(40):
            joining = [turn // 2] if turn % 2 == 0 and turn // 2 < SEATS else []
            rows, admitted = [], []
            for seat in [*at, *joining]:
                if seat in joining:
                    admitted.append(self.admission(seat, lengths[seat]))
                    at[seat] = 0
                count = max(1, min(chunk, lengths[seat] - at[seat]))
                sample = at[seat] + count >= lengths[seat]
                rows.append(Row(f"r{seat}", seat, at[seat], count, int(sample), sample, at[seat], 0, ()))
                at[seat] += count
            copies = [BlockCopy(BLOCKS - 1, BLOCKS - 2, 1 + turn % BLOCK)] if turn % 3 == 0 else []
            self.submit(StepPlan(self.step, rows, admitted, copies))
        while self.pending:
            self._collect()
        self.submit(StepPlan(self.step, [], released=list(at)))
        while self.pending:
            self._collect()
        return self.texts

    def admission(self, seat: int, length: int) -> Admission:
        blocks = tuple(range(13 * seat, 13 * (seat + 1)))
        prompt = [(7 * seat + 13 * i) % 2999 + 1 for i in range(length)]
        return Admission(f"r{seat}", seat, prompt, length, self.params, 100 + seat, (), blocks)

    def submit(self, plan: StepPlan) -> None:
        handle = self.runner.submit(plan)
        self.runner.sample(handle)
        self.pending.append(handle)
        self.step += 1
        if len(self.pending) >= self.depth:
            self._collect()

    def _collect(self) -> None:
        for row in self.runner.collect(self.pending.pop(0)).rows:
            self.texts.setdefault(int(row.request_id[1:]), []).extend(row.token_ids)


GREEDY = SequenceParams(max_tokens=200, temperature=0.0, ignore_eos=True)
DRAWN = SequenceParams(max_tokens=200, temperature=1.0, ignore_eos=True)


@pytest.mark.parametrize("shape", [QWEN3, GPT2, MISTRAL, MIXED_WINDOWS], ids=["qwen3", "gpt2", "mistral", "windows"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_graphs_equal_eager_equal_torch(tmp_path, shape, params):
    """Use float32, where different kernels still agree on every token."""
    graphs = Script(build(tmp_path, shape), 2, params).run()
    eager = Script(build(tmp_path, shape, enforce_eager=True), 1, params).run()
    torch_backend = Script(build(tmp_path, shape, attention_backend="torch"), 1, params).run()
    assert graphs == eager == torch_backend


@pytest.mark.parametrize("shape", [QWEN3, MISTRAL], ids=["qwen3", "mistral"])
def test_chunks_of_any_size_give_the_same_text(tmp_path, shape):
    built = build(tmp_path, shape)
    texts = [Script(built, 2, GREEDY).run(chunk) for chunk in (100, 5)]
    shortest = {seat: min(len(text[seat]) for text in texts) for seat in range(SEATS)}
    first, second = ({seat: text[seat][: shortest[seat]] for seat in shortest} for text in texts)
    assert first == second and sum(shortest.values()) > 100


@pytest.mark.parametrize("shape", [QWEN3, MIXED_WINDOWS, MIXTURE], ids=["qwen3", "windows", "experts"])
def test_steady_state_neither_waits_nor_compiles(tmp_path, shape):
    from triton import knobs

    built = build(tmp_path, shape, dtype="bfloat16")
    compiled = []
    knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(what["fn"].name)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for params in (GREEDY, DRAWN):
            Script(built, 2, params).run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_padding_rows_and_replays_leave_other_blocks_alone(tmp_path, monkeypatch):
    stores: list[KVStore] = []
    monkeypatch.setattr(assembly, "KVStore", lambda *args: stores.append(KVStore(*args)) or stores[-1])
    built = build(tmp_path, QWEN3)
    store = stores[-1]  # those before it were for measurements
    store.data.fill_(7.0)
    script = Script(built, 1, GREEDY)
    admission = script.admission(3, 20)  # owns blocks 39 to 51
    script.submit(StepPlan(0, [Row("r3", 3, 0, 20, 1, True, 0, 0, ())], [admission]))
    for step in range(1, 8):
        script.submit(StepPlan(step, [Row("r3", 3, 19 + step, 1, 1, True, 19 + step, 0, ())]))
    torch.cuda.synchronize()
    owned = set(range(39, 52))
    others = [block for block in range(BLOCKS) if block not in owned]
    assert bool((store.data[others] == 7.0).all())
    assert not bool((store.data[39:41] == 7.0).all())
