"""Recording and repeating operators: what is run again, from where, and how it lies in memory."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup._core.lazy_values import Value
from recoup._core.operators import traits_of
from recoup.errors import ReplayError
from recoup.regions.operator_draws import DrawRecorder, DrawReplayer
from recoup.regions.recomputing import Recomputing, place_in_code
from recoup.regions.recorded_block import RecordedBlock
from recoup.regions.recorded_ops import Origin, RecordedStorage, layout_of
from recoup.regions.recorded_storages import Storages
from recoup.regions.recorder import _with_device_index

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    """The names of the operators that run within."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def block():
    return Recomputing("the block")


def seen_in_backward(loss):
    with Seen() as seen:
        loss.backward()
    return seen.names


@pytest.fixture
def a():
    return torch.randn(6, 6).requires_grad_()


# -- what is run again ----------------------------------------------------------------------------


def test_only_what_is_asked_for_is_run_again(a):
    with block():
        w = a.sin()
        unasked = a.detach().cosh()
    assert unasked.shape == (6, 6)
    names = seen_in_backward((w * w).sum())
    assert names.count("sin") == 1
    assert "cosh" not in names


def test_draws_before_the_one_that_is_asked_for_are_run_again(a):
    with block():
        first = torch.rand(6, 6)
        second = torch.rand(6, 6)
    want = second.clone()
    del first
    with Seen() as seen:
        (a * second).sum().backward()
    assert torch.equal(a.grad, want)
    assert seen.names.count("rand") == 2


def test_a_draw_with_a_state_of_its_own_needs_no_other(a):
    with block():
        torch.rand(6, 6)
        torch.manual_seed(1)
        second = torch.rand(6, 6)
    want = second.clone()
    with Seen() as seen:
        (a * second).sum().backward()
    assert torch.equal(a.grad, want)
    assert seen.names.count("rand") == 1


def test_what_only_python_reads_is_not_run_again(a):
    with block():
        w = a * a.abs().max().item()
        assert not torch.equal(w, a)
    names = seen_in_backward((w * w).sum())
    assert "_local_scalar_dense" not in names
    assert "equal" not in names


def test_changes_of_what_is_not_asked_for_are_not_run_again(a):
    with block():
        w = a.sin()
        other = a.cos()
        other.mul_(2)
    names = seen_in_backward((w * w).sum())
    assert "mul_" not in names


def test_a_second_run_sees_grad_mode_as_the_first_did():
    """The kernel of an LSTM makes what its backward needs only where grad mode is on."""
    layer, x = nn.LSTM(6, 6), torch.randn(3, 2, 6)
    with block():
        h, _ = layer(x.requires_grad_())
        with torch.no_grad():
            layer(x)
    h.square().sum().backward()
    assert x.grad is not None


# -- from where -----------------------------------------------------------------------------------


def origin_of(change, tensor, *, is_ours=False, **given):
    storages = Storages("the block")
    if is_ours:
        storages.made(tensor, is_blank=True)
    for read in given.get("reads", ()):
        storages.record(read)
    storages.will_change(change, "an operator", is_overwritten=given.get("is_overwritten", True))
    return storages.record(tensor).storage.origin


def test_where_a_storage_comes_from():
    x = torch.randn(4, 6)
    assert origin_of(x, x) is Origin.BLANK
    assert origin_of(x.t(), x) is Origin.BLANK
    assert origin_of(x[1:], x) is Origin.COPY
    assert origin_of(x, x, is_overwritten=False) is Origin.COPY
    assert origin_of(x, x, reads=[x[0]]) is Origin.COPY
    assert origin_of(x.expand(2, 4, 6)[0], x, is_ours=True) is Origin.BLANK


def test_a_storage_that_died_is_not_taken_for_the_next_one():
    storages = Storages("the block")
    x = torch.randn(8)
    memory = storages.made(x, is_blank=False)
    assert storages.to_be_made(x) is memory
    address = x.untyped_storage()._cdata
    del x
    found = []
    for _ in range(64):  # until the address is given to another one
        y = torch.randn(8)
        found.append(y)
        if y.untyped_storage()._cdata == address:
            break
    assert storages.to_be_made(found[-1]) is None


def test_statistics_are_written_though_no_schema_says_so():
    assert traits_of(aten.native_batch_norm.default).writes >= {3, 4}
    assert traits_of(aten.add_.Tensor).writes >= {0}
    assert traits_of(aten.add.out).writes == {"out"}
    assert not traits_of(aten.add.Tensor).writes


def test_what_is_known_of_operators():
    assert traits_of(aten.t.default).is_view
    assert not traits_of(aten.add_.Tensor).is_view
    assert traits_of(aten.copy_.default).overwrites
    assert traits_of(aten.add.out).overwrites
    assert not traits_of(aten.add_.Tensor).overwrites
    assert traits_of(aten.native_dropout.default).may_draw
    assert not traits_of(aten.mm.default).may_draw
    assert not traits_of(aten._local_scalar_dense.default).makes_or_writes


def test_memory_that_was_only_allocated_is_kept(a):
    with block():
        fresh = torch.empty(6, 6)
        fresh.numpy()[...] = 3.0
        w = a * fresh
    assert type(fresh) is torch.Tensor
    assert type(w) is Value
    (w * w).sum().backward()
    assert torch.allclose(a.grad, 18 * a)


def test_memory_that_was_freed_since(a):
    given = a.detach().clone()
    with block():
        h = (given * 2).sin()
    loss = (a * h).sum()
    given.untyped_storage().resize_(0)
    with pytest.raises(ReplayError, match="was freed before backward"):
        loss.backward()


def test_operators_that_take_functions(a):
    with block():
        with torch.no_grad():
            noise = torch.rand(6, 6)
            (h,) = torch.ops.higher_order.cond(
                torch.tensor(True), lambda t: (t * 2,), lambda t: (t,), (noise,)
            )
        w = a * h + noise
    assert type(h) is torch.Tensor
    (w * w).sum().backward()
    assert torch.allclose(a.grad, 2 * (a * h + noise) * h)


def test_what_processes_tell_each_other_is_not_told_again(a):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with block():
            h = torch.rand(6, 6)
            dist.all_reduce(h)
            w = (a * h).exp()
    finally:
        dist.destroy_process_group()
    assert type(h) is torch.Tensor
    w.sum().backward()  # without a group there is nobody to talk to
    assert torch.allclose(a.grad, (a * h).exp() * h)


def test_an_operator_that_does_not_do_the_same(a):
    sizes = iter((6, 5))

    def fickle(x):
        return x.new_zeros(next(sizes), 6)

    library = torch.library.Library("recoup_test", "FRAGMENT")
    library.define("fickle(Tensor x) -> Tensor")
    library.impl("fickle", fickle, "CompositeExplicitAutograd")
    with block():
        h = torch.ops.recoup_test.fickle(a.detach())
    with pytest.raises(ReplayError, match="returned another tensor than in the first run"):
        (a * h).sum().backward()


# -- how it lies in memory ------------------------------------------------------------------------


def test_a_result_that_lies_otherwise_is_laid_out_as_it_was():
    """Hooks beneath may return what they kept with other strides, and results follow arguments."""
    x = torch.randn(4, 6).t().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.contiguous().clone(), lambda t: t.clone()
    ):
        with block():
            w = x.exp()
        loss = (w[1:] * w[:-1].sin()).sum()
    loss.backward()
    got, x.grad = x.grad, None
    w = x.exp()
    (w[1:] * w[:-1].sin()).sum().backward()
    assert torch.allclose(got, x.grad)


def test_views_of_every_kind(a):
    def use(w):
        parts = (
            w.t()[1:4],
            torch.as_strided(w, (3, 2), (2, 5), 4),
            w.view(torch.int32).view(torch.float32)[2],
            w.diagonal(),
            w.expand(2, 6, 6),
            torch.view_as_complex(w.view(6, 3, 2)).abs(),
        )
        return sum((part * part).sum() for part in parts)

    with block():
        w = a.exp()
    use(w).backward()
    got, a.grad = a.grad, None
    use(a.exp()).backward()
    assert torch.equal(got, a.grad)


# -- draws ----------------------------------------------------------------------------------------


def draw(recorder, func, *args, **kwargs):
    result, found = recorder.run(func, args, kwargs)
    return result, found


def test_a_stream_is_kept_where_it_does_not_follow():
    recorder = DrawRecorder()
    torch.manual_seed(1)
    _, first = draw(recorder, aten.rand.default, [3])
    _, second = draw(recorder, aten.native_dropout.default, torch.ones(3), 0.5, True)
    torch.rand(1)
    _, third = draw(recorder, aten.rand.default, [3])
    generator = torch.Generator().manual_seed(4)
    _, fourth = draw(recorder, aten.rand.generator, [3], generator=generator)
    assert first.state == 1
    assert second.state is None
    assert isinstance(third.state, torch.Tensor)
    assert fourth.state == 4
    assert first.stream is second.stream is third.stream
    assert fourth.stream is not first.stream


def test_an_operator_that_draws_nothing_has_no_draw():
    before = torch.get_rng_state()
    _, found = draw(DrawRecorder(), aten.native_dropout.default, torch.ones(3), 0.5, False)
    assert found is None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("func", [aten.rand.default, aten.native_dropout.default])
def test_the_default_generator_moves_in_forward_and_not_when_it_is_repeated(func):
    args = ([5],) if func is aten.rand.default else (torch.ones(5), 0.5, True)
    torch.manual_seed(2)
    plain = func(*args)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    result, found = draw(DrawRecorder(), func, *args)
    assert torch.equal(torch.get_rng_state(), after)
    torch.rand(3)
    state = torch.get_rng_state()
    again = DrawReplayer().run(func, args, {}, found)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in ((result, plain), (again, plain)):
        pairs = zip(a, b, strict=True) if isinstance(a, tuple) else ((a, b),)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_other_threads_may_draw_at_any_time():
    """From the generator that a block draws from, without a block of their own."""
    is_done = threading.Event()

    def disturb():
        while not is_done.is_set():
            torch.rand(64)

    others = [threading.Thread(target=disturb) for _ in range(4)]
    for thread in others:
        thread.start()
    try:
        a = torch.ones(64, 64, requires_grad=True)
        for _ in range(40):
            with block():
                mask = F.dropout(torch.ones(64, 64), 0.5) * torch.rand(64, 64)
            want = mask.clone()
            (got,) = torch.autograd.grad((a * mask).sum(), a)
            assert torch.equal(got, want)
    finally:
        is_done.set()
        for thread in others:
            thread.join()


def test_a_device_without_an_index_gets_the_one_that_is_current(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert _with_device_index({"device": torch.device("cuda")}) == {
        "device": torch.device("cuda", 3)
    }
    for given in ({}, {"device": None}, {"device": torch.device("cuda", 1)}):
        assert _with_device_index(given) == given
    given = {"device": torch.device("cpu")}
    assert _with_device_index(given) == given


def test_a_device_whose_generators_are_unknown():
    with pytest.raises(ReplayError, match="draws on xpu"):
        draw(DrawRecorder(), aten.rand.default, [3], device=torch.device("xpu"))


@pytest.mark.cuda
def test_draws_on_cuda():
    a = torch.ones(64, 64, device="cuda", requires_grad=True)
    generator = torch.Generator("cuda").manual_seed(1)
    with block():
        mask = F.dropout(torch.ones_like(a), 0.5) * torch.rand(64, 64, device="cuda")
        mask = mask + torch.randn(64, 64, device="cuda", generator=generator) + torch.randn_like(a)
    want = mask.clone()
    torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    (got,) = torch.autograd.grad((a * mask).sum(), a)
    assert torch.equal(got, want)
    assert torch.equal(torch.cuda.get_rng_state(), state)


# -- the record itself ----------------------------------------------------------------------------


def test_a_record_that_is_not_whole_is_not_run():
    record = RecordedBlock("the block")
    source = record.source(RecordedStorage(Origin.MADE, torch.device("cpu")), torch.ones(2))
    record.end(is_whole=False)
    with pytest.raises(ReplayError, match="that the block made before it raised an exception"):
        source.make()


def test_layouts_tell_how_tensors_look():
    x = torch.zeros(4, 6, dtype=torch.complex64)
    layout = layout_of(x.t()[1:].conj())
    assert (layout.size, layout.stride, layout.offset) == ((5, 4), (1, 6), 1)
    assert layout.is_conj
    assert not layout.is_neg
    assert layout == layout_of(x.t()[1:].conj())


def test_the_place_in_code_is_that_of_the_caller():
    assert place_in_code().partition(":")[0].endswith("test_recorded.py")
