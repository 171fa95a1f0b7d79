"""What stands in the way of a backward: hooks, checkpoints, threads, and errors half way."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import MODES, NAMES, Undisturbed, assert_holds, made, plain


class Checkpointed(nn.Module):
    """A head over a checkpointed body; a layer may be in both, and a checkpoint in the body."""

    def __init__(self, kind, *, is_tied=False, is_nested=False):
        super().__init__()
        self.body, self.deeper = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = self.body if is_tied else nn.Linear(4, 4)
        self.is_reentrant, self.is_nested = kind == "reentrant", is_nested
        self.double()

    def forward(self, x):
        def run(x):
            y = self.body(x).tanh()
            if self.is_nested:
                return checkpoint(self.deeper, y, use_reentrant=self.is_reentrant)
            return self.deeper(y)

        return self.head(checkpoint(run, x, use_reentrant=self.is_reentrant))


@pytest.fixture
def x():
    return torch.randn(5, 4, dtype=torch.float64, requires_grad=True)


# -- checkpoints -----------------------------------------------------------------------------------


# Of torch: a checkpoint within a reentrant one runs without a graph at first.
quiet = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


@quiet
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["reentrant", "other"])
def test_checkpoints_deliver_all_or_are_refused(kind, is_nested, is_tied, mode, x):
    module = Checkpointed(kind, is_tied=is_tied, is_nested=is_nested)
    want = plain(module, [x, x], lambda y: y.sin().sum())
    x.grad = None
    store = GradStore(module.parameters())
    with Undisturbed(*module.parameters(), x):
        for _ in range(2):
            loss = module(x).sin().sum()
            if kind == "reentrant" and mode not in ("auto", "harvest"):
                with pytest.raises(GradientError, match='Use mode="harvest"'):
                    store.backward(loss, mode=mode)
                assert len(store) == 0
                return
            store.backward(loss, mode=mode)
    assert_holds(store, module, want, 1e-14)


@quiet
@pytest.mark.parametrize("is_nested", [False, True])
def test_reentrant_checkpoint_of_leaves_that_are_no_targets(is_nested, x):
    """They show when the checkpoint runs again, and must be left alone all the same."""
    module = Checkpointed("reentrant", is_nested=is_nested)
    want = plain(module, [x], lambda y: y.sin().sum())
    want_x, x.grad = x.grad, None
    for targets in (module.head, module.deeper):
        store = GradStore(targets.parameters())
        loss = module(x).sin().sum()
        with Undisturbed(*module.parameters(), x):
            (dx,) = store.backward(loss, inputs=x, retain_graph=True)
            store.backward(loss, retain_graph=True)
        assert torch.equal(dx, want_x)
        name = "head" if targets is module.head else "deeper"
        assert_holds(store, targets, {n: 2 * want[f"{name}.{n}"] for n in ("weight", "bias")})
    module.zero_grad()
    loss.backward(retain_graph=True)  # a plain backward of the same graph is as it was
    loss.backward()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, 2 * want[name])


def test_create_graph_through_a_reentrant_checkpoint(x):
    """The head alone would get a gradient."""
    module = Checkpointed("reentrant")
    with pytest.raises(GradientError, match=r"`create_graph`.*reentrant.*Leave one of the two out"):
        GradStore.from_backward(module(x).sum(), module.parameters(), create_graph=True)


class RunsWithin(torch.autograd.Function):
    """A checkpoint of the reentrant kind under a name that says nothing of it."""

    @staticmethod
    def forward(ctx, layer, x):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradient)
        return None, x.grad


def test_a_plain_backward_reaches_leaves_that_nothing_shows(x):
    first, layer = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    want = plain(nn.Sequential(first, layer), [x], torch.sum)
    store = GradStore([*first.parameters(), *layer.parameters()])
    store.backward(RunsWithin.apply(layer, first(x)).sum(), mode="harvest")
    assert_holds(store, nn.Sequential(first, layer), want)


# -- hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_tensors_run_once(mode):
    module, inputs = made("tied")
    calls = []

    def tenfold(gradient):
        calls.append(gradient)
        return gradient * 10

    want = plain(module, inputs)
    handle = module.a.weight.register_hook(tenfold)
    store = GradStore(module.parameters())
    for x in inputs:
        store.backward(module(x).double().sin().sum(), mode=mode)
    handle.remove()
    assert len(calls) == 2
    want["a.weight"] *= 10
    assert_holds(store, module, want, 1e-14)
    kept = [each.clone() for each in calls]
    store.scale_(3.0)
    assert all(map(torch.equal, calls, kept)), "what a hook has kept is its own"


@pytest.mark.parametrize("mode", MODES)
def test_hooks_after_accumulation(mode):
    module, (x, _) = made("linear")
    calls = []
    module.weight.register_post_accumulate_grad_hook(calls.append)
    store = GradStore(module.parameters())
    if mode == "harvest":
        with pytest.raises(GradientError, match=r'post-accumulate hook.*Use mode="grad"'):
            store.backward(module(x).sum(), mode=mode)
        assert len(store) == 0
    else:
        store.backward(module(x).sum(), mode=mode)
        assert len(store) == 2
    with (
        pytest.raises(GradientError, match=r"post-accumulate hook.*Use `backward`"),
        store.collecting(),
    ):
        module(x).sum().backward()
    assert calls == []


# -- errors half way -------------------------------------------------------------------------------


class Breaks(nn.Module):
    """Backward reaches `last`, then a hook, then `first`; or fails there."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.fails = False

    def forward(self, x):
        y = self.first(x)
        y.register_hook(self.hook)
        return self.last(y)

    def hook(self, gradient):
        if self.fails:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize("was_empty", [True, False])
@pytest.mark.parametrize("way", [*MODES, "collecting"])
def test_an_error_half_way(way, was_empty, x):
    module = Breaks()
    # In another type, harvest sums aside, and an error changes nothing.
    dtype = torch.float64 if way == "harvest" else torch.float32
    store = GradStore(module.parameters(), dtype=dtype)

    def backward():
        if way != "collecting":
            store.backward(module(x).sin().sum(), mode=way)
            return
        with store.collecting():
            module(x).sin().sum().backward()

    if not was_empty:
        backward()
    before = {name: each.clone() for name, each in store.named(module).items()}
    module.fails = True
    with Undisturbed(*module.parameters()), pytest.raises(RuntimeError, match="on purpose"):
        backward()
    module.fails = False
    if was_empty or way == "grad":
        assert_holds(store, module, before)
    else:
        for use in (
            backward,
            store.norm,
            store.clone,
            lambda: store[module.last.weight],
            lambda: store.extend_(GradStore()),
            lambda: GradStore().extend_(store),
            lambda: store.step(torch.optim.SGD(module.parameters())),
        ):
            with pytest.raises(GradientError, match=r"RuntimeError: on purpose.*Call `clear"):
                use()
        assert "not usable" in repr(store)
        store.clear()
        before = {}
    weight = store.weight
    backward()
    assert store.weight == weight + 1
    want = plain(module, [x], lambda y: y.sin().sum())
    for name, gradient in store.named(module).items():
        wanted = want[name] + before.get(name, 0)
        torch.testing.assert_close(gradient, wanted.to(dtype), rtol=1e-5, atol=1e-6)


def test_an_error_in_collecting_before_any_backward(x):
    module = Breaks()
    store = GradStore.from_backward(module(x).sum(), module.parameters())
    with Undisturbed(*module.parameters()), pytest.raises(KeyError), store.collecting():
        raise KeyError
    assert len(store) == 4


# -- misuse of `collecting` ------------------------------------------------------------------------


def cleared(module, store):
    module.zero_grad()


def replaced(module, store):
    module.weight.grad = torch.zeros_like(module.weight)


def stepped(module, store):
    store.step(torch.optim.SGD(module.parameters(), lr=0.0))


def with_graph(module, store):
    (module.weight**3).sum().backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("misuse", [cleared, replaced, stepped, with_graph])
def test_what_would_lose_gradients_raises(misuse, is_last):
    module, (x, _) = made("linear")
    store = GradStore(module.parameters())
    store.backward(module(x).sum())

    def collect():
        with store.collecting():
            if not is_last:
                misuse(module, store)
            module(x).sum().backward()
            if is_last:
                misuse(module, store)

    with (
        Undisturbed(*module.parameters()),
        pytest.raises(GradientError, match="Within `collecting`"),
    ):
        collect()
    with pytest.raises(GradientError, match="Call `clear"):
        store.clone()


def test_a_tensor_that_was_resized():
    module, (x, _) = made("linear")
    store = GradStore(module.parameters())
    store.backward(module(x).sum())
    module.weight.data, module.bias.data = torch.ones(7, 4).double(), torch.ones(7).double()
    for mode in NAMES:
        with pytest.raises(ValueError, match=r"shape \(3.* is a tensor of shape \(7.*`discard`"):
            store.backward(module(x).sum(), mode=mode)
    store.discard(module.weight)
    store.discard(module.bias)
    store.backward(module(x).sum())


# -- threads ---------------------------------------------------------------------------------------


def in_threads(*calls):
    errors = []

    def run(call):
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("mode", ["auto", "grad"])
def test_threads_with_the_same_parameters(mode):
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30))).double()
    inputs = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]
    stores = [GradStore(module.parameters()) for _ in inputs]
    start = threading.Barrier(len(inputs))

    def collect(store, x):
        start.wait()
        for _ in range(20):
            store.backward(module(x).sum(), mode=mode)

    with Undisturbed(*module.parameters()):
        in_threads(*(lambda s=s, x=x: collect(s, x) for s, x in zip(stores, inputs, strict=True)))
    for store, x in zip(stores, inputs, strict=True):
        assert store.weight == 20
        assert_holds(store, module, plain(module, [x] * 20, torch.sum), 1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_while_another_thread_collects(mode):
    module, (x, _) = made("linear")
    outer, inner = GradStore(module.parameters()), GradStore(module.parameters())

    def other():
        if mode == "harvest":
            with pytest.raises(GradientError, match=r'nother thread.*Use mode="grad"'):
                inner.backward(module(x).sum(), mode=mode)
            with pytest.raises(GradientError, match="nother thread"), inner.collecting():
                pass
        else:
            inner.backward(module(x).sum(), mode=mode)

    with Undisturbed(*module.parameters()), outer.collecting():
        in_threads(other)
        module(x).exp().sum().backward()
    assert_holds(outer, module, plain(module, [x], lambda y: y.exp().sum()))
    assert_holds(inner, module, {} if mode == "harvest" else plain(module, [x], torch.sum))


def test_another_thread_comes_first_at_the_last_moment(monkeypatch):
    """`auto` has chosen when the other one begins."""
    from recoup.gradients import collecting

    module, (x, _) = made("linear")
    held, done = threading.Event(), threading.Event()
    outer, inner = GradStore(module.parameters()), GradStore(module.parameters())

    def other():
        with outer.collecting(allow_empty=True):
            held.set()
            done.wait()

    thread = threading.Thread(target=other)
    real = collecting.ends_of

    def late(outputs):
        if not thread.is_alive():
            thread.start()
            held.wait()
        return real(outputs)

    monkeypatch.setattr(collecting, "ends_of", late)
    try:
        inner.backward(module(x).sum())
    finally:
        done.set()
        thread.join()
    assert_holds(inner, module, plain(copy.deepcopy(module), [x], torch.sum))
