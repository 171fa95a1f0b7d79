"""Bytes as the `memory` of chains, which plan themselves in their first forward."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.flows import DenseNetwork, Flow, Glow, RealNVP
from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Chain,
    Flip,
    VariationalDequantize,
)
from tests.alive import allocated_bytes

NUM_ROWS, DIM = 256, 8
CHECKPOINT = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


class Network(nn.Module):
    """A network with weights that draw and batch statistics, and dropout."""

    def __init__(self):
        super().__init__()
        self.up = recoup.weight_noise(nn.Linear(DIM // 2, 64), std=0.1)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(64, DIM // 2)

    def forward(self, x):
        return self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))


def chain_of(num_couplings=2, memory="linear"):
    modules = [
        layer
        for _ in range(num_couplings)
        for layer in (ActNorm(DIM), AdditiveCoupling(Network()), Flip())
    ]
    return Chain(*modules, memory=memory).double()


def batch(num_rows=NUM_ROWS):
    return torch.randn(num_rows, DIM, dtype=torch.float64)


def chain_loss(chain, x, *context):
    y, log_det = chain(x, *context)
    return y.square().sum() - log_det.sum()


def gradients(model, loss):
    """Gradients, and all that a step leaves behind, from seed 1."""
    torch.manual_seed(1)
    model.zero_grad()
    loss().backward()
    found = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*found, *(b.clone() for b in model.buffers()), torch.rand(3)]


def peak(model, loss):
    model.zero_grad()
    found, _ = allocated_bytes(lambda: loss().backward())
    model.zero_grad()
    return found


def peaks(model, loss):
    """The peaks of a step: with every residual, and in a plan of the least bytes."""
    loss()  # the first forward starts each ActNorm
    model.memory = "linear"
    most = peak(model, loss)
    model.memory = "1 KiB"
    with pytest.raises(BudgetError, match=r"^`memory` is 1 KiB") as caught:
        loss()
    return most, caught.value.least_bytes


def is_close(found, want):
    """Whether values are equal to the rounding of inverses, which chains with bytes may run."""
    tolerance = 1e-10 if want.dtype is torch.float64 else 1e-4
    found, want = found.double(), want.double()
    return float((found - want).norm()) <= tolerance * (1e-6 + float(want.norm()))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", [0.0, 0.5, 2.0])
def test_a_chain_keeps_to_its_bytes(part):
    """R10: gradients, buffers and the stream are those of the plain chain, to rounding."""
    chain, x = chain_of(4), batch()
    plain = copy.deepcopy(chain)
    probe = copy.deepcopy(chain)
    most, least = peaks(probe, lambda: chain_loss(probe, x))
    assert least < 0.8 * most
    budget = int(least + part * (most - least))
    chain.memory = f"{budget} B"
    for _ in range(2):  # the first step plans
        found = gradients(chain, lambda: chain_loss(chain, x))
        want = gradients(plain, lambda: chain_loss(plain, x))
        assert all(map(is_close, found, want))
    (made,) = recoup.applied_plans(chain)
    assert made.rehearsed_peak_bytes <= budget
    assert recoup.measure(lambda: sum_loss(chain, x).backward()).peak_bytes <= budget
    chain.zero_grad()
    assert peak(chain, lambda: sum_loss(chain, x)) <= budget
    assert chain.state_dict().keys() == plain.state_dict().keys()


def first_loss(output):
    """A loss of a few bytes, as the plan takes it."""
    return output[0].abs().sum() + output[1].abs().sum()


def sum_loss(chain, x):
    return first_loss(chain(x))


def test_too_few_bytes_are_an_error_that_names_the_least():
    """R10: which inverses are a part of, so that nothing else is named."""
    chain, x = chain_of(memory="1 KiB"), batch()
    with pytest.raises(BudgetError, match=r"\((\d+) bytes\)") as caught:
        chain(x)
    assert "exact=False" not in str(caught.value)
    chain.memory = f"{caught.value.least_bytes} B"
    chain_loss(chain, x).backward()
    assert len(recoup.applied_plans(chain)) == 1


@pytest.mark.slow
def test_what_takes_more_is_planned_for_anew():
    """R10: larger inputs, unfrozen parameters and training after evaluation; not smaller ones."""
    chain, x = chain_of(memory="1 GiB"), batch()
    seen = []

    def plan_of(num_rows):
        chain_loss(chain, x[:num_rows]).backward()
        (made,) = recoup.applied_plans(chain)
        if made not in seen:
            seen.append(made)
        return len(seen)

    assert [plan_of(n) for n in (64, 64, 32, 128, 64)] == [1, 1, 1, 2, 2]
    chain.requires_grad_(False)
    chain[1].requires_grad_(True)
    assert plan_of(64) == 2
    chain.memory = "1 GiB"
    assert plan_of(64) == 3
    chain.requires_grad_(True)
    assert plan_of(64) == 4
    chain.eval()
    assert plan_of(256) == 5
    chain.train()
    assert plan_of(64) == 6
    assert len(seen) == 6


def test_modules_that_are_added_are_planned_for():
    """R10: of a `Sequential` too."""
    chain = recoup.Sequential(*(nn.Linear(DIM, DIM).double() for _ in range(3)), memory="1 GiB")
    x = batch()
    chain(x).sum().backward()
    chain.append(nn.Linear(DIM, DIM).double())
    chain(x).sum().backward()
    assert recoup.applied_plans(chain)[0].num_blocks == 4


def test_nothing_is_planned_without_a_backward():
    """R10: frozen chains, and forwards without gradients; integers pass through."""
    chain, x = chain_of(memory="1 KiB").requires_grad_(False), batch()
    assert not chain(x)[0].requires_grad
    with torch.no_grad():
        chain.requires_grad_(True)(x)
    y, _ = Chain(Flip(), Flip(), memory="1 KiB")(torch.arange(6).view(2, 3))
    assert torch.equal(y, torch.arange(6).view(2, 3))
    assert recoup.applied_plans(chain) == []


def test_an_input_that_wants_a_gradient_gets_it():
    """R10"""
    chain, x = chain_of(memory="1 GiB").eval().requires_grad_(False), batch().requires_grad_()
    found = torch.autograd.grad(chain_loss(chain, x), x)[0]
    assert len(recoup.applied_plans(chain)) == 1
    chain.memory = "linear"
    assert recoup.applied_plans(chain) == []
    assert is_close(found, torch.autograd.grad(chain_loss(chain, x), x)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_plans_for_itself(how):
    """R10"""
    chain, x = chain_of(memory="1 GiB"), batch()
    chain_loss(chain, x).backward()
    other = copy.deepcopy(chain) if how == "deepcopy" else pickle.loads(pickle.dumps(chain))
    assert (other.memory, recoup.applied_plans(other)) == ("1 GiB", [])
    found = gradients(other, lambda: chain_loss(other, x))
    (made,) = recoup.applied_plans(other)
    assert recoup.applied_plans(chain) != [made]
    plain = copy.deepcopy(chain)
    plain.memory = "linear"
    plain.load_state_dict(other.state_dict())
    want = gradients(plain, lambda: chain_loss(plain, x))
    assert all(map(is_close, found[: -1 - len(list(chain.buffers()))], want))


@pytest.mark.slow
def test_memory_is_assigned_at_any_time():
    """R10: also while a graph exists; what is no memory leaves the one of before."""
    chain, x = chain_of(), batch()
    chain(x)
    modes = ["1 GiB", "constant", " 1 GiB", "log", 2, "1 GiB", "linear"]
    want = gradients(chain, lambda: chain_loss(chain, x))[: len(list(chain.parameters()))]
    for memory in modes:
        chain.memory = memory
        found = gradients(chain, lambda: chain_loss(chain, x))
        for one, other in zip(found, want, strict=False):
            torch.testing.assert_close(one, other)
        assert len(recoup.applied_plans(chain)) == (str(memory).strip() == "1 GiB")
    chain.memory = "1 GiB"
    loss = chain_loss(chain, x)
    chain.memory = "linear"
    loss.backward()
    for chains in (chain, recoup.Sequential(nn.Tanh(), nn.Tanh())):
        chains.memory = "1 GiB"
        for wrong in ("1 parsec", "none", 0):
            with pytest.raises(ValueError, match="`memory`"):
                chains.memory = wrong
            assert chains.memory == "1 GiB"
            chains(x)


def test_a_context_and_chains_within_are_planned():
    """R10: the context gets its gradient, and the chain within is no block of its own."""

    def coupling():
        return AffineCoupling(DenseNetwork(DIM // 2, DIM, width=32, num_context=3))

    chain = Chain(coupling(), Chain(Flip(), coupling(), memory="1 KiB"), coupling()).double()
    with torch.no_grad():
        for parameter in chain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, context = batch(), torch.randn(NUM_ROWS, 3, dtype=torch.float64).requires_grad_()
    want = torch.autograd.grad(_plainly(chain, x, context), [context, *chain.parameters()])
    chain.memory = "1 KiB"
    with pytest.raises(BudgetError) as caught:
        chain(x, context)
    chain.memory = f"{caught.value.least_bytes} B"
    found = torch.autograd.grad(chain_loss(chain, x, context), [context, *chain.parameters()])
    assert all(map(is_close, found, want))
    assert recoup.applied_plans(chain)[0].num_blocks == 4
    y, log_det = chain(x, context)
    back, minus = chain.inverse(y, context)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(minus, -log_det)


def _plainly(chain, x, context):
    chain[1].memory = "linear"
    loss = chain_loss(chain, x, context)
    chain[1].memory = "1 KiB"
    return loss


# -- flows -----------------------------------------------------------------------------------------


def test_a_flow_keeps_to_its_bytes():
    """R10: the first forward starts each ActNorm, as in any mode; early latents pass by."""
    flow = Glow((1, 8, 8), levels=16, num_levels=2, num_steps=2, width=16).double()
    x = torch.randint(16, (16, 1, 8, 8))
    plain, probe = copy.deepcopy(flow), copy.deepcopy(flow)
    most, least = peaks(probe.chain, lambda: probe.log_prob(x).sum())
    assert least < 0.9 * most
    flow.memory = f"{(least + most) // 2} B"
    for _ in range(2):
        found = gradients(flow, lambda: flow.log_prob(x).sum())
        want = gradients(plain, lambda: plain.log_prob(x).sum())
        assert all(map(is_close, found, want))
    (made,) = recoup.applied_plans(flow)
    assert made.rehearsed_peak_bytes <= made.budget_bytes
    assert peak(flow, lambda: flow.log_prob(x).sum()) < most
    assert flow.eval().sample(2).shape == (2, 1, 8, 8)


def test_the_chain_of_a_learned_noise_has_bytes_of_its_own():
    """R10: each chain of a flow keeps to them by itself."""
    noise = Chain(ActNorm(1), ActNorm(1))
    flow = Flow(
        Chain(ActNorm(1), ActNorm(1)), shape=(1, 4, 4), dequantize=VariationalDequantize(4, noise)
    )
    flow.memory = "1 GiB"
    assert noise.memory == flow.memory == "1 GiB"
    flow.log_prob(torch.randint(4, (8, 1, 4, 4))).sum().backward()
    assert len(recoup.applied_plans(flow)) == 2
    flow.memory = "constant"
    assert recoup.applied_plans(flow) == []


# -- what is around --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("checkpoint", [recoup.checkpoint, CHECKPOINT], ids=["ours", "torch"])
def test_a_checkpoint_around_a_chain_decides(checkpoint, is_planned):
    """R10: the chain is run again whole, with a plan of its own or without."""
    chain, x = chain_of(), batch()
    want = gradients(chain, lambda: sum_loss(chain, x))[: len(list(chain.parameters()))]
    chain.memory = "1 GiB"
    if is_planned:
        chain(x)
    found = gradients(chain, lambda: first_loss(checkpoint(chain, x)))
    for one, other in zip(found, want, strict=False):
        torch.testing.assert_close(one, other)
    assert len(recoup.applied_plans(chain)) == is_planned


def test_a_chain_within_a_chain_with_bytes_follows_the_outer_plan():
    """R10"""

    def layer():
        return nn.Sequential(nn.Linear(DIM, 32), nn.Tanh(), nn.Linear(32, DIM)).double()

    inner = recoup.Sequential(layer(), layer(), layer(), memory="1 GiB")
    outer, x = recoup.Sequential(inner, layer(), memory="1 GiB"), batch()
    plain = nn.Sequential(nn.Sequential(*inner), outer[1])
    want = gradients(plain, lambda: plain(x).square().sum())
    found = gradients(outer, lambda: outer(x).square().sum())
    assert all(map(is_close, found, want))
    assert [made.model for made in recoup.applied_plans(outer)] == [outer]
    with pytest.raises(ValueError, match='memory="linear"'):
        recoup.plan(nn.Sequential(*outer), x, budget="1 GiB")


def test_an_error_in_the_first_forward_leaves_no_plan():
    """R10: the next forward plans."""
    chain, x = chain_of(memory="1 GiB"), batch()
    chain(x)
    chain.memory = "1 GiB"
    with pytest.raises(ValueError, match="channels"):
        chain(x[:, :6])
    assert recoup.applied_plans(chain) == []
    chain_loss(chain, x).backward()
    with pytest.raises(ValueError, match="channels"):
        chain(x[:, :6])
    chain_loss(chain, x).backward()
    assert len(recoup.applied_plans(chain)) == 1


def test_threads_and_the_compiler_find_one_plan():
    """R10: one of two threads plans in their first forward, and a compiled chain is planned too."""
    chain, x = chain_of().eval(), batch()
    want = torch.autograd.grad(sum_loss(chain, x), list(chain.parameters()))
    chain.memory = "1 GiB"
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(sum_loss, chain, x) for _ in range(2)]
        losses = [run.result() for run in runs]
    compiled = torch.compile(chain, backend="eager")
    for loss in (*losses, first_loss(compiled(x))):
        assert all(map(is_close, torch.autograd.grad(loss, list(chain.parameters())), want))
    assert len(recoup.applied_plans(chain)) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("has_aux", [False, True])
def test_segments_keep_to_bytes(has_aux):
    """R10: the plan lives in the store from one step to the next; the loss is part of the step."""
    torch.manual_seed(0)
    cells = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))] * 6
    x, params = torch.randn(256, 16), list(cells[0].parameters())

    def loss_fn(y):
        loss = y.square().mean()
        return (loss, y.detach()) if has_aux else loss

    def step(store, memory):
        torch.manual_seed(1)
        options = {"memory": memory, "has_aux": has_aux}
        return recoup.segments_backward(cells, x, loss_fn, store, **options)

    def gradients_and_peak(memory):
        store = recoup.GradStore(params)
        step(store, memory)
        found = [store[p].clone() for p in params]
        store.clear()
        peak_bytes, _ = allocated_bytes(lambda: step(store, memory))
        assert all(torch.equal(store[p], g) for p, g in zip(params, found, strict=True))
        return found, peak_bytes

    want, most = gradients_and_peak("linear")
    store = recoup.GradStore(params)
    with pytest.raises(BudgetError) as raised:
        step(store, "1 KiB")
    assert not store
    least = raised.value.least_bytes
    assert least < most / 2
    for budget in (least, (least + most) // 2, most):
        found, peak_bytes = gradients_and_peak(f"{budget} B")
        assert peak_bytes <= budget
        assert all(torch.equal(g, w) for g, w in zip(found, want, strict=True))


def test_segments_with_bytes_are_planned_once_for_each_store():
    cells = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    x = torch.randn(8, 16)
    store = recoup.GradStore(nn.ModuleList(cells).parameters())
    plans = set()
    for _ in range(3):
        recoup.segments_backward(cells, x, torch.sum, store, memory="1 MiB")
        (plan,) = recoup.applied_plans(nn.ModuleList(cells))
        plans.add(plan)
    other = recoup.GradStore(nn.ModuleList(cells).parameters())
    recoup.segments_backward(cells, x, torch.sum, other, memory="1 MiB")
    assert recoup.applied_plans(nn.ModuleList(cells)) == list(plans)
    assert len(plans) == 1
    recoup.segments_backward(cells[:2], x, torch.sum, store, memory="1 MiB")
    recoup.segments_backward(cells, x, torch.sum, other, memory="1 MiB")
    plans.clear()
    del store, other, plan
    gc.collect()
    assert recoup.applied_plans(nn.ModuleList(cells)) == []
    store = recoup.GradStore(cells[0].parameters())
    with pytest.raises(ValueError, match=r"segment 1 .* is no module"):
        recoup.segments_backward([cells[0], torch.tanh], x, torch.sum, store, memory="1 MiB")


def test_a_realnvp_in_single_precision_keeps_to_its_bytes():
    """R10: by the meter of `recoup.measure`."""
    x = torch.randn(512, 2)
    flow = RealNVP((2,), levels=None, num_steps=4, width=32).eval()

    def step():
        flow.zero_grad()
        flow.log_prob(x).sum().backward()
        return [p.grad for p in flow.parameters() if p.grad is not None]

    want, most = step(), recoup.measure(step).peak_bytes
    flow.memory = f"{int(0.7 * most)} B"
    assert all(map(is_close, step(), want))
    assert recoup.measure(step).peak_bytes < 0.75 * most
