"""Reparametrized weights and values in code that others, or other rooms of ours, run again."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.errors import ChangedError, RecoupError, ReplayError
from recoup.weights import disabled, enabled, same_draw
from tests import ways
from tests.oracle import hooks_in_force, loss_of_all
from tests.ways import a_step, a_step_with, assert_same, outcome
from tests.weight_zoo import MORE, OURS, Runs, Uses, attending, first_of, looped

# Reentrant checkpoints say so, whenever they run without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


def plain(module, *args):
    return module(*args)


def torchs(**settings):
    settings = {"use_reentrant": False} | settings
    return lambda module, *args: torch_checkpoint(module, *args, **settings)


def within(outer, inner):
    return lambda module, *args: outer(lambda *args: inner(module, *args), *args)


PRODUCTS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
selecting = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
TORCH, REENTRANT, OURS_TOO = torchs(), torchs(use_reentrant=True), recoup.checkpoint
CALLS = {
    "torch": TORCH,
    "torch, no early stop": torchs(early_stop=False),
    "torch, unchecked": torchs(determinism_check="none"),
    "torch, selective": torchs(context_fn=selecting),
    "torch, nested": within(TORCH, TORCH),
    "reentrant": REENTRANT,
    "reentrant, nested": within(REENTRANT, REENTRANT),
    "torch in reentrant": within(REENTRANT, TORCH),
    "reentrant in torch": within(TORCH, REENTRANT),
    "ours": OURS_TOO,
    "ours, nested thrice": within(OURS_TOO, within(OURS_TOO, OURS_TOO)),
    "torch in ours": within(OURS_TOO, TORCH),
    "ours in torch": within(TORCH, OURS_TOO),
    "reentrant in ours": within(OURS_TOO, REENTRANT),
    "ours in reentrant": within(REENTRANT, OURS_TOO),
}
FEW = ["torch", "torch, nested", "reentrant", "reentrant in torch", "ours", "torch in ours"]


class Blocks(nn.Sequential):
    """Blocks in a row, each called through `call`: the way of the transformers library."""

    call = staticmethod(plain)

    def forward(self, x):
        for block in self:
            x = self.call(block, x)
        return x


def dense(dropout=0.3):
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout), nn.Tanh())


def attention():
    layer = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)
    return Runs(layer, lambda layer, x: x + attending(layer, x))


BLOCKS = {
    "dense": (dense, (5, 6)),
    "shared": (dense, (5, 6)),  # one block, used again and again
    "without dropout": (lambda: dense(0.0), (5, 6)),
    "attention": (attention, (2, 5, 6)),
    "gru": (lambda: Runs(nn.GRU(6, 6), first_of), (4, 2, 6)),
    "cell": (lambda: Runs(nn.GRUCell(6, 6), lambda cell, x: x + looped(cell, x)), (4, 2, 6)),
}
WEIGHTS = r"(.*[._])?weight(_[ih]h.*)?"


def built(kind="dense", way="stacked", where="model"):
    build, size = BLOCKS[kind]
    torch.manual_seed(0)
    model = Blocks(*([build()] * 3 if kind == "shared" else [build() for _ in range(3)]))
    for module in dict.fromkeys(model) if where == "blocks" else [model]:
        MORE[way](module, WEIGHTS)
    return model, torch.randn(*size, requires_grad=True)


def steps_and_evaluations(model, x):
    found = []
    for number in range(3):
        if number == 1:
            with torch.no_grad():
                model.eval()(x)
            model.train()
        with same_draw(seed=number) if number == 2 else nullcontext():
            found += a_step(model, x)
    return found


def enabled_in_evaluation(model, x):
    with enabled(model.eval()), same_draw(seed=3):
        return a_step(model, x)


def without(where):
    return lambda model, x: a_step_with(**{where: lambda: disabled(model)})(model, x)


OWN = {
    "steps_and_evaluations": steps_and_evaluations,
    "enabled_in_evaluation": enabled_in_evaluation,
    "same_draw": a_step_with(around=lambda: same_draw(5)),
    "same_draw_around_backward": a_step_with(around_backward=lambda: same_draw(5)),
    "disabled": without("around"),
    "disabled_around_backward": without("around_backward"),
}
SHARED = ["three_steps", "two_forwards", "under_autocast", "part_by_part"]
SITUATIONS = {name: ways.SITUATIONS[name] for name in SHARED} | OWN


def result_of(model, x, call, act):
    model = copy.deepcopy(model)
    model.call = call
    return outcome(model, x, act)


def assert_like_plain(model, x, call, act, rtol=0.0):
    assert_same(result_of(model, x, call, act), result_of(model, x, plain, act), rtol)


def rtol_of(call, situation="three_steps"):
    """A reentrant checkpoint has other kernels without gradients, and adds in another order."""
    if "reentrant" not in call:
        return 0.0
    return 0.03 if situation == "under_autocast" else 2e-4


OTHERS = ["attention", "gru", "cell"]  # who read weights of their own accord
CASES = [
    *product(CALLS, SITUATIONS, ["dense", "shared"], ["stacked"], ["model", "blocks"]),
    *product(FEW, ["three_steps"], ["dense"], MORE, ["model"]),
    *product(FEW, ["three_steps"], OTHERS, ["dropout", "norm", "stacked", "function"], ["model"]),
]


@pytest.mark.sampled(100)
@pytest.mark.parametrize(("call", "situation", "kind", "way", "where"), CASES)
def test_code_that_runs_again_has_the_draws_of_its_first_run(call, situation, kind, way, where):
    if situation == "part_by_part" and ("reentrant" in call or "selective" in call):
        pytest.skip("torch cannot do this")
    if (call, kind) == ("torch, selective", "shared"):
        pytest.skip("what is not made a second time is an error of torch, also without recoup")
    model, x = built(kind, way, where)
    rtol = rtol_of(call, situation) * (20 if kind in OTHERS else 1)
    assert_like_plain(model, x, CALLS[call], SITUATIONS[situation], rtol)


@pytest.mark.parametrize("in_evaluation", [False, True])
@pytest.mark.parametrize("call", ["torch", "reentrant", "ours"])
def test_two_forwards_at_one_place_of_the_stream(call, in_evaluation):
    """A reentrant checkpoint tells neither from the other: that is an error, not a wrong draw."""
    model, x = built(way="dropout")

    def loss_of(called, number):
        torch.manual_seed(4)
        model.call = called
        model.train(not (in_evaluation and number))
        with same_draw(seed=0 if in_evaluation else number):
            return model(x).square().sum()

    losses = [loss_of(CALLS[call], number) for number in range(2)]
    for number, loss in enumerate(losses):
        want = torch.autograd.grad(loss_of(plain, number), x)
        x.grad = None
        if call == "reentrant" and (number or not in_evaluation):
            with pytest.raises(ReplayError, match="one place of the random stream"):
                loss.backward()
        else:
            loss.backward()
            assert torch.equal(x.grad, want[0])


LOSING = {
    f"losing, {use_reentrant}": torchs(preserve_rng_state=False, use_reentrant=use_reentrant)
    for use_reentrant in (False, True)
}
LOST = ["three_steps", "same_draw", "enabled_in_evaluation", "disabled_around_backward"]
MAY_LOSE = [
    *product(LOSING, [*LOST, "draws_in_between"], ["blocks", "model"]),
    *product(FEW, ["evaluation_from_then_on"], ["model"]),
]


@pytest.mark.parametrize(("call", "situation", "where"), MAY_LOSE)
def test_draws_without_the_stream_or_mode_are_right_or_an_error(call, situation, where):
    """Without draws of torch's own; no second run is taken for one in evaluation."""
    model, x = built("without dropout", "dropout", where)
    act = (ways.SITUATIONS | OWN)[situation]
    want = result_of(model, x, plain, act)
    errors = (ReplayError, CheckpointError) if call in LOSING else (RecoupError, RuntimeError)
    try:
        got = result_of(model, x, (CALLS | LOSING)[call], act)
    except errors as raised:
        assert hooks_in_force() is None
        # The only draw of a frame needs no stream; it may be right instead.
        assert situation != "draws_in_between" or call == "losing, True"
        assert "ours" not in call or "mode" in str(raised)  # noqa: PT017
    else:
        assert_same(got, want, 1e-4)


@pytest.mark.parametrize("way", ["norm", "stacked"])
@pytest.mark.parametrize("call", FEW)
def test_a_weight_that_changes_before_backward(call, way):
    if (way, call) == ("norm", "reentrant"):
        pytest.skip("it runs with the weight that is there now, which is torch's own")
    model, x = built(way=way)
    model.call = CALLS[call]
    output = model(x)
    with torch.no_grad():
        model[1][0].get_parameter("weight").mul_(2.0)
    with pytest.raises(ChangedError, match=r"`(1\.)?0\.weight` of .* changed in place"):
        loss_of_all(output).backward()


def recomputes():
    """A value that is not kept, between two layers, made by a call that draws."""
    activation = recoup.Recompute(nn.Sequential(nn.GELU(), nn.Dropout(0.3)))
    return nn.Sequential(nn.Linear(6, 6), activation, nn.Linear(6, 6), nn.Tanh())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("call", CALLS)
def test_weights_and_values_as_arguments_results_and_within(call):
    x, rtol = torch.randn(6, 6, requires_grad=True), rtol_of(call) / 10
    given = Blocks(Uses(lambda x, w: ((x @ w).sin() @ w).tanh(), 6, 6))
    through = lambda block, x: CALLS[call](block.use, x, block.weight)  # noqa: E731
    assert_like_plain(OURS["noise"](given), x, through, a_step, rtol)
    if "selective" not in call:
        model = OURS["stacked"](Blocks(recomputes(), recomputes()), ".*weight")
        assert_like_plain(model, x, CALLS[call], a_step, rtol)
    layers, found = [nn.Linear(6, 6) for _ in range(2)], []
    for called, through in ((CALLS[call], recoup.recompute), (plain, lambda fn: fn)):
        x.grad = None
        value = through(nn.functional.gelu)(layers[0](x))
        value = called(lambda v: through(torch.sin)((layers[1](v) * v).exp() * v), value)  # noqa: B023
        loss_of_all(value * value.mean(0)).backward()
        found.append(x.grad)
    assert torch.equal(*found)
