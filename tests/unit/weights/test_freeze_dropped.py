"""Entries that were dropped are left alone by the optimizer: it is the oracle for all others."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.weights import applied, disabled, freeze_dropped, remove, same_draw, step
from tests.weight_zoo import Tied, used

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))


def adamw(parameters, **how):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, **how)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5, nesterov=True)


def layer(p=0.5, **how):
    return recoup.weight_dropout(nn.Linear(8, 8), p=p, **how)


def frozen_layer(make=adamw):
    module = layer()
    optimizer = make(module.parameters())
    return module, module.get_parameter("weight"), optimizer, freeze_dropped(optimizer, module)


def trained(module, x=X):
    loss = module(x).pow(2).sum()
    loss.backward()
    return loss


def watched(module, call, dropped):
    names = {parameter: name for name, parameter in module.named_parameters()}
    with step(module):
        result = call()
        for entry in applied(module):
            owner, _, key = entry.name.rpartition(".")
            name = names[module.get_parameter(entry.name)]
            weight = used(module.get_submodule(owner), key)
            dropped[name] = dropped.get(name, True) & (weight == 0)
    return result


class Pair:
    """A module under the handle, and a copy without it, that are trained on the same draws."""

    def __init__(self, module, make=adamw):
        self.module, self.plain = module, copy.deepcopy(module)
        self.optimizer, self.plain_optimizer = (make(m.parameters()) for m in (module, self.plain))
        freeze_dropped(self.optimizer, module)

    def step(self, run=trained, seed=1, take=lambda optimizer, module: optimizer.step()):
        """Check a step; return how many entries were left alone that would have been moved."""
        before = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.plain.load_state_dict(self.module.state_dict())
        pairs = ((self.plain, self.plain_optimizer), (self.module, self.optimizer))
        for module, optimizer in pairs:
            module.zero_grad()
            dropped = {}
            torch.manual_seed(seed)
            watched(module, lambda module=module: run(module), dropped)
            take(optimizer, module)
        num_saved = 0
        for name, mine in self.module.named_parameters():
            frozen = dropped.get(name, torch.zeros_like(mine, dtype=torch.bool))
            theirs = self.plain.get_parameter(name)
            assert torch.equal(mine, torch.where(frozen, before[name], theirs)), name
            num_saved += (frozen & (theirs != before[name])).sum().item()
        return num_saved


KINDS = [(sgd, {}), *((partial(adamw, foreach=each), {}) for each in (False, True))]
KINDS += [(partial(adamw, fused=True), {}), (adamw, {"p": 0.0}), (adamw, {"p": 0.3, "axes": (1,)})]
KINDS += [(adamw, {"p": lambda number: float(number % 2), "axes": (0,)})]


@pytest.mark.parametrize(("make", "how"), KINDS)
def test_dropped_entries_are_left_alone(make, how):
    pair = Pair(layer(**how), make)
    saved = sum(pair.step(seed=number) for number in range(4))
    assert saved == 0 if how.get("p") == 0.0 else saved > 40


def checkpointed(call, **how):
    return lambda module: call(module, X.clone().requires_grad_(), **how).pow(2).sum().backward()


def stored(module):
    module.store = recoup.GradStore.from_backward(module(X).pow(2).sum(), module.parameters())


def scaled(module):
    module.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    module.scaler.scale(module(X).pow(2).sum()).backward()


WAYS = {  # to run, and to take a step
    "torch": {"run": checkpointed(torch_checkpoint, use_reentrant=False)},
    "reentrant": {"run": checkpointed(torch_checkpoint, use_reentrant=True)},
    "ours": {"run": checkpointed(recoup.checkpoint)},
    "twice": {"run": lambda module: (module(X) * module(X)).sum().backward()},
    "compiled": {"run": lambda module: trained(torch.compile(module, backend="aot_eager"))},
    "store": {"run": stored, "take": lambda optimizer, module: module.store.step(optimizer)},
    "scaler": {"run": scaled, "take": lambda optimizer, module: module.scaler.step(optimizer)},
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", WAYS)
def test_each_draw_counts_once_whoever_runs_code_again_and_takes_the_step(way):
    assert Pair(layer()).step(**WAYS[way]) > 15


def test_one_draw_for_several_steps():
    module, raw, optimizer, _ = frozen_layer()
    with same_draw(5):
        for _ in range(2):  # the second forward draws nothing
            before = raw.detach().clone()
            optimizer.zero_grad()
            trained(module)
            optimizer.step()
            assert 15 < (raw.grad == 0).sum() < 50
            assert torch.equal(raw == before, raw.grad == 0)


@pytest.mark.parametrize("use", ["disabled", "outside", "evaluation"])
def test_a_use_without_dropout_is_not_lost(use):
    module, raw, optimizer, _ = frozen_layer()
    trained(module)
    is_dropped, before = raw.grad == 0, raw.detach().clone()
    with disabled(module) if use == "disabled" else nullcontext():
        module.train(use != "evaluation")
        trained(module if use != "outside" else lambda x: F.linear(x, raw))
    optimizer.step()
    assert is_dropped.any()
    assert (raw != before)[is_dropped].all()


def test_tied_names_are_left_alone_where_all_of_them_drop():
    model, ids = Tied(recurrent=False), torch.arange(12)
    both = recoup.weight_dropout(copy.deepcopy(model), r".*weight")
    assert 3 < Pair(both).step(lambda module: trained(module, ids)) < 40
    recoup.weight_dropout(model.embedding)
    raw, optimizer = model.embedding.get_parameter("weight"), adamw(model.parameters())
    with pytest.raises(ValueError, match="each use has weight dropout"):
        freeze_dropped(optimizer, model)
    freeze_dropped(optimizer, model.embedding)
    before = raw.detach().clone()
    trained(model, ids)
    optimizer.step()
    assert (raw != before).all()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_embedding(is_sparse):
    embedding = recoup.weight_dropout(nn.Embedding(40, 4, sparse=is_sparse), p=0.5)
    pair = Pair(embedding, torch.optim.SparseAdam if is_sparse else adamw)
    ids = torch.tensor([[1, 4, 1], [7, 39, 0]])
    num_saved = sum(pair.step(lambda module: trained(module, ids), n) for n in range(3))
    # What was not looked up has no gradient: only a dense optimizer moves it.
    assert num_saved > (10 if is_sparse else 60)


@pytest.mark.parametrize(
    ("make", "name"), [(adamw, "closure"), (lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3), "")]
)
def test_closures(make, name):
    module, raw, optimizer, _ = frozen_layer(make)
    with pytest.raises(KeyError):
        optimizer.step(lambda: {}["broken"])
    before, dropped = raw.detach().clone(), {}

    def closure():
        optimizer.zero_grad()
        return watched(module, lambda: trained(module), dropped)

    assert (optimizer.step(closure=closure) if name else optimizer.step(closure)) > 0
    frozen = dropped["weight"]
    assert frozen.any()
    assert torch.equal(raw[frozen], before[frozen])
    assert make is not adamw or (raw != before)[~frozen].all()


def moves_all(module, optimizer):
    raw = module.get_parameter("weight")
    before = raw.detach().clone()
    optimizer.zero_grad()
    trained(module)
    optimizer.step()
    return bool((raw != before).all())


def test_the_end_of_it_and_of_one_of_two():
    module, _, optimizer, handle = frozen_layer()
    other = freeze_dropped(optimizer, module)
    for _ in range(2):
        assert not moves_all(module, optimizer)
        handle.remove()
    other.remove()
    assert moves_all(module, optimizer)
    assert not any(entry.reparametrization.records for entry in applied(module))
    module, _, optimizer, _ = frozen_layer()
    remove(module)
    assert moves_all(module, optimizer)
