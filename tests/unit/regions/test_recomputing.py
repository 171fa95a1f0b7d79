"""`recomputing`: the plain code is the oracle, for gradients, statistics, stream and bytes."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from recoup.regions.recomputing import recomputing
from recoup.regions.recorded_block import RecordedBlock
from tests.alive import no_collector
from tests.oracle import hooks_in_force

SIZE = 48
UNIT = SIZE * SIZE * 4  # one noisy weight


def nothing_of_ours():
    return hooks_in_force() is None and torch._C._len_torch_dispatch_stack() == 0


def leaves():
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(SIZE, SIZE, generator=generator).div_(4).requires_grad_()
    return a, torch.randn(8, SIZE, generator=generator).requires_grad_()


def noisy(a):
    return a + 0.1 * torch.randn_like(a)


class Ran:
    """A step of `body(context, a, x)`: what it left, and what it held between its passes."""

    def __init__(self, body, context, between=nullcontext):
        a, x = leaves()
        torch.manual_seed(5)
        torch.rand(3)
        with StorageTracker() as tracker:
            output = body(context, a, x)
            loss = output.float().square().mean()
            del output
            self.held = tracker.current_bytes
        assert nothing_of_ours()
        with between():
            torch.rand(7)
            loss.backward()
        self.left = [loss.detach(), a.grad, x.grad, torch.get_rng_state()]


def assert_same(got, want):
    for ours, plain in zip(got, want, strict=True):
        assert (ours is None) is (plain is None)
        assert ours is None or torch.equal(ours, plain)


def compare(body, between=nullcontext):
    """Run `body` plainly and in blocks, hold the two against each other, and return both."""
    ours, plain = Ran(body, recomputing, between), Ran(body, nullcontext, between)
    assert ours.left[1] is not None
    assert ours.left[1].abs().sum() > 0
    assert_same(ours.left, plain.left)
    return ours, plain


def made_then(make, use=F.linear):
    def body(context, a, x):
        with context():
            w = make(a)
        return use(x, w)

    return body


# -- bytes ----------------------------------------------------------------------------------------


def under_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w)


CONSUMERS = {
    "v_ * x": lambda x, w: w[:8] * x,
    "x @ w": lambda x, w: x @ w,
    "x @ w.t()": lambda x, w: x @ w.t(),
    "F.linear": F.linear,
    "F.linear, 3-D": lambda x, w: F.linear(x.view(2, 4, SIZE), w, w[0]),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "a view": lambda x, w: x @ w.view(-1).view(SIZE, SIZE),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "autocast": under_autocast,
    "two consumers": lambda x, w: F.linear(x, w) + (x @ w).tanh().sum(),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_the_noisy_tensor_is_not_held(name):
    ours, plain = compare(made_then(noisy, CONSUMERS[name]))
    copies = UNIT // 2 if name == "autocast" else UNIT  # autocast's copy takes its place
    assert plain.held - ours.held == copies


def test_under_autocast_the_block_and_the_copy_are_not_held():
    def body(context, a, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with context():
                w = torch.mm(a, a.t())  # in bfloat16
            return F.linear(x, w)

    ours, plain = compare(body, between=partial(torch.autocast, "cpu", dtype=torch.bfloat16))
    assert ours.held <= plain.held - UNIT // 2


def test_backward_under_an_autocast_that_forward_did_not_see():
    between = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    compare(made_then(lambda a: torch.mm(a, a.t()).exp()), between=between)


MAKERS = {
    "saves its result": lambda a: a.tanh().exp(),
    "dropout": lambda a: F.dropout(a, 0.3),
    "dropout in place": lambda a: F.dropout(a * 2, 0.3, inplace=True),
    "gelu of dropout": lambda a: F.gelu(F.dropout(a, 0.3)).exp(),
    "in place": lambda a: (a + 1).mul_(torch.rand_like(a)).add_(a),
    "in place through a view": lambda a: changed_through_a_view(a * 2),
    "where": lambda a: torch.where(a > 0, a, 0.1 * a).cumsum(0),
    "foreach": lambda a: torch._foreach_mul([a, noisy(a)], 2.0)[1],
    "another type": lambda a: noisy(a.double()).float(),
}


def changed_through_a_view(h):
    h.t()[1:3].mul_(3)
    return h


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_saved_within_is_not_held(name):
    ours, _ = compare(made_then(MAKERS[name]))
    nothing_saved, _ = compare(made_then(lambda a: a + 1, lambda x, w: F.linear(x, w)))
    assert ours.held <= nothing_saved.held + 8192  # a random state


def test_a_fresh_seed_takes_8_bytes():
    def body(context, a, x):
        torch.manual_seed(1)
        with context():
            w = noisy(a)
        return x @ w

    without, _ = compare(made_then(lambda a: a * 2, lambda x, w: x @ w))
    assert compare(body)[0].held == without.held


def test_ten_blocks_alive_at_once():
    def body(context, a, x):
        weights = []
        for _ in range(10):
            with context():
                weights.append(noisy(a))
        for place in (3, 1, 4, 0, 5, 9, 2, 6, 8, 7):
            x = F.linear(x, weights[place])
        return x

    ours, plain = compare(body)
    # One random state for each, since something is drawn between two blocks for all they know.
    assert ours.held <= plain.held - 10 * UNIT + 10 * 5056


def test_blocks_that_die_between_others():
    def body(context, a, x):
        weights = []
        for _ in range(3):
            with context():
                weights.append(noisy(a))
        first = F.linear(x, weights.pop(0))
        weights.pop(0)
        return first + F.linear(x, weights.pop(0))

    compare(body)


# -- what runs again, and how often ---------------------------------------------------------------


class Runs:
    """Counts how often blocks run again within."""

    def __init__(self, monkeypatch):
        self.count = 0
        replay = RecordedBlock.replay

        def counted(record):
            self.count += 1
            replay(record)

        monkeypatch.setattr(RecordedBlock, "replay", counted)


def test_a_block_runs_again_once_for_all_its_values(monkeypatch):
    runs = Runs(monkeypatch)

    def body(context, a, x):
        with context():
            w = noisy(a).tanh()
            v = w.exp()
        return F.linear(F.linear(x, w), v) @ w.t()

    compare(body)
    assert runs.count == 1


def test_a_value_that_nobody_saves_costs_nothing(monkeypatch):
    runs = Runs(monkeypatch)
    a, x = leaves()
    with recomputing():
        w = a + 1
    (w.sum() + x.sum()).backward()
    assert runs.count == 0


def test_the_graph_retained():
    a, x = leaves()
    with recomputing():
        w = noisy(a).tanh()
    loss = F.linear(x, w).square().sum()
    first = torch.autograd.grad(loss, (a, x), retain_graph=True)
    torch.manual_seed(0)
    assert_same(torch.autograd.grad(loss, (a, x), retain_graph=True), first)
    assert_same(torch.autograd.grad(loss, (a,)), first[:1])


def test_gradient_of_the_gradient():
    def run(context):
        a, x = leaves()
        torch.manual_seed(0)
        with context():
            w = (noisy(a) * a).tanh()
        found = torch.autograd.grad(F.linear(x, w).square().sum(), (a, x), create_graph=True)
        sum(part.square().sum() for part in found).backward()
        return a.grad, x.grad

    assert_same(run(recomputing), run(nullcontext))


def test_gradcheck():
    a = leaves()[0][:4, :4].detach().double().requires_grad_()

    def fn(a):
        with recomputing():
            h = (a @ a).tanh()
        return h * a + h.t() @ h

    assert torch.autograd.gradcheck(fn, (a,))
    assert torch.autograd.gradgradcheck(fn, (a,))


# -- what may be in a block -----------------------------------------------------------------------


def by_slices(a):
    out = torch.empty_like(a)
    for row in range(len(a)):
        out[row] = a[row] * row
    return out


def filled_behind_our_back(a):
    out = torch.empty(SIZE, SIZE)
    out.numpy()[...] = 3.0
    return a * out.mul_(2)


def split_views(a):
    first, _, last = noisy(a).split(SIZE // 3)
    return torch.cat((last, first, first.t().reshape(-1, SIZE)))


def with_no_grad(a):
    with torch.no_grad():
        mask = torch.rand_like(a) > 0.5
    return a * mask


def through_complex(a):
    z = torch.fft.fft(a)
    return (z * z.conj()).real + torch.view_as_real(z)[..., 1] + z.conj().imag


class Exp(torch.autograd.Function):
    """Saves what it is given and what it returns."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * (x == x)


CODE = {
    "data-dependent shapes": lambda a: a[(a > 0.5).any(1).nonzero()[:, 0]].exp(),
    "item": lambda a: a * (a.abs().max().item() + len(a[a > 0])),
    "constants": lambda a: a * torch.tensor(2.0) + torch.arange(SIZE),
    "slices of fresh memory": by_slices,
    "memory filled behind our back": filled_behind_our_back,
    "views": split_views,
    "no_grad": with_no_grad,
    "complex": through_complex,
    "autograd.Function": lambda a: Exp.apply(a * 2),
    "sparse": lambda a: torch.sparse.mm((a * 1).to_sparse(), a.exp()),
    "linalg": lambda a: torch.linalg.svd(a)[1][:, None] * a,
    "seeded within": lambda a: (torch.rand(3), torch.manual_seed(2), noisy(a))[-1],
    "vmap": torch.vmap(lambda row: row.tanh() * row),
    "bool index": lambda a: a.masked_fill(a > 0.2, 0.0).sort(dim=1)[0],
    "a slice of a larger tensor": lambda a: a[3:].exp()[:, 5:].t().contiguous(),
}


@pytest.mark.parametrize("name", CODE)
def test_code_within(name):
    compare(made_then(CODE[name], lambda x, w: (0.1 * w * w.flip(0)).exp() * x.sum()))


def test_a_function_of_somebodys_own_that_takes_a_value():
    ours, plain = compare(made_then(noisy, lambda x, w: F.linear(x, Exp.apply(w))))
    assert ours.held <= plain.held + 8192


def test_one_context_used_again_and_within_itself():
    def body(context, a, x):
        block = context()
        with block:
            w = noisy(a)
            with block:
                v = w.tanh()
        with block:
            u = v.exp()
        return F.linear(x, u) @ w * v[0]

    compare(body)


def test_nested_blocks():
    def body(context, a, x):
        with context():
            h = x * 2
            with context():
                w = noisy(a).tanh()
            h = F.linear(h, w).tanh()
        return F.linear(h, w)

    ours, plain = compare(body)
    assert ours.held <= plain.held - UNIT


def test_a_block_that_takes_a_value_of_another():
    def body(context, a, x):
        with context():
            w = noisy(a)
        with context():
            h = F.gelu(F.linear(x, w))
        return h @ a

    ours, plain = compare(body)
    assert ours.held <= plain.held - UNIT


def test_a_long_chain_of_blocks():
    """Asked as a whole, it would be made again as a whole, by a recursion as deep as it is long."""

    def body(context, a, x):
        for _ in range(150):
            with context():
                x = (x + 1).sin()
        return x @ a

    compare(body)


def test_the_statistics_of_norms_are_counted_once():
    def run(context):
        norm = nn.BatchNorm1d(SIZE)
        a, x = leaves()
        with context():
            h = norm(F.relu(norm(x)))
        F.linear(h, a).square().sum().backward()
        return [a.grad, x.grad, norm.weight.grad, *norm.buffers()]

    got = run(recomputing)
    assert_same(got, run(nullcontext))
    assert got[-1] == 2


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_between_forward_and_backward(training):
    """What a second forward does to the statistics does not reach the first one's backward."""

    def run(context):
        norm = nn.BatchNorm1d(SIZE).train(training)
        a, x = leaves()
        with context():
            h = norm(x)
        with torch.no_grad():
            norm.train()(x * 3)
        F.linear(h, a).square().sum().backward()
        return [a.grad]

    assert_same(run(recomputing), run(nullcontext))


def test_tensors_from_outside_that_the_block_changes():
    def run(context):
        a, x = leaves()
        outside, total = x * 1, torch.ones(SIZE)
        with context():
            before = outside + total
            outside.add_(a[:8])
            total.add_(outside.detach().sum(0))
            torch.add(total, 1, out=total)
            w = (before + outside + total).exp()
        F.linear(w, a).square().sum().backward()
        return [a.grad, x.grad, outside, total]

    assert_same(run(recomputing), run(nullcontext))


LAYERS = {
    "LSTM": lambda: nn.LSTM(SIZE, SIZE, 2, dropout=0.2),
    "GRU": lambda: nn.GRU(SIZE, SIZE, bidirectional=True),
    "RNN": lambda: nn.RNN(SIZE, SIZE),
    "attention": lambda: nn.TransformerEncoderLayer(SIZE, 4, SIZE, dropout=0.2),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
    "weight noise": lambda: recoup.weight_noise(nn.Linear(SIZE, SIZE), std=0.1),
    "weight dropout": lambda: recoup.weight_dropout(nn.LSTM(SIZE, SIZE), "weight_hh_l0", p=0.5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_within(name):
    torch.manual_seed(1)
    layer = LAYERS[name]()

    def run(context):
        module = copy.deepcopy(layer)
        _, x = leaves()
        torch.manual_seed(2)
        with context():
            h = module(x.view(4, 2, SIZE))
            h = h[0] if isinstance(h, tuple) else h
        h.exp().square().sum().backward()
        found = [parameter.grad for parameter in module.parameters()]
        return [x.grad, *found, *module.buffers(), torch.get_rng_state()]

    assert_same(run(recomputing), run(nullcontext))


def test_a_layer_with_weight_noise_holds_no_weight():
    layer = recoup.weight_noise(nn.Linear(SIZE, SIZE), std=0.1)

    def body(context, a, x):
        with context():
            h = layer(x).tanh()
        return F.linear(h, a)

    ours, _ = compare(body)
    plain, _ = compare(lambda context, a, x: F.linear(x, a))
    assert ours.held <= plain.held + 2 * 8192


# -- draws ----------------------------------------------------------------------------------------


def with_generator(a):
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    first = torch.randn(a.shape, generator=generator) + torch.randn_like(a)
    return a + first * torch.empty_like(a).bernoulli_(0.5, generator=generator)


DRAWS = {
    "randn": lambda a: a + torch.randn(a.shape),
    "randn_like": lambda a: a + torch.randn_like(a),
    "rand": lambda a: a * torch.rand(a.shape) * torch.rand_like(a),
    "randint": lambda a: a * torch.randint(5, a.shape) * torch.randint(2, 5, a.shape),
    "randint_like": lambda a: a * torch.randint_like(a, 3) * torch.randint_like(a, 2, 5),
    "randperm": lambda a: a[torch.randperm(SIZE)],
    "normal_": lambda a: a + torch.empty_like(a).normal_(),
    "bernoulli_": lambda a: a * torch.empty_like(a).bernoulli_(0.5),
    "bernoulli": lambda a: a * torch.bernoulli(a.detach().sigmoid()),
    "multinomial": lambda a: a[:, torch.multinomial(torch.ones(SIZE), SIZE)],
    "F.dropout": lambda a: F.dropout(a, 0.4),
    "native_dropout": lambda a: torch.native_dropout(a, 0.4, True)[0],
    "rrelu": lambda a: F.rrelu(a, training=True),
    "a generator": with_generator,
    "a factory with a device": lambda a: a + torch.randn(a.shape, device="cpu"),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_repeated(name):
    """Others draw before the block, between it and backward, and the stream goes on after it."""
    draw = DRAWS[name]
    compare(made_then(lambda a: draw(draw(a).tanh())))


def test_a_generator_is_left_alone():
    generator = torch.Generator().manual_seed(7)
    a, x = leaves()
    with recomputing():
        w = a + torch.randn(a.shape, generator=generator)
    loss = F.linear(x, w).sum()
    state = generator.get_state()
    loss.backward()
    assert torch.equal(generator.get_state(), state)


# -- never silently wrong -------------------------------------------------------------------------


def changes_outside(a, w):
    a.add_(1)


def changes_the_value(a, w):
    w.mul_(2)


@pytest.mark.parametrize("change", [changes_outside, changes_the_value])
def test_changed_between_forward_and_backward(change):
    a, x = leaves()
    with recomputing():
        w = noisy(a)
    loss = F.linear(x, w).sum()
    with torch.no_grad():
        change(a, w)
    with pytest.raises(ChangedError, match=r"the block at .*test_recomputing\.py:\d+"):
        loss.backward()
    assert nothing_of_ours()


def test_changed_after_the_block_and_before_it_is_saved():
    def body(context, a, x):
        with context():
            w = noisy(a)
        w.mul_(2)
        return F.linear(x, w)

    ours, plain = compare(body)
    assert ours.held == plain.held


def test_changed_within_after_it_was_saved():
    a, _ = leaves()
    with recomputing():
        h = a.exp()
        h.add_(1)
    with pytest.raises(ChangedError, match="changed in place"):
        h.sum().backward()


def test_changed_within_between_two_saves():
    """Plain torch minds only if backward comes to the first of them."""
    unused = []

    def body(context, a, x):
        with context():
            h = a * 2
            unused.append(h.sin())
            h.add_(1)
            w = h.sin()
        return F.linear(x, w)

    compare(body)


def test_taken_from_outside_and_changed_there():
    """As plain torch says it of what an operator saved."""
    a, x = leaves()
    with recomputing():
        y = (x * 1).sin()
    z = y * 2
    y.add_(1)
    (z @ a).sum().backward()  # nobody saved `y`


def test_backward_within():
    a, _ = leaves()
    for _ in range(2):
        a.grad = None
        with recomputing():
            (a * 1).exp().sum().backward()
        assert torch.equal(a.grad, a.detach().exp())
        assert nothing_of_ours()


def test_an_exception_within():
    a, x = leaves()
    made = []

    def fail():
        made.append(noisy(a).exp())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), recomputing():
        fail()
    (w,) = made
    assert nothing_of_ours()
    assert type(w) is torch.Tensor
    with pytest.raises(ReplayError, match="made before it raised an exception"):
        F.linear(x, w).sum().backward()


def test_a_sparse_tensor_changed_in_place():
    a, _ = leaves()
    sparse = a.detach().to_sparse()
    with pytest.raises(ReplayError, match="Do it outside of the block"), recomputing():
        sparse.mul_(2)


def test_functional_transforms_are_refused():
    def fn(x):
        with recomputing():
            y = x.sin()
        return y.sum()

    with pytest.raises(RecoupError, match=r"transforms of torch\.func"):
        torch.func.grad(fn)(torch.ones(3))
    with pytest.raises(RuntimeError, match="saved tensor hooks"), recomputing():
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(3))
    assert nothing_of_ours()


# -- a good guest ---------------------------------------------------------------------------------


def test_without_gradients_nothing_is_done():
    a, _ = leaves()
    with torch.no_grad(), recomputing():
        assert nothing_of_ours()
        w = a + 1
    assert type(w) is torch.Tensor


def test_parameters_made_within_stay_parameters():
    with recomputing():
        parameter = nn.Parameter(torch.randn(3))
        leaf = torch.randn(3).requires_grad_()
    assert type(parameter) is nn.Parameter
    assert type(leaf) is torch.Tensor


def test_values_are_copied_and_pickled_plainly():
    a, _ = leaves()
    with recomputing():
        noise = torch.randn_like(a)
    for copied in (copy.deepcopy(noise), pickle.loads(pickle.dumps(noise))):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, noise)


def test_nothing_is_left_without_the_collector():
    a, x = leaves()
    layer = nn.BatchNorm1d(SIZE)
    gone = []
    with no_collector(), StorageTracker() as tracker:
        for step in range(6):
            with recomputing():
                w = noisy(a).tanh()
                with recomputing():
                    h = layer(w).exp()
            loss = F.linear(x, w).sum() + (h * w).sum()
            gone += [weakref.ref(w._recoup_source), weakref.ref(h._recoup_source)]
            if step % 2:
                loss.backward()
                a.grad = x.grad = None
            del w, h, loss
            layer.zero_grad()
        assert all(ref() is None for ref in gone)
        assert tracker.current_bytes == 0


def test_nothing_is_left_after_an_exception_or_without_gradients():
    a, _ = leaves()
    with no_collector(), StorageTracker() as tracker:
        for context in (torch.no_grad, torch.enable_grad):
            try:
                with context(), recomputing():
                    w = noisy(a).exp()
                    raise KeyError
            except KeyError:
                del w
        assert tracker.current_bytes == 0


def test_memory_falls_as_the_block_runs_and_runs_again():
    """At most two of ten states in a row are alive, in forward and when they are made again."""
    a, _ = leaves()
    with StorageTracker() as tracker:
        with recomputing():
            h = a.detach()
            for _ in range(10):
                h = torch.randn_like(h) + h
            y = a * h
        del h
        loss = y.sum()
        del y
        assert tracker.peak_bytes <= 3 * UNIT + 3 * 8192
        tracker.peak_bytes = tracker.current_bytes
        loss.backward()
    assert tracker.peak_bytes <= 5 * UNIT + 3 * 8192


CHECKPOINTS = {
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "torch, reentrant": partial(torch_checkpoint, use_reentrant=True),
    "ours": recoup.checkpoint,
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_inside_of_a_checkpoint(name):
    def body(context, a, x):
        def fn(x, a):
            h = x * 2
            with context():
                w = noisy(a).tanh()
            return F.linear(h.sin(), w) @ w

        return CHECKPOINTS[name](fn, x, a) @ a

    ours, plain = compare(body)
    assert ours.held <= plain.held


@pytest.mark.parametrize("name", [*CHECKPOINTS, "recompute"])
def test_a_checkpoint_within(name):
    call = recoup.recompute if name == "recompute" else partial(partial, CHECKPOINTS[name])

    def body(context, a, x):
        with context():
            w = call(lambda a: noisy(a).tanh())(a * 2)
            w = w.exp()
        return F.linear(x, w)

    ours, plain = compare(body)
    assert ours.held <= plain.held - UNIT


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_block_within_a_checkpoint_within_a_block(name):
    def body(context, a, x):
        def fn(x, a):
            with context():
                w = noisy(a).tanh()
            return F.linear(x, w).sin()

        with context():
            h = CHECKPOINTS[name](fn, x * 1, a).exp()
        return h @ a

    compare(body)


def test_early_stop_of_a_checkpoint():
    """The recomputation ends in the midst of a block, or in its end."""

    def fn(x, a):
        with recomputing():
            w = noisy(a)
            w = w * x.sum()
        return w.exp().sum()

    a, x = leaves()
    torch_checkpoint(fn, x * 1, a, use_reentrant=False).backward()
    assert nothing_of_ours()
    assert a.grad is not None


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_value_from_outside_of_a_checkpoint(name):
    def body(context, a, x):
        with context():
            w = noisy(a)

        def fn(x, w):
            with context():
                h = F.linear(x, w).tanh()
            return h @ w.sin()

        return CHECKPOINTS[name](fn, x, w) @ a

    compare(body)


@pytest.mark.parametrize("is_nested", [False, True])
def test_hooks_around_see_what_is_kept(is_nested):
    seen = []

    def see(tensor):
        seen.append(tensor.shape)
        return tensor

    a, x = leaves()
    with saved_tensors_hooks(see, lambda tensor: tensor):
        with recomputing(), recomputing() if is_nested else nullcontext():
            w = noisy(a).tanh() * x.sum()
        y = F.linear(x, w)
    assert torch.Size((8, SIZE)) in seen  # what `linear` saves of its input
    assert (SIZE, SIZE) in seen  # `a`, which the block takes
    assert seen.count((SIZE, SIZE)) == 1 + is_nested  # once for each block
    y.sum().backward()


@pytest.mark.parametrize("where", ["around", "after", "within"])
def test_save_on_cpu(where):
    def body(context, a, x):
        with save_on_cpu() if where == "around" else nullcontext():
            with context(), save_on_cpu() if where == "within" else nullcontext():
                w = noisy(a).tanh()
            with save_on_cpu() if where == "after" else nullcontext():
                y = F.linear(x, w)
        del w
        with save_on_cpu():
            return y.exp()

    compare(body)


def test_hooks_that_change_the_strides():
    """What comes back from hooks of others may lie in memory in another way."""

    def body(context, a, x):
        with saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
            with context():
                w = a.t().exp()
            return x @ w

    ours, plain = Ran(body, recomputing), Ran(body, nullcontext)
    assert torch.allclose(ours.left[1], plain.left[1])


def test_hooks_that_are_disabled():
    a, _ = leaves()
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        recomputing(),
    ):
        a.exp()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_threads_share_a_graph():
    a, x = leaves()
    with recomputing():
        w = noisy(a).tanh()
    losses = [(F.linear(x, w) * (1 + place)).sum() for place in range(8)]
    (want,) = torch.autograd.grad(losses[0], a, retain_graph=True)
    wrong = []

    def work(place):
        for _ in range(25):
            (found,) = torch.autograd.grad(losses[place], a, retain_graph=True)
            if not torch.allclose(found, want * (1 + place), rtol=1e-4):
                wrong.append(found)

    in_threads(work, 8)
    assert wrong == []


def test_threads_with_blocks_of_their_own():
    """A default generator that they all draw from; each has its own mask in both passes."""
    wrong = []

    def work(place):
        a, _ = leaves()
        for _ in range(25):
            with recomputing():
                mask = torch.native_dropout(torch.ones_like(a), 0.5, True)[0]
                noise = F.dropout(torch.rand_like(a), 0.5)
            want = (mask * noise).clone()
            (found,) = torch.autograd.grad((a * mask * noise).sum(), a)
            if not torch.equal(found, want):
                wrong.append(place)

    in_threads(work, 8)
    assert wrong == []


def in_threads(work, count):
    failed = []

    def run(place):
        try:
            work(place)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


# -- the compiler ---------------------------------------------------------------------------------


def in_a_block(a, x):
    h = x * 2
    with recomputing():
        w = (a * a).tanh()
    return F.linear(h, w).square().sum()


def gradients_of(fn):
    a, x = leaves()
    fn(a, x).backward()
    return a.grad, x.grad


def test_compiled_around(fresh_compiler):
    compiled = torch.compile(in_a_block, backend="aot_eager")
    for _ in range(2):
        for got, want in zip(gradients_of(compiled), gradients_of(in_a_block), strict=True):
            assert torch.allclose(got, want)
        assert nothing_of_ours()


def test_compiled_as_one_graph(fresh_compiler):
    compiled = torch.compile(in_a_block, backend="aot_eager", fullgraph=True)
    for got, want in zip(gradients_of(compiled), gradients_of(in_a_block), strict=True):
        assert torch.allclose(got, want)
    assert nothing_of_ours()


def test_compiled_within(fresh_compiler):
    compiled = torch.compile(lambda a: noisy(a).tanh(), backend="aot_eager")
    compiled(leaves()[0])

    def body(context, a, x):
        with context():
            w = compiled(a) * 2
        return F.linear(x, w)

    compare(body)


WAYS_PAST_THE_VERSION = {
    "unsafe_chunk": lambda y: torch.unsafe_chunk(y, 2, 1)[0].detach().mul_(3.0),
    "unsafe_split": lambda y: y.unsafe_split(2, 1)[0].detach().mul_(3.0),
    "data": lambda y: y.data.mul_(3.0),
    "numpy": lambda y: y.detach().numpy().__imul__(3.0),
    "__array__": lambda y: y.detach().__array__().__imul__(3.0),
    "dlpack": lambda y: torch.from_dlpack(y.detach()).mul_(3.0),
    "storage": lambda y: y.new_empty(0).set_(y.storage()).detach().mul_(3.0),
}


@pytest.mark.parametrize("way", WAYS_PAST_THE_VERSION)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_f1_a_value_changed_through_memory_with_a_version_of_its_own(way):
    """Before it is saved: it is kept as it is then."""
    if way in ("numpy", "__array__"):
        pytest.importorskip("numpy")
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def step(around):
        with around():
            y = x.sin() @ x.sin()
        WAYS_PAST_THE_VERSION[way](y)
        return torch.autograd.grad((y * y).sin().sum(), x)[0]

    assert torch.equal(step(recomputing), step(nullcontext))
