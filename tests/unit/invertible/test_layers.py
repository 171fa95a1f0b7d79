"""Layers: gradients, manners, order, noise, and what is refused; test_check.py has their values."""

from __future__ import annotations

import copy
import io
import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch import distributions as dist
from torch.distributions import Normal

import recoup
from recoup import invertible as inv
from recoup import schedules
from recoup.errors import GridError
from recoup.flows import ConvNetwork, Flow
from recoup.invertible.contract import as_tuple
from tests.invertible_zoo import Says
from tests.oracle import assert_same_tensors


def flat(y):
    return torch.cat([part.flatten(1) for part in as_tuple(y)], dim=1)


def test_calls_leave_input_stream_and_layer_as_they_were_and_take_an_empty_batch(case):
    layer, x = case
    # A log-determinant that is kept on the layer holds the graph of a call, and gets stale.
    before, version, same = dict(vars(layer)), x._version, x.clone()
    state = torch.random.get_rng_state()
    layer.inverse(layer(x)[0])
    assert vars(layer) == before
    assert x._version == version
    assert torch.equal(x, same)
    assert torch.equal(torch.random.get_rng_state(), state)
    for call, value in product((layer, layer.inverse), (None, [1.0])):
        with pytest.raises(ValueError, match=r"`[xy]` is "):
            call(value)
    empty, log_det = layer(x[:0])
    assert log_det.shape == (0,)
    assert layer.inverse(empty)[0].shape == x[:0].shape


def test_gradients_of_a_batch_hold_each_samples_own_and_no_parameter_is_without(case):
    layer, x = case

    def gradient(x):
        x = x.clone().requires_grad_()
        y, log_det = layer(x)
        (flat(y).pow(3).sum() + log_det.sum()).backward()
        return x.grad

    alone = torch.cat([gradient(x[:1]), gradient(x[1:])])
    torch.testing.assert_close(gradient(x), alone, rtol=1e-10, atol=1e-10)
    # A weight that the log-determinant does not depend on must still train.
    assert [name for name, p in layer.named_parameters() if p.grad is None] == []


def test_float32_stays_float32_under_autocast_too(case):
    layer, x = case[0].float(), case[1].float()
    plain, of_plain = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, log_det = layer(x)
        back, _ = layer.inverse(y)
    for each in (plain, y):
        assert flat(each).dtype == log_det.dtype == of_plain.dtype == torch.float32
    for each in (layer.inverse(plain)[0], back):
        torch.testing.assert_close(each, x, rtol=1e-4, atol=1e-4)
    # Only the networks of couplings are rounded.
    if not hasattr(layer, "network") or isinstance(layer, inv.InvertibleResidual):
        assert torch.equal(flat(y), flat(plain))
        assert torch.equal(log_det, of_plain)


X = torch.arange(24.0).view(2, 3, 2, 2)
PIXELS = torch.arange(16.0).view(1, 1, 4, 4)
TO_DEPTH = torch.tensor([0, 2, 8, 10, 1, 3, 9, 11, 4, 6, 12, 14, 5, 7, 13, 15]).view(1, 4, 2, 2)
ROWS = X.transpose(1, 2)  # not contiguous


@pytest.mark.parametrize(("layer", "x", "wanted"), [
    (inv.Flatten((3, 2, 2)), X, X.flatten(1)),
    (inv.Flatten((2, 3, 2)), ROWS, ROWS.flatten(1)),
    (inv.Squeeze(), PIXELS, TO_DEPTH.float()),  # space to depth, not a reshape
    (inv.Split(), X, (X[:, :2], X[:, 2:])),  # the first part is the larger, and goes on
    (inv.Permute([2, 0, 1]), X, X[:, [2, 0, 1]]),  # channel i is the one named
    (inv.Flip(), X, X[:, [2, 1, 0]]),
])  # fmt: skip
def test_where_values_go(layer, x, wanted):
    y, log_det = layer(x)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    back, inverse_log_det = layer.inverse(y)
    assert torch.equal(back, x)
    assert log_det.tolist() == inverse_log_det.tolist() == [0.0] * len(x)
    for z in y[1:] if isinstance(y, tuple) else ():  # an early latent does not hold its neighbour
        assert z.untyped_storage().nbytes() == z.numel() * 4


def test_an_order_is_random_and_a_loaded_one_changes_the_inverse_too():
    order = inv.Permute(20).permutation.tolist()
    assert order != sorted(order) == list(range(20))
    layer = inv.Permute([0, 1, 2])
    layer.load_state_dict(inv.Permute([1, 2, 0]).state_dict())
    y, _ = layer(X)
    assert torch.equal(y, X[:, [1, 2, 0]])
    assert torch.equal(layer.inverse(y)[0], X)


@pytest.mark.parametrize("shape", [(64, 4), (8, 4, 5, 7)])
def test_first_training_batch_has_mean_0_and_variance_1_a_channel(shape):
    scale = torch.tensor([0.01, 1.0, 50.0, 0.0]).view(1, 4, *[1] * (len(shape) - 2))
    layer = inv.ActNorm(4)
    y, log_det = layer(torch.randn(shape) * scale - 1 / 3)
    dims = [0, *range(2, y.dim())]
    torch.testing.assert_close(y.mean(dims), torch.zeros(4), atol=1e-3, rtol=0)
    variance = torch.tensor([1.0, 1.0, 1.0, 0.0])  # a channel that is constant is moved alone
    torch.testing.assert_close(y.var(dims, correction=0), variance, atol=1e-3, rtol=0)
    assert y[:, 3].abs().max() < 1e-6
    assert layer.log_scale[3] == 0
    assert log_det.isfinite().all()


def resumed(layer):
    torch.save(layer.state_dict(), buffer := io.BytesIO())
    other = inv.ActNorm(2)
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    return other


@pytest.mark.parametrize("again", [lambda layer: layer, copy.deepcopy, resumed])
def test_start_happens_once(again):
    layer = inv.ActNorm(2)
    assert not again(layer).started
    layer(5 + torch.randn(16, 2))
    other, before = again(layer), copy.deepcopy(layer.state_dict())
    other(torch.randn(16, 2))
    assert_same_tensors(dict(other.state_dict()), dict(before))


def test_evaluation_an_empty_batch_and_values_that_are_not_finite_do_not_start():
    layer, x = inv.ActNorm(2).eval(), 3 + torch.randn(4, 2)
    y, log_det = layer(x)
    assert torch.equal(y, x)
    assert log_det.tolist() == [0.0] * 4
    assert not layer.started
    layer.train()(x[:0])
    x[3, 1] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        layer(x)
    assert not layer.started
    assert layer.bias.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", [inv.InvertibleConv1x1, inv.InvertibleConv1x1LU])
@pytest.mark.parametrize("num_channels", [1, 7])
def test_starts_as_a_rotation_that_follows_the_default_generator(kind, num_channels):
    weights = []
    for seed in (0, 1, 2, 3, 3):  # the sign of a determinant is drawn
        torch.manual_seed(seed)
        layer = kind(num_channels, dtype=torch.float64)
        weights.append(layer.weight() if kind is inv.InvertibleConv1x1LU else layer.weight)
        assert torch.linalg.det(weights[-1]) > 0
    weight = weights[-1]
    assert torch.equal(weight, weights[-2])
    assert num_channels == 1 or not torch.equal(weight, weights[0])
    eye = torch.eye(num_channels, dtype=torch.float64)
    torch.testing.assert_close(weight @ weight.T, eye, atol=1e-5, rtol=0)
    assert all(parameter.is_contiguous() for parameter in layer.parameters())


def test_logit_keeps_the_ends_finite():
    x = torch.tensor([[0.0, 1.0]], requires_grad=True)
    y, log_det = inv.Logit()(x)
    (y.sum() + log_det.sum()).backward()
    assert all(each.isfinite().all() for each in (y, log_det, x.grad))
    x, log_det = inv.Logit(0.05).inverse(torch.tensor([[-200.0, 200.0]]))
    assert x.isfinite().all()
    torch.testing.assert_close(log_det, torch.tensor([-400.0 - 2 * math.log(0.9)]))


def learned(levels=17):
    torch.manual_seed(1)
    network = partial(ConvNetwork, 1, 2, width=4, num_context=1)
    coupling = partial(inv.AffineCoupling, split="checkerboard")
    couplings = [coupling(network(), condition=side) for side in ("second", "first")]
    made = inv.VariationalDequantize(levels, inv.Chain(inv.ActNorm(1), *couplings))
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made.eval()


kinds = pytest.mark.parametrize("make", [inv.Dequantize, learned])


@kinds
@pytest.mark.parametrize(
    ("levels", "dtype"),
    [(2, torch.uint8), (17, torch.int64), (255, torch.float32), (256, torch.float64)],
)
def test_every_level_is_found_again(make, dtype, levels):
    layer = make(levels).to(dtype if dtype.is_floating_point else torch.float32)
    x = torch.arange(levels).repeat(400).view(50, 1, 4, -1).to(dtype)
    y, log_det = layer(x)
    assert y.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert y.min() >= 0
    assert y.max() < 1
    back, inverse_log_det = layer.inverse(y)
    assert torch.equal(back, x.to(back.dtype))
    if make is inv.Dequantize:
        expected = torch.full((50,), -8 * levels * math.log(levels))
        torch.testing.assert_close(log_det, expected.to(log_det))
    if make is inv.Dequantize or dtype is torch.float64:
        torch.testing.assert_close(inverse_log_det, -log_det, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("levels", [3, 255, 256, 1000])
def test_the_ends_of_the_noise_do_not_round_to_another_level(monkeypatch, levels):
    x = torch.arange(float(levels)).view(1, 1, 1, -1)
    layer = inv.Dequantize(levels)
    monkeypatch.setattr("recoup.invertible.preprocess.draw_seed", lambda: 0)
    for end in (0, -1):  # the lowest and the highest draw
        draw = lambda high, size, *, end=end, **_: torch.full(size, end % high)  # noqa: E731
        monkeypatch.setattr(torch, "randint", draw)
        assert torch.equal(layer.inverse(layer(x)[0])[0], x)
    for end in (-1e4, -20.0, 20.0, 1e4):
        layer = inv.VariationalDequantize(levels, inv.Chain(inv.ActNorm(1)).eval())
        layer.chain[0].bias.data.fill_(end)  # as that of a trained one may be
        y, log_det = layer(x)
        assert torch.equal(layer.inverse(y)[0], x)
        assert log_det.isfinite().all()


@kinds
def test_noise_follows_one_seed_and_moves_the_stream_by_one(make):
    layer, x = make(17), torch.zeros(2, 1, 4, 4)
    torch.manual_seed(5)
    first = layer(x)[0]
    state = torch.random.get_rng_state()
    assert not torch.equal(layer(x)[0], first)
    torch.manual_seed(5)
    assert torch.equal(layer(x)[0], first)
    torch.manual_seed(5)
    inv.Dequantize(17)(torch.zeros(200, 3, 8, 8))  # whatever the size
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_noise_is_cut_off_and_learned_noise_is_not_moved_to_a_cell():
    noise = inv.Dequantize(17)(torch.full((1, 50_000), 3))[0].double() * 17 - 3
    assert noise.var().item() == pytest.approx(1 / 12, abs=2e-3)
    assert noise.min() < 1e-3
    assert noise.max() > 1 - 1e-3
    # At 256 levels in float32: the mean over the noise is that of the distribution it states.
    made = inv.VariationalDequantize(256, inv.Chain(inv.Flip()))  # u = sigmoid of a standard normal
    noise = (made(torch.full((4, 1, 200, 200), 255))[0].double() * 256 - 255).flatten()
    expected = torch.sigmoid(torch.randn(400_000, dtype=torch.float64))
    assert noise.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert noise.var().item() == pytest.approx(expected.var().item(), rel=0.02)
    assert noise.unique().numel() > 30_000  # a grid of 4096 cells would have fewer


@pytest.mark.parametrize("margin", [None, 0.1])  # that of float64 is too small to be seen
def test_log_det_is_the_entropy_of_the_noise_by_a_jacobian(monkeypatch, margin):
    made, x = learned(5).double(), torch.randint(5, (1, 1, 2, 2)).double()
    if margin is not None:
        monkeypatch.setattr(made, "_margin", lambda dtype: margin)
    drawn = torch.randn(x.shape, dtype=torch.float64)

    def called(values):
        monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: values)
        return made(x)

    noise = lambda values: called(values)[0] * 5 - x  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(noise, drawn).view(4, 4)
    log_density = Normal(0.0, 1.0).log_prob(drawn).sum() - torch.linalg.slogdet(jacobian)[1]
    expected = -log_density - 4 * math.log(5)
    y, log_det = called(drawn)
    torch.testing.assert_close(log_det[0], expected, rtol=0, atol=1e-9)
    assert made.inverse(y)[1].isfinite()
    y[0, 0, 0, 0] = x[0, 0, 0, 0] / 5  # the very edge of its level: noise that it cannot make
    assert made.inverse(y)[1] == -math.inf


def test_the_first_batch_of_each_kind_is_looked_at():
    layer, x = inv.Dequantize(256), torch.rand(3, 5)
    with pytest.raises(ValueError, match=r"for continuous data leave `levels` out"):
        layer(x)
    layer((x * 255).round())
    layer(x)  # later batches cost nothing
    for call in (lambda: layer(x.double()), lambda: layer.eval()(x)):
        with pytest.raises(ValueError, match="`x` has values from"):
            call()
    assert inv.Dequantize(256)(torch.full((1, 2), math.nan))[0].isnan().all()


def test_the_chain_of_learned_noise_follows_its_flow_and_is_not_asked_in_sampling():
    chain = inv.Chain(
        inv.ActNorm(1), inv.Squeeze(), inv.AffineCoupling(nn.Conv2d(2, 4, 1)), inv.Flip()
    )
    flow = Flow(chain, shape=(1, 4, 4), dequantize=learned(5)).double().eval()
    flow.memory = "sqrt"
    assert flow.dequantize.chain.memory == flow.chain.memory == "sqrt"
    schedule = schedules.sqrt(len(flow.chain))  # is for one chain
    flow.memory = "linear"
    flow.memory = schedule
    assert flow.chain.memory is schedule
    assert flow.dequantize.chain.memory == "linear"

    flow.dequantize.chain.inverse = None  # would raise
    assert set(flow.sample(3).flatten().tolist()) <= set(range(5))
    # Levels may be said twice, but not differ.
    assert Flow(chain, shape=(1, 4, 4), levels=5, dequantize=learned(5)).levels == 5
    with pytest.raises(ValueError, match="`levels` is 16, but `dequantize` is for 17"):
        Flow(chain, shape=(1, 4, 4), levels=16, dequantize=learned(17))


# Couplings, and what a network returns for each value that they change.
KINDS = {inv.AdditiveCoupling: 1, inv.AffineCoupling: 2, inv.MixtureCoupling: 26}


OF_COUPLINGS = {"condition": ["left"], "split": ["rows"]}
NO_ARGUMENTS = [  # what makes a layer, and values of arguments that are none
    (partial(inv.AffineCoupling, nn.Identity()), {**OF_COUPLINGS, "bound": [0]}),
    (partial(inv.AdditiveCoupling, nn.Identity()), {**OF_COUPLINGS, "fraction_bits": [21]}),
    (partial(inv.MixtureCoupling, nn.Identity()), {"num_components": [0]}),
    (partial(inv.LipschitzLinear, 2, 2), {"coefficient": [0.0, 1.0, math.nan]}),
    (partial(inv.LipschitzConv2d, 2, 2, 1), {"coefficient": [0.0, 1.0]}),
    (partial(inv.InvertibleResidual, nn.Identity()), {
        "log_det": ["trace"], "num_terms": [0], "max_iterations": [0],
        "continuation": [1.0], "tolerance": [0.0],
    }),
    (inv.Logit, {"alpha": [-0.1, 0.5, math.nan]}),
    (inv.Dequantize, {"levels": [0]}),
    (inv.Flatten, {"shape": [(), (2, 0)]}),
    (inv.Squeeze, {"factor": [0]}),
    (inv.Permute, {"permutation": [[0, 0, 1], [1, 2, 3], [0, 2]]}),
    (inv.adapt, {"transform": [42, None, nn.Linear, dist.AbsTransform(), dist.SoftmaxTransform()]}),
    (partial(inv.Chain, inv.Flip(), inv.Flip()), {"memory": ["square", 0, 1.5, None, True]}),
]  # fmt: skip


REFUSED = [
    *((partial(make, **{name: value}), f"`{name}` is ")
      for make, values in NO_ARGUMENTS for name, each in values.items() for value in each),
    (lambda: inv.Chain(inv.Flip(), nn.Tanh()), r"`modules\[1\]` is a Tanh"),
    (lambda: inv.Chain(inv.Flip(), memory=schedules.sqrt(3)), "for 3 stages, but the chain has 1"),
    (lambda: inv.check_invertible(inv.Flip(), torch.randn(2, 6), max_dims=5), "`max_dims` 5"),
    (lambda: inv.check_invertible(inv.Flip(), torch.randn(0, 3)), r"a batch \(N, ...\) is needed"),
    (lambda: inv.adapt(dist.ExpTransform(cache_size=1)), "`transform` keeps its last value"),
    (lambda: recoup.train_in(inv.Chain(inv.ActNorm(2))),
     "`model` is a .*, in which there is no flow of zuko"),
    (lambda: recoup.train_in(42), r"`model` is 42, but must be an nn\.Module"),
    *((lambda kind=kind: kind(Says(0.0, num_channels=3))(torch.randn(1, 5)),
       f"Give it {2 * KINDS[kind]} output channels") for kind in KINDS),
    (lambda: inv.AffineCoupling(nn.Identity())(torch.randn(1, 1, 4, 4)), "Squeeze"),
    (lambda: inv.AffineCoupling(nn.Conv2d(1, 2, 1), split="checkerboard")(torch.randn(1, 1, 3, 4)),
     "a checkerboard needs .* even H and W"),
    (lambda: inv.AdditiveCoupling(nn.Identity(), exact=True)(torch.randn(2, 16).bfloat16()),
     r"torch.bfloat16, but with `exact`"),
    (lambda: inv.InvertibleResidual(nn.Sequential(inv.LipschitzLinear(2, 2), nn.Dropout())),
     "has a Dropout at `1`"),
    (lambda: inv.InvertibleResidual(nn.Linear(2, 3))(torch.zeros(1, 2)),
     r"shape \(1, 3\).*same shape"),
    (lambda: inv.InvertibleResidual(nn.Identity())(torch.zeros(1, 1, 16, 17)), "at most 256"),
    (lambda: inv.Normalize(0.0, [1.0, 0.0]), "`std` may be 0"),
    (lambda: inv.Normalize([0.0, 1.0], [1.0, 1.0, 1.0]), "2 and `std` 3"),
    (lambda: inv.Dequantize(4)(torch.zeros(1, 2) * 1j), "grey levels are real"),
    (lambda: inv.VariationalDequantize(5, inv.Chain(inv.Squeeze()))(torch.zeros(2, 1, 4, 4)),
     "made noise of shape"),
    (lambda: inv.Flatten((2, 2))(torch.zeros(1, 4)), r"`x` has shape .* needs \(N, 2, 2\)"),
    *((partial(inv.Squeeze(), torch.randn(shape)), "`x` has shape .* `factor` 2")
      for shape in ((1, 1, 5, 4), (1, 1, 4, 5))),
    (lambda: inv.Squeeze().inverse(torch.randn(1, 6, 2, 2)), "multiple of 4"),
    (lambda: inv.Split()(torch.randn(2, 1, 4)), r"`x` has shape \(2, 1, 4\), but Split needs"),
    (lambda: inv.Split().inverse(torch.randn(2, 4)), "`y` has 1 parts, .* the pair"),
    *((lambda size=size: inv.LipschitzConv2d(2, 2, size), "`kernel_size")
      for size in ((), (3, 3, 3), (3, 0))),
    (lambda: inv.LipschitzConv2d(2, 2, 3, padding=()), "`padding` is "),
    *((lambda value=value: inv.check_invertible(inv.Flip(), torch.randn(2, 6), tolerance=value),
       "`tolerance` is ") for value in (-1, math.inf)),
    *((partial(call, value), "`[xy]` is ") for value in (None, [1.0])
      for of in (inv.Chain(), inv.Flip(), inv.Dequantize(4)) for call in (of, of.inverse)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_unsuitable_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_values_that_the_grid_does_not_hold_are_an_error(direction):
    x, coupling = torch.zeros(2, 16), inv.AdditiveCoupling(nn.Identity(), exact=True)
    words = r"AdditiveCoupling.*300.*below 256 only.*fewer `fraction_bits`"
    for value, said in ((math.nan, "AdditiveCoupling.*not finite"), (300.0, words)):
        x[0, 15], coupling.fraction_bits = value, 16
        with pytest.raises(GridError, match=said):
            getattr(coupling, direction)(x)
    coupling.fraction_bits = 15
    getattr(coupling, direction)(x)


def start_on_a_rank(rank, port_file, out):
    init = f"file://{port_file}"
    distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    torch.manual_seed(rank)
    x = 3 * rank + torch.randn(5 + rank, 2)  # ranks with other batches, even of other sizes
    layer = inv.ActNorm(2)
    layer(x)
    torch.save((x, layer.state_dict()), f"{out}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_start_from_the_batches_of_all(tmp_path):
    multiprocessing.spawn(start_on_a_rank, (tmp_path / "port", tmp_path), nprocs=2)
    (x0, state0), (x1, state1) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    whole = inv.ActNorm(2)
    whole(torch.cat([x0, x1]))
    for name, value in whole.state_dict().items():
        assert torch.equal(state0[name], state1[name])
        torch.testing.assert_close(state0[name], value)
