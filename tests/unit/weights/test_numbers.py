"""What a reparametrized module computes: plain torch with the very same weights, bit by bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.weights import applied, same_draw
from tests.oracle import tensors
from tests.weight_zoo import LAYERS, MORE, OURS, Kind, Runs, Uses, Way, built, compare, looped

pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
]


KINDS = LAYERS | {
    "bias": Kind(lambda: nn.Linear(6, 5), lambda: (torch.randn(4, 6),), "bias"),
    "biases of an lstm": Kind(lambda: nn.LSTM(4, 5), lambda: (torch.randn(6, 2, 4),), "bias_.*"),
    "layer norm": Kind(lambda: nn.LayerNorm(6), lambda: (torch.randn(4, 6),)),
    "batch norm": Kind(lambda: nn.BatchNorm1d(6), lambda: (torch.randn(4, 6),)),
    "prelu": Kind(lambda: nn.PReLU(6), lambda: (torch.randn(4, 6),)),
}
EXACT = ["dropout", "noise", "norm", "thirds"]


def module_of(name):
    """The plain layer without dropout of activations, and its inputs."""
    plain, inputs = built(KINDS[name], "float32")
    for part in plain.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    return plain, inputs


@pytest.mark.sampled(70)
@pytest.mark.parametrize("way", MORE)
@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_that_of_the_materialised_weights(name, way):
    if "sparse" in name and way not in ("dropout", "noise", "thirds", "shared"):
        pytest.skip("a norm of torch takes no sparse gradient")
    plain, inputs = module_of(name)
    compare(MORE[way], plain, inputs, KINDS[name].pattern, rtol=0.0 if way in EXACT else 1e-4)


@pytest.mark.parametrize("way", MORE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype, way):
    x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    rtol = 0.0 if way in EXACT else 0.05 if dtype.itemsize == 2 else 1e-6
    ours, _ = compare(MORE[way], nn.Linear(6, 5).to(dtype), (x,), rtol=rtol)
    assert all(p.grad.dtype is p.dtype is dtype for p in ours.parameters())


@pytest.mark.parametrize("way", MORE)
@pytest.mark.parametrize("name", ["linear", "conv2d", "lstm", "embedding", "attention to itself"])
def test_the_same_numbers_without_a_graph(name, way):
    module, inputs = module_of(name)
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


LAYOUTS = {
    "channels last": lambda w: w.to(memory_format=torch.channels_last),
    "transposed": lambda w: w.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda w: w.repeat_interleave(2, 0).repeat_interleave(2, 2)[::2, :, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, -1, None])
@pytest.mark.parametrize("way", ["dropout", "noise", "rows", "norm", "norm of rows", "stacked"])
def test_the_layout_of_a_weight_makes_no_difference(way, dim, layout):
    more = {"rows": ROWS["rows"], "norm of rows": ROWS["rows and a norm"]}
    more |= {"norm": Way({}, {"p": 0.5})}
    way = (OURS | more)[way]
    way = way if way.norm is None else way._replace(norm={"dim": dim})
    base, results = nn.Conv2d(3, 4, 3, dtype=torch.float64), []
    for change in (torch.Tensor.contiguous, LAYOUTS[layout]):
        conv = nn.Conv2d(3, 4, 3, dtype=torch.float64)
        conv.weight = nn.Parameter(change(base.weight.detach()))
        conv.bias = nn.Parameter(base.bias.detach().clone())
        way(conv)
        x = torch.linspace(-1, 1, 150, dtype=torch.float64).view(2, 3, 5, 5).requires_grad_()
        with same_draw(3):
            output = conv(x)
        output.sin().sum().backward()
        results.append([output, x.grad, *(p.grad for p in conv.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# -- dropout ---------------------------------------------------------------------------------------


def read(module, name="weight"):
    """The weight that a step uses."""
    with recoup.weights.step(module), torch.no_grad():
        return getattr(module, name) * 1


@pytest.mark.parametrize("way", [Way(dropout={"p": 0.0}), Way(noise={"std": 0.0})])
@pytest.mark.parametrize("name", ["linear", "embedding", "lstm", "attention to itself"])
def test_nothing_that_is_drawn_is_the_plain_module(name, way):
    module, inputs = module_of(name)
    want = tensors(module(*inputs))
    way(module, KINDS[name].pattern)
    state = torch.get_rng_state()
    for got, expected in zip(tensors(module(*inputs)), want, strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(state, torch.get_rng_state())


SHAPES = [(12, 9), (5, 6, 7), (6, 5, 3, 3), (20,)]
AXES = [(0,), (1,), (-1,), (0, 1), [1], (1, -1), (0, 2), (2, 0), (2, 3), (-1, -2, -3)]
FITTING = [(s, a) for s, a in itertools.product(SHAPES, AXES) if max(map(abs, a)) < len(s)]


@pytest.mark.parametrize(("size", "axes"), FITTING)
def test_axes_share_the_mask(size, axes):
    module = recoup.weight_dropout(Uses(F.linear, *size).double(), p=0.5, axes=axes)
    together, seen = sorted({axis % len(size) for axis in axes}), []
    for _ in range(8):
        weight = read(module)
        kept = (weight != 0).double()
        shared = kept.amax(dim=together, keepdim=True)
        assert torch.equal(kept, shared.expand(size))
        assert torch.equal(weight, module.get_parameter("weight") * kept * 2)
        assert all(shared.shape[axis] == size[axis] for axis in set(range(len(size))) - {*together})
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
    "rows and a norm": Way({}, {"p": 0.5, "axes": (1,)}),
}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", [way for way in ROWS if "norm" not in way])
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


@pytest.mark.parametrize("way", [way for way in ROWS if "norm" not in way])
@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_rows_of_the_parameter_are_shortened_however_many_are_looked_up(norm_type, way):
    embedding = nn.Embedding(11, 6, max_norm=1.0, norm_type=norm_type)
    raw = embedding.weight.detach().clone()
    ROWS[way](embedding)
    for ids in (torch.arange(4), torch.arange(11).repeat(2)):
        with same_draw(2):
            rows, table = embedding(ids), embedding.weight.detach()
        F.embedding(ids, raw, max_norm=1.0, norm_type=norm_type)
        assert torch.equal(embedding.get_parameter("weight"), raw)
        assert torch.equal(rows, table[ids])


class Shifted(nn.Embedding):
    """An embedding whose forward does more than to look up."""

    def forward(self, ids):
        return super().forward(ids) + 1.0


class Tied(nn.Module):
    """A model whose decoder reads the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, ids):
        hidden = self.embedding(ids)
        return hidden, F.linear(hidden, self.embedding.weight)


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize("build", [lambda: Shifted(9, 4), Tied])
def test_all_reads_of_a_table_in_one_forward_have_one_draw(build, way):
    compare(ROWS[way], build(), (torch.tensor([[1, 3], [8, 0]]),), rtol=1e-5)


@pytest.mark.parametrize("kind", [nn.Embedding, Shifted])
def test_a_seed_says_the_table_whoever_reads_it_and_however_many_rows(kind):
    embedding, ids = ROWS["rows and noise"](kind(30, 4)), torch.tensor([3, 29])
    with same_draw(4):
        some, many = embedding(ids), embedding(torch.arange(30).repeat(2))
        table = embedding.weight.detach()
    assert torch.equal(some, many[ids])
    assert torch.equal(some, table[ids] + float(kind is Shifted))


def test_rows_and_entries_of_a_bag_with_sparse_gradients():
    bag = nn.EmbeddingBag(11, 6, mode="sum", sparse=True)
    ids, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4])
    for way in ("dropout", "rows"):
        compare(ROWS[way], bag, (ids, offsets), rtol=1e-6)


# -- recurrent layers ------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_in_a_loop_bit_by_bit(cell):
    """Also where the gradient is scaled by no power of 2, so that sums come before scales."""
    x = torch.randn(6, 2, 4, requires_grad=True)
    compare(MORE["thirds"], Runs(cell(4, 5), looped), (x,), r".*weight_.*")


class OfUsers(nn.LSTM):
    """A recurrent layer with a forward of its own, which flattens its weights first."""

    def forward(self, x, state=None):
        self.flatten_parameters()
        assert len(self.all_weights[0]) == 4
        output, state = super().forward(x.flip(0), state)
        return output.flip(0), state


def test_a_recurrent_layer_of_a_user():
    x = torch.randn(6, 2, 4, requires_grad=True)
    ours, _ = compare(OURS["dropout"], OfUsers(4, 5, 2), (x,), r"weight_hh_l\d")
    assert all(weight is p for weight, p in zip(ours._flat_weights, ours.parameters(), strict=True))


# -- order, and derivatives of any order -----------------------------------------------------------


@pytest.mark.parametrize("calls", [*itertools.permutations(("norm", "dropout", "noise", "apply"))])
def test_norm_then_dropout_then_noise_then_functions_in_whichever_order_they_are_applied(calls):
    way = Way({}, {"p": 0.5}, {"std": 0.5}, MORE["function"].function)

    class InThisOrder(Way):
        def __call__(self, module, pattern):
            for kind in map({"apply": "function"}.get, calls, calls):
                given = getattr(self, kind)
                Way(**{kind: given} if given is not None else {})(module, pattern)
            return module

    plain = nn.Linear(30, 20, dtype=torch.float64)
    x = torch.randn(3, 30, dtype=torch.float64, requires_grad=True)
    ours, _ = compare(InThisOrder(*way), plain, (x,), rtol=1e-12)
    kinds = [entry.reparametrization.kind for entry in applied(ours)]
    assert kinds == ["weight_norm", "weight_dropout", "weight_noise", "apply"]
