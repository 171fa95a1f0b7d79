"""Bytes as the `memory` of chains, which plan themselves in their first forward (R10)."""

from __future__ import annotations

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.func import functional_call

import recoup
from recoup.errors import BudgetError
from recoup.flows import DenseNetwork, Glow
from recoup.invertible import ActNorm, AdditiveCoupling, AffineCoupling, Chain, Flip
from tests.alive import allocated_bytes
from tests.neighbours.planned import result_of
from tests.oracle import assert_same_tensors, loss_of_all
from tests.plan_oracle import Residual, peak_of

NUM_ROWS, DIM = 256, 8


def network():
    up, down = recoup.weight_noise(nn.Linear(DIM // 2, 64), std=0.1), nn.Linear(64, DIM // 2)
    return nn.Sequential(up, nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.2), down)


def chain_of(memory="linear"):
    layers = (lambda: ActNorm(DIM), lambda: AdditiveCoupling(network()), Flip)
    return Chain(*(layer() for layer in layers * 2), memory=memory).double()


def batch(num_rows=NUM_ROWS):
    return torch.randn(num_rows, DIM, dtype=torch.float64)


def loss_of(output):
    return output[0].abs().sum() + output[1].abs().sum()


def step_of(chain, *args):
    return lambda: loss_of(chain(*args)).backward()


plans_of = recoup.applied_plans


def least_of(model, step):
    model.memory = "1 KiB"
    with pytest.raises(BudgetError, match=r"^`memory` is 1 KiB.*\(\d+ bytes\)") as caught:
        step()
    assert "exact=False" not in str(caught.value)  # inverses are a part of it
    return caught.value.least_bytes


def assert_keeps(model, step, budget, wanted, rtol=1e-10):
    model.memory = f"{budget} B"
    for _ in range(2):  # the first step plans
        assert_same_tensors(result_of(model, step), wanted, rtol)
    assert peak_of(model, step) <= budget
    assert all(made.rehearsed_peak_bytes <= budget for made in plans_of(model))


def of_sequential():
    chain = recoup.Sequential(*(Residual(DIM) for _ in range(6)), memory="linear").double()
    x = batch()
    return chain, lambda: loss_of_all(chain(x)).backward(), 0.9, 0.0


def of_glow():
    flow = Glow((1, 8, 8), levels=16, num_levels=2, num_steps=2, width=16).double()
    x = torch.randint(16, (16, 1, 8, 8))
    flow.log_prob(x)
    return flow, lambda: flow.log_prob(x).sum().backward(), 0.9, 1e-10


@pytest.mark.parametrize("build", [of_sequential, of_glow])
def test_a_chain_keeps_to_its_bytes(build):
    torch.manual_seed(0)
    model, step, share, rtol = build()
    wanted, most = result_of(model, step), peak_of(model, step)
    least = least_of(model, step)
    assert least < share * most
    for budget in (least, (least + most) // 2):
        assert_keeps(model, step, budget, wanted, rtol)
        assert len(plans_of(model)) == 1


def test_a_forward_beside_one_that_is_pending_keeps_to_the_bytes():
    torch.manual_seed(0)
    chain, step, _, _ = of_sequential()
    least, x, y = least_of(chain, step), batch(), batch(8)
    chain.memory = f"{least} B"
    step()

    def both(other):
        return lambda: (chain(x).sum() + chain(other).sum()).backward()

    with pytest.raises(BudgetError, match=r"second time .* with `num_forwards=2`") as caught:
        both(y)()
    many = 3 * caught.value.least_bytes
    del caught  # whose frames hold the first forward
    for _ in range(2):  # what has no backward and is freed waits no more
        chain(x)
        step()
    chain.memory = f"{many} B"
    assert peak_of(chain, both(x)) <= many


def test_a_context_and_chains_within_are_planned_and_an_input_alone():
    """The context gets its gradient, and the chain within is no block of its own."""

    def coupling():
        return AffineCoupling(DenseNetwork(DIM // 2, DIM, width=32, num_context=3))

    chain = Chain(coupling(), Chain(Flip(), coupling(), memory="1 KiB"), coupling()).double()
    with torch.no_grad():
        for parameter in chain.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, context = batch(), torch.randn(NUM_ROWS, 3, dtype=torch.float64).requires_grad_()

    def step():
        return torch.autograd.grad(loss_of(chain(x, context)), [context, *chain.parameters()])

    chain[1].memory = "linear"
    wanted = result_of(chain, step)
    chain[1].memory = "1 KiB"
    assert_keeps(chain, step, least_of(chain, step), wanted)
    assert plans_of(chain)[0].num_blocks == 4
    torch.testing.assert_close(chain.inverse(chain(x, context)[0], context)[0], x)
    chain, x = chain_of(memory="1 GiB").eval().requires_grad_(False), batch().requires_grad_()
    found = torch.autograd.grad(loss_of(chain(x)), x)[0]
    assert len(plans_of(chain)) == 1
    chain.memory = "linear"
    assert plans_of(chain) == []
    torch.testing.assert_close(found, torch.autograd.grad(loss_of(chain(x)), x)[0])


def test_a_plan_is_made_for_a_backward_and_again_for_modules_that_are_added():
    chain, x = chain_of(memory="1 KiB").requires_grad_(False), batch()
    assert not chain(x)[0].requires_grad
    with torch.no_grad():
        chain.requires_grad_(True)(x)
    y, _ = Chain(Flip(), Flip(), memory="1 KiB")(torch.arange(6).view(2, 3))
    assert torch.equal(y, torch.arange(6).view(2, 3))
    assert plans_of(chain) == []
    chain = recoup.Sequential(*(nn.Linear(DIM, DIM).double() for _ in range(3)), memory="1 GiB")
    for num_blocks in (3, 4):
        chain(x).sum().backward()
        assert plans_of(chain)[0].num_blocks == num_blocks
        chain.append(nn.Linear(DIM, DIM).double())


def test_a_copy_plans_for_itself():
    chain, x = chain_of(memory="1 GiB"), batch()
    step_of(chain, x)()
    own = plans_of(chain)
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert (other.memory, plans_of(other)) == ("1 GiB", [])
        found = result_of(other, step_of(other, x))
        assert plans_of(chain) == own != plans_of(other) != []
        other.memory = "linear"
        assert_same_tensors(found, result_of(other, step_of(other, x)), 1e-10)


def test_memory_is_assigned_at_any_time():
    chain, x = chain_of(), batch()
    chain(x)
    step = step_of(chain, x)
    wanted = result_of(chain, step)
    for memory in ("constant", " 1 GiB", 2, "linear"):
        chain.memory = memory
        assert_same_tensors(result_of(chain, step), wanted, 1e-10)
        assert len(plans_of(chain)) == (memory == " 1 GiB")
    chain.memory = "1 GiB"
    loss = loss_of(chain(x))
    chain.memory = "linear"
    loss.backward()
    chain.memory = "1 GiB"
    for wrong in ("1 parsec", "none", 0):
        with pytest.raises(ValueError, match="`memory`"):
            chain.memory = wrong
        assert chain.memory == "1 GiB"
    chain(x)


def test_a_checkpoint_around_a_chain_decides():
    chain, x = chain_of(), batch()
    chain(x)
    wanted = result_of(chain, step_of(chain, x))
    chain.memory = "1 GiB"
    for num_plans in (0, 1):
        found = result_of(chain, lambda: loss_of(recoup.checkpoint(chain, x)).backward())
        for name, _ in chain.named_parameters():
            torch.testing.assert_close(found[f"grad of {name}"], wanted[f"grad of {name}"])
        assert len(plans_of(chain)) == num_plans
        chain(x)


def test_a_chain_within_a_chain_with_bytes_follows_the_outer_plan():
    inner = recoup.Sequential(*(Residual(DIM) for _ in range(3)), memory="1 GiB")
    outer, x = recoup.Sequential(inner, Residual(DIM), memory="1 GiB").double(), batch()
    plain = nn.Sequential(nn.Sequential(*inner), outer[1])
    step = lambda model: lambda: model(x).square().sum().backward()  # noqa: E731
    assert_same_tensors(result_of(outer, step(outer)), result_of(plain, step(plain)))
    assert [made.model for made in plans_of(outer)] == [outer]
    with pytest.raises(ValueError, match='memory="linear"'):
        recoup.plan(nn.Sequential(*outer), x, budget="1 GiB")


def test_an_error_in_a_forward_leaves_no_plan_or_the_one_of_before():
    chain, x = chain_of(memory="1 GiB"), batch()
    for num_plans in (0, 1):
        with pytest.raises(ValueError, match="channels"):
            chain(x[:, :6])
        assert len(plans_of(chain)) == num_plans
        step_of(chain, x)()


def test_threads_and_the_compiler_find_one_plan():
    chain, x = chain_of().eval(), batch()
    parameters = list(chain.parameters())
    want = torch.autograd.grad(loss_of(chain(x)), parameters)
    chain.memory = "1 GiB"
    with ThreadPoolExecutor(2) as pool:
        outputs = [*pool.map(chain, (x, x))]
    for output in (*outputs, torch.compile(chain, backend="eager")(x)):
        torch.testing.assert_close(torch.autograd.grad(loss_of(output), parameters), want)
    assert len(plans_of(chain)) == 1


def test_segments_keep_to_bytes():
    torch.manual_seed(0)
    cells = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))] * 6
    x, params = torch.randn(256, 16), list(cells[0].parameters())

    def step(store, memory):
        torch.manual_seed(1)
        loss_fn = lambda y: (y.square().mean(), y.detach())  # noqa: E731
        recoup.segments_backward(cells, x, loss_fn, store, memory=memory, has_aux=True)

    def gradients_and_peak(memory):
        store = recoup.GradStore(params)
        step(store, memory)
        store.clear()  # which keeps the plan
        peak_bytes, _ = allocated_bytes(lambda: step(store, memory))
        return [store[p] for p in params], peak_bytes

    want, most = gradients_and_peak("linear")
    store = recoup.GradStore(params)
    with pytest.raises(BudgetError) as raised:
        step(store, "1 KiB")
    assert not store
    least = raised.value.least_bytes
    assert least < most / 2
    for budget in (least, (least + most) // 2):
        found, peak_bytes = gradients_and_peak(f"{budget} B")
        assert peak_bytes <= budget
        assert all(map(torch.equal, found, want))


def test_segments_with_bytes_are_planned_once_for_each_store():
    x, model = torch.randn(8, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    cells, store, plans = list(model), recoup.GradStore(model.parameters()), set()
    for _ in range(3):
        recoup.segments_backward(cells, x, torch.sum, store, memory="1 MiB")
        plans.update(plans_of(model))
    assert len(plans) == 1
    del store, plans
    gc.collect()
    assert plans_of(model) == []
    store = recoup.GradStore(model.parameters())
    with pytest.raises(ValueError, match=r"segment 1 .* is no module"):
        recoup.segments_backward([cells[0], torch.tanh], x, torch.sum, store, memory="1 MiB")


def test_weights_that_were_computed_are_refused_before_what_computed_them_is_gone():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    chain, scale = recoup.Sequential(*layers, memory="1 GiB"), torch.ones((), requires_grad=True)
    weights = {name: value.detach() * scale for name, value in chain.named_parameters()}
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="weights were computed"):
        functional_call(chain, weights, x)
    chain(x)  # plans
    outputs = (functional_call(each, weights, x).sum() for each in (nn.Sequential(*layers), chain))
    want, found = (torch.autograd.grad(y, scale, retain_graph=True) for y in outputs)
    assert torch.equal(*want, *found)
