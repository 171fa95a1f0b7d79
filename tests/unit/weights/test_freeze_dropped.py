"""Entries that were dropped are left alone by the optimizer.

The oracle is the optimizer itself: the same step without the handle, of a copy, tells where every
other entry must be; where a weight was dropped is read within the steps.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.weights import disabled, freeze_dropped, same_draw, step

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))


def adamw(parameters, **how):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, **how)


def layer(p=0.5, **how):
    return recoup.weight_dropout(nn.Linear(8, 8), p=p, **how)


def trained(module, x=X):
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    loss = output.float().pow(2).sum()
    loss.backward()
    return loss


class Watched:
    """What is dropped in the steps within, of each noisy weight: where all of them dropped it."""

    def __init__(self, module):
        self.module = module
        self.dropped = {}

    def run(self, call):
        """Do something in a step, and see what it drops."""
        with step(self.module):
            result = call()
            for entry in recoup.weights.applied(self.module):
                owner, _, key = entry.name.rpartition(".")
                with torch.no_grad():
                    weight = getattr(self.module.get_submodule(owner), key)
                before = self.dropped.get(entry.name, True)
                self.dropped[entry.name] = before & (weight == 0)
        return result


class Pair:
    """A module under the handle, and a copy without it, that are trained on the same draws."""

    def __init__(self, module, make=adamw):
        self.module, self.plain = module, copy.deepcopy(module)
        self.optimizer, self.plain_optimizer = (make(m.parameters()) for m in (module, self.plain))
        self.handle = freeze_dropped(self.optimizer, module)

    def step(
        self, run=trained, seed=1, num_forwards=1, take=lambda optimizer, module: optimizer.step()
    ):
        """Check a step; return how many entries were left alone that would have been moved."""
        before = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.plain.load_state_dict(self.module.state_dict())
        pairs = ((self.plain, self.plain_optimizer), (self.module, self.optimizer))
        for module, optimizer in pairs:
            module.zero_grad()
            watched = Watched(module)
            for number in range(num_forwards):
                torch.manual_seed(100 * seed + number)
                watched.run(lambda module=module: run(module))
            take(optimizer, module)
        num_saved = 0
        for name, mine in self.module.named_parameters():
            frozen = watched.dropped.get(name, torch.zeros_like(mine, dtype=torch.bool))
            theirs = self.plain.get_parameter(name)
            assert torch.equal(mine, torch.where(frozen, before[name], theirs)), name
            num_saved += (frozen & (theirs != before[name])).sum().item()
        return num_saved


OPTIMIZERS = {
    "adamw": adamw,
    "adamw, foreach": lambda p: adamw(p, foreach=True),
    "adamw, fused": lambda p: adamw(p, fused=True),
    "adam, maximizing": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dropped_entries_are_left_alone(name):
    pair = Pair(layer(), OPTIMIZERS[name])
    assert sum(pair.step(seed=number) for number in range(4)) > 40


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0, lambda number: float(number % 2)])
@pytest.mark.parametrize("axes", [(), (1,), (0,)])
def test_rates_and_axes(p, axes):
    pair = Pair(layer(p, axes=axes))
    saved = [pair.step(seed=number) for number in range(3)]
    assert (min(saved) > 0) >= (p == 1.0)
    assert (max(saved) == 0) >= (p == 0.0)


def by_torch(reentrant):
    return lambda module: torch.utils.checkpoint.checkpoint(
        module, X.clone().requires_grad_(), use_reentrant=reentrant
    ).pow(2).sum().backward()  # fmt: skip


RUNS = {
    "torch": by_torch(reentrant=False),
    "reentrant": by_torch(reentrant=True),
    "ours": lambda module: recoup.checkpoint(module, X).pow(2).sum().backward(),
}


@pytest.mark.parametrize("run", RUNS)
def test_each_draw_counts_once_whoever_runs_code_again(run):
    assert Pair(layer()).step(RUNS[run]) > 15


def test_one_draw_for_several_steps():
    pair = Pair(layer())
    module, raw = pair.module, pair.module.get_parameter("weight")
    with same_draw(5):
        for _ in range(2):  # the second forward draws nothing
            before = raw.detach().clone()
            pair.optimizer.zero_grad()
            trained(module)
            pair.optimizer.step()
            assert 15 < (raw.grad == 0).sum() < 50
            assert torch.equal(raw == before, raw.grad == 0)
    before = raw.detach().clone()
    raw.grad = torch.zeros(8, 8)
    pair.optimizer.step()  # without a forward nothing is protected
    assert (raw != before).all()


@pytest.mark.parametrize("use", ["disabled", "outside", "evaluation"])
def test_a_use_without_dropout_is_not_lost(use):
    module = layer()
    raw, optimizer = module.get_parameter("weight"), adamw(module.parameters())
    freeze_dropped(optimizer, module)
    trained(module)
    is_dropped = raw.grad == 0
    if use == "disabled":
        with disabled(module):
            trained(module)
    elif use == "outside":
        F.linear(X, raw).pow(2).sum().backward()
    else:
        trained(module.eval())
    before = raw.detach().clone()
    optimizer.step()
    assert is_dropped.any()
    assert (raw != before)[is_dropped].all()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        return self.decoder(self.embedding(ids))


@pytest.mark.parametrize("both", [True, False])
def test_tied_names_are_left_alone_where_all_of_them_drop(both):
    model = Tied()
    recoup.weight_dropout(model if both else model.embedding, r".*weight")
    raw, optimizer = model.embedding.get_parameter("weight"), adamw(model.parameters())
    if not both:
        with pytest.raises(ValueError, match="each use has weight dropout"):
            freeze_dropped(optimizer, model)
    freeze_dropped(optimizer, model if both else model.embedding)
    before, watched = raw.detach().clone(), Watched(model)
    watched.run(lambda: trained(model, torch.arange(12)))
    optimizer.step()
    frozen = torch.stack([*watched.dropped.values()]).all(0) & both
    assert torch.equal(raw == before, frozen)
    assert (3 < frozen.sum() < 25) == both


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_embedding(is_sparse):
    embedding = recoup.weight_dropout(nn.Embedding(40, 4, sparse=is_sparse), p=0.5)
    pair = Pair(embedding, torch.optim.SparseAdam if is_sparse else adamw)
    ids = torch.tensor([[1, 4, 1], [7, 39, 0]])
    num_saved = sum(pair.step(lambda module: trained(module, ids), n) for n in range(3))
    # What was not looked up has no gradient: only a dense optimizer moves it.
    assert num_saved > (10 if is_sparse else 60)
    momentum = Pair(embedding, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for number in range(3):
        momentum.step(lambda module, n=number: trained(module, torch.arange(n, n + 9)), number)


# -- ways to step ----------------------------------------------------------------------------------


class MovesFirst(torch.optim.SGD):
    """An optimizer that moves the weights, evaluates the closure there, and moves them back."""

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        for each in parameters:
            each.add_(1.0)
        with torch.enable_grad():
            loss = closure()
        for each in parameters:
            each.sub_(1.25)
        return loss


CLOSURES = {
    "adamw": adamw,
    "sgd": OPTIMIZERS["sgd"],
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "moves first": lambda p: MovesFirst(p, lr=0.1),
}


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("name", CLOSURES)
def test_closures(name, is_named):
    module = layer()
    raw, optimizer = module.get_parameter("weight"), CLOSURES[name](module.parameters())
    freeze_dropped(optimizer, module)
    with pytest.raises(KeyError):
        optimizer.step(lambda: {}["broken"])
    for _ in range(2):
        before, watched = raw.detach().clone(), Watched(module)

        def closure(watched=watched):
            optimizer.zero_grad()
            return watched.run(lambda: trained(module))

        found = optimizer.step(closure=closure) if is_named else optimizer.step(closure)
        assert found > 0
        frozen = watched.dropped["weight"]
        assert frozen.any()
        assert torch.equal(raw[frozen], before[frozen])
        assert name == "lbfgs" or (raw != before)[~frozen].all()


def test_a_store_of_gradients_a_scaler_and_a_graph_of_the_compiler():
    def take(optimizer, module):
        stores[module].step(optimizer)

    def run(module):
        stores[module] = recoup.GradStore(module.parameters())
        stores[module].backward(module(X).pow(2).sum())

    stores = {}
    assert Pair(layer()).step(run, take=take) > 15

    def scaled(module):
        scalers[module] = torch.amp.GradScaler("cpu", init_scale=8.0)
        scalers[module].scale(module(X).pow(2).sum()).backward()

    scalers = {}
    assert Pair(layer()).step(scaled, take=lambda o, m: scalers[m].step(o)) > 15
    module = layer()
    raw, optimizer = module.get_parameter("weight"), adamw(module.parameters())
    freeze_dropped(optimizer, module)
    before = raw.detach().clone()
    torch.compile(module, backend="aot_eager")(X).pow(2).sum().backward()
    optimizer.step()
    assert torch.equal(raw == before, raw.grad == 0)
    torch._dynamo.reset()


# -- the handle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["remove", "twice", "block", "no dropout", "replaced"])
def test_the_end_of_it(way):
    module = layer()
    optimizer = adamw(module.parameters())
    handle = freeze_dropped(optimizer, module)
    trained(module)
    optimizer.step()
    if way == "block":
        with handle:
            trained(module)
    elif way in ("remove", "twice"):
        for _ in range(2 if way == "twice" else 1):
            handle.remove()
    elif way == "no dropout":
        recoup.weights.remove(module)
    else:
        module.weight = nn.Parameter(torch.randn(8, 8))
        optimizer.add_param_group({"params": [module.get_parameter("weight")]})
    raw = module.get_parameter("weight")
    before = raw.detach().clone()
    optimizer.zero_grad()
    trained(module)
    optimizer.step()
    assert (raw != before).all()
    records = [entry.reparametrization.records for entry in recoup.weights.applied(module)]
    assert way == "replaced" or not any(records)


@pytest.mark.parametrize("is_in_order", [False, True])
def test_two_handles_end_one_by_one(is_in_order):
    module = layer()
    raw, optimizer = module.get_parameter("weight"), adamw(module.parameters())
    handles = [freeze_dropped(optimizer, module) for _ in range(2)]
    for handle, are_moved in zip(handles[:: 1 if is_in_order else -1], (False, True), strict=True):
        handle.remove()
        before = raw.detach().clone()
        optimizer.zero_grad()
        trained(module)
        optimizer.step()
        assert (raw != before).all() == are_moved
