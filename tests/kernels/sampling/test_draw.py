"""The draw kernels against sorting, in small chunks, so that a small vocabulary is cut like a large one.

The interpreter takes half a second for each filtered row, so there are few without a GPU.
"""

import pytest
import torch

from roseinfer.kernels.sampling.argmax import NOT_FINITE, NOTHING_LEFT
from roseinfer.kernels.sampling.draw import draw, draw_reference
from roseinfer.kernels.sampling.draw_weights import MAX_GREEDY_TEMPERATURE
from roseinfer.runner.rng import uniforms
from roseinfer.runner.seats import MIN_TEMPERATURE
from tests.helpers.cases import cases, each_value

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's infinities
ROWS = 64 if torch.cuda.is_available() else 5
SMALL = {"chunk": 256, "num_warps": 4, "tile": 1024, "finish_warps": 4, "pick_warps": 4}
SEATS, LENGTH = 64, 40


class Batch:
    """Rows whose seats have settings (temperature, top_k, top_p, min_p); row i has seat SEATS - 1 - i."""

    def __init__(self, logits, settings):
        device, rows = logits.device, len(logits)
        assert len(settings) == rows
        self.logits = logits
        self.seats = torch.arange(SEATS - 1, SEATS - 1 - rows, -1, device=device)
        self.ends = torch.randint(5, LENGTH, (rows,)).to(device)
        self.settings = torch.full((SEATS, 3), torch.nan, dtype=torch.float64, device=device)
        self.integers = torch.full((SEATS, 3), -1, dtype=torch.int64, device=device)
        for seat, (temperature, top_k, top_p, min_p) in zip(self.seats.tolist(), settings, strict=True):
            self.settings[seat] = torch.tensor([temperature, top_p, min_p], dtype=torch.float64)
            seed = int(torch.randint(-(2**63), 2**63 - 1, ()))
            self.integers[seat] = torch.tensor([seed, 3, top_k], dtype=torch.int64)

    def run(self, function, **options):
        pool = torch.zeros(SEATS, LENGTH, dtype=torch.int32, device=self.logits.device)
        out = torch.full((len(self.logits),), -9, device=self.logits.device)
        function(self.logits, self.seats, self.ends, self.settings, self.integers, pool, out, **options)
        assert pool[self.seats, self.ends].tolist() == out.clamp_min(0).tolist()
        return out.tolist()

    def draw(self, filtered=True, **options):
        size = SMALL if filtered else {name: SMALL[name] for name in ("chunk", "num_warps", "pick_warps")}
        return self.run(draw, filtered=filtered, **(size | options))

    def expected(self):
        integers = self.integers[self.seats]
        return self.run(draw_reference, u=uniforms(integers[:, 0], self.ends - integers[:, 1]))


def random_settings(rows, generator):
    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    return [
        (pick(0.3, 1.0, 1.7), pick(0, 0, 1, 2, 40, 700, 5000), pick(1.0, 0.0, 0.1, 0.5, 0.9, 0.999), pick(0.0, 0.05))
        for _ in range(rows)
    ]


def shaped(kind, rows, vocab_size, dtype, device):
    """Return logits of a model that is sure, of one that is not, and of one with few different values."""
    x = torch.randn(rows, vocab_size, device=device)
    scale = {"flat": 0.1, "wide": 1.0, "sure": 5.0, "tied": 1.0}[kind]
    return ((x * 3).round() / 3 if kind == "tied" else x * scale).to(dtype)


@each_value(kind=["flat", "wide", "sure", "tied"], dtype=[torch.float32, torch.bfloat16])
def test_draws_the_same_tokens_as_sorting(kind, dtype, device):
    generator = torch.Generator().manual_seed(len(kind))
    for rows, vocab_size in ((1, 1), (ROWS, 1000)):
        batch = Batch(shaped(kind, rows, vocab_size, dtype, device), random_settings(rows, generator))
        assert batch.draw() == batch.expected()


def test_without_filters_both_ways_give_the_same(device):
    logits = shaped("wide", 8, 1000, torch.float32, device)
    batch = Batch(logits, [(0.5 + i / 8, 0, 1.0, 0.1 * (i % 2)) for i in range(8)])
    assert batch.draw(filtered=False) == batch.draw(filtered=True) == batch.expected()


@pytest.mark.parametrize("filtered", [False, True])
def test_greedy_seats_among_others(filtered, device):
    logits = shaped("tied", 8, 700, torch.float32, device)
    settings = [((1.0, 0.0, MIN_TEMPERATURE, MAX_GREEDY_TEMPERATURE)[i % 4], 0, 1.0, 0.0) for i in range(8)]
    batch = Batch(logits, settings)
    tokens = batch.draw(filtered=filtered)
    likeliest = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1).tolist()
    assert [t for i, t in enumerate(tokens) if i % 4] == [t for i, t in enumerate(likeliest) if i % 4]
    assert tokens == batch.expected()


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_without_an_answer(filtered, device):
    inf = torch.inf
    logits = shaped("wide", 5, 600, torch.float32, device)
    logits[0, 599] = torch.nan
    logits[1, 300] = inf
    logits[2] = -inf
    logits[3] = -inf
    logits[3, 555] = 1e30
    top = (5, 0.5) if filtered else (0, 1.0)
    tokens = Batch(logits, [(1.0, *top, 0.0)] * 5).draw(filtered=filtered)
    assert tokens[:4] == [NOT_FINITE, NOT_FINITE, NOTHING_LEFT, 555] and 0 <= tokens[4] < 600


def test_few_tokens_left(device):
    """A grammar may mask most of a vocabulary, and leave fewer tokens than top-k."""
    logits = torch.full((7, 1000), -torch.inf, device=device)
    logits[:, 100:400:50] = torch.randn(7, 6, device=device)
    settings = [(1.0, (3, 6, 7, 900, 999, 1000, 0)[i], (1.0, 0.6)[i % 2], 0.0) for i in range(7)]
    batch = Batch(logits.bfloat16(), settings)
    tokens = batch.draw()
    assert tokens == batch.expected() and set(tokens) <= set(range(100, 400, 50))


def test_equal_tokens_are_kept_by_id(device):
    logits = torch.zeros(6, 1000, dtype=torch.bfloat16, device=device)
    logits[:, 500] = 1e-3
    settings = [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.25, 0.0), (1.0, 40, 0.5, 0.0)] * 2
    batch = Batch(logits, settings)
    tokens = batch.draw()
    assert tokens == batch.expected()
    assert set(tokens[::3]) <= {0, 1, 2, 3, 500} and max(t for t in tokens[1::3] if t != 500) < 250
    assert max(t for t in tokens[2::3] if t != 500) < 20


@cases("options", [{"capacity": 8}, {"rounds": 1}, {"chunk": 1024}], exhaustive=[{"rounds": 5}, {"tile": 128}])
def test_how_the_border_is_found_does_not_matter(options, device):
    """A capacity that fits too few tokens makes the last step take whole rows."""
    generator = torch.Generator().manual_seed(3)
    batch = Batch(shaped("wide", 4, 1000, torch.bfloat16, device), random_settings(4, generator))
    assert batch.draw(**options) == batch.expected()


def test_a_row_does_not_depend_on_its_batch(device):
    generator = torch.Generator().manual_seed(4)
    batch = Batch(shaped("sure", 6, 800, torch.bfloat16, device), random_settings(6, generator))
    together = batch.draw()
    batch.logits, batch.seats, batch.ends = batch.logits[3:4], batch.seats[3:4], batch.ends[3:4]
    assert batch.draw() == together[3:4]
    batch.logits = batch.logits.float()
    assert batch.draw() == together[3:4]


@pytest.mark.parametrize("filtered", [False, True])
def test_frequencies(filtered, device):
    """Each kept token is drawn in proportion to its weight; the kernels are tested on a GPU only."""
    rows = 48
    logits = torch.full((rows, 300), -torch.inf, device=device)
    shares = {3: 0.4, 100: 0.3, 250: 0.2, 299: 0.1}
    for token, share in shares.items():
        logits[:, token] = torch.tensor(share).log()
    batch = Batch(logits, [(1.0, 0, 0.85 if filtered else 1.0, 0.0)] * rows)
    if filtered:
        shares = {token: share / 0.9 for token, share in shares.items() if token != 299}
    drawn = []
    for position in range(5, 25):
        batch.ends.fill_(position)
        drawn += batch.draw(filtered=filtered) if device.type == "cuda" else batch.expected()
    assert set(drawn) == shares.keys()
    for token, share in shares.items():
        assert abs(drawn.count(token) / len(drawn) - share) < 4 * (share * (1 - share) / len(drawn)) ** 0.5


def test_strided_rows_and_an_odd_vocabulary(device):
    wide = torch.full((2, 1100), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, :1037] = torch.randn(2, 1037, device=device)
    batch = Batch(wide[:, :1037], [(1.0, 0, 0.9, 0.0), (1.0, 30, 1.0, 0.0)])
    assert batch.draw() == batch.expected()
