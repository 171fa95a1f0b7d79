"""`recomputing` and `recompute_`: the numbers, names and types of plain code, and fewer bytes."""

from __future__ import annotations

import copy
import operator
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import recoup
from recoup.errors import ChangedError, RecoupError, ReplayError
from tests import block_code as code
from tests.oracle import Operators, assert_same_step, run_step

recomputing = recoup.recomputing


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", code.STEPS)
def test_steps(name):
    body, more = code.STEPS[name]
    held, held_plainly = code.compare(body)
    if more is None:
        held_plainly, more = code.ran(code.made_then(lambda a: a + 1), recomputing)[1], code.STATE
    assert held <= held_plainly + more


AGAIN = [  # what makes the values, how many of them are used, and how often what runs again
    (lambda a: (a.sin(), a.detach().cosh()), 1, {"sin": 1, "cosh": 0}),
    (lambda a: a * (torch.rand(6, 6), torch.rand(6, 6))[1], 1, {"rand": 2}),
    (lambda a: a * (torch.rand(6), torch.manual_seed(1), torch.rand(6))[2], 1, {"rand": 1}),
    (lambda a: a * a.abs().max().item(), 1, {"_local_scalar_dense": 0, "max": 0}),
    (lambda a: ((w := a.tanh()), w.exp()), 2, {"tanh": 1, "exp": 1}),
    (lambda a: a.exp() @ a.detach(), 0, {"exp": 1, "mm": 1}),  # of which one is backward's own
]


@pytest.mark.parametrize(("make", "num_used", "want"), AGAIN)
def test_what_runs_again(make, num_used, want):
    a = torch.randn(6, 6).requires_grad_()
    with recomputing():
        made = make(a)
    made = made if isinstance(made, tuple) else (made,)
    loss = sum(w.sum() for w in made) + sum((w * w).sum() for w in made[:num_used])
    with Operators() as seen:
        loss.backward()
    assert {op: seen.names.count(op) for op in want} == want


_library = torch.library.Library("recoup_test", "FRAGMENT")
_calls, made = [], []
_FAULTY = {
    "clock": lambda x: _calls.append(x) or x + len(_calls),
    "greedy": lambda x: _calls.append(x) or x + torch.rand(len(_calls)).sum(),
    "fickle": lambda x: _calls.append(x) or x.new_zeros(code.SIZE + len(_calls) - 1),
}
for _name, _fn in _FAULTY.items():
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, _fn, "CompositeExplicitAutograd")
ops = torch.ops.recoup_test


def block(make, then=lambda a, w: None):
    def step(a):
        with recomputing():
            w = make(a)
        loss = F.linear(a[:3].detach(), w).sum() + (w * w).sum()
        with torch.no_grad():
            then(a, w)
        loss.backward()

    return step


def fused(a, w):
    a.grad = torch.ones_like(a)
    torch.optim.AdamW([a], lr=0.1, fused=True).step()


def of_a_branch(a):
    with recomputing():
        w = (a * ops.clock(a.detach())).tanh() + (a * a.detach()).exp()
    w.sum().backward()


def asked_within(a):
    h = (a * ops.clock(a.detach())).tanh()
    torch.autograd.grad(h.sum(), a)
    return h


def after_an_exception(a):
    with pytest.raises(ZeroDivisionError), recomputing():
        made.append(code.noisy(a).exp()) or 1 / 0
    assert code.nothing_of_ours()
    assert type(made[-1]) is torch.Tensor
    made.pop().sin().sum().backward()


def freed_since(a):
    given = a.detach().clone()
    block(lambda a: a * (given * 2).sin(), lambda a, w: given.untyped_storage().resize_(0))(a)


HERE = r"the block at .*test_recompute\.py:\d+"
OTHER = HERE + r" again, and .* returned other numbers than in forward.*off by.*compare=False"
WRONG = {
    "outside": (block(code.noisy, lambda a, w: a.add_(1)), ChangedError, HERE),
    "the value": (block(code.noisy, lambda a, w: w.mul_(2)), ChangedError, HERE),
    "an exception": (after_an_exception, ReplayError, "made before it raised an exception"),
    "fused": (block(lambda a: a * 2, fused), ReplayError, OTHER),
    "clock": (block(lambda a: ops.clock(a.detach()) * a), ReplayError, OTHER),
    "a branch": (of_a_branch, ReplayError, OTHER),

    "within it": (block(asked_within), ReplayError, OTHER),
    "draws": (block(lambda a: ops.greedy(a.detach()) * a), ReplayError, "drew other numbers"),
    "a shape": (block(lambda a: ops.fickle(a.detach()) * a), ReplayError,
                "returned another tensor than in the first run"),
    "freed": (freed_since, ReplayError, "was freed before backward"),
    "sparse": (block(lambda a: a.detach().to_sparse().mul_(2)), ReplayError, "outside of the bl"),
    "func": (torch.func.grad(lambda a: block(torch.sin)(a)), RecoupError, r"of torch\.func"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_right_is_an_error(name):
    step, error, match = WRONG[name]
    _calls.clear()
    with pytest.raises(error, match=match):
        step(code.leaves()[0])
    assert code.nothing_of_ours()


def test_a_comparison_can_be_left_out():
    a, _ = code.leaves()
    with recomputing(compare=False):
        w = ops.clock(a.detach()) * a
    w.sum().backward()


@pytest.mark.parametrize("others_draw", [False, True])
def test_threads_with_blocks_of_their_own(others_draw):
    one, is_done = recomputing(), []

    def work(place):
        while others_draw and place == 0 and not is_done:
            torch.rand(64)
        (a, _), are_right = code.leaves(), []
        for _ in range(25):
            with one:
                mask = F.dropout(torch.rand_like(a), 0.5)
                if not others_draw:  # it takes no generator
                    mask = mask * torch.native_dropout(torch.ones_like(a), 0.5, True)[0]
            want = mask.clone()
            are_right.append(torch.equal(*torch.autograd.grad((a * mask).sum(), a), want))
        return is_done.append(place) or all(are_right)

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(work, range(3)))


def test_tensors_stay_what_they_are():
    with torch.no_grad(), recomputing():
        assert code.nothing_of_ours()
        assert type(code.leaves()[0] + 1) is torch.Tensor
    with recomputing():
        parameter, leaf = nn.Parameter(torch.randn(3)), torch.randn(3).requires_grad_()
        values = [torch.randn(3) for _ in range(20)]
    assert (type(parameter), type(leaf)) == (nn.Parameter, torch.Tensor)
    values.append(values[0])
    for copied in (copy.deepcopy(values), pickle.loads(pickle.dumps(values))):
        assert {type(each) for each in copied} == {torch.Tensor}
        code.assert_same(copied, values)
        assert copied[0] is copied[-1]


@pytest.mark.parametrize("is_nested", [False, True])
def test_hooks_around_see_what_is_kept(is_nested):
    seen = []  # and may give it back in another layout

    def turned(tensor):
        return tensor if is_nested or tensor.dim() != 2 else tensor.t().contiguous()

    def body(context, a, x):
        with saved_tensors_hooks(lambda t: seen.append(t.shape) or turned(t), turned):
            with context(), context() if is_nested else nullcontext():
                w = code.noisy(a).tanh() * x.sum()
            return F.linear(x, w)

    ours, _ = code.ran(body, recomputing)
    assert (8, code.SIZE) in seen  # what `linear` saves of its input
    assert (
        seen.count((code.SIZE, code.SIZE)) == 1 + is_nested
    )  # `a`, once for each block that takes it
    assert torch.allclose(ours[1], code.ran(body, nullcontext)[0][1])


WIDTH, HIDDEN = 16, 64
CHOSEN = (nn.GELU, nn.Dropout, nn.LayerNorm)


def normed():
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(), nn.Linear(HIDDEN, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), *linear, nn.LayerNorm(WIDTH))


def batch():
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_()


REPARAMETRIZED = (
    lambda model: recoup.weight_noise(model, r".*weight", std=0.1),
    lambda model: recoup.weight_dropout(model, r"1\.weight", p=0.3),
)


@pytest.mark.parametrize("place", range(3))
def test_before_between_and_after_what_reparametrizes_its_weights(place):
    model, other, x = normed(), normed(), batch()
    again = lambda model: recoup.recompute_(model, nn.LayerNorm, nn.Linear)  # noqa: E731
    for apply in REPARAMETRIZED:
        apply(model)
    for apply in (*REPARAMETRIZED[:place], again, *REPARAMETRIZED[place:]):
        apply(other)
    for each in (other, pickle.loads(pickle.dumps(other))):
        assert_same_step(run_step(each, x), run_step(model, x))
    recoup.weights.remove(other)
    assert_same_step(run_step(other, x), run_step(normed(), x))
    assert [*map(type, other.modules())] == [*map(type, again(normed()).modules())]


def test_the_backward_of_such_an_output_runs_regions_as_forward_did():
    """Torch hides subclasses of tensors from all that runs in the backward of one."""
    model, x = normed(), batch()
    want = run_step(model, x, loss=lambda y: F.mse_loss(y, x))
    recoup.recompute_(model, *CHOSEN)
    loss = recoup.recompute(F.mse_loss)
    found = run_step(model, x, call=recoup.checkpoint, loss=lambda y: loss(y, x))
    assert_same_step(found, want)


def gated(call):
    h = F.linear(torch.linspace(-1, 1, 12).view(3, 4), WEIGHT)
    return h[:, :4] * call(h[:, 4:])


WEIGHT = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
CALLS = [
    (gated, nn.ReLU(inplace=True)),
    (gated, nn.Dropout(inplace=True)),
    (lambda call: operator.mul(*call(WEIGHT)),
     lambda w: ((z := torch.view_as_complex(w.view(8, 2, 2)).exp().conj()).real, z.imag)),
]  # fmt: skip


@pytest.mark.parametrize(("run", "fn"), CALLS)
def test_outputs_that_are_in_memory_of_others(run, fn):
    found = []
    for call in (fn, recoup.recompute(fn)):
        torch.manual_seed(2)
        found += torch.autograd.grad(run(call).sin().sum(), WEIGHT)
    assert torch.equal(*found)


def test_names_and_types_stay():
    model, other = normed(), recoup.recompute_(normed(), *CHOSEN)
    other.load_state_dict(model.state_dict(), strict=True)
    for part, plain in zip(other.modules(), model.modules(), strict=True):
        assert isinstance(part, type(plain))
        assert type(part).__qualname__ == type(plain).__qualname__
        assert (type(part) is not type(plain)) == isinstance(plain, CHOSEN)
    assert repr(recoup.recompute_(nn.GELU(), nn.GELU)) == "GELU(approximate='none', recomputed)"
    kinds = [*map(type, other.modules())]
    assert recoup.recompute_(other, nn.GELU) is other  # a second call changes nothing
    assert [*map(type, other.modules())] == kinds


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(how):
    layers = (nn.Linear(WIDTH, WIDTH), recoup.Recompute(F.gelu), recoup.Recompute(nn.LayerNorm(16)))
    for model in (recoup.recompute_(normed(), *CHOSEN), nn.Sequential(*layers)):
        other = how(model)
        assert [*map(type, other.modules())] == [*map(type, model.modules())]
        assert_same_step(run_step(other, batch()), run_step(model, batch()))


def test_a_graph_is_the_plain_one():
    model, x = recoup.recompute_(normed(), *CHOSEN).eval(), batch()
    graphs = [torch.export.export(each, (x,)).graph for each in (model, normed().eval())]
    ours, plain = ([node.target for node in graph.nodes] for graph in graphs)
    assert ours == plain
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), recoup.Recompute(nn.GELU()))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    assert list(recoup.Recompute(nn.LayerNorm(WIDTH)).state_dict()) == ["fn.weight", "fn.bias"]
    assert repr(recoup.Recompute(F.gelu)) == "Recompute(gelu)"
