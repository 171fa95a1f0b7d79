"""What a reparametrized module computes: plain torch with the very same weights, bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.weights import same_draw
from tests.oracle import tensors
from tests.weight_zoo import (
    LAYERS,
    MORE,
    OURS,
    Kind,
    Reads,
    Runs,
    Way,
    built,
    compare,
    given,
    looped,
    used,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]


def decoded(embedding, ids):
    """Words by the weight of their embedding."""
    hidden = embedding(ids)
    return hidden, F.linear(hidden, embedding.weight)


class OfUsers(nn.LSTM):
    """A recurrent layer with a forward of its own, which flattens its weights first."""

    def forward(self, x, state=None):
        self.flatten_parameters()
        return super().forward(x.flip(0), state)


def of_type(dtype):
    """A layer and an input of a type."""
    return Kind(
        lambda: nn.Linear(6, 5, dtype=dtype),
        lambda: (torch.randn(4, 6, dtype=dtype, requires_grad=True),),
    )


OTHERS = {
    "bias": Kind(lambda: nn.Linear(6, 5), given((4, 6)), "bias"),
    "biases of an lstm": Kind(lambda: nn.LSTM(4, 5), given((6, 2, 4)), "bias_.*"),
    "layer norm": Kind(lambda: nn.LayerNorm(6), given((4, 6))),
    "batch norm": Kind(lambda: nn.BatchNorm1d(6), given((4, 6))),
    "prelu": Kind(lambda: nn.PReLU(6), given((4, 6))),
    "gru cell, in a loop": Kind(
        lambda: Runs(nn.GRUCell(4, 5), looped), given((6, 2, 4)), r".*weight_.*"
    ),
    "embedding bag, sparse": Kind(
        lambda: nn.EmbeddingBag(11, 6, mode="sum", sparse=True),
        lambda: (torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4])),
    ),
    "embedding, its weight read, too": Kind(
        lambda: Runs(nn.Embedding(9, 4), decoded),
        lambda: (torch.tensor([[1, 3], [8, 0]]),),
        ".*weight",
    ),
    "lstm of a user": Kind(lambda: OfUsers(4, 5, 2), given((6, 2, 4)), r"weight_hh_l\d"),
    "float64": of_type(torch.float64),
    "bfloat16": of_type(torch.bfloat16),
    "float16": of_type(torch.float16),
}
KINDS = LAYERS | OTHERS
WAYS = MORE | {
    "learned entries": Way(noise={"std": 0.3, "learned": "weight"}),
    "learned, relative": Way(noise={"std": 0.3, "learned": "tensor", "relative": True}),
}
EXACT = ["dropout", "noise", "norm", "thirds"]  # but where gradients are added in another order:
ADDED = {"embedding bag, sparse": 1e-6, "embedding, its weight read, too": 1e-5}
OF_TYPES = {"float64": 1e-6, "bfloat16": 0.05, "float16": 0.05}
SPARSE = ["dropout", "noise", "thirds", "shared"]  # a norm of torch takes no sparse gradient


def assert_materialised(name, way):
    plain, inputs = built(KINDS[name], dropout=False)
    is_long = WAYS[way].norm is not None or "attention" in name
    rtol = 1e-4 if is_long or WAYS[way].function is not None else 1e-5
    rtol = 0.0 if way in EXACT else OF_TYPES.get(name, rtol)
    compare(WAYS[way], plain, inputs, KINDS[name].pattern, rtol=max(rtol, ADDED.get(name, 0.0)))


def cases_of(kinds):
    pairs = itertools.product(kinds, WAYS)
    return [(name, way) for name, way in pairs if "sparse" not in name or way in SPARSE]


@pytest.mark.sampled(70)
@pytest.mark.parametrize(("name", "way"), cases_of(LAYERS))
def test_a_step_is_that_of_the_materialised_weights(name, way):
    assert_materialised(name, way)


@pytest.mark.parametrize(("name", "way"), cases_of(OTHERS))
def test_a_step_of_small_layers_and_other_types_is_that_of_the_materialised_weights(name, way):
    assert_materialised(name, way)


@pytest.mark.parametrize("way", MORE)
@pytest.mark.parametrize("name", ["linear", "conv2d", "lstm", "embedding", "attention to itself"])
def test_the_same_numbers_without_a_graph(name, way):
    module, inputs = built(KINDS[name], dropout=False)
    MORE[way](module, KINDS[name].pattern)
    outputs = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        torch.manual_seed(2)
        with mode():
            outputs.append((tensors(module(*inputs))[0], torch.get_rng_state()))
    assert [output.requires_grad for output, _ in outputs] == [True, False, False]
    for output, stream in outputs[1:]:
        torch.testing.assert_close(output, outputs[0][0], rtol=1e-3, atol=1e-4)
        assert torch.equal(stream, outputs[0][1])


@pytest.mark.parametrize("way", [Way(dropout={"p": 0.0}), Way(noise={"std": 0.0})])
@pytest.mark.parametrize("name", ["linear", "embedding", "lstm", "attention to itself"])
def test_nothing_that_is_drawn_is_the_plain_module(name, way):
    module, inputs = built(KINDS[name], dropout=False)
    want = tensors(module(*inputs))
    way(module, KINDS[name].pattern)
    state = torch.get_rng_state()
    assert all(map(torch.equal, tensors(module(*inputs)), want))
    assert torch.equal(state, torch.get_rng_state())


LAYOUTS = {
    "channels last": lambda w: w.to(memory_format=torch.channels_last),
    "transposed": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda w: w.repeat_interleave(2, 0).repeat_interleave(2, 2)[::2, :, ::2],
}
OF_LAYOUTS = OURS | {
    "rows": Way(dropout={"p": 0.5, "axes": (1,)}),
    "norm of rows": Way({}, {"p": 0.5, "axes": (1,)}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1, None])
@pytest.mark.parametrize("way", OF_LAYOUTS)
def test_the_layout_of_a_weight_makes_no_difference(way, dim, layout):
    way = OF_LAYOUTS[way]
    way = way if way.norm is None else way._replace(norm={"dim": dim})
    raw, results = torch.randn(4, 3, 3, 3, dtype=torch.float64), []
    for change in (torch.Tensor.contiguous, LAYOUTS[layout]):
        conv = nn.Conv2d(3, 4, 3, dtype=torch.float64, bias=False)
        conv.weight = nn.Parameter(change(raw))
        way(conv)
        x = torch.linspace(-1, 1, 150, dtype=torch.float64).view(2, 3, 5, 5).requires_grad_()
        with same_draw(3):
            output = conv(x)
        output.sin().sum().backward()
        results.append([output, x.grad, *(p.grad for p in conv.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


SHAPES = [(12, 9), (5, 6, 7), (6, 5, 3, 3), (20,)]
AXES = [(0,), (1,), (-1,), (0, 1), [1], (1, -1), (0, 2), (2, 0), (2, 3), (-1, -2, -3)]
FITTING = [(s, a) for s, a in itertools.product(SHAPES, AXES) if max(map(abs, a)) < len(s)]


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize(("size", "axes"), FITTING)
def test_axes_share_the_mask(size, axes, is_table):
    module = nn.Embedding(*size).double() if is_table and len(size) == 2 else None
    module = module or Reads(torch.randn(size).double())
    recoup.weight_dropout(module, p=0.5, axes=axes)
    together, seen = sorted({axis % len(size) for axis in axes}), []
    for _ in range(8):
        weight = used(module)
        kept = (weight != 0).double()
        shared = kept.amax(dim=together, keepdim=True)
        assert torch.equal(kept, shared.expand(size))
        assert torch.equal(weight, module.get_parameter("weight") * kept * 2)
        seen.append(shared.flatten())
    assert 0 < torch.cat(seen).mean() < 1
    assert any(not torch.equal(seen[0], other) for other in seen[1:])


# -- rows of embeddings ----------------------------------------------------------------------------

SETTINGS = {
    "dense": {},
    "sparse": {"sparse": True},
    "padded": {"padding_idx": 2},
    "padded and sparse": {"padding_idx": 2, "sparse": True},
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
ROWS = {
    "dropout": Way(dropout={"p": 0.5}),
    "noise": Way(noise={"std": 0.3}),
    "rows": Way(dropout={"p": 0.5, "axes": (1,)}),
    "columns": Way(dropout={"p": 0.5, "axes": (-2,)}),
    "rows and noise": Way(dropout={"p": 0.5, "axes": (-1,)}, noise={"std": 0.3}),
}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", ROWS)
def test_rows_are_those_of_the_noisy_table(way, settings, ids, dtype):
    """Looked up in a table that plain torch was given, gradients by plain autograd."""
    settings, ids = SETTINGS[settings], IDS[ids]
    if settings.get("sparse") and ids.dim() == 0:
        pytest.skip("torch itself cannot do this")

    def looked_up(run, parameters, ids):
        found = run(ids)
        # Small multiples of 1/8: sums have the same bits in any order.
        generator = torch.Generator().manual_seed(1)
        found.backward(torch.randint(-8, 9, found.shape, generator=generator).to(dtype) / 8)
        grad = parameters["weight"].grad
        assert grad.is_sparse is settings.get("sparse", False)
        return {"rows": found, "grad": grad}

    compare(ROWS[way], nn.Embedding(11, 6, **settings).to(dtype), (ids,), act=looked_up)


class Shifted(nn.Embedding):
    """An embedding whose forward does more than to look up."""

    def forward(self, ids):
        return super().forward(ids) + 1.0


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (nn.Embedding, {}),
        (Shifted, {}),
        (nn.Embedding, {"max_norm": 1.0}),
        (nn.Embedding, {"max_norm": 1.0, "norm_type": 1.0}),
    ],
)
def test_a_seed_says_the_table_whoever_reads_it_and_however_many_rows(way, kind, how):
    """Also where torch shortens the rows that are looked up."""
    embedding = kind(11, 6, **how)
    raw = embedding.weight.detach().clone()
    ROWS[way](embedding)
    for ids in (torch.tensor([3, 10]), torch.arange(11).repeat(2)):
        with same_draw(2):
            rows, table = embedding(ids), embedding.weight.detach()
        F.embedding(ids, raw, **how)
        assert torch.equal(embedding.get_parameter("weight"), raw)
        assert torch.equal(rows, table[ids] + float(kind is Shifted))
