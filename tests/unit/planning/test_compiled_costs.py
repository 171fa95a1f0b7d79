"""Plans over compiled blocks: which codes they choose, and that their steps are right."""

from __future__ import annotations

import itertools
import logging
import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import ChangedError, ReplayError
from recoup.planning import compiling, partitioning, priced_ways
from recoup.planning.compiling import BlockCode, CompiledCode
from recoup.planning.forwards import followed
from tests.neighbours.planned import (
    Block,
    Net,
    assert_same,
    give_steady_times,
    loss_of,
    result_of,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def steady_times(monkeypatch):
    give_steady_times(monkeypatch)


def model_and_input(num_blocks=4, width=32):
    torch.manual_seed(0)
    model = Net(width, num_blocks)
    model.stem.eval()  # so that all steps are the same
    return model, torch.randn(64, width)


def plan_at(model, x, budget, **options):
    return recoup.plan(model, x, budget=budget, loss=loss_of, compile="aot_eager", **options)


def compiled_plainly(model, x, share=1.0):
    """What a step makes whose blocks are compiled and keep what the compiler keeps."""
    code = CompiledCode(share, "aot_eager")
    with followed(model.blocks, code):
        return result_of(model, lambda: loss_of(model(x)).backward())


def ways(plan):
    return {row.way for row in plan.blocks}


@pytest.mark.slow
def test_every_budget_is_kept_with_the_gradients_of_compiled_blocks(steady_times):
    model, x = model_and_input()
    wanted = compiled_plainly(model, x)
    whole = plan_at(model, x, "1 GiB")
    least, most = whole.least_bytes, whole.most_bytes
    peaks, forwards, seen = [], [], set()
    for third in range(4):
        plan = plan_at(model, x, least + (most - least) * third // 3)
        with plan.applied():
            assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)
            peak = recoup.measure(lambda: loss_of(model(x)).backward(), device="cpu", repeats=0)
        assert peak.peak_bytes <= plan.budget_bytes
        peaks.append(peak.peak_bytes)
        forwards.append(sum(row.num_forwards for row in plan.blocks))
        seen |= ways(plan)
    assert peaks == sorted(peaks)
    assert forwards == sorted(forwards, reverse=True)
    assert len([way for way in seen if way.startswith("keep, compiled")]) > 1
    assert any(way.startswith("recompute, compiled") for way in seen)


def test_a_plan_keeps_its_budget_with_the_gradients_of_compiled_blocks(steady_times):
    model, x = model_and_input()
    wanted = compiled_plainly(model, x)
    plan = plan_at(model, x, "380 KiB")
    with plan.applied():
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)
        peak = recoup.measure(lambda: loss_of(model(x)).backward(), device="cpu", repeats=0)
    assert peak.peak_bytes <= plan.budget_bytes
    assert all("compiled" in way for way in ways(plan))
    assert "compiled" in str(plan)


class Normed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width, momentum=0.3)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


@pytest.mark.slow
def test_norms_are_compiled_once_and_count_once(steady_times, caplog):
    torch.manual_seed(0)
    model, x = Net(64, 4, Normed), torch.randn(256, 64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = compiled_plainly(model, x)
    least = plan_at(model, x, "1 GiB").least_bytes
    model.load_state_dict(state)
    caplog.set_level(logging.INFO, logger=compiling.__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "The .grad attribute")
        plan = plan_at(model, x, least)
    assert all(way.startswith(("recompute, compiled", "keep, compiled")) for way in ways(plan))
    assert any(row.num_forwards > 1 for row in plan.blocks)
    ours = [each.message for each in caplog.records if each.name == compiling.__name__]
    assert len([each for each in ours if ": compiled" in each]) == len(compiling.SHARES)
    with plan.applied():
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)


def test_masks_are_not_drawn_again(steady_times):
    # The compiler's own budget of 0 draws dropout anew in backward, so that gradients are wrong.
    model, x = model_and_input(num_blocks=2)
    assert_same(compiled_plainly(model, x, share=0.0), compiled_plainly(model, x, share=1.0))


@pytest.mark.parametrize("drawn", [0, 1])
def test_at_a_share_of_nothing_inputs_and_what_is_drawn_are_kept(monkeypatch, drawn):
    shares, partition = [], partitioning.min_cut_rematerialization_partition

    def recorded(*args, **kwargs):
        shares.append(torch._functorch.config.activation_memory_budget)
        return partition(*args, **kwargs)

    monkeypatch.setattr(partitioning, "min_cut_rematerialization_partition", recorded)
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5 * drawn), nn.Linear(64, 32))
    x = torch.randn(16, 32, requires_grad=True)
    known = {tensor.data_ptr() for tensor in (x, *block.parameters())}
    others = []

    def pack(tensor):
        if tensor.data_ptr() not in known:
            others.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        CompiledCode(0.0, "aot_eager").of_call(block, block.forward)(x)
    assert shares == [partitioning.TINY_SHARE if drawn else 0.0]
    assert others.count(torch.bool) == drawn  # the mask
    assert drawn or not others


class Branching(Block):
    """A block that draws in a branch of a graph."""

    def forward(self, x):
        h = torch.cond(x.sum() > -1e9, lambda h: self.drop(h.sin()), torch.cos, (self.norm(x),))
        return x + h.exp()


def test_what_a_branch_draws_is_not_drawn_again():
    torch.manual_seed(0)
    model, x = Net(num_blocks=2, block=Branching), torch.randn(64, 32)
    for share in (0.5, 0.0):
        assert_same(compiled_plainly(model, x, share=share), compiled_plainly(model, x, share=1.0))


@torch.library.custom_op("recoup_tests::counted_sine", mutates_args=())
def counted_sine(x: torch.Tensor) -> torch.Tensor:
    counted_sine.num_calls += 1
    return x.sin()


counted_sine.register_fake(torch.empty_like)
counted_sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_a_share_of_nothing_is_exact_for_operators_of_torch_alone(monkeypatch):
    shares, partition = [], partitioning.min_cut_rematerialization_partition

    def recorded(*args, **kwargs):
        shares.append(torch._functorch.config.activation_memory_budget)
        return partition(*args, **kwargs)

    monkeypatch.setattr(partitioning, "min_cut_rematerialization_partition", recorded)
    counted_sine.num_calls = 0

    class Uses(nn.Linear):
        def forward(self, x):
            return counted_sine(super().forward(x)).exp()

    block, x = Uses(4, 4), torch.randn(2, 4, requires_grad=True)
    result = CompiledCode(0.0, "aot_eager").of_call(block, block.forward)(x)
    (found,) = torch.autograd.grad(result.sum(), x)
    (wanted,) = torch.autograd.grad(block(x).sum(), x)
    assert shares == [partitioning.TINY_SHARE]
    torch.testing.assert_close(found, wanted)


def test_alike_blocks_are_compiled_once(steady_times, caplog):
    caplog.set_level(logging.INFO, logger="recoup.planning.compiling")
    model, x = model_and_input(num_blocks=6)
    plan_at(model, x, "1 GiB")
    messages = [record.message for record in caplog.records]
    assert len([each for each in messages if ": compiled" in each]) == len(compiling.SHARES)
    assert "Block: compiled 0.5 in " in caplog.text
    assert "4 of 5 budgets of the compiler are done" in caplog.text


@pytest.mark.slow
def test_a_plan_that_is_removed_leaves_no_compiled_block(steady_times):
    model, x = model_and_input()
    wanted = result_of(model, lambda: loss_of(model(x)).backward())
    plan = plan_at(model, x, "1 GiB").apply()
    plan.remove()
    assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)


def test_where_the_compiler_fails_the_blocks_run_as_they_are(steady_times, monkeypatch):
    def fails(graph, inputs):
        raise torch._dynamo.exc.InternalTorchDynamoError("out of order")

    monkeypatch.setitem(compiling._BACKENDS, "aot_eager", fails)
    model, x = model_and_input()
    wanted = result_of(model, lambda: loss_of(model(x)).backward())
    with pytest.warns(UserWarning, match="A Block cannot be compiled.*\n?.*out of order"):
        plan = plan_at(model, x, "1 GiB")
    assert ways(plan) == {"keep"}
    with plan.applied():
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)


def test_a_block_that_fails_at_one_share_is_compiled_at_none(steady_times, monkeypatch):
    partition = compiling._BACKENDS["aot_eager"]
    count = itertools.count()

    def fails_later(graph, inputs):
        if next(count) >= 2:
            raise torch._dynamo.exc.InternalTorchDynamoError("out of order")
        return partition(graph, inputs)

    monkeypatch.setitem(compiling._BACKENDS, "aot_eager", fails_later)
    model, x = model_and_input()
    with pytest.warns(UserWarning, match="A Block cannot be compiled"):
        plan = plan_at(model, x, "1 GiB")
    assert ways(plan) == {"keep"}


def test_compiled_blocks_that_compute_something_else_are_left_out(steady_times, monkeypatch):
    class Wrong(CompiledCode):
        def of_call(self, module, forward):
            right = super().of_call(module, forward)
            return lambda x: 1.5 * right(x)

    monkeypatch.setattr(priced_ways, "CompiledCode", Wrong)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    with pytest.warns(UserWarning, match="No block is compiled. A planned step"):
        plan = plan_at(model, torch.randn(64, 32), "1 GiB")
    assert ways(plan) == {"keep"}


class Amplifying(nn.Sequential):
    """Blocks whose rounding errors what follows makes a hundred thousand times larger."""

    def forward(self, x):
        return torch.sin(3e5 * super().forward(x))


@pytest.mark.parametrize("factor", [1 + 2.0**-23, 1 + 2.0**-15])
def test_what_rounding_grows_to_is_no_difference(steady_times, monkeypatch, factor):
    class Rounding(CompiledCode):
        def of_call(self, module, forward):
            right = super().of_call(module, forward)
            return lambda x: factor * right(x)

    monkeypatch.setattr(priced_ways, "CompiledCode", Rounding)
    torch.manual_seed(0)
    model = Amplifying(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    x = torch.randn(64, 32)
    is_rounding = factor == 1 + 2.0**-23
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No block is compiled" if not is_rounding else "never")
        found = plan_at(model, x, "1 GiB", blocks=list(model))
    assert any("compiled" in way for way in ways(found)) == is_rounding


def test_blocks_that_cannot_run_again_compiled_run_as_they_are(steady_times, monkeypatch):
    class Changed(CompiledCode):
        def of_call(self, module, forward):
            raise ChangedError("A tensor was changed in place")

    monkeypatch.setattr(priced_ways, "CompiledCode", Changed)
    model, x = model_and_input()
    with pytest.warns(UserWarning, match="No block is compiled, as it cannot run again. A tensor"):
        plan = plan_at(model, x, "1 GiB")
    assert ways(plan) == {"keep"}


def test_where_compiled_steps_cannot_be_compared_the_blocks_run_as_they_are(
    steady_times, monkeypatch
):
    def changed(self, module, forward):
        raise ReplayError("A block drew elsewhere")

    monkeypatch.setattr(priced_ways.NudgedCode, "of_call", changed)
    model, x = model_and_input()
    with pytest.warns(UserWarning, match="No block is compiled. A block drew elsewhere"):
        plan = plan_at(model, x, "1 GiB")
    assert ways(plan) == {"keep"}


def test_blocks_for_which_compiling_does_not_pay_stay_as_they_are(monkeypatch):
    slow = itertools.count()

    def times(own, steps):
        del own
        is_own = next(slow) == 0
        return [(1.0, 3.0 if is_own else 4.0) for _ in steps[0].calls]

    monkeypatch.setattr(priced_ways, "_times", times)
    torch.manual_seed(0)
    # What is compiled keeps as much: a product keeps its input alone.
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    plan = plan_at(model, torch.randn(64, 32), "1 GiB", blocks=list(model))
    assert ways(plan) == {"keep"}


def test_a_call_that_began_under_a_mode_is_not_compiled():
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    code = CompiledCode(1.0, "aot_eager")
    block, x = Block(), torch.ones(2, 32)
    with Mode():
        under_a_mode = code.of_call(block, block.forward)
        under_a_mode(x)
    under_a_mode(x)
    assert code.num_graphs == 0
    code.of_call(block, block.forward)(x)
    assert code.num_graphs == 1


def test_what_compile_may_be():
    model, x = model_and_input()
    with pytest.raises(ValueError, match="`compile` is 'eager', but must be True, False or"):
        recoup.plan(model, x, budget="1 GiB", compile="eager")
    assert not isinstance(BlockCode(), CompiledCode)


class Checkpointed(Block):
    """A block that draws within and after a checkpoint of torch, and so in one fused operator."""

    def forward(self, x):
        within = torch.utils.checkpoint.checkpoint(
            lambda h: self.drop(self.up(h)), self.norm(x), use_reentrant=False
        )
        return x + self.drop(self.down(self.drop(within)))


def test_what_a_checkpoint_within_a_block_draws_is_not_drawn_again():
    torch.manual_seed(0)
    model, x = Net(num_blocks=2, block=Checkpointed), torch.randn(64, 32)
    model.stem.eval()
    assert_same(compiled_plainly(model, x, share=0.0), compiled_plainly(model, x, share=1.0))


class Bottleneck(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + super().forward(x))


@pytest.mark.slow
def test_inputs_that_compiled_code_copies_are_counted_once(steady_times):
    torch.manual_seed(0)
    model = nn.Sequential(*(Bottleneck() for _ in range(4)))
    x = torch.randn(8, 32, 16, 16)
    plan = recoup.plan(model, x, budget="1 GiB", blocks=list(model), compile=True)
    assert any("compiled" in way for way in ways(plan))
    assert 0.95 < plan.predicted_peak_bytes / plan.rehearsed_peak_bytes < 1.1
