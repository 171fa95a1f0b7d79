"""What a forward with reparametrized weights computes: plain torch with the very same weights."""

from __future__ import annotations

import copy
import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import recoup
from recoup.weights import applied, draws, row_draws, same_draw
from tests.unit.weights.plain_run import PlainRun, mask, recorded, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These layers are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Reads(nn.Module):
    """A forward that returns its weight."""

    def __init__(self, *size, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*size, dtype=dtype) + 3.0)

    def forward(self, times=1):
        return self.weight * times


class Loop(nn.Module):
    """A cell at each step of a sequence."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for step in x:
            state = self.cell(step, state)
        return state


class Attends(nn.MultiheadAttention):
    """Attention of a sequence to itself, or to another."""

    def forward(self, x, other=None):
        other = x if other is None else other
        return super().forward(x, other, other[..., : self.vdim])


class Bag(nn.EmbeddingBag):
    """Bags of equal length."""

    def forward(self, ids):
        return super().forward(ids, None)


def x_of(*size):
    return lambda: (torch.randn(*size, requires_grad=True),)


def ids_of(*size):
    return lambda: (torch.randint(1, 9, size),)


RECURRENT = r"(.*\.)?weight_.*"
WEIGHT = r"(.*\.)?weight"
LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), x_of(4, 6), WEIGHT),
    "linear 3-D": (lambda: nn.Linear(6, 5, bias=False), x_of(2, 4, 6), WEIGHT),
    "bias": (lambda: nn.Linear(6, 5), x_of(4, 6), "bias"),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), lambda: (*x_of(6, 3)(), *x_of(6, 4)()), WEIGHT),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), x_of(2, 4, 7), WEIGHT),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), x_of(2, 3, 5, 5), WEIGHT),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), x_of(1, 2, 3, 3, 3), WEIGHT),
    "conv2d transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), x_of(2, 3, 4, 4), WEIGHT),
    "layer norm": (lambda: nn.LayerNorm(6), x_of(4, 6), WEIGHT),
    "batch norm": (lambda: nn.BatchNorm1d(6), x_of(4, 6), WEIGHT),
    "prelu": (lambda: nn.PReLU(6), x_of(4, 6), WEIGHT),
    "embedding": (lambda: nn.Embedding(9, 4), ids_of(2, 5), WEIGHT),
    "embedding bag": (lambda: Bag(9, 4, mode="mean"), ids_of(2, 5), WEIGHT),
    "lstm": (lambda: nn.LSTM(4, 5), x_of(6, 2, 4), RECURRENT),
    "lstm unbatched": (lambda: nn.LSTM(4, 5, bias=False), x_of(6, 4), RECURRENT),
    "lstm of all kinds": (
        lambda: nn.LSTM(4, 5, 2, bidirectional=True, proj_size=3, batch_first=True),
        x_of(2, 6, 4),
        RECURRENT,
    ),
    "lstm biases": (lambda: nn.LSTM(4, 5), x_of(6, 2, 4), "bias_.*"),
    "gru": (lambda: nn.GRU(4, 5, 2, bidirectional=True), x_of(6, 2, 4), RECURRENT),
    "rnn": (lambda: nn.RNN(4, 5, nonlinearity="relu"), x_of(6, 2, 4), RECURRENT),
    "lstm cell": (lambda: nn.LSTMCell(4, 5), x_of(3, 4), RECURRENT),
    "gru cell": (lambda: nn.GRUCell(4, 5), x_of(3, 4), RECURRENT),
    "rnn cell": (lambda: nn.RNNCell(4, 5), x_of(3, 4), RECURRENT),
    "attention": (lambda: Attends(4, 2), x_of(5, 2, 4), ".*weight"),
    "attention to others": (
        lambda: Attends(4, 2, kdim=6, vdim=3),
        lambda: (*x_of(5, 2, 4)(), *x_of(7, 2, 6)()),
        ".*weight",
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0),
        x_of(5, 2, 4),
        ".*weight",
    ),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
        x_of(5, 4),
        ".*weight",
    ),
}


def stacked(module, pattern):
    recoup.weight_noise(module, pattern, std=0.1)
    recoup.weight_norm(module, pattern)
    recoup.weight_dropout(module, pattern, p=0.3)


WAYS = {
    "dropout": lambda module, pattern: recoup.weight_dropout(module, pattern, p=0.3),
    "shared": lambda module, pattern: recoup.weight_dropout(module, pattern, p=0.3, axes=(0,)),
    "noise": lambda module, pattern: recoup.weight_noise(module, pattern, std=0.1),
    "norm": recoup.weight_norm,
    "stacked": stacked,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_other_types(dtype, way):
    run = PlainRun(nn.Linear(6, 5).to(dtype), lambda module: WAYS[way](module, "weight"))
    run.compare(torch.randn(4, 6, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("way", WAYS)
def test_more_entries_than_a_thread_is_given(way):
    """Draws are made by other operators where there are many entries."""
    run = PlainRun(nn.Linear(300, 301), lambda module: WAYS[way](module, "weight"))
    run.compare(torch.randn(4, 300, requires_grad=True))


def chosen_by(pattern):
    return lambda name, parameter, module: re.fullmatch(pattern, name) is not None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", ["linear", "lstm", "attention", "lstm cell"])
def test_frozen_weights(layer, way):
    """The gradient of the input goes through the very weight, which has none."""
    build, inputs, pattern = LAYERS[layer]
    where = chosen_by(pattern)  # a pattern leaves them out
    run = PlainRun(build().requires_grad_(requires_grad=False), lambda m: WAYS[way](m, where))
    assert not any(p.requires_grad for p in run.module.parameters())
    run.compare(*inputs())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", ["linear", "conv2d", "lstm", "gru cell", "attention"])
def test_the_same_numbers_without_a_graph(layer, way):
    build, inputs, pattern = LAYERS[layer]
    module, x = build(), inputs()
    WAYS[way](module, pattern)

    def outputs():
        torch.manual_seed(2)
        with recorded() as made:
            output = module(*x)
        return [output] if isinstance(output, torch.Tensor) else list(output[:1]), made

    with_graph, made = outputs()
    with torch.no_grad():
        without, made_without = outputs()
    with torch.inference_mode():
        inference, _ = outputs()
    assert [d.seed for d in made] == [d.seed for d in made_without]
    for a, b, c in zip(with_graph, without, inference, strict=True):
        assert a.requires_grad
        assert not b.requires_grad
        assert torch.equal(a, b)
        assert torch.equal(a, c)


LAYOUTS = {
    "channels last": lambda w: w.to(memory_format=torch.channels_last),
    "transposed": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda w: w.repeat_interleave(2, 0).repeat_interleave(2, 2)[::2, :, ::2],
}
STEPS = {
    "dropout": lambda m: recoup.weight_dropout(m, p=0.5),
    "axes": lambda m: recoup.weight_dropout(m, p=0.5, axes=(1, 2)),
    "noise": lambda m: recoup.weight_noise(m, std=0.3),
    "norm": recoup.weight_norm,
    "norm of dim 1": lambda m: recoup.weight_norm(m, dim=1),
    "norm of dim 3": lambda m: recoup.weight_norm(m, dim=-1),
    "norm of all": lambda m: recoup.weight_norm(m, dim=None),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("second", ["dropout", "axes", "noise", None])
@pytest.mark.parametrize("first", [name for name in STEPS if name.startswith("norm")] + [None])
def test_weights_that_are_not_contiguous(layout, first, second):
    """The numbers do not depend on how a weight lies in memory."""
    results = []
    base = nn.Conv2d(3, 4, 3, dtype=torch.float64)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    for is_contiguous in (True, False):
        conv = copy.deepcopy(base)
        if not is_contiguous:
            conv.weight = nn.Parameter(LAYOUTS[layout](conv.get_parameter("weight").detach()))
            assert not conv.weight.is_contiguous()
        for step in (first, second):
            if step is not None:
                STEPS[step](conv)
        z = x.clone().requires_grad_()
        with same_draw(3):
            y = conv(z)
        y.sin().sum().backward()
        gradients = {name: p.grad for name, p in conv.named_parameters()}
        results.append([y.detach(), z.grad, *gradients.values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["dropout", "shared", "noise"])
def test_weights_without_entries(way):
    """Not norms: torch's fused operator for them ends the process."""
    linear = nn.Linear(4, 3, bias=False)
    WAYS[way](linear, "weight")
    linear.weight = nn.Parameter(torch.zeros(0, 4))
    y = linear(torch.ones(2, 4))
    assert y.shape == (2, 0)
    y.sum().backward()


def test_a_weight_that_is_one_number():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.weight

    for apply in (
        recoup.weight_noise,
        recoup.weight_dropout,
        lambda m: recoup.weight_norm(m, dim=None),
    ):
        run = PlainRun(Scale(), apply)
        run.compare(torch.randn(3, requires_grad=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", ["linear", "conv2d", "lstm", "lstm cell", "attention"])
def test_autocast(layer, way):
    build, inputs, pattern = LAYERS[layer]
    run = PlainRun(build(), lambda module: WAYS[way](module, pattern))
    with torch.autocast("cpu", torch.bfloat16):
        run.compare(*inputs())
    assert all(p.grad.dtype is torch.float32 for p in run.module.parameters())


# -- dropout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_what_stays_is_scaled_up(p):
    reads = recoup.weight_dropout(Reads(100, 50, dtype=torch.float64), p=p)
    weight = reads()
    kept = weight != 0
    rounded = round(p * 65536) / 65536
    if p < 1:
        want = reads.get_parameter("weight")[kept] / (1 - rounded)
        torch.testing.assert_close(weight[kept], want, rtol=1e-14, atol=0)
    assert abs(kept.double().mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / 5000) + 1e-12


@pytest.mark.parametrize("p", [0.3, 0.5])
def test_the_gradient_is_zero_where_dropped(p):
    """Closed form: the plain gradient, divided by 1 - p where the weight was not dropped."""
    linear = nn.Linear(40, 30, dtype=torch.float64)
    x = torch.randn(7, 40, dtype=torch.float64)
    plain = torch.ones(7, 30, dtype=torch.float64).T @ x
    recoup.weight_dropout(linear, p=p)
    with recorded() as made:
        linear(x).sum().backward()
    scales = mask(linear.get_parameter("weight"), made[0])
    dropped = scales == 0
    assert 0 < dropped.sum() < dropped.numel()
    assert torch.count_nonzero(linear.get_parameter("weight").grad[dropped]) == 0
    want = plain[~dropped] / (1 - round(p * 65536) / 65536)
    torch.testing.assert_close(
        linear.get_parameter("weight").grad[~dropped], want, rtol=1e-13, atol=0
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_all_dropped(layer):
    """Everything is zero, and nothing is NaN."""
    build, inputs, pattern = LAYERS[layer]
    module, x = recoup.weight_dropout(build(), pattern, p=1.0), inputs()
    run = PlainRun(build(), lambda m: recoup.weight_dropout(m, pattern, p=1.0))
    run.compare(*x)
    names = {entry.name for entry in applied(module)}
    for name, parameter in run.module.named_parameters():
        assert parameter.grad.isfinite().all()
        if name in names:
            assert torch.count_nonzero(parameter.grad) == 0


@pytest.mark.sampled(15)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "apply",
    [
        lambda module, pattern: recoup.weight_dropout(module, pattern, p=0.0),
        lambda module, pattern: recoup.weight_noise(module, pattern, std=0.0),
    ],
    ids=["dropout", "noise"],
)
def test_nothing_drawn_is_the_plain_module(layer, apply):
    build, inputs, pattern = LAYERS[layer]
    module, x = build(), inputs()
    plain = module(*x)
    apply(module, pattern)
    state = torch.get_rng_state()
    for a, b in zip(
        *((y if isinstance(y, tuple) else (y,)) for y in (plain, module(*x))), strict=True
    ):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
    assert torch.equal(state, torch.get_rng_state())


# -- axes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "axes"),
    [
        ((12, 9), (0,)),
        ((12, 9), (1,)),
        ((12, 9), (-1,)),
        ((12, 9), (0, 1)),
        ((12, 9), [1]),
        ((12, 9), (1, -1)),
        ((5, 6, 7), (1,)),
        ((5, 6, 7), (0, 2)),
        ((5, 6, 7), (2, 0)),
        ((6, 5, 3, 3), (2, 3)),
        ((6, 5, 3, 3), (-1, -2, -3)),
        ((20,), (0,)),
    ],
)
def test_axes_share_the_mask(size, axes):
    reads = recoup.weight_dropout(Reads(*size, dtype=torch.float64), p=0.5, axes=axes)
    seen = []
    for _ in range(8):
        weight = reads()
        kept = (weight != 0).double()
        others = [axis for axis in range(len(size)) if axis not in {a % len(size) for a in axes}]
        shared = kept.amax(dim=sorted({a % len(size) for a in axes}), keepdim=True)
        assert torch.equal(kept, shared.expand(size))
        assert torch.equal(weight, reads.get_parameter("weight") * kept * 2)
        seen.append(shared.flatten())
        # Along the other axes it is not shared.
        for axis in others:
            assert shared.shape[axis] == size[axis]
    assert 0 < torch.cat(seen).mean() < 1
    assert any(not torch.equal(seen[0], other) for other in seen[1:])


def test_axes_have_the_gradient_of_their_mask():
    run = PlainRun(nn.Conv2d(4, 5, 3), lambda m: recoup.weight_dropout(m, p=0.3, axes=(1, 2, 3)))
    made = run.compare(torch.randn(2, 4, 6, 6, requires_grad=True))
    scales = mask(run.module.get_parameter("weight"), made[0], (1, 2, 3)).expand_as(
        run.module.get_parameter("weight")
    )
    assert torch.count_nonzero(run.module.get_parameter("weight").grad[scales == 0]) == 0
    assert torch.count_nonzero(run.module.get_parameter("weight").grad[scales != 0]) > 0


# -- rows of embeddings ----------------------------------------------------------------------------

SETTINGS = {
    "dense": {},
    "sparse": {"sparse": True},
    "padded": {"padding_idx": 2},
    "padded and sparse": {"padding_idx": 2, "sparse": True},
    "short": {"max_norm": 1.0},
    "short in another norm": {"max_norm": 1.0, "norm_type": 1.0, "sparse": True},
    "by frequency": {"scale_grad_by_freq": True},
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("size", [(), (7,), (3, 5), (2, 3, 4), (0,), (4, 0)])
def test_rows_of_an_embedding(settings, size):
    """The specification: `embedding(ids, w) * mask[ids]`."""
    settings = SETTINGS[settings]
    if size == () and settings.keys() == {"padding_idx", "sparse"}:
        pytest.skip("torch itself cannot do this")
    embedding = nn.Embedding(11, 6, **settings)
    raw = embedding.get_parameter("weight").detach().clone().requires_grad_()
    recoup.weight_dropout(embedding, p=0.4, axes=(1,))
    for dtype in (torch.int64, torch.int32):
        ids = torch.randint(11, size, dtype=dtype)
        with recorded() as made:
            rows = embedding(ids)
        scales = mask(raw, made[0], (1,))
        want = F.embedding(ids, raw, **{"padding_idx": None, **settings}) * scales[ids]
        assert torch.equal(rows, want)
        assert torch.equal(embedding.get_parameter("weight"), raw)
        embedding.get_parameter("weight").grad = raw.grad = None
        rows.sin().sum().backward()
        want.sin().sum().backward()
        assert embedding.get_parameter("weight").grad.is_sparse is settings.get("sparse", False)
        same("gradient", embedding.get_parameter("weight").grad, raw.grad)


def test_rows_are_dropped_whole():
    embedding = recoup.weight_dropout(nn.Embedding(200, 8), p=0.5, axes=(1,))
    with recorded() as made:
        rows = embedding(torch.arange(200))
    dropped = mask(embedding.get_parameter("weight"), made[0], (1,)).squeeze(1) == 0
    assert 60 < dropped.sum() < 140
    assert torch.equal(rows, embedding.get_parameter("weight") * (~dropped).unsqueeze(1) * 2)
    rows.sum().backward()
    assert torch.count_nonzero(embedding.get_parameter("weight").grad[dropped]) == 0


def test_a_word_is_dropped_wherever_it_stands():
    embedding = recoup.weight_dropout(nn.Embedding(40, 3), p=0.5, axes=(1,))
    rows = embedding(torch.arange(40).repeat(5, 1))
    assert torch.equal(rows, rows[:1].expand_as(rows))


def test_rows_need_no_copy_of_the_embedding(monkeypatch):
    """One number a row that is looked up is drawn, and never a dropped weight."""
    shapes = []
    scales = row_draws._scales

    def recording(rows, *args):
        shapes.append((*scales(rows, *args).shape, rows.tolist()))
        return scales(rows, *args)

    monkeypatch.setattr(row_draws, "_scales", recording)
    embedding = recoup.weight_dropout(nn.Embedding(50, 8), p=0.5, axes=(-1,))
    embedding(torch.tensor([3, 4, 3])).sum().backward()
    assert shapes == [(3, 1, [3, 4, 3])] * 2


def test_rows_by_keyword_and_without_a_graph():
    embedding = recoup.weight_dropout(nn.Embedding(11, 6), p=0.5, axes=(1,))
    ids = torch.tensor([1, 5, 5])
    with same_draw(4):
        rows = embedding(input=ids)
        with torch.no_grad():
            assert torch.equal(embedding(ids), rows)
    embedding.eval()
    assert torch.equal(embedding(ids), embedding.weight[ids])


@pytest.mark.parametrize("other", [recoup.weight_noise, recoup.weight_norm])
def test_rows_and_another_reparametrization(other):
    """Rows are dropped where they are looked up only if that is all there is."""

    def apply(embedding):
        recoup.weight_dropout(embedding, p=0.5, axes=(1,))
        other(embedding)

    run = PlainRun(nn.Embedding(11, 6), apply)
    made = run.compare(torch.tensor([[1, 4, 1], [4, 4, 10]]))
    assert len(made) == 2


def test_a_decoder_that_reads_the_embedding_has_its_mask():
    """The weight of an embedding may be read by others: a row that is dropped is dropped there."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(12, 4)

        def forward(self, ids):
            hidden = self.embedding(ids)
            return hidden, hidden @ self.embedding.weight.T

    model = recoup.weight_dropout(Tied(), r"embedding\.weight", p=0.5, axes=(1,))
    raw = model.embedding.get_parameter("weight").detach().clone().requires_grad_()
    ids = torch.randint(12, (9,))
    with recorded() as made:
        hidden, logits = model(ids)
    assert len(made) == 1
    scales = mask(raw, made[0], (1,))
    want = F.embedding(ids, raw) * scales[ids]
    assert torch.equal(hidden, want)
    want_logits = want @ (raw * scales).T
    assert torch.equal(logits, want_logits)
    logits.sin().sum().backward()
    want_logits.sin().sum().backward()
    torch.testing.assert_close(
        model.embedding.get_parameter("weight").grad, raw.grad, rtol=1e-5, atol=1e-6
    )


def test_entries_of_an_embedding_with_sparse_gradients():
    run = PlainRun(nn.Embedding(11, 6, sparse=True), lambda m: recoup.weight_dropout(m, p=0.3))
    ids = torch.tensor([[1, 4, 1], [4, 4, 10]])
    run.compare(ids)
    assert run.module.get_parameter("weight").grad.is_sparse


def test_sparse_gradients_raise_no_warning():
    embedding = recoup.weight_dropout(nn.Embedding(11, 6, sparse=True), p=0.3)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Those of torch itself: 2.11 asks each process to choose.
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
            embedding(torch.tensor([1, 4, 1])).sum().backward()
    finally:
        torch.set_warn_always(False)


def test_rows_of_a_bag_with_sparse_gradients():
    bag = nn.EmbeddingBag(11, 6, mode="sum", sparse=True)
    ids, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4])
    run = PlainRun(bag, lambda m: recoup.weight_dropout(m, p=0.5, axes=(1,)))
    run.compare(ids, offsets)
    assert run.module.get_parameter("weight").grad.is_sparse


def test_noise_keeps_gradients_sparse():
    run = PlainRun(nn.Embedding(11, 6, sparse=True), lambda m: recoup.weight_noise(m, std=0.3))
    run.compare(torch.tensor([[1, 4, 1], [4, 4, 10]]))
    assert run.module.get_parameter("weight").grad.is_sparse


# -- recurrent layers, by hand ---------------------------------------------------------------------

KINDS = {
    "lstm": (nn.LSTM, nn.LSTMCell, {}),
    "gru": (nn.GRU, nn.GRUCell, {}),
    "rnn": (nn.RNN, nn.RNNCell, {}),
    "relu": (nn.RNN, nn.RNNCell, {"nonlinearity": "relu"}),
}


def unrolled(cell_of, weights, x, settings):
    """A layer of one direction, a cell at a time, all steps with the same weights."""
    hidden = weights[1].shape[1]
    cell = cell_of(x.shape[-1], hidden, dtype=x.dtype, **settings)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    state, outputs = None, []
    for step in x:
        state = functional_call(cell, dict(zip(names, weights, strict=True)), (step, state))
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_its_cells_with_one_mask(kind):
    """Two layers, both directions: every step of a direction has the same dropped weight."""
    layer_of, cell_of, settings = KINDS[kind]
    layer = layer_of(3, 4, 2, bidirectional=True, dtype=torch.float64, **settings)
    recoup.weight_dropout(layer, r"weight_hh_l\d+(_reverse)?", p=0.5)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    raw = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    with recorded() as made:
        output, _ = layer(x)
    names = [entry.name for entry in applied(layer)]
    assert len(made) == len(names) == 4
    drawn = {each.step: each for each in made}
    used = dict(raw)
    for entry in applied(layer):
        scales = mask(raw[entry.name], drawn[entry.reparametrization])
        assert 0 < torch.count_nonzero(scales) < scales.numel()
        used[entry.name] = raw[entry.name] * scales
    want = x
    for place in range(2):
        ways = []
        for suffix in ("", "_reverse"):
            weights = [
                used[f"{part}_l{place}{suffix}"]
                for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            steps = want.flip(0) if suffix else want
            y = unrolled(cell_of, weights, steps, settings)
            ways.append(y.flip(0) if suffix else y)
        want = torch.cat(ways, dim=-1)
    torch.testing.assert_close(output, want, rtol=1e-12, atol=1e-12)
    output.sin().sum().backward()
    want.sin().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, raw[name].grad, rtol=1e-10, atol=1e-12)


def test_a_layer_with_projections_is_its_cell():
    layer = nn.LSTM(3, 5, proj_size=2, bias=False, dtype=torch.float64)
    recoup.weight_dropout(layer, "weight_.*", p=0.3)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    with recorded() as made:
        output, _ = layer(x)
    drawn = {each.step: each for each in made}
    ih, hh, hr = (
        layer.get_parameter(entry.name)
        * mask(layer.get_parameter(entry.name), drawn[entry.reparametrization])
        for entry in applied(layer)
    )
    h, c, steps = torch.zeros(2, 2, dtype=x.dtype), torch.zeros(2, 5, dtype=x.dtype), []
    for step in x:
        i, f, g, o = (step @ ih.T + h @ hh.T).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = (o.sigmoid() * c.tanh()) @ hr.T
        steps.append(h)
    torch.testing.assert_close(output, torch.stack(steps), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(kind, enforce_sorted):
    layer_of, _, settings = KINDS[kind]
    layer = layer_of(3, 4, bidirectional=True, batch_first=True, dtype=torch.float64, **settings)
    recoup.weight_dropout(layer, "weight_hh.*", p=0.5)
    lengths = [6, 4, 1] if enforce_sorted else [1, 6, 4]
    x = torch.randn(3, 6, 3, dtype=torch.float64)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
    with same_draw(1):
        output, lengths_out = pad_packed_sequence(layer(packed)[0], batch_first=True)
        assert lengths_out.tolist() == lengths
        for one, length, got in zip(x, lengths, output, strict=True):
            want, _ = layer(one[:length].unsqueeze(0))
            torch.testing.assert_close(got[:length], want[0], rtol=1e-12, atol=1e-12)


def test_the_first_step_has_no_recurrence():
    """From a zero state, two masks of the recurrent weight give the same first step."""
    lstm = recoup.weight_dropout(nn.LSTM(4, 8), "weight_hh_l0", p=0.5)
    x = torch.randn(5, 2, 4)
    a, b = lstm(x)[0], lstm(x)[0]
    assert torch.equal(a[0], b[0])
    for step in range(1, 5):
        assert not torch.equal(a[step], b[step])


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("p", [0.5, 0.3])
def test_a_cell_in_a_loop(cell, p):
    """Bit by bit from the first forward on, also where the gradient is scaled by no power of 2."""
    run = PlainRun(Loop(cell(4, 5)), lambda m: recoup.weight_dropout(m, r"cell\.weight_.*", p=p))
    for _ in range(3):
        made = run.compare(torch.randn(6, 2, 4, requires_grad=True))
        assert len(made) == 2


# -- gradients in float64 --------------------------------------------------------------------------


def checked(module, *inputs, twice=True):
    """Compare gradients of the inputs and of all parameters with differences."""
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    names = list(parameters)

    def run(*tensors):
        given = dict(zip(names, tensors[: len(names)], strict=True))
        with same_draw(5):
            output = functional_call(module, given, tensors[len(names) :])
        return output if isinstance(output, torch.Tensor) else output[0]

    tensors = [t.requires_grad_(t.is_floating_point()) for t in (*parameters.values(), *inputs)]
    assert gradcheck(run, tensors)
    if twice:
        assert gradgradcheck(run, tensors)


@pytest.mark.parametrize("way", WAYS)
def test_differences_of_a_linear_layer(way):
    linear = nn.Linear(4, 3, dtype=torch.float64)
    WAYS[way](linear, "weight")
    checked(linear, torch.randn(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("way", ["dropout", "stacked"])
def test_differences_of_other_layers(way):
    conv = nn.Conv1d(2, 3, 2, dtype=torch.float64)
    WAYS[way](conv, "weight")
    checked(conv, torch.randn(1, 2, 4, dtype=torch.float64), twice=way == "dropout")
    lstm = nn.LSTM(2, 3, dtype=torch.float64)
    WAYS[way](lstm, "weight_hh_l0")
    checked(lstm, torch.randn(3, 1, 2, dtype=torch.float64), twice=False)


def test_differences_of_rows():
    embedding = recoup.weight_dropout(nn.Embedding(5, 3, dtype=torch.float64), p=0.3, axes=(1,))
    checked(embedding, torch.tensor([1, 4, 4]))


# -- evaluation ------------------------------------------------------------------------------------


class Shows(nn.Linear):
    """A layer that shows what its forward reads."""

    def forward(self, x):
        self.seen = [self.weight, self.weight]
        return super().forward(x)


def test_the_raw_parameter_where_nothing_is_drawn():
    shows = recoup.weight_noise(recoup.weight_dropout(Shows(4, 3), p=0.0), std=0.0)
    shows(torch.randn(2, 4))
    assert shows.seen[0] is shows._parameters["weight"]


@pytest.mark.parametrize("layer", LAYERS)
def test_evaluation_is_the_plain_module(layer):
    build, inputs, pattern = LAYERS[layer]
    plain, x = build().eval(), inputs()
    state = plain.state_dict()
    module = recoup.weight_dropout(build(), pattern)
    module.load_state_dict(state)
    for _ in range(2):
        module.train()
        module(*x)
        module.eval()
        plain.load_state_dict(module.state_dict())
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                stream = torch.get_rng_state()
                got, want = module(*x), plain(*x)
                assert torch.equal(stream, torch.get_rng_state())
            pairs = zip(*((y if isinstance(y, tuple) else (y,)) for y in (got, want)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def test_always():
    shows = recoup.weight_dropout(Shows(8, 8), mode="always").eval()
    x = torch.ones(1, 8)
    seen = [(shows(x), shows.seen[0])[1] for _ in range(3)]
    assert all(weight is not shows._parameters["weight"] for weight in seen)
    assert not torch.equal(seen[0], seen[1])
    with torch.no_grad():
        assert not torch.equal(shows(x), shows(x))
    run = PlainRun(nn.LSTM(4, 5).eval(), lambda m: recoup.weight_dropout(m, ".*", mode="always"))
    assert len(run.compare(torch.randn(6, 2, 4))) == 4


# -- order -----------------------------------------------------------------------------------------

APPLY = {
    "norm": recoup.weight_norm,
    "dropout": lambda module: recoup.weight_dropout(module, p=0.5),
    "noise": lambda module: recoup.weight_noise(module, std=0.5),
}


@pytest.mark.parametrize(
    "calls",
    [
        ("norm", "dropout", "noise"),
        ("noise", "dropout", "norm"),
        ("dropout", "noise", "norm"),
        ("noise", "norm", "dropout"),
        ("noise", "dropout"),
        ("dropout", "norm"),
        ("noise", "norm"),
    ],
)
def test_norm_then_dropout_then_noise(calls):
    reads = Reads(30, 20, dtype=torch.float64)
    for call in calls:
        APPLY[call](reads)
    order = [f"weight_{name}" for name in ("norm", "dropout", "noise") if name in calls]
    assert [entry.reparametrization.kind for entry in applied(reads)] == order
    if "norm" in calls:
        with torch.no_grad():
            reads.weight_g.mul_(3.0)
    with recorded() as made:
        weight = reads()
    by_kind = {each.step.kind: each for each in made}
    want = reads._parameters["weight"].detach()
    if "norm" in calls:
        want = 3.0 * want
    if "dropout" in calls:
        want = want * mask(want, by_kind["weight_dropout"])
    if "noise" in calls:
        drawn = by_kind["weight_noise"]
        want = draws.noised(want, drawn.seed, drawn.magnitude)
        assert torch.count_nonzero(weight) == weight.numel()
    torch.testing.assert_close(weight.detach(), want, rtol=1e-13, atol=1e-13)


# -- statistics ------------------------------------------------------------------------------------


def mean_and_deviation(reads, n):
    with torch.no_grad():
        weights = torch.stack([reads() for _ in range(n)])
    return weights.mean(0), weights.std(0)


@pytest.mark.parametrize("axes", [(), (1,)])
def test_the_mean_over_masks_is_the_raw_weight(axes):
    reads = recoup.weight_dropout(Reads(6, 5, dtype=torch.float64), p=0.3, axes=axes)
    n = 2000
    mean, deviation = mean_and_deviation(reads, n)
    assert ((mean - reads.get_parameter("weight")).abs() < 5 * deviation / n**0.5).all()
    want = reads.get_parameter("weight").abs() * math.sqrt(0.3 / 0.7)
    torch.testing.assert_close(deviation, want.detach(), rtol=0.1, atol=0)


def test_the_moments_of_noise():
    reads = recoup.weight_noise(Reads(6, 5, dtype=torch.float64), std=0.25)
    n = 2000
    mean, deviation = mean_and_deviation(reads, n)
    assert ((mean - reads.get_parameter("weight")).abs() < 5 * 0.25 / n**0.5).all()
    torch.testing.assert_close(deviation, torch.full_like(deviation, 0.25), rtol=0.1, atol=0)


def test_masks_of_two_weights_are_not_the_same():
    model = nn.Sequential(*(Reads(20, 20) for _ in range(2)))
    recoup.weight_dropout(model, ".*weight")
    with recorded() as made:
        model[0]()
        model[1]()
    first, second = (mask(model[0].get_parameter("weight"), each) for each in made)
    assert abs((first == second).double().mean() - 0.5) < 0.15
