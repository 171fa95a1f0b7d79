from __future__ import annotations

import gc
import re
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import recoup
from recoup._core.saved_tensors import current, pair_in_force
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError
from recoup.memory.census import Residual, Residuals, residuals

WAYS = ("keep", "recompute", "regenerate", "invert", "offload")
X_BYTES = 32 * 16 * 4


def x():
    return torch.ones(32, 16).mul(0.5).requires_grad_()


def blocks(num_blocks=5):
    return [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(num_blocks)]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def found(fn):
    """Operators, modules and ways, of what has bytes."""
    return [
        (each.value.split(" [")[0], each.module, each.way)
        for each in residuals(fn)
        if each.num_bytes
    ]


def state():
    return (
        pair_in_force(),
        torch._C._len_torch_function_stack(),
        dict(nn.modules.module._global_forward_hooks),
        dict(nn.modules.module._global_forward_pre_hooks),
        dict(nn.modules.module._global_forward_hooks_always_called),
        current.observer,
        torch.is_grad_enabled(),
    )


@pytest.fixture(autouse=True)
def nothing_remains():
    before = state()
    yield
    assert state() == before


# -- bytes ---------------------------------------------------------------------------------


def held_by_graph(fn):
    """What the tracker sees alive after `fn` once its outputs are gone, but not their graph."""
    gc.collect()
    with StorageTracker() as tracker:
        result = fn()
        nodes = [value.grad_fn for value in (result if isinstance(result, tuple) else (result,))]
        del result
    assert all(nodes)
    return tracker.current_bytes


def mlp():
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 16), nn.Tanh()
    )
    return lambda: model(x())


def convolutions():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2))
    return lambda: model(torch.ones(3, 2, 10, 10).mul(0.5))


def transformer():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return lambda: model(torch.ones(2, 6, 16).mul(0.5))


def noisy_lstm():
    model = recoup.weight_dropout(nn.LSTM(16, 8), r"weight_hh_l\d+", p=0.5)
    return lambda: model(torch.ones(5, 3, 16).mul(0.5))[0]


def autocast():
    model = nn.Sequential(recoup.weight_noise(nn.Linear(16, 16), std=0.1), nn.GELU())
    given = x()  # a leaf made within would be held, though nobody saves it

    def fn():
        with torch.autocast("cpu", torch.bfloat16):
            return model(given)

    return fn


def sqrt():
    model = recoup.Sequential(*blocks(), memory="sqrt")
    return lambda: model(x())


def region():
    block = blocks(1)[0]
    return lambda: recoup.checkpoint(block, x()).sin()


def region_of_torch():
    block = blocks(1)[0]
    return lambda: torch.utils.checkpoint.checkpoint(block, x(), use_reentrant=False).sin()


def value():
    weight = nn.Parameter(torch.ones(16, 16))
    return lambda: recoup.recompute(F.gelu)(x()) @ weight


def flow():
    model = recoup.flows.Glow((1, 8, 8), levels=None, num_steps=1, width=4, memory="constant")
    images = torch.rand(2, 1, 8, 8)
    model.log_prob(images)  # initialises
    return lambda: model.log_prob(images.add(0.0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "build",
    [
        mlp,
        convolutions,
        transformer,
        noisy_lstm,
        autocast,
        sqrt,
        region,
        region_of_torch,
        value,
        flow,
    ],
)
def test_kept_bytes_are_those_that_the_tracker_sees(build):
    fn = build()
    expected = held_by_graph(fn)
    assert expected > 0
    assert residuals(fn).total_bytes("keep") == expected


def test_a_storage_counts_once_and_where_it_is_kept():
    given = x()

    def fn():
        y = recoup.checkpoint(torch.exp, given)  # its slot looks at the result, which sin keeps
        return y.sin() + y.view(-1).cos().sum()

    sizes = [(each.way, each.num_bytes) for each in residuals(fn)]
    assert sorted(sizes) == [
        ("keep", 0),
        ("keep", X_BYTES),  # what sin and cos look at
        ("keep", X_BYTES),  # what the region is given
        ("recompute", 0),
    ]


def test_parameters_and_buffers_are_left_out():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).eval()
    # The inputs of both; not weights, their transposes, statistics.
    assert [each.num_bytes for each in residuals(lambda: model(x()))] == [X_BYTES, X_BYTES]
    free = nn.Parameter(torch.ones(16, 16))
    assert residuals(lambda: x() @ free.t()).total_bytes() == X_BYTES
    given = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    given["0.weight"].requires_grad_()
    called = residuals(lambda: torch.func.functional_call(model, given, (x(),)))
    assert [each.num_bytes for each in called] == [X_BYTES, X_BYTES]


@pytest.mark.parametrize("memory", ["sqrt", "log", 2])
def test_bytes_of_what_is_not_kept_are_those_of_keeping_it(memory):
    model = recoup.Sequential(*blocks())
    given = x()
    plain = residuals(lambda: model(given))
    assert plain.total_bytes() == plain.total_bytes("keep") == 10 * X_BYTES
    model.memory = memory
    saved = residuals(lambda: model(given))
    assert saved.total_bytes() == plain.total_bytes()
    assert saved.total_bytes("keep") + saved.total_bytes("recompute") == saved.total_bytes()
    assert 0 < saved.total_bytes("keep") < plain.total_bytes()


def test_only_what_is_still_held_counts():
    def fn():
        x().exp().sin()
        y = x().exp()
        y.sum().backward()
        return x().tanh()

    assert found(fn) == [("tanh", "-", "keep")]


def test_what_fn_does_not_return_counts_if_its_graph_lives():
    outside = []
    assert found(lambda: outside.append(x().exp())) == [("exp", "-", "keep")]


def test_sparse_tensors_count():
    eye = torch.eye(16).to_sparse().requires_grad_()
    total = residuals(lambda: torch.sparse.mm(eye, x().detach().t().contiguous())).total_bytes()
    assert total >= 16 * 4 + 2 * 16 * 8


# -- ways ----------------------------------------------------------------------------------


def test_ways_of_recoup():
    model = recoup.Sequential(*blocks(3), memory=1)
    assert {way for _, _, way in found(lambda: model(x()))} == {"keep", "recompute"}
    assert ("matmul", "-", "recompute") in found(value())
    assert ("lstm", "LSTM", "regenerate") in found(noisy_lstm())
    assert ("lstm", "LSTM", "keep") in found(noisy_lstm())
    noisy = recoup.weight_noise(nn.Linear(16, 16), std=0.1)
    assert found(lambda: recoup.checkpoint(noisy, x())) == [
        ("input of the checkpointed call of Linear", "-", "keep"),
        ("linear", "Linear", "regenerate"),
    ]


def test_what_is_inverted():
    ways = {}
    for operator, module, way in found(flow()):
        ways.setdefault(way, []).append((operator, module))
    assert set(ways) == {"keep", "invert"}
    assert {module for _, module in ways["keep"]} <= {"chain", "-"}
    assert any("network" in module for _, module in ways["invert"])  # what networks save
    assert any(module.count(".") == 1 for _, module in ways["invert"])  # what layers save


def test_a_weight_in_autocast_is_regenerated():
    each = next(each for each in residuals(autocast()) if each.way == "regenerate")
    assert each == Residual("linear [16, 16] bfloat16", "0", 16 * 16 * 2, "regenerate")


def test_a_chain_may_invert_and_recompute():
    class Shift(nn.Module):
        def forward(self, x):
            return x.exp().log() + 1

        def inverse(self, y):
            return y - 1

    modules = [Shift(), Shift(), nn.GELU()]
    model = recoup.Sequential(*modules, memory="constant", otherwise="recompute")
    ways = {(each.module, each.way) for each in residuals(lambda: model(x()))}
    # The first input is kept, for the drift guard to begin from.
    assert {("0", "recompute"), ("1", "invert"), ("2", "recompute")} <= ways
    assert ("Sequential", "keep") in ways
    assert not any(way == "keep" for module, way in ways if module in ("0", "1", "2"))


class OnDisk:
    def __init__(self, tensor):
        self.path = "a file"
        self.shape = tensor.shape


@pytest.mark.parametrize(
    ("pack", "unpack", "expected"),
    [
        (lambda t: t, lambda p: p, ("keep", X_BYTES)),
        (lambda t: [{"view": t.view(-1)}], lambda p: p, ("keep", X_BYTES)),
        (lambda t: t.bfloat16(), lambda p: p.float(), ("keep", X_BYTES // 2)),
        (lambda t: ("cpu", t.clone()), lambda p: p[1], ("offload", X_BYTES)),
        (lambda t: t.to("meta"), lambda p: p, ("offload", X_BYTES)),
        (OnDisk, lambda p: torch.ones(p.shape), ("offload", X_BYTES)),
        (lambda t: 7, lambda p: p, ("offload", X_BYTES)),
    ],
)
@pytest.mark.parametrize("is_outside", [False, True])
def test_ways_of_hooks_of_others(pack, unpack, expected, is_outside):
    def fn():
        with saved_tensors_hooks(pack, unpack):
            return x().exp()

    if is_outside:
        with saved_tensors_hooks(pack, unpack):
            entries = list(residuals(lambda: x().exp()))
    else:
        entries = list(residuals(fn))
    assert [(each.way, each.num_bytes) for each in entries] == [expected]


def test_within_save_on_cpu():
    block = blocks(1)[0]

    def fn():
        y = x()
        with save_on_cpu(pin_memory=True):  # makes copies
            y = Squared.apply(block(y))
            y = recoup.checkpoint(block, y)
            y = torch.utils.checkpoint.checkpoint(block, y + 1, use_reentrant=False)
        return y.exp()

    assert found(fn) == [
        ("linear", "0", "offload"),
        ("gelu", "1", "offload"),
        ("Squared", "-", "offload"),
        ("input of the checkpointed call of Sequential", "-", "offload"),
        ("gelu", "1", "recompute"),
        ("input of checkpoint", "-", "offload"),
        ("gelu", "1", "recompute"),
        ("exp", "-", "keep"),
    ]


def test_hooks_of_others_around_a_module_that_is_one_function():
    class Square(nn.Module):
        def forward(self, x):
            return Squared.apply(x)

    square, given = Square(), x()

    def fn():
        with save_on_cpu(pin_memory=True):
            return square(given)

    assert found(fn) == [("Squared", "Square", "offload")]


def test_save_on_cpu_of_what_is_on_the_cpu_keeps():
    def fn():
        with save_on_cpu():
            return x().exp()

    assert found(fn) == [("exp", "-", "keep")]


def test_in_a_checkpoint_of_torch():
    noisy = recoup.weight_noise(nn.Linear(16, 16), std=0.1)

    def run(x):
        return Squared.apply(recoup.recompute(F.gelu)(noisy(x)))

    fn = lambda: torch.utils.checkpoint.checkpoint(run, x(), use_reentrant=False)  # noqa: E731
    assert found(fn) == [
        ("input of checkpoint", "-", "keep"),
        ("linear", "Linear", "regenerate"),
        ("input of the checkpointed call of gelu", "-", "recompute"),
        ("Squared", "-", "recompute"),
    ]


def test_a_function_in_a_region():
    def run(x):
        return Squared.apply(x + 1)

    assert found(lambda: recoup.checkpoint(run, x()))[1:] == [("Squared", "-", "recompute")]


# -- names ---------------------------------------------------------------------------------


def test_operators_modules_shapes_and_types():
    model = nn.Sequential(nn.Linear(16, 16, dtype=torch.float64), nn.GELU())
    assert list(residuals(lambda: model(x().double()).exp())) == [
        Residual("linear [32, 16] float64", "0", 2 * X_BYTES, "keep"),
        Residual("gelu [32, 16] float64", "1", 2 * X_BYTES, "keep"),
        Residual("exp [32, 16] float64", "-", 2 * X_BYTES, "keep"),
    ]


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.within = blocks(1)[0]

    def forward(self, x):
        return self.within(x).exp()

    def method(self, x):
        return self.within(x)


def test_the_root_is_named_by_its_class():
    root = Root()
    assert found(lambda: root(x()))[-1] == ("exp", "Root", "keep")
    assert found(lambda: root.method(x()))[-1] == ("gelu", "within.1", "keep")
    given = x()
    bound = type("Bound", (Root,), {"method": lambda self: self.within(given)})()
    assert found(bound.method)[-1] == ("gelu", "within.1", "keep")
    unknown = [lambda: None, {"model": root}]  # too deep for its name to be seen
    assert found(lambda: next(iter(unknown[1].values())).within(x()))[-1][1] in ("1", "within.1")


def test_several_roots_have_several_names():
    first, second = Root(), Root()
    modules = {each.module for each in residuals(lambda: second(first(x())))}
    assert modules == {
        *("Root", "Root.within.0", "Root.within.1"),
        *("Root#2", "Root#2.within.0", "Root#2.within.1"),
    }


def test_an_exception_within_fn_leaves_the_names_right():
    class Raises(Root):
        def forward(self, x):
            with save_on_cpu(pin_memory=True):
                super().forward(x)
                raise ValueError

    bad, good = Raises(), Root()

    def fn():
        with pytest.raises(ValueError, match=r"^$"):
            bad(x())
        return good(x()) + Squared.apply(x())

    assert [(each, way) for each, _, way in found(fn)] == [
        *[(each, "keep") for each in ("linear", "gelu", "exp", "Squared")],
    ]
    assert [module for _, module, _ in found(fn)] == ["within.0", "within.1", "Root", "-"]


def test_modules_of_other_threads_are_not_listed():
    other, mine = Root(), Root()

    def fn():
        thread = threading.Thread(target=other, args=(x(),))
        outside = x().exp()
        thread.start()
        thread.join()
        return outside, x().exp(), mine(x())

    assert [module for _, module, _ in found(fn)] == ["-", "-", "within.0", "within.1", "Root"]


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    assert found(lambda: model(x()))[0] == ("linear", "0", "keep")
    shaped = residuals(lambda: model(x()))
    model[0], model[1] = nn.LazyLinear(4), nn.LazyBatchNorm1d()
    assert residuals(lambda: model(x())).total_bytes() == shaped.total_bytes()


# -- a good guest --------------------------------------------------------------------------


def test_nothing_remains_after_an_exception():
    before = state()

    def fn():
        with save_on_cpu():
            x().exp()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        residuals(fn)
    assert state() == before


def test_no_memory_remains():
    fn = transformer()
    residuals(fn)
    gc.collect()
    gc.disable()
    try:
        with StorageTracker() as tracker:
            listed = residuals(fn)
            assert listed.total_bytes() > 0
            assert tracker.current_bytes == 0
    finally:
        gc.enable()


def test_a_graph_that_outlives_the_call_holds_no_modules():
    outside = []
    root = Root()
    gone = weakref.ref(root)
    residuals(lambda root=root: outside.append(root(x())))
    del root
    gc.collect()
    assert gone() is None


def test_it_runs_once_with_grad_and_draws_as_a_forward_does():
    calls = []
    dropout = nn.Dropout(0.5)

    def fn():
        calls.append(torch.is_grad_enabled())
        return dropout(x())

    torch.manual_seed(0)
    fn()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    calls.clear()
    with torch.no_grad():
        residuals(fn)
    assert calls == [True]
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("build", [mlp, transformer, noisy_lstm, sqrt, region_of_torch, flow])
def test_a_graph_that_outlives_the_call_is_right(build):
    fn = build()
    outside = []

    def leak():
        outside.append(fn().sum())

    def gradients(loss):
        leaves, seen, nodes = [], set(), [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node not in seen:
                seen.add(node)
                nodes += [before for before, _ in node.next_functions if before is not None]
                if hasattr(node, "variable"):
                    leaves.append(node.variable)
        return torch.autograd.grad(loss, leaves)

    torch.manual_seed(0)
    expected = gradients(fn().sum())
    torch.manual_seed(0)
    assert len(residuals(leak)) > 0
    got = gradients(outside.pop())
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_a_change_in_place_is_still_found():
    outside = []

    def fn():
        y = x().exp()
        outside.append(y.sin())
        y.add_(1)

    residuals(fn)
    with pytest.raises(ChangedError, match="that sin saved"):
        outside[0].sum().backward()


@pytest.mark.parametrize("is_outside", [False, True])
def test_hooks_of_others_see_what_they_would_have_seen(is_outside):
    noisy = recoup.weight_noise(nn.Linear(16, 16), std=0.1)
    block = blocks(1)[0]
    seen = []

    def pack(tensor):
        seen.append((type(tensor), tuple(tensor.shape), tensor.grad_fn is None))
        return tensor

    def body():
        y = Squared.apply(block(noisy(x())))
        return recoup.checkpoint(block, y).exp()

    def fn():
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return body()

    fn()
    expected, seen[:] = list(seen), []
    if is_outside:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            residuals(body)
    else:
        residuals(fn)
    assert seen == expected
    assert len(seen) > 5


def test_a_census_within_a_region_or_another_census():
    block = blocks(1)[0]
    inner = []

    def fn():
        inner.append(found(lambda: block(x())))
        return block(x())

    expected = [("linear", "0", "keep"), ("gelu", "1", "keep")]
    assert found(fn) == expected
    sizes = []

    def run(y):
        inner.append(found(lambda: block(y)))
        sizes.extend(each.num_bytes for each in residuals(lambda: block(y)))
        return block(y)

    recoup.checkpoint(run, x())
    assert sizes == [X_BYTES, X_BYTES]  # each is told once
    assert inner == [expected, [(operator, at, "recompute") for operator, at, _ in expected]]


def test_compiled_code_is_listed_as_it_was_written(fresh_compiler):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    compiled(x())
    assert [each for each, _, _ in found(lambda: compiled(x()))] == ["linear", "gelu"]
    compiled(x())
    assert len(graphs) == 1


# -- the report ----------------------------------------------------------------------------


def test_the_table():
    mib = 2**20
    listed = Residuals(
        (
            Residual("gelu [8, 8] float32", "layers.0", mib, "recompute"),
            Residual("linear [8, 8] float32", "layers.0", mib // 2, "keep"),
            Residual("linear [8, 8] float32", "layers.0", mib, "keep"),
            Residual("linear [8, 8] float32", "layers.0", 0, "keep"),
        )
    )
    assert str(listed).splitlines() == [
        "value                  module    count    MiB  way",
        "linear [8, 8] float32  layers.0      2  1.500  keep",
        "gelu [8, 8] float32    layers.0      1  1.000  recompute",
        "total                                   1.500  keep",
        "                                        1.000  recompute",
        "1 more look at memory that is counted above",
    ]
    assert len(listed) == 4
    assert [each.num_bytes for each in listed] == [mib, mib // 2, mib, 0]


def test_ways_are_in_their_order_and_lines_in_their_width():
    shape = [1024] * 4
    entries = [
        Residual(f"{'long_' * 9}{way} {shape} bfloat16", f"{'deep.' * 9}{way}", 2**35, way)
        for way in reversed(WAYS)
    ]
    lines = str(Residuals(tuple(entries))).splitlines()
    assert max(map(len, lines)) <= 100
    assert tuple(line.split()[-1] for line in lines[-5:]) == WAYS
    for line in lines[1:6]:
        assert re.search(rf"\.\.\. {re.escape(str(shape))} bfloat16 +\.\.\.\S*deep\.\w+ ", line)


def test_total_bytes():
    listed = residuals(value())
    assert listed.total_bytes() == sum(listed.total_bytes(way) for way in WAYS) > 0
    with pytest.raises(ValueError, match=r"`way` is 'kept', but must be one of keep, recompute"):
        listed.total_bytes("kept")


def test_nothing_to_list():
    assert str(residuals(lambda: None)).splitlines()[-1].split() == ["total", "0.000", "keep"]
