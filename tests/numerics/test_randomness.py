"""Random draws: the same in every mode, and the same stream after them."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import recoup
from recoup._core.rng import Draws, SeededCall, draw_seed, hash_seed
from recoup.errors import RecoupError, ReplayError
from recoup.invertible import AdditiveCoupling, Chain, Dequantize, Logit
from tests.oracle import assert_same_step, run_step
from tests.zoo import Direct, couplings, leaf


@pytest.mark.parametrize("memory", ["sqrt", "log", "constant", 1])
def test_dequantization_is_replayed(memory):
    x = torch.randint(17, (4, 6)).double()
    modules = [Dequantize(17), Logit(), *couplings(0.3)]
    model = Chain(*modules).double()
    want = run_step(model, x, memory="linear")
    assert_same_step(run_step(model, x, memory=memory), want, rtol=1e-10)


@pytest.mark.parametrize("both", [False, True])
def test_networks_that_draw_without_evaluate(both):
    """Their draws come in another order in the inverse: right, or an error."""
    torch.manual_seed(0)
    model = Chain(*(Direct(0.5, both=both).double() for _ in range(3)))
    x = leaf(4, 6)
    want = run_step(model, x, memory="linear")
    try:
        got = run_step(model, x, memory="constant")
    except RecoupError as raised:
        said = str(raised)
    else:
        assert_same_step(got, want, rtol=1e-10)
        said = "Direct"
    assert "Direct" in said


def test_one_network_twice_in_a_coupling_that_draws():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
    model = Chain(AdditiveCoupling(network, network))
    x = leaf(4, 6)
    want = run_step(model, x, memory="linear")
    try:
        got = run_step(model, x, memory="constant")
    except RecoupError as raised:
        said = str(raised)
    else:
        assert_same_step(got, want, rtol=1e-10)
        said = "Use two networks"
    assert "Use two networks" in said


@pytest.mark.parametrize("is_again", [False, True])
def test_another_thread_that_draws_meanwhile(is_again):
    """After all that the region draws itself, so that no residual shows it."""

    def fn(x):
        y = nn.functional.dropout(x, 0.5)
        if is_again == (torch._C._current_graph_task_id() != -1):
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
        return y.exp().sin()

    with pytest.raises(ReplayError, match=r"[Aa]nother thread draws from it"):
        recoup.checkpoint(fn, leaf(64, 64)).sum().backward()


# -- the parts -------------------------------------------------------------------------------------


def test_seeds_made_of_numbers_are_those_of_splitmix64():
    """Draws of weights are made of them, so another hash would give every model other noise."""
    assert hash_seed(0) == 0xE220A8397B1DCDAF
    assert hash_seed(7, 3) == 0xF53A29A2695577C0
    assert hash_seed(2**63 - 1, 0) == 0x69C9D98A86C5CD1E


def test_seeded_repeats_itself_and_leaves_the_stream():
    call = SeededCall()
    torch.manual_seed(0)
    first = call.run(lambda: torch.rand(3))
    after = torch.get_rng_state()
    again = call.run(lambda: torch.rand(3))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(0)
    SeededCall().run(lambda: torch.rand(300))
    assert torch.equal(torch.get_rng_state(), after), "the stream depends on how much was drawn"


def test_seeded_gives_the_stream_back_after_an_exception():
    after = []
    for breaks in (False, True):
        torch.manual_seed(0)
        try:
            SeededCall().run(lambda b=breaks: [torch.rand(3), {0: 0}[int(b)]])
        except KeyError:
            assert breaks
        after.append(torch.get_rng_state())
    assert torch.equal(*after)


def test_a_replay_repeats_seeds_and_foreign_draws_in_any_mixture():
    draws = Draws()

    def run():
        values = [torch.rand(2), torch.tensor(float(draw_seed() % 1000))]
        values += [SeededCall().run(lambda: torch.rand(2) + draw_seed() % 1000), torch.rand(1)]
        values += [SeededCall().run(lambda: torch.zeros(2)), torch.rand(1)]
        return values

    torch.manual_seed(0)
    with draws.recording():
        first = run()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for _ in range(2):
        with draws.replaying():
            again = run()
        for got, want in zip(again, first, strict=True):
            assert torch.equal(got, want)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_first_run_within_a_second_one_writes_down_what_it_is_given():
    outer = Draws()
    inners = []

    def run():
        inner = Draws()
        inners.append(inner)
        with inner.recording():
            first = SeededCall().run(lambda: torch.rand(2))
            return [first, torch.tensor(draw_seed()), torch.rand(2)]

    with outer.recording():
        first = run()
    with outer.replaying():
        second = run()
    with inners[1].replaying():
        third = [SeededCall().run(lambda: torch.rand(2)), torch.tensor(draw_seed()), torch.rand(2)]
    for other in (second, third):
        for got, want in zip(other, first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("memory", ["sqrt", "constant", 2])
@pytest.mark.parametrize("switch", ["p", "train"])
def test_dropout_that_is_switched_on_later(memory, switch):
    """What is drawn follows from the network as it is, not from what it did before."""
    drops = [nn.Dropout(0.0 if switch == "p" else 0.5) for _ in range(8)]
    networks = [nn.Sequential(nn.Linear(3, 8), drop, nn.Linear(8, 3)).double() for drop in drops]
    pairs = zip(networks[::2], networks[1::2], strict=True)
    model, x = Chain(*(AdditiveCoupling(*pair) for pair in pairs), memory=memory), leaf(5, 6)
    new = copy.deepcopy(model)
    model.train(switch == "p")
    model(x)[0].sum().backward()
    for chain in (model.train(), new):
        for module in chain.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
    new.memory = "linear"
    assert_same_step(run_step(model, x), run_step(new, x), rtol=1e-10)


def test_a_second_run_leaves_the_draws_of_the_last_region_within_to_that_region():
    """It ends where that region begins, as without draws: no block runs four times."""
    runs = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            runs.append(self)
            return nn.functional.dropout(self.layer(x), 0.3).sin()

    blocks = [Block(), Block()]
    x = torch.randn(64, 64, requires_grad=True)

    def stage(x, call):
        for block in blocks:
            x = call(block, x)
        return x

    def step(outer, inner):
        runs.clear()
        torch.manual_seed(1)
        (found,) = torch.autograd.grad(outer(stage, x, inner).sum(), x)
        return found, torch.rand(3)

    wanted = step(lambda fn, *args: fn(*args), lambda block, x: block(x))
    for _ in range(2):
        torch.testing.assert_close(
            step(recoup.checkpoint, recoup.checkpoint), wanted, rtol=0, atol=0
        )
    assert [runs.count(block) for block in blocks] == [3, 2]
