"""Plans over compiled blocks: which codes they choose, and that their steps are right."""

from __future__ import annotations

import collections
import itertools
import logging
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.errors import ChangedError, ReplayError
from recoup.planning import compiling, priced_ways
from recoup.planning.compiling import CompiledCode
from recoup.planning.forwards import followed
from tests.neighbours.planned import Block, Net, assert_same, give_steady_times, loss_of, result_of
from tests.oracle import Operators
from tests.plan_oracle import Made, assert_as_plain, dense, ways_of

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _steady_times_and_fewer_budgets_of_the_compiler(monkeypatch):
    for module in (compiling, priced_ways):
        monkeypatch.setattr(module, "SHARES", (1.0, 0.5, 0.0))
    give_steady_times(monkeypatch)


def of_net(num_blocks=4, block=Block):
    torch.manual_seed(0)
    model, x = Net(32, num_blocks, block), torch.randn(64, 32)
    model.stem.eval()  # so that all steps are the same
    return model, x, lambda: loss_of(model(x)).backward()


def plan_at(model, x, budget="1 GiB", **options):
    return recoup.plan(model, x, budget=budget, loss=loss_of, compile="aot_eager", **options)


def compiled_plainly(model, step, share=1.0):
    with followed(model.blocks, CompiledCode(share, "aot_eager")):
        return result_of(model, step)


def test_a_plan_keeps_its_budget_with_the_gradients_of_blocks_that_are_compiled_once(caplog):
    caplog.set_level(logging.INFO, logger=compiling.__name__)
    model, x, step = of_net()
    plan = plan_at(model, x, "380 KiB")
    assert caplog.text.count("Block: compiled ") == len(compiling.SHARES)
    assert_as_plain(plan, step, compiled_plainly(model, step))
    assert all("compiled" in way for way in ways_of(plan))
    assert "compiled" in str(plan)


def branching(block, x):
    h = torch.cond(x.sum() > -1e9, lambda h: block.drop(h.sin()), torch.cos, (block.norm(x),))
    return x + h.exp()


def checkpointed(block, x):
    """Draws within and after a checkpoint of torch, and so in one fused operator."""
    within = torch_checkpoint(lambda h: block.drop(block.up(h)), block.norm(x), use_reentrant=False)
    return x + block.drop(block.down(block.drop(within)))


@pytest.mark.parametrize("forward", [Block.forward, branching, checkpointed])
def test_masks_are_not_drawn_again(forward):
    """The compiler's own budget of 0 draws anew in backward, so that gradients are wrong."""
    kind = type("Drawing", (Block,), {"forward": forward})
    model, _, step = of_net(2, block=kind)
    wanted = compiled_plainly(model, step)
    for share in (0.5, 0.0):
        assert_same(compiled_plainly(model, step, share), wanted)


@pytest.mark.parametrize(("between", "num_masks"), [(nn.GELU(), 0), (nn.Dropout(), 1)])
def test_at_a_share_of_nothing_inputs_and_masks_alone_are_kept(between, num_masks):
    block = nn.Sequential(nn.Linear(32, 64), between, nn.Linear(64, 32))
    x = torch.randn(16, 32, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch.manual_seed(1)
        result = CompiledCode(0.0, "aot_eager").of_call(block, block.forward)(x)
    known = {tensor.data_ptr() for tensor in (x, *block.parameters())}
    others = [tensor.dtype for tensor in saved if tensor.data_ptr() not in known]
    assert others.count(torch.bool) == num_masks
    assert num_masks or not others
    torch.manual_seed(1)
    gradients = [torch.autograd.grad(each.sum(), x)[0] for each in (result, block(x))]
    torch.testing.assert_close(*gradients)


# -- codes that are left out -----------------------------------------------------------------------


def failing_after(num):
    backend, count = compiling._BACKENDS["aot_eager"], itertools.count()

    def fails(graph, inputs):
        if next(count) >= num:
            raise torch._dynamo.exc.InternalTorchDynamoError("out of order")
        return backend(graph, inputs)

    return lambda monkeypatch: monkeypatch.setitem(compiling._BACKENDS, "aot_eager", fails)


def with_code(around, name="CompiledCode"):
    """Codes with something around what they run."""
    right = getattr(priced_ways, name)

    def of_call(code, module, forward):
        return around(code, right.of_call(code, module, forward))

    kind = type("Other", (right,), {"of_call": of_call})
    return lambda monkeypatch: monkeypatch.setattr(priced_ways, name, kind)


def times(factor):
    return with_code(lambda code, run: lambda x: factor * run(x))


def raising(error, *name):
    return with_code(MagicMock(side_effect=error), *name)


def drawing(code, run):
    """Draw before the block does, as kernels may that are called in another order."""
    return lambda x: (torch.rand(int(code.share == 0.5)), run(x))[1]


FAILURES = [
    (failing_after(0), "A .* cannot be compiled.*\n?.*out of order"),
    (failing_after(2), "A .* cannot be compiled"),
    (times(1.5), "No block is compiled. A planned step"),
    (raising(ChangedError("A tensor was changed")), "No block is compiled. A tensor"),
    (raising(ReplayError("It drew elsewhere"), "NudgedCode"), "No block is compiled. It drew else"),
]


@pytest.mark.parametrize(("replace", "message"), FAILURES)
def test_blocks_that_cannot_be_compiled_run_as_they_are_as_is_said(monkeypatch, replace, message):
    replace(monkeypatch)
    model, x = dense(3, 32), torch.randn(64, 32)
    with pytest.warns(UserWarning, match=message):
        plan = plan_at(model, x)
    assert ways_of(plan) == {"keep"}
    assert_as_plain(plan, lambda: loss_of(model(x)).backward())


@pytest.mark.parametrize("is_rounding", [True, False])
def test_what_rounding_grows_to_is_no_difference(monkeypatch, is_rounding):
    """Of blocks whose rounding errors what follows makes a hundred thousand times larger."""
    model = Made(lambda model, x: torch.sin(3e5 * model.blocks(x)), blocks=dense(3, 32))
    times(1 + 2.0 ** (-23 if is_rounding else -15))(monkeypatch)
    with nullcontext() if is_rounding else pytest.warns(UserWarning, match="No block is compiled"):
        found = plan_at(model, torch.randn(64, 32))
    assert any("compiled" in way for way in ways_of(found)) == is_rounding


@pytest.mark.parametrize("around", [None, drawing])
def test_a_code_that_draws_otherwise_than_the_first_is_left_out(monkeypatch, around):
    if around is not None:
        with_code(around)(monkeypatch)
    frontier = recoup.plan(*of_net(2)[:2], loss=loss_of, compile="aot_eager")
    compiled, _ = frontier._kinds
    names = {each.name for call in compiled.calls for each in call.codes}
    assert {"compiled 1", "compiled 0.5", "compiled 0"} - names == (
        {"compiled 0.5"} if around is drawing else set()
    )
    if around is None:  # times are over the step as it is
        point = next(each for each in frontier.points if each.is_compiled)
        plan = frontier.plan(point.peak_bytes)
        assert plan.predicted_time_ratio == pytest.approx(point.relative_time)
        assert point.relative_time != pytest.approx(1.0)


def test_blocks_for_which_compiling_does_not_pay_stay_as_they_are(monkeypatch):
    seconds = itertools.chain([3.0], itertools.repeat(4.0))

    def times(own, steps, seconds=seconds):
        return [(1.0, next(seconds))] * len(steps[0].calls)

    monkeypatch.setattr(priced_ways, "_times", times)
    # What is compiled keeps as much: a product keeps its input alone.
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    assert ways_of(plan_at(model, torch.randn(64, 32), blocks=list(model))) == {"keep"}


# -- calls that are compiled -----------------------------------------------------------------------


def test_a_call_that_began_under_a_mode_is_not_compiled():
    code, block, x = CompiledCode(1.0, "aot_eager"), Block(), torch.ones(2, 32)
    with Operators():
        under_a_mode = code.of_call(block, block.forward)
        under_a_mode(x)
    under_a_mode(x)
    assert code.num_graphs == 0


def test_hooks_that_are_added_within_a_compiled_block_run():
    model, x, step = of_net()
    plan, plain = plan_at(model, x, "380 KiB"), result_of(model, step)
    with plan.applied():
        hook = model.blocks[1].down.register_forward_hook(lambda module, args, y: 2 * y)
        with_hook = result_of(model, step)
        hook.remove()
        assert_same(result_of(model, step), plain)
    model.blocks[1].down.register_forward_hook(lambda module, args, y: 2 * y)
    assert_same(with_hook, result_of(model, step))


def test_a_block_that_is_compiled_again_and_again_runs_as_it_is(monkeypatch):
    def counting(block, x):
        block.num_calls += 1
        return Block.forward(block, x)

    model, x, step = of_net(block=type("Counting", (Block,), {"forward": counting, "num_calls": 0}))
    plan = plan_at(model, x, "380 KiB")
    monkeypatch.setattr(compiling, "_RECOMPILE_LIMIT", 3)
    with plan.applied(), pytest.warns(UserWarning, match="compiles it again and again"):
        collections.deque((step() for _ in range(6)), maxlen=0)
