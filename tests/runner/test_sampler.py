import math
import random

import pytest
import torch

from roseinfer.core.plan import Admission
from roseinfer.core.sampling import SequenceParams
from roseinfer.runner.sampler import NOT_FINITE, NOTHING_LEFT, Sampler, likeliest
from roseinfer.runner.seats import SeatTable
from tests.runner.reference import distribution, edited, uniform

VOCAB = 12


def make_table(seats: int = 8, length: int = 64, vocab_size: int = VOCAB) -> SeatTable:
    return SeatTable(seats, length, 4, vocab_size, torch.device("cpu"))


def admission(
    seat: int, tokens: list[int], prompt_len: int | None = None, *, seed: int = 0, stop: tuple = (), **params: object
) -> Admission:
    sampling = SequenceParams(**{"max_tokens": 64, **params})
    prompt_len = len(tokens) if prompt_len is None else prompt_len
    return Admission(f"r{seat}", seat, tokens, prompt_len, sampling, seed, stop, ())


def sample(table: SeatTable, logits: torch.Tensor, seats: list[int], ends: list[int]) -> list[int]:
    return Sampler(table).sample(logits.clone(), seats, ends).tokens.tolist()


def random_logits(rows: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def expected_token(logits: list[float], params: SequenceParams, seed: int, index: int) -> int:
    """Return the inverse of the cumulative distribution, in the order of token ids."""
    if params.greedy:
        return max(range(len(logits)), key=lambda t: (logits[t], -t))
    shares = distribution(logits, params)
    u, total = uniform(seed, index), 0.0
    for token in sorted(shares):
        total += shares[token]
        if u < total:
            return token
    return max(shares)


def test_greedy_takes_the_first_of_the_likeliest():
    table = make_table()
    table.admit([admission(0, [1], temperature=0.0), admission(1, [1], temperature=0.0)])
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 9]] = 1.0
    logits[1, 3] = 1.0
    assert sample(table, logits, [0, 1], [1, 1]) == [7, 3]
    assert table.tokens[:2, 1].tolist() == [7, 3]


GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1e-6}


@pytest.mark.parametrize(
    ("settings", "taken"),
    [((GREEDY, GREEDY), True), ((GREEDY, DRAWN), False), ((GREEDY, {**GREEDY, "logprobs": 1}), False)],
)
def test_rows_without_settings_take_the_forward_passs_choice(settings: tuple[dict, ...], taken: bool) -> None:
    """Check that one row with settings makes all rows sample again. The next pass overwrites its own choice."""
    table = make_table()
    table.admit([admission(seat, [1], **params) for seat, params in enumerate(settings)])
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 9.0
    chosen = torch.tensor([7, 3])
    tokens = Sampler(table).sample(logits, [0, 1], [1, 1], greedy=chosen).tokens
    chosen.zero_()
    assert tokens.tolist() == ([7, 3] if taken else [5, 5])


@pytest.mark.parametrize("vocab_size", [1, 256, 511, 512, 513, 1000, 1024])
def test_the_likeliest_of_a_large_vocabulary_is_the_first_of_the_largest(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    # equal values, in one block and in several
    logits = torch.randint(0, 40, (200, vocab_size), generator=generator).float()
    logits[0, -1] = logits[1, 0] = logits[2, vocab_size // 2] = 50.0
    logits[3] = -torch.inf
    logits[4, -1] = torch.nan
    best, tokens = likeliest(logits)
    expected = [max(range(vocab_size), key=lambda t: (row[t], -t)) for row in logits[:4].tolist()]
    assert tokens[:4].tolist() == expected
    assert torch.equal(tokens[5:], (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)[5:])
    assert best.isnan().nonzero().tolist() == [[4]]
    assert torch.equal(best[:4], logits[:4].amax(-1))


def test_end_to_end_distribution_follows_the_seeded_draws():
    """Test output indices of one request with chi-square, with all filters on."""
    n = 6000
    table = make_table(1, n + 1)
    params = {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.02}
    table.admit([admission(0, [1], seed=1234, **params)])
    logits = random_logits(1, 3)
    tokens = sample(table, logits.expand(n, -1), [0] * n, list(range(1, n + 1)))
    shares = distribution(logits[0].tolist(), SequenceParams(**params))
    assert set(tokens) == set(shares)
    chi_square = sum((tokens.count(t) - n * p) ** 2 / (n * p) for t, p in shares.items())
    assert chi_square < 20.5  # at most 5 degrees of freedom, p = 0.001


def random_bans(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Return sequences over few tokens, so that matches are frequent. Some end alike, some occur twice."""
    bans = [tuple(rng.randrange(4) for _ in range(rng.choice([1, 2, 2, 3, 4]))) for _ in range(rng.randint(1, 5))]
    return tuple(bans + bans[:1])


def random_params(rng: random.Random) -> SequenceParams:
    def maybe(value: float, off: float) -> float:
        return value if rng.random() < 0.5 else off

    return SequenceParams(
        max_tokens=64,
        temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
        top_k=int(maybe(rng.randint(1, VOCAB), 0)),
        top_p=maybe(rng.uniform(0.2, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.01, 0.3), 0.0),
        repetition_penalty=maybe(rng.uniform(0.7, 1.8), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=((2, 3.5), (5, -100.0)) if rng.random() < 0.3 else (),
        allowed_token_ids=tuple(rng.sample(range(VOCAB), 7)) if rng.random() < 0.3 else None,
        bad_token_ids=random_bans(rng) if rng.random() < 0.5 else (),
        min_tokens=rng.choice([0, 3]),
        logprobs=rng.choice([None, 0, 2]),
    )


def test_mixed_rows_equal_the_plain_reference():
    """Compare some steps of batches with mixed settings with one-row sampling in plain Python."""
    rng = random.Random(11)
    for round_ in range(6):
        table = make_table()
        params = [random_params(rng) for _ in range(8)]
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))] for _ in params]
        stop = (1, 4)
        table.admit(
            [
                Admission(f"r{i}", i, list(prompt), len(prompt), p, 100 + i, stop, ())
                for i, (p, prompt) in enumerate(zip(params, prompts, strict=True))
            ]
        )
        sampler, outputs = Sampler(table), [[] for _ in params]
        for step in range(8):
            seats = rng.sample(range(8), rng.randint(1, 8))
            logits = random_logits(len(seats), 100 * round_ + step)
            ends = [len(prompts[s]) + len(outputs[s]) for s in seats]
            tokens = sampler.sample(logits.clone(), seats, ends).tokens.tolist()
            for row, seat in enumerate(seats):
                changed = edited(logits[row].tolist(), params[seat], prompts[seat], outputs[seat], stop)
                expected = expected_token(changed, params[seat], 100 + seat, len(outputs[seat]))
                assert tokens[row] == expected, (round_, step, params[seat])
                outputs[seat].append(tokens[row])


def test_a_seeded_row_draws_the_same_in_any_batch():
    settings = [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1}, {"temperature": 0.0}, {"repetition_penalty": 1.4}]
    table = make_table()
    table.admit([admission(i, [1, 2], seed=9, **s) for i, s in enumerate(settings)])
    logits = random_logits(6)
    together = sample(table, logits, list(range(6)), [2] * 6)
    for i, params in enumerate(settings):
        other = make_table()
        other.admit([admission(5, [1, 2], seed=9, **params)])
        assert sample(other, logits[i : i + 1], [5], [2]) == [together[i]]


def test_seeds_and_positions_change_the_draw():
    table = make_table(2, 300)
    table.admit([admission(0, [1], seed=1), admission(1, [1], seed=2)])
    logits = torch.zeros(200, VOCAB)
    first = sample(table, logits, [0] * 200, list(range(1, 201)))
    second = sample(table, logits, [1] * 200, list(range(1, 201)))
    assert first != second
    assert len(set(first)) == VOCAB


def test_min_tokens_bans_stop_ids():
    table = make_table()
    table.admit([admission(0, [1, 2], temperature=0.0, min_tokens=2, stop=(7, 3, VOCAB + 5))])
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 3], logits[0, 5] = 9.0, 8.0, 7.0
    assert [sample(table, logits, [0], [end])[0] for end in (2, 3, 4)] == [5, 5, 7]


def test_a_sequence_cannot_be_completed_by_the_output_but_the_prompt_does_not_count():
    table = make_table()
    table.admit([admission(0, [5, 6], temperature=0.0, bad_token_ids=((5, 6, 7), (6, 7), (7, 7), (3,)))])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 7], logits[0, 6], logits[0, 5] = 9.0, 8.0, 7.0, 6.0
    # 3 is never chosen. 7 may follow the prompt's 6, but not a 7 or a 6 of the output.
    assert [sample(table, logits, [0], [end])[0] for end in range(2, 8)] == [7, 6, 6, 6, 6, 6]
    logits[0, 6] = -9.0
    assert [sample(table, logits, [0], [end])[0] for end in range(8, 13)] == [5, 7, 5, 7, 5]


def test_tokens_that_the_host_has_not_seen_count():
    """Sample a second step before the host knows the first one's token, as with two steps in flight."""
    table = make_table()
    table.admit([admission(0, [1], temperature=0.0, bad_token_ids=((4, 4),)), admission(1, [1], temperature=0.0)])
    logits = torch.zeros(2, VOCAB)
    logits[:, 4], logits[:, 2] = 2.0, 1.0
    sampler = Sampler(table)
    steps = [sampler.sample(logits.clone(), [0, 1], [end, end]) for end in (1, 2, 3)]
    assert [step.tokens.tolist() for step in steps] == [[4, 4], [2, 4], [4, 4]]


def test_readmission_rebuilds_banned_sequences():
    logits = random_logits(1, 8)
    bans = {"bad_token_ids": tuple((a, b) for a in range(VOCAB) for b in range(0, VOCAB, 2)), "seed": 5}
    table = make_table()
    table.admit([admission(0, [1, 2, 3], **bans)])
    outputs = [sample(table, logits, [0], [3 + i])[0] for i in range(10)]
    assert all(token % 2 for token in outputs[1:])
    for cut in (1, 4, 9):
        again = make_table()
        again.admit([admission(6, [1, 2, 3, *outputs[:cut]], 3, **bans)])
        assert [sample(again, logits, [6], [3 + i])[0] for i in range(cut, 10)] == outputs[cut:]


def test_only_allowed_tokens_are_sampled_in_the_rows_that_name_them():
    table = make_table()
    allowed = (9, 2, 9)
    table.admit([admission(0, [1], temperature=0.0, allowed_token_ids=allowed), admission(1, [1], temperature=0.0)])
    table.admit([admission(2, [1], allowed_token_ids=(0,), bad_token_ids=((0,),)), admission(3, [1], top_k=3)])
    logits = torch.zeros(4, VOCAB)
    logits[:, 5], logits[:, 9] = 2.0, 1.0
    tokens = sample(table, logits, [0, 1, 2, 3], [1] * 4)
    assert tokens[:3] == [9, 5, NOTHING_LEFT]
    table.release([0, 2])
    table.admit([admission(0, [1], temperature=0.0), admission(2, [1], temperature=0.0)])
    assert sample(table, logits[:3], [0, 1, 2], [1] * 3) == [5, 5, 5]


def test_logit_bias_adds_and_bans():
    table = make_table()
    table.admit(
        [
            admission(0, [1], temperature=0.0, logit_bias=((4, 2.0),)),
            admission(1, [1], temperature=1.0, logit_bias=((0, -100.0), (1, -100.0))),
        ]
    )
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = 1.5
    logits[1, :2] = 20.0
    tokens = sample(table, logits, [0, 1], [1, 1])
    assert tokens[0] == 4
    assert tokens[1] not in (0, 1)


def test_penalties_count_what_sampling_chose_without_the_host():
    table = make_table()
    table.admit([admission(0, [1], temperature=0.0, frequency_penalty=1.0)])
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 2.5, 2.0
    assert [sample(table, logits, [0], [end])[0] for end in (1, 2, 3, 4)] == [5, 6, 5, 6]


def test_readmission_rebuilds_penalties_and_output_index():
    settings = {"temperature": 1.0, "presence_penalty": 1.5, "repetition_penalty": 1.3}
    logits = random_logits(1, 8)
    table = make_table()
    table.admit([admission(0, [1, 2, 3], seed=5, **settings)])
    outputs = [sample(table, logits, [0], [3 + i])[0] for i in range(10)]
    for cut in (1, 4, 9):
        again = make_table()
        again.admit([admission(6, [1, 2, 3, *outputs[:cut]], 3, seed=5, **settings)])
        rest = [sample(again, logits, [6], [3 + i])[0] for i in range(cut, 10)]
        assert rest == outputs[cut:]


def test_a_released_seat_leaves_no_penalty_behind():
    table = make_table()
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.0
    for penalty in (2.0, 0.0, 2.0):
        table.admit([admission(0, [5, 5], 1, temperature=0.0, presence_penalty=penalty)])
        assert sample(table, logits, [0], [2]) == [0 if penalty else 5]
        table.release([0])


def test_logprobs_are_those_of_the_raw_model():
    table = make_table()
    table.admit(
        [
            admission(0, [1], temperature=0.0, logprobs=3, logit_bias=((4, 100.0),)),
            admission(1, [1], temperature=0.5, top_k=2, logprobs=0, seed=3),
            admission(2, [1], temperature=0.0),
            admission(3, [1], temperature=0.7, logprobs=-1, repetition_penalty=1.9),
            admission(4, [1], temperature=0.0, logprobs=VOCAB + 9),
            admission(5, [1], temperature=0.0, logprobs=1, allowed_token_ids=(6, 7)),
            admission(6, [1], temperature=0.0, logprobs=1, bad_token_ids=((2,), (3,), (4, 4))),
        ]
    )
    logits = random_logits(7)
    raw = logits.log_softmax(-1)
    sampled = Sampler(table).sample(logits.clone(), list(range(7)), [1] * 7)
    assert sampled.scored == [0, 1, 3, 4, 5, 6]
    entries = [entry for part in sampled.scores for entry in part.to_python()]
    for row, entry in zip(sampled.scored, entries, strict=True):
        token = sampled.tokens[row].item()
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(raw[row, token].item(), abs=1e-6)
        assert entry.rank == 1 + int((raw[row] > raw[row, token]).sum())
        best = raw[row].sort(descending=True)
        assert [t for t, _ in entry.top] == best.indices[: len(entry.top)].tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values[: len(entry.top)].tolist(), abs=1e-6)
    assert entries[0].token_id == 4
    assert [len(e.top) for e in entries] == [3, 0, VOCAB, VOCAB, 1, 1]


def test_editing_leaves_the_raw_logprobs_alone_when_every_row_wants_them():
    table = make_table()
    table.admit([admission(0, [1, 5], temperature=0.0, logprobs=1, logit_bias=((4, 100.0),), repetition_penalty=2.0)])
    logits = random_logits(1)
    (part,) = Sampler(table).sample(logits.clone(), [0], [2]).scores
    (entry,) = part.to_python()
    raw = logits[0].log_softmax(-1)
    assert (entry.token_id, entry.logprob) == (4, pytest.approx(raw[4].item(), abs=1e-6))
    assert entry.top == ((raw.argmax().item(), pytest.approx(raw.max().item(), abs=1e-6)),)


def test_slices_of_the_rows_change_nothing(monkeypatch):
    settings = [{"logprobs": i % 4, "top_p": 0.8 if i % 2 else 1.0, "presence_penalty": 0.25 * i} for i in range(8)]
    results = []
    for elements in (2**19, 3 * VOCAB, 1):
        monkeypatch.setattr("roseinfer.runner.device.MAX_CPU_SLICE_ELEMENTS", elements)
        table = make_table()
        table.admit([admission(i, [1, 2], seed=i, **params) for i, params in enumerate(settings)])
        sampled = Sampler(table).sample(random_logits(8), list(range(8)), [2] * 8)
        results.append([entry for part in sampled.scores for entry in part.to_python()])
    assert [len(entry.top) for entry in results[0]] == [0, 1, 2, 3] * 2
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 1}])
def test_a_bad_row_is_marked_and_the_others_are_right(params):
    good = random_logits(1)
    table = make_table()
    table.admit([admission(i, [1, 2], seed=4, stop=tuple(range(VOCAB)), **params) for i in range(4)])
    alone = sample(table, good, [1], [2])
    logits = good.repeat(4, 1)
    logits[0, 3] = math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    assert sample(table, logits, [0, 1, 2, 3], [2] * 4) == [NOT_FINITE, alone[0], NOT_FINITE, NOTHING_LEFT]
    assert table.tokens[:4, 2].min() >= 0


def test_minus_infinity_for_some_tokens_is_a_distribution():
    table = make_table()
    table.admit([admission(0, [1], temperature=1.0)])
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 6] = -3.0
    assert sample(table, logits, [0], [1]) == [6]


@pytest.mark.parametrize("sampling", [{}, {"top_k": 40, "top_p": 0.9}])
def test_drafts_by_the_request_s_random_number_are_right_more_often(sampling: dict[str, float]) -> None:
    """Compare with the likeliest token and with other random numbers, for a head that nearly knows the model."""
    count, vocabulary = 300, 64
    generator = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(count, vocabulary, generator=generator)
    head = target + 0.5 * torch.randn(count, vocabulary, generator=generator)
    table = make_table(count, 16, vocabulary)
    table.admit([admission(seat, [1], temperature=1.0, seed=seat, **sampling) for seat in range(count)])
    sampler, seats = Sampler(table), list(range(count))
    index, ends = torch.arange(count), torch.ones(count, dtype=torch.int64)
    drafts = sampler.draft(head, seats, index, ends)
    others = sampler.draft(head, seats, index, ends + 1)
    tokens = sampler.sample(target.clone(), seats, [1] * count).tokens
    kept = [int((guess == tokens).sum()) for guess in (drafts, head.argmax(-1), others)]
    assert kept[0] > 1.05 * kept[1] and kept[0] > 1.2 * kept[2]
    assert torch.equal(sampler.draft(target, seats, index, ends), tokens), "an exact head is always right"
