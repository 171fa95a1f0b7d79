"""Draws that are addressed by row, and what an embedding draws for.

The specification of the numbers is NOTE [ A draw that is addressed by row ], computed here with
Python's integers. What an embedding does with them is compared with plain torch, bit by bit.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

import recoup
from recoup.weights import draws, row_draws, same_draw
from tests.chance import are_even, are_gaussian, are_uncorrelated, has_share
from tests.unit.weights.plain_run import PlainRun, recorded, reparametrized, same

MASK_64 = 2**64 - 1
SEEDS = [0, 1, 17, 2**63 - 1]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def split_mix(number):
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK_64
    return number ^ (number >> 31)


STEP = 0x9E3779B97F4A7C15


def word(row, index, num_words, seed):
    start = split_mix((seed + STEP) & MASK_64)
    return split_mix((start + (row * num_words + index) * STEP) & MASK_64)


def scales(rows, width, seed, p, dtype=torch.float32):
    """The entries of a mask in some rows."""
    rows = torch.as_tensor(rows)
    return row_draws.dropped(torch.ones(rows.numel(), width, dtype=dtype), seed, p, rows)


def normals(rows, width, seed, dtype=torch.float32):
    """The entries of noise in some rows."""
    rows = torch.as_tensor(rows)
    return row_draws.noised(torch.zeros(rows.numel(), width, dtype=dtype), seed, 1.0, rows)


# -- the numbers are what the note says ------------------------------------------------------------

ROWS = [0, 1, 2, 3, 49_999, 2**31, 2**40 + 5]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("width", [1, 3, 4, 8, 13, 64])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.3, 1 / 65536, 0.5, 65535 / 65536])
def test_masks_are_what_the_note_says(width, seed, p):
    num_bits = 8 if p * 256 == int(p * 256) else 16
    num_each, sign = 64 // num_bits, 2 ** (num_bits - 1)
    num_words = -(-width // num_each)
    found = scales(ROWS, width, seed, p)
    for place, row in enumerate(ROWS):
        lanes = [
            ((word(row, index, num_words, seed) >> shift) % 2**num_bits) ^ sign
            for index in range(num_words)
            for shift in range(0, 64, num_bits)
        ]
        want = [lane >= round(p * 2**num_bits) for lane in lanes[:width]]
        assert (found[place] != 0).tolist() == want


def test_the_largest_noise_is_finite(monkeypatch):
    for bits in (0, -1, 2**63 - 1, -(2**63), 2**32, -(2**31)):
        monkeypatch.setattr(row_draws, "_words", lambda *_, bits=bits: torch.full((3, 4), bits))
        assert normals([0, 1, 2], 8, 0).abs().max() <= 6.6


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 0.50001, 65535 / 65536, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rates_are_rounded_as_for_any_weight(p, dtype):
    want = draws.scales((2**20,), 5, p, dtype=dtype, device=torch.device("cpu"))
    found = scales(range(2**14), 64, 5, p, dtype)
    assert found.dtype is dtype
    assert found.max() == want.max()
    assert found.isfinite().all()


# -- an entry depends on its row and column --------------------------------------------------------

SIZES = [(50_000, 64), (1, 1), (37, 5), (4, 33_000), (300, 257), (0, 8), (8, 0)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_some_rows_have_the_numbers_of_the_table(size, dtype):
    table = torch.randn(size).to(dtype)
    whole = row_draws.dropped(table, 3, 0.3), row_draws.noised(table, 3, 0.3)
    for num in (0, 1, 2, 6, 700 if size[1] < 1000 else 3):
        rows = torch.randint(max(size[0], 1), (min(num, 700 * size[0]),), dtype=torch.int32)
        some = (
            row_draws.dropped(table[rows], 3, 0.3, rows),
            row_draws.noised(table[rows], 3, 0.3, rows),
        )
        for found, want in zip(some, whole, strict=True):
            assert torch.equal(found, want[rows])


def test_they_do_not_depend_on_threads_or_on_the_rows_beside_them():
    rows = torch.randperm(5000)
    table, before = torch.randn(5000, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = row_draws.noised(table, 3, 0.3), row_draws.dropped(table, 3, 0.3)
        torch.set_num_threads(3)
        found = row_draws.noised(table[rows], 3, 0.3, rows)
        assert torch.equal(found, want[0][rows])
        assert torch.equal(row_draws.dropped(table[rows], 3, 0.3, rows), want[1][rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("axes", [(), (0,), (1,), (0, 1)])
def test_axes_share_a_mask(axes):
    table, rows = torch.ones(40, 12), torch.tensor([3, 39, 3])
    whole = row_draws.dropped(table, 7, 0.5, axes=axes)
    assert torch.equal(row_draws.dropped(table[rows], 7, 0.5, rows, axes=axes), whole[rows])
    for axis in axes:
        assert torch.equal(whole, whole.select(axis, 0).unsqueeze(axis).expand_as(whole))
    assert whole.unique().numel() == 2 - (len(axes) == 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_and_strided(dtype):
    wide = torch.randn(70, 60).to(dtype)
    for table in (wide.clone(), wide[:, ::2], wide.t()):
        calls = (
            lambda w, **how: row_draws.dropped(w, 2, 0.3, **how),
            lambda w, **how: row_draws.noised(w, 2, 0.3, **how),
            lambda w, **how: row_draws.dropped(w, 2, 0.3, axes=(1,), **how),
            lambda w, **how: row_draws.dropped(w, 2, 1.0, **how),
        )
        for call in calls:
            want, mine = call(table), table.clone()
            assert want.is_contiguous()
            assert want.data_ptr() != table.data_ptr()
            assert call(mine, in_place=True) is mine
            assert torch.equal(mine, want)


def test_noise_is_added_to_the_weight_after_rounding():
    for dtype in DTYPES:
        table = torch.randn(40, 16).to(dtype)
        noise = row_draws.noised(torch.zeros_like(table), 3, 0.3)
        assert torch.equal(row_draws.noised(table, 3, 0.3), table + noise)


def test_a_whole_table_is_drawn_in_small_pieces():
    table = torch.randn(20_000, 64)
    for draw in (
        lambda: row_draws.dropped(table, 1, 0.3, in_place=True),
        lambda: row_draws.noised(table, 1, 0.3, in_place=True),
    ):
        measured = recoup.measure(draw, repeats=0)
        assert 0 < measured.peak_bytes <= table.nbytes / 5


def test_on_meta_there_is_a_shape():
    for rows in (None, torch.zeros(9, dtype=torch.int64, device="meta")):
        table = torch.empty(9, 4, device="meta")
        for found in (
            row_draws.dropped(table, 1, 0.5, rows),
            row_draws.noised(table, 1, 0.5, rows),
        ):
            assert found.is_meta
            assert found.shape == (9, 4)


def test_arguments_out_of_range():
    table = torch.ones(3, 2)
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="`p`"):
            row_draws.dropped(table, 1, p)
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="`seed`"):
            row_draws.dropped(table, seed, 0.5)
        with pytest.raises(ValueError, match="`seed`"):
            row_draws.noised(table, seed, 0.5)


# -- the numbers are random ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_the_share_of_dropped_entries_is_p(width, p):
    exact = round(p * 65536) / 65536
    for seed in range(3):
        dropped = scales(range(2**18 // width), width, seed, p) == 0
        assert has_share(dropped, exact)
        for column in range(min(width, 8)):
            part = dropped[:, column]
            assert has_share(part, exact)


def test_every_share_of_65536_is_met_exactly():
    for num_dropped in (1, 2, 255, 256, 32767, 32769, 65534, 65535):
        p = num_dropped / 65536
        found = scales(range(2**14), 64, 3, p)
        assert has_share(found == 0, p)
        assert (1 - p) * found.max().item() == pytest.approx(1, rel=1e-6)


def masks(rows, width, seed):
    return scales(rows, width, seed, 0.5)


@pytest.mark.parametrize("draw", [masks, lambda *a: scales(*a, 0.3), normals])
def test_rows_columns_and_seeds_do_not_depend_on_each_other(draw):
    found = draw(range(8192), 64, 17)
    for lag in (1, 2, 3, 4, 8, 64, 512, 4096):
        assert are_uncorrelated(found[:-lag], found[lag:]), lag
        assert are_uncorrelated(found[:-lag].square(), found[lag:].square()), lag
    for lag in (1, 2, 3, 4, 8, 16, 31, 32, 33, 63):
        assert are_uncorrelated(found[:, :-lag], found[:, lag:]), lag
        assert are_uncorrelated(found[:, :-lag].square(), found[:, lag:].square()), lag
    others = [draw(range(8192), 64, seed) for seed in (16, 18, 17 + 2**32, 2**63 - 1)]
    for other in others:
        assert are_uncorrelated(found, other)
        assert are_uncorrelated(found[1:], other[:-1])
        assert are_uncorrelated(found[:, 1:], other[:, :-1])


def test_one_row_over_many_seeds_is_random_too():
    kept = torch.cat([masks([49_999], 8, seed) for seed in range(2000)]) > 0
    noise = torch.cat([normals([49_999], 8, seed) for seed in range(2000)])
    for column in range(8):
        assert has_share(kept[:, column], 0.5)
        assert are_gaussian(noise[:, column])
        assert are_uncorrelated(noise[1:, column], noise[:-1, column])


def test_groups_of_eight_entries_are_uniform():
    kept = masks(range(2**15), 64, 23) > 0
    for bits in (kept.view(-1, 8), kept.t().reshape(-1, 8)):
        counts = torch.bincount((bits * 2 ** torch.arange(8)).sum(1), minlength=256)
        assert are_even(counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [2, 64])
def test_noise_is_gaussian(width, dtype):
    for seed in (0, 1):
        table = normals(range(2**19 // width), width, seed, dtype)
        for x in (table.flatten(), table[:, 0], table[:, -1]):
            assert are_gaussian(x)


def test_tails_are_long():
    largest = max(normals(range(2**14), 64, seed).abs().max().item() for seed in range(4))
    assert 4.7 < largest < 6.6


# -- an embedding draws for the rows that it looks up ----------------------------------------------


@pytest.fixture
def drawn_numels(monkeypatch):
    """How many numbers each call of a row function makes."""
    numels = []

    def recording(make):
        def record(*args):
            numels.append(make(*args).numel())
            return make(*args)

        return record

    for name in ("_scales", "_normals"):
        monkeypatch.setattr(row_draws, name, recording(getattr(row_draws, name)))
    for name in ("dropped", "dropped_", "noised", "noised_", "scales"):
        monkeypatch.setattr(draws, name, None)
    return numels


def both(embedding):
    recoup.weight_noise(embedding, std=0.3)
    recoup.weight_dropout(embedding, p=0.5)


WAYS = {
    "dropout": lambda e: recoup.weight_dropout(e, p=0.5),
    "noise": lambda e: recoup.weight_noise(e, std=0.3),
    "noise, scheduled": lambda e: recoup.weight_noise(e, std=lambda step: 0.1 * (step + 1)),
    "noise, of a tensor": lambda e: recoup.weight_noise(e, std=torch.tensor(0.3)),
    "both": both,
    "rows": lambda e: recoup.weight_dropout(e, p=0.5, axes=(1,)),
    "columns": lambda e: recoup.weight_dropout(e, p=0.5, axes=(0,)),
    "rows and noise": lambda e: recoup.weight_noise(
        recoup.weight_dropout(e, p=0.5, axes=(1,)), std=0.3
    ),
}
NUM_DRAWN = {  # of six rows of 64, in forward and in backward
    "dropout": ([6 * 64], [6 * 64]),
    "noise": ([6 * 64], []),
    "noise, scheduled": ([6 * 64], []),
    "noise, of a tensor": ([6 * 64], []),
    "both": ([6 * 64, 6 * 64], [6 * 64]),
    "rows": ([6], [6]),
    "columns": ([64], [64]),
    "rows and noise": ([6, 6 * 64], [6]),
}


class Shifted(nn.Embedding):
    """An embedding whose forward does more than to look up."""

    def forward(self, ids):
        return super().forward(ids) + 1.0


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_the_table_are_shortened_however_many_are_looked_up(way):
    embedding = nn.Embedding(11, 6, max_norm=1.0)
    raw = embedding.get_parameter("weight").detach().clone()
    WAYS[way](embedding)
    for ids in (torch.arange(4), torch.arange(11).repeat(2)):
        with recorded() as made:
            rows = embedding(ids)
        F.embedding(ids, raw, max_norm=1.0)
        assert torch.equal(embedding.get_parameter("weight"), raw)
        table = raw
        for each in sorted(made, key=lambda each: each.step.order):
            table = reparametrized(table, each)
        assert torch.equal(rows, table[ids])


SETTINGS = {
    "dense": {},
    "sparse": {"sparse": True},
    "padded": {"padding_idx": 2},
    "padded and sparse": {"padding_idx": -1, "sparse": True},
    "short": {"max_norm": 1.0},
    "short in another norm": {"max_norm": 1.0, "norm_type": 1.0, "sparse": True},
    "by frequency": {"scale_grad_by_freq": True},
}
IDS = {
    "empty": torch.zeros(0, 4, dtype=torch.int64),
    "of no dimension": torch.tensor(2),
    "one": torch.tensor([2]),
    "repeated": torch.tensor([[[1, 2], [2, 10]], [[1, 1], [9, 2]]]),
    "of 32 bits": torch.tensor([[3, 2, 3]], dtype=torch.int32),
    "more than rows": torch.arange(24).remainder(11).view(4, 6),
}


@pytest.mark.sampled(36)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_the_noisy_table(way, settings, ids, dtype):
    """Looked up in a table that plain torch was given, gradients by plain autograd."""
    settings, ids = SETTINGS[settings], IDS[ids]
    if ids.dim() == 0 and settings.get("sparse") and "padding_idx" in settings:
        pytest.skip("torch itself cannot do this")
    embedding = nn.Embedding(11, 6, **settings).to(dtype)
    raw = embedding.get_parameter("weight").detach().clone()
    WAYS[way](embedding)
    with recorded() as made:
        rows = embedding(ids)
    assert rows.dtype is dtype
    if "max_norm" in settings:  # torch shortens the rows of the parameter
        plain = {"max_norm": settings["max_norm"], "norm_type": settings.get("norm_type", 2.0)}
        F.embedding(ids, raw, **plain)
    assert torch.equal(embedding.get_parameter("weight"), raw)
    raw.requires_grad_()
    table = raw
    for each in sorted(made, key=lambda each: each.step.order):
        table = reparametrized(table, each)
    rest = {k: v for k, v in settings.items() if k not in ("max_norm", "norm_type")}
    want = F.embedding(ids, table, **rest)
    assert torch.equal(rows, want)
    # Small multiples of 1/8 times 2 or 0: sums have the same bits in any order.
    gradient = torch.randint(-8, 9, rows.shape).to(dtype) / 8
    rows.backward(gradient)
    want.backward(gradient)
    assert embedding.get_parameter("weight").grad.is_sparse is settings.get("sparse", False)
    if settings.get("scale_grad_by_freq"):
        torch.testing.assert_close(embedding.get_parameter("weight").grad, raw.grad)
    else:
        same("gradient", embedding.get_parameter("weight").grad, raw.grad)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_rates_of_all_and_nothing(p):
    embedding = recoup.weight_dropout(nn.Embedding(30, 4, sparse=True), p=p)
    ids = torch.tensor([1, 4, 1])
    rows = embedding(ids)
    assert torch.equal(rows, embedding.weight[ids] * (1 - p))
    rows.sum().backward()
    assert embedding.get_parameter("weight").grad.to_dense().sum() == 12 * (1 - p)


class Tied(nn.Module):
    """A model whose decoder reads the weight of its embedding."""

    def __init__(self, embedding=None):
        super().__init__()
        self.embedding = nn.Embedding(30, 4) if embedding is None else embedding

    def forward(self, ids):
        hidden = self.embedding(ids)
        return hidden, F.linear(hidden, self.embedding.weight)


@pytest.mark.parametrize("way", WAYS)
def test_all_reads_of_one_forward_have_one_draw(way):
    model = _applied_to_tree(Tied(), WAYS[way])
    ids = torch.tensor([[3, 29, 3]])
    with recorded() as made:
        hidden, logits = model(ids)
    raw = model.embedding.get_parameter("weight").detach().clone().requires_grad_()
    table = raw
    for each in sorted(made, key=lambda each: each.step.order):
        table = reparametrized(table, each)
    want = F.embedding(ids, table)
    assert torch.equal(hidden, want)
    want_logits = F.linear(want, table)
    assert torch.equal(logits, want_logits)
    logits.sin().sum().backward()
    want_logits.sin().sum().backward()
    torch.testing.assert_close(
        model.embedding.get_parameter("weight").grad, raw.grad, rtol=1e-5, atol=1e-6
    )


def _applied_to_tree(model, apply):
    """Apply to the whole tree what `apply` applies to an embedding."""
    inner = nn.Embedding(30, 4)
    apply(inner)
    for entry in recoup.weights.applied(inner):
        step = entry.reparametrization
        if step.kind == "weight_noise":
            recoup.weight_noise(model, r"embedding\.weight", step.std)
        else:
            recoup.weight_dropout(model, r"embedding\.weight", step.p, axes=step.axes)
    return model


class Decodes(nn.Embedding):
    """An embedding whose forward reads the whole table."""

    def forward(self, ids):
        return super().forward(ids) @ self.weight.T


class Scaled(nn.Embedding):
    """An embedding with a setting of its own, and torch's forward."""


@pytest.mark.parametrize("way", ["dropout", "noise", "both", "rows"])
@pytest.mark.parametrize("kind", [Shifted, Decodes, Scaled])
def test_embeddings_of_users(kind, way):
    run = PlainRun(kind(9, 4), WAYS[way])
    run.compare(torch.tensor([[1, 3], [8, 0]]))


@pytest.mark.parametrize("kind", [nn.Embedding, Shifted])
def test_the_same_seed_is_the_same_table_whoever_reads_it(kind):
    embedding, ids = kind(30, 4), torch.tensor([3, 29])
    both(embedding)
    with same_draw(4):
        some, all_rows = embedding(ids), embedding(torch.arange(30).repeat(2))
    assert torch.equal(some, all_rows[ids])


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["dropout", "noise", "both", "rows and noise"])
def test_derivatives_of_any_order(way):
    embedding = nn.Embedding(9, 3, dtype=torch.float64)
    WAYS[way](embedding)
    ids = torch.tensor([1, 4, 4])

    def run(weight):
        with same_draw(5):
            return functional_call(embedding, {"weight": weight}, (ids,)).sin()

    raw = embedding.get_parameter("weight").detach().clone().requires_grad_()
    assert gradcheck(run, [raw])
    assert gradgradcheck(run, [raw])


def test_ids_changed_before_backward_are_an_error():
    embedding = recoup.weight_dropout(nn.Embedding(30, 4))
    ids = torch.tensor([1, 2])
    loss = embedding(ids).sum()
    ids.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- copies ----------------------------------------------------------------------------------------


def test_code_that_runs_again_has_the_same_rows():
    embedding = nn.Embedding(50, 4)
    both(embedding)
    ids = torch.tensor([1, 2, 2])
    runs = (
        lambda: torch.utils.checkpoint.checkpoint(embedding, ids, use_reentrant=False),
        lambda: recoup.checkpoint(embedding, ids),
    )
    for run in runs:
        torch.manual_seed(2)
        embedding.get_parameter("weight").grad = None
        plain = embedding(ids)
        plain.sin().sum().backward()
        want, embedding.get_parameter("weight").grad = embedding.get_parameter("weight").grad, None
        torch.manual_seed(2)
        rows = run()
        assert torch.equal(rows, plain)
        rows.sin().sum().backward()
        assert torch.equal(embedding.get_parameter("weight").grad, want)
