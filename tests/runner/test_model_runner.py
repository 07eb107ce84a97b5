import pytest
import torch

from roseinfer.core.plan import BlockCopy
from roseinfer.runner import forward
from tests.runner.tiny import BAD_TOKEN, VOCAB, Bench, full_logits, greedy, run

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def test_generates_what_the_whole_sequence_gives():
    bench = Bench()
    assert bench.generate(1, PROMPT, 12) == greedy(bench.model, PROMPT, 12)


@pytest.mark.parametrize("chunk", range(1, len(PROMPT) + 1))
def test_chunked_prefill_equals_whole(chunk):
    bench = Bench()
    admitted = [bench.admit(2, PROMPT)]
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        last = start + count == len(PROMPT)
        result = bench.run(admitted, [bench.row(2, start, count, sample=last)])
        admitted = []
        assert len(result.rows[0].token_ids) == int(last)
    assert list(result.rows[0].token_ids) == greedy(bench.model, PROMPT, 1)


def test_mixed_rows_equal_rows_alone():
    """Run decode rows, a chunk that samples and one that does not in one step."""
    prompts = {0: PROMPT[:5], 1: PROMPT, 2: PROMPT[::-1], 3: [7]}
    bench = Bench()
    first = bench.run(
        [bench.admit(0, prompts[0]), bench.admit(3, prompts[3])], [bench.row(0, 0, 5), bench.row(3, 0, 1)]
    )
    second = bench.run(
        [bench.admit(1, prompts[1]), bench.admit(2, prompts[2])],
        [bench.row(2, 0, 6, sample=False), bench.row(0, 5, 1), bench.row(1, 0, 11), bench.row(3, 1, 1)],
    )
    third = bench.run([], [bench.row(3, 2, 1), bench.row(2, 6, 5), bench.row(0, 6, 1), bench.row(1, 11, 1)])
    assert [r.request_id for r in second.rows] == ["r2", "r0", "r1", "r3"]
    assert second.rows[0].token_ids == ()
    tokens: dict[str, list[int]] = {}
    for result in (first, second, third):
        for row in result.rows:
            tokens.setdefault(row.request_id, []).extend(row.token_ids)
    for seat, prompt in prompts.items():
        got = tokens[f"r{seat}"]
        assert got == greedy(bench.model, prompt, len(got))


def test_decode_batch_and_mixed_batch_describe_the_same_step():
    """Compare the short path for decode steps with the general one, field by field."""
    bench = Bench()
    seats = [2, 0, 1]
    bench.run(
        [bench.admit(s, PROMPT[:n]) for s, n in zip(seats, (3, 4, 9), strict=True)],
        [bench.row(s, 0, n) for s, n in zip(seats, (3, 4, 9), strict=True)],
    )
    rows = [bench.row(s, n, 1) for s, n in zip(seats, (3, 4, 9), strict=True)]
    bench.seats.grow_tables([row for row in rows if row.new_blocks])
    columns = forward.Columns.of(rows)
    short = forward.build_batch(columns, bench.seats)
    general = forward.mixed_batch(columns, bench.seats, short.context_lens)
    (short_paging,), (general_paging,) = short.paging, general.paging
    fields = [(name, getattr(short, name), getattr(general, name)) for name in type(short).__dataclass_fields__]
    fields.append(("tables", short_paging.tables, general_paging.tables))
    fields.append(("slots", short_paging.slots, general_paging.slots))
    for name, a, b in fields:
        if name == "paging":
            continue
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b), name
        else:
            assert a == b, name
    assert short.num_decodes == len(short.query_lens)
    assert short.context_lens == [4, 5, 10]


def test_two_plans_in_flight_read_tokens_from_the_pool():
    bench = Bench()
    runner = bench.runner
    handles = []
    for step in range(6):
        admitted = [] if step else [bench.admit(0, PROMPT)]
        row = bench.row(0, 10 + step, 1) if step else bench.row(0, 0, 11)
        handle = runner.submit(bench.plan(admitted, [row]))
        runner.sample(handle)
        handles.append(handle)
    tokens = [runner.collect(handle).rows[0].token_ids[0] for handle in handles]
    assert tokens == greedy(bench.model, PROMPT, 6)


def test_write_from_protects_shared_blocks():
    """Recompute the last token of a fully cached prompt for its logits; its block belongs to another request."""
    bench = Bench()
    prompt = PROMPT[:8]
    bench.run([bench.admit(0, prompt)], [bench.row(0, 0, 8)])
    shared = tuple(bench.seats.block_tables[0, :2].tolist())
    result = bench.run([bench.admit(1, prompt, blocks=shared)], [bench.row(1, 7, 1, write_from=8)])
    assert list(result.rows[0].token_ids) == greedy(bench.model, prompt, 1)
    # A chunk across the border writes only after it.
    result = bench.run([bench.admit(2, PROMPT, blocks=shared)], [bench.row(2, 4, 7, write_from=8)])
    assert list(result.rows[0].token_ids) == greedy(bench.model, PROMPT, 1)
    # Recomputed K/V equals the stored, so only a mark shows a write.
    mark = torch.full_like(bench.store.data[list(shared)], 7.0)
    bench.store.data[list(shared)] = mark
    for seat, row in ((1, bench.row(1, 7, 1, write_from=8)), (2, bench.row(2, 4, 7, write_from=8))):
        bench.run([bench.admit(seat, PROMPT, blocks=shared)], [row], released=[seat])
        assert torch.equal(bench.store.data[list(shared)], mark)


def test_copies_come_before_the_table_and_the_forward_pass():
    """Fork a request, which appends to a copy of the parent's last block: both go on as if alone."""
    bench = Bench()
    first = bench.run([bench.admit(0, PROMPT)], [bench.row(0, 0, 11)]).rows[0].token_ids[0]
    table = bench.seats.block_tables[0, :3].tolist()
    target = bench.next_block
    bench.next_block += 1
    fork = bench.admit(1, [*PROMPT, 8], prompt_len=11, blocks=tuple(table))
    row = bench.row(1, 11, 1)._replace(table_from=2, new_blocks=(target,))
    result = bench.run([fork], [bench.row(0, 11, 1), row], [BlockCopy(table[2], target, 3)])
    assert bench.seats.block_tables[1, :3].tolist() == [*table[:2], target]
    assert list(result.rows[0].token_ids) == greedy(bench.model, [*PROMPT, first], 1)
    assert list(result.rows[1].token_ids) == greedy(bench.model, [*PROMPT, 8], 1)
    parent = bench.run([], [bench.row(0, 12, 1)]).rows[0].token_ids
    assert list(parent) == greedy(bench.model, [*PROMPT, first, *result.rows[0].token_ids], 1)


def test_several_copies_in_one_step():
    bench = Bench()
    bench.run([bench.admit(0, [*PROMPT, 7])], [bench.row(0, 0, 12)])
    before = bench.store.data.clone()
    bench.run([], [bench.row(0, 12, 1)], copies=[BlockCopy(0, 20, 4), BlockCopy(1, 21, 4), BlockCopy(2, 22, 1)])
    assert torch.equal(bench.store.data[20:22], before[0:2])
    assert torch.equal(bench.store.data[22], before[2])


SAMPLED = {
    "temperature": 1.2,
    "top_p": 0.95,
    "presence_penalty": 0.8,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.2,
    "seed": 17,
}


def test_readmission_continues_the_same_text():
    whole = Bench().generate(0, PROMPT, 14, **SAMPLED)
    for cut in (1, 5, 13):
        bench = Bench()
        assert bench.generate(3, PROMPT, cut, **SAMPLED) == whole[:cut]
        known = PROMPT + whole[:cut]
        again = bench.admit(2, known, prompt_len=len(PROMPT), **SAMPLED)
        result = bench.run([again], [bench.row(2, 0, len(known))], released=[3])
        rest = list(result.rows[0].token_ids)
        while cut + len(rest) < 14:
            at = len(known) + len(rest) - 1
            rest += bench.run([], [bench.row(2, at, 1)]).rows[0].token_ids
        assert rest == whole[cut:]


def test_a_seat_is_reused_in_the_step_that_releases_it():
    bench = Bench()
    bench.generate(0, PROMPT, 3, presence_penalty=2.0)
    admitted = bench.admit(0, PROMPT[::-1])
    result = bench.run([admitted], [bench.row(0, 0, 11)], released=[0])
    assert list(result.rows[0].token_ids) == greedy(bench.model, PROMPT[::-1], 1)


def test_a_request_may_fill_the_context():
    bench = Bench(length=12)
    result = bench.run([bench.admit(0, [*PROMPT, 1])], [bench.row(0, 0, 12)])
    assert list(result.rows[0].token_ids) == greedy(bench.model, [*PROMPT, 1], 1)


def test_a_plan_without_rows_only_changes_state():
    bench = Bench()
    bench.generate(0, PROMPT, 1)
    result = bench.run([], [], released=[0])
    assert result.rows == []
    assert bench.seats.seats[0] is None


# --- log probabilities ------------------------------------------------------------------------------------------
def test_logprobs_of_the_sampled_token():
    bench = Bench()
    result = bench.run([bench.admit(0, PROMPT, logprobs=2)], [bench.row(0, 0, 11)])
    (entry,) = result.rows[0].logprobs
    raw = full_logits(bench.model, PROMPT)[-1].log_softmax(-1)
    best = raw.sort(descending=True)
    assert (entry.token_id, entry.rank) == (int(best.indices[0]), 1)
    assert entry.logprob == pytest.approx(float(best.values[0]), abs=1e-5)
    assert [t for t, _ in entry.top] == best.indices[:2].tolist()


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 11])
def test_prompt_logprobs_are_the_same_in_chunks(chunk):
    bench = Bench()
    admitted = [bench.admit(0, PROMPT, prompt_logprobs=2), bench.admit(1, PROMPT[:3])]
    entries, beside = [], bench.row(1, 0, 3)
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        row = bench.row(0, start, count, sample=start + count == len(PROMPT), logits=count)
        result = bench.run(admitted, [beside, row])
        assert list(result.rows[0].token_ids)[:1] == list(result.rows[0].token_ids)
        admitted, beside = [], bench.row(1, 3 + start // chunk, 1)
        entries += result.rows[1].prompt_logprobs or ()
    assert list(result.rows[1].token_ids) == greedy(bench.model, PROMPT, 1)
    raw = full_logits(bench.model, PROMPT).log_softmax(-1)
    assert [e.token_id for e in entries] == PROMPT[1:]
    for position, entry in enumerate(entries):
        chosen = raw[position, entry.token_id]
        assert entry.logprob == pytest.approx(float(chosen), abs=1e-5)
        assert entry.rank == 1 + int((raw[position] > chosen).sum())
        assert [t for t, _ in entry.top] == raw[position].topk(2).indices.tolist()


def test_prompt_logprobs_in_slices_of_a_chunk(monkeypatch):
    monkeypatch.setattr("roseinfer.runner.logprobs.MAX_SCORED_POSITIONS", 3)
    monkeypatch.setattr("roseinfer.runner.device.MAX_CPU_SLICE_ELEMENTS", 2 * VOCAB)
    bench = Bench()
    admitted = [bench.admit(0, PROMPT, prompt_logprobs=0)]
    result = bench.run(admitted, [bench.row(0, 0, 11, logits=11)])
    raw = full_logits(bench.model, PROMPT).log_softmax(-1)
    expected = [float(raw[i, t]) for i, t in enumerate(PROMPT[1:])]
    assert [e.logprob for e in result.rows[0].prompt_logprobs] == pytest.approx(expected, abs=1e-5)


def test_no_prompt_logprobs_past_the_prompt():
    bench = Bench()
    known = [*PROMPT, 8, 8, 8]
    admitted = [bench.admit(0, known, prompt_len=11, prompt_logprobs=0)]
    result = bench.run(admitted, [bench.row(0, 0, 14, logits=14)])
    assert [e.token_id for e in result.rows[0].prompt_logprobs] == PROMPT[1:]
    assert bench.run([], [bench.row(0, 14, 1)]).rows[0].prompt_logprobs is None


# --- errors -----------------------------------------------------------------------------------------------------
def test_a_row_that_is_not_finite_ends_alone():
    bench = Bench(bad=True)
    bad = [1, 2, BAD_TOKEN, 3]
    result = bench.run(
        [bench.admit(0, PROMPT), bench.admit(1, bad), bench.admit(2, PROMPT[:3])],
        [bench.row(0, 0, 11), bench.row(1, 0, 4), bench.row(2, 0, 3)],
    )
    assert "not finite" in result.rows[1].error
    assert result.rows[1].token_ids == ()
    assert [list(result.rows[i].token_ids) for i in (0, 2)] == [
        greedy(bench.model, PROMPT, 1),
        greedy(bench.model, PROMPT[:3], 1),
    ]
    # Its next step was submitted already: an error again, while other requests continue.
    again = bench.run([], [bench.row(1, 4, 1), bench.row(0, 11, 1)])
    assert again.rows[0].error
    assert list(again.rows[1].token_ids) == greedy(bench.model, PROMPT, 2)[1:]


def test_blocks_of_a_failed_request_are_safe_for_the_next_owner():
    bench = Bench(bad=True)
    bench.run([bench.admit(0, [2, 3, 4, BAD_TOKEN])], [bench.row(0, 0, 4)])
    block = int(bench.seats.block_tables[0, 0])
    assert bench.store.data[block].isnan().any()
    admitted = bench.admit(0, PROMPT[:2], blocks=(block,))
    result = bench.run([admitted], [bench.row(0, 0, 2)], released=[0])
    assert list(result.rows[0].token_ids) == greedy(bench.model, PROMPT[:2], 1)


def test_a_failed_request_leaves_shared_blocks_as_they_are():
    """A request that began from the same values must not get an answer that ignores them."""
    bench = Bench(bad=True)
    prefix = [1, 2, BAD_TOKEN, 3]
    bench.run([bench.admit(0, [*prefix, 4])], [bench.row(0, 0, 4, sample=False)])
    (shared,) = range(bench.next_block)
    sharing = bench.admit(1, [*prefix, 5], blocks=(shared,))
    bench.run([sharing], [bench.row(0, 4, 1)])
    result = bench.run([], [bench.row(1, 4, 1)], released=[0])
    assert "not finite" in result.rows[0].error


def test_prompt_chunk_that_is_not_finite_ends_alone():
    bench = Bench(bad=True)
    admitted = [bench.admit(0, [1, BAD_TOKEN, 3], prompt_logprobs=1), bench.admit(1, PROMPT)]
    result = bench.run(admitted, [bench.row(0, 0, 2, sample=False, logits=2), bench.row(1, 0, 11)])
    assert "not finite" in result.rows[0].error
    assert result.rows[1].error is None


@pytest.mark.parametrize(
    ("tokens", "params"),
    [
        ([1, VOCAB], {}),
        ([1, -1], {}),
        ([1, 2], {"logit_bias": ((VOCAB, 1.0),)}),
        ([1, 2], {"allowed_token_ids": (3, VOCAB)}),
        ([1, 2], {"bad_token_ids": ((3, VOCAB),)}),
    ],
)
def test_unusable_ids_end_their_request_alone(tokens, params):
    bench = Bench()
    admitted = [bench.admit(0, tokens, presence_penalty=0.5, **params), bench.admit(1, PROMPT)]
    result = bench.run(admitted, [bench.row(0, 0, 2), bench.row(1, 0, 11)])
    assert "vocabulary" in result.rows[0].error
    assert list(result.rows[1].token_ids) == greedy(bench.model, PROMPT, 1)
    # The seat works for the next request.
    result = bench.run([bench.admit(0, PROMPT)], [bench.row(0, 0, 11)], released=[0])
    assert list(result.rows[0].token_ids) == greedy(bench.model, PROMPT, 1)


def test_no_token_left_is_an_error_of_the_row():
    bench = Bench()
    every = tuple(range(VOCAB))
    admitted = [bench.admit(0, PROMPT, min_tokens=1, stop=every), bench.admit(1, PROMPT)]
    result = bench.run(admitted, [bench.row(0, 0, 11), bench.row(1, 0, 11)])
    assert "no token is allowed" in result.rows[0].error
    assert result.rows[1].error is None


def test_results_have_step_and_duration():
    bench = Bench()
    plan = bench.plan([bench.admit(0, PROMPT)], [bench.row(0, 0, 11)])
    result = run(bench.runner, plan)
    assert result.step == plan.step
    assert result.duration_s > 0
