"""Entries that were dropped are left alone by the optimizer.

The oracle is the optimizer itself: the same step without the handle, of a copy, tells where every
other entry must be, and masks come from the draws that were recorded.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.weights import disabled, freeze_dropped, same_draw
from recoup.weights.dropout import WeightDropout
from tests.unit.weights.plain_run import mask, recorded

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def layer(p=0.5, **how):
    return recoup.weight_dropout(nn.Linear(8, 8), p=p, **how)


def dropped_in(weight, made):
    """Where all draws of some forwards dropped an entry."""
    found = torch.ones(weight.shape, dtype=torch.bool)
    for each in made:
        if isinstance(each.step, WeightDropout):
            found &= (mask(weight.detach(), each, each.step.axes) == 0).expand_as(found)
    return found


class Pair:
    """A module under the handle, and a copy without it, that are trained on the same draws."""

    def __init__(self, module, make=adamw, parameters=nn.Module.parameters):
        self.module, self.plain = module, copy.deepcopy(module)
        self.optimizer = make(list(parameters(module)))
        self.plain_optimizer = make(list(parameters(self.plain)))
        self.handle = freeze_dropped(self.optimizer, module)

    def step(self, run, seed=1, num_forwards=1, *, step=lambda optimizer: optimizer.step()):
        """Check a step; return how many entries were left alone that would have been moved."""
        before = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.plain.load_state_dict(self.module.state_dict())
        made = []
        for module in (self.plain, self.module):
            module.zero_grad()
            for number in range(num_forwards):
                torch.manual_seed(100 * seed + number)
                with recorded() as now:
                    run(module)
                made += now if module is self.module else []
        step(self.plain_optimizer)
        step(self.optimizer)
        num_saved = 0
        for name, mine in self.module.named_parameters():
            frozen = torch.zeros(mine.shape, dtype=torch.bool)
            if name.endswith("weight") and made:
                frozen = dropped_in(mine, made)
            theirs = self.plain.get_parameter(name)
            assert torch.equal(mine, torch.where(frozen, before[name], theirs)), name
            num_saved += (frozen & (theirs != before[name])).sum().item()
        return num_saved


def trained(module):
    module(X).pow(2).sum().backward()


OPTIMIZERS = {
    "adamw": adamw,
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, fused=True),
    "adam, maximizing": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dropped_entries_are_left_alone(name):
    pair = Pair(layer(), OPTIMIZERS[name])
    num_saved = 0
    for number in range(4):
        num_saved += pair.step(trained, number)
    assert num_saved > 40


def test_without_it_momentum_and_decay_move_them():
    module = layer()
    optimizer = adamw(module.parameters())
    before = module.get_parameter("weight").detach().clone()
    trained(module)
    optimizer.step()
    assert (module.get_parameter("weight") != before)[
        module.get_parameter("weight").grad == 0
    ].all()


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0, lambda step: float(step % 2)])
@pytest.mark.parametrize("axes", [(), (1,), (0,)])
def test_rates_and_axes(p, axes):
    pair = Pair(layer(p, axes=axes))
    for number in range(3):
        num_saved = pair.step(trained, number)
        assert num_saved > 0 or p not in (1.0,)
        assert num_saved == 0 or p != 0.0


def test_several_forwards_protect_what_all_of_them_dropped():
    pair = Pair(layer())
    one, four = pair.step(trained, 1), pair.step(trained, 2, num_forwards=4)
    assert 0 < four < one


def test_one_draw_for_several_forwards_and_for_several_steps():
    pair = Pair(layer())

    def twice(module):
        with same_draw(3):
            trained(module)
            trained(module)

    assert pair.step(twice) > 15
    module, optimizer = pair.module, pair.optimizer
    optimizer.zero_grad()
    with same_draw(5):
        for _ in range(2):  # the second forward draws nothing
            before = module.get_parameter("weight").detach().clone()
            module(X).sum().backward()
            optimizer.step()
            is_dropped = module.get_parameter("weight").grad == 0
            assert is_dropped.sum() > 15
            assert torch.equal(module.get_parameter("weight")[is_dropped], before[is_dropped])


def test_nothing_is_protected_without_a_forward():
    pair = Pair(layer())
    pair.step(trained)
    assert (
        pair.step(lambda module: setattr(module.get_parameter("weight"), "grad", torch.zeros(8, 8)))
        == 0
    )


def test_evaluation_between_steps_does_not_count():
    pair = Pair(layer())

    def run(module):
        trained(module)
        module.eval()
        with torch.no_grad():
            module(X)
        module.train()

    assert pair.step(run) > 15


@pytest.mark.parametrize("raw", ["disabled", "outside", "evaluation"])
def test_a_use_without_dropout_is_not_lost(raw):
    module = layer()
    optimizer = adamw(module.parameters())
    freeze_dropped(optimizer, module)
    trained(module)
    is_dropped = module.get_parameter("weight").grad == 0
    if raw == "disabled":
        with disabled(module):
            trained(module)
    elif raw == "outside":
        F.linear(X, module.get_parameter("weight")).pow(2).sum().backward()
    else:
        trained(module.eval())
    before = module.get_parameter("weight").detach().clone()
    optimizer.step()
    assert is_dropped.any()
    assert (module.get_parameter("weight") != before)[is_dropped].all()


# -- tied names ------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids, *, decodes=True):
        hidden = self.embedding(ids)
        return self.decoder(hidden) if decodes else hidden


def test_a_tied_name_that_does_not_drop():
    model = Tied()
    recoup.weight_dropout(model.embedding)
    with pytest.raises(ValueError, match="each use has weight dropout"):
        freeze_dropped(adamw(model.parameters()), model)
    # A part that does not know of the other use: what has a gradient moves.
    optimizer = adamw(model.parameters())
    freeze_dropped(optimizer, model.embedding)
    before = model.embedding.get_parameter("weight").detach().clone()
    model(torch.arange(12)).pow(2).sum().backward()
    optimizer.step()
    assert (model.embedding.get_parameter("weight") != before).all()


def test_tied_names_that_all_drop():
    model = Tied()
    recoup.weight_dropout(model, r".*\.weight")
    optimizer = adamw(model.parameters())
    freeze_dropped(optimizer, model)
    before = model.embedding.get_parameter("weight").detach().clone()
    with recorded() as made:
        model(torch.arange(12)).pow(2).sum().backward()
    optimizer.step()
    assert len(made) == 2
    frozen = dropped_in(before, made)
    assert 3 < frozen.sum() < 25
    assert torch.equal(model.embedding.get_parameter("weight") == before, frozen)


# -- kinds of layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_embedding(is_sparse):
    embedding = recoup.weight_dropout(nn.Embedding(40, 4, sparse=is_sparse), p=0.5)
    make = torch.optim.SparseAdam if is_sparse else adamw

    def run(module):
        module(torch.tensor([[1, 4, 1], [7, 39, 0]])).pow(2).sum().backward()

    pair = Pair(embedding, make)
    num_saved = sum(pair.step(run, number) for number in range(3))
    # What was not looked up has no gradient: only a dense optimizer moves it.
    assert num_saved > (10 if is_sparse else 60)


def test_a_sparse_use_without_dropout_is_not_lost():
    embedding = recoup.weight_dropout(nn.Embedding(9, 4, sparse=True))
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    freeze_dropped(optimizer, embedding)
    before = embedding.get_parameter("weight").detach().clone()
    with recorded() as made:
        embedding(torch.tensor([1, 4])).pow(2).sum().backward()
    table = embedding.get_parameter("weight")
    F.embedding(torch.tensor([4, 5, 4]), table, sparse=True).pow(2).sum().backward()
    optimizer.step()
    frozen = dropped_in(before, made)
    assert frozen[1].any()
    assert frozen[4].any()
    frozen[[4, 5]] = False
    has_gradient = torch.tensor([1, 4, 5])
    assert torch.equal(
        (embedding.get_parameter("weight") == before)[has_gradient], frozen[has_gradient]
    )


def test_sparse_gradients_with_momentum_move_what_was_not_looked_up():
    embedding = recoup.weight_dropout(nn.Embedding(40, 4, sparse=True), p=0.5)
    pair = Pair(embedding, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for number in range(3):
        ids = torch.randint(40, (8,))
        pair.step(lambda module, ids=ids: module(ids).pow(2).sum().backward(), number)


def test_noise_and_functions_on_the_same_weight():
    module = recoup.weight_noise(layer(), std=0.1)
    recoup.weights.apply(module, lambda weight, draw: weight + draw.normal() * 0.1)
    assert Pair(module).step(trained) > 15


def test_recurrent_layers():
    lstm = recoup.weight_dropout(nn.LSTM(8, 6), "weight_hh_l0")
    optimizer = adamw(lstm.parameters())
    freeze_dropped(optimizer, lstm)
    before = lstm.get_parameter("weight_hh_l0").detach().clone()
    with recorded() as made:
        lstm(X.unsqueeze(1))[0].sum().backward()
    optimizer.step()
    frozen = dropped_in(before, made)
    assert torch.equal(lstm.get_parameter("weight_hh_l0")[frozen], before[frozen])
    assert (lstm.get_parameter("weight_hh_l0") != before)[~frozen].all()


def test_a_weight_with_a_norm_is_moved():
    model = nn.Sequential(recoup.weight_norm(layer()), layer())
    optimizer = adamw(model.parameters())
    freeze_dropped(optimizer, model)
    before = [part.get_parameter("weight").detach().clone() for part in model]
    trained(model)
    optimizer.step()
    assert (model[0].get_parameter("weight") != before[0]).all()
    assert not (model[1].get_parameter("weight") != before[1]).all()
    with pytest.raises(ValueError, match="no weight norm"):
        freeze_dropped(optimizer, model[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype):
    def run(module):
        module(X.to(dtype)).pow(2).sum().backward()

    assert Pair(layer().to(dtype)).step(run) > 15


def test_autocast():
    def run(module):
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(X).pow(2).sum()
        loss.backward()

    assert Pair(layer()).step(run) > 15


# -- code that runs again --------------------------------------------------------------------------

CHECKPOINTS = {
    "torch": lambda m: torch.utils.checkpoint.checkpoint(m, X, use_reentrant=False),
    "torch, reentrant": lambda m: torch.utils.checkpoint.checkpoint(
        m, X.clone().requires_grad_(), use_reentrant=True
    ),
    "recoup": lambda m: recoup.checkpoint(m, X),
    "torch within recoup": lambda m: recoup.checkpoint(
        lambda: torch.utils.checkpoint.checkpoint(m, X, use_reentrant=False)
    ),
}


def test_a_graph_of_the_compiler():
    torch.compiler.reset()
    module = layer()
    optimizer = adamw(module.parameters())
    freeze_dropped(optimizer, module)
    compiled = torch.compile(module, backend="aot_eager")
    for _ in range(2):
        before = module.get_parameter("weight").detach().clone()
        optimizer.zero_grad()
        with recorded() as made:
            compiled(X).pow(2).sum().backward()
        optimizer.step()
        frozen = dropped_in(before, made)
        assert 15 < frozen.sum() < 50
        assert torch.equal(module.get_parameter("weight") == before, frozen)


# -- ways to step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_closure(name, is_named):
    pair = Pair(layer(), OPTIMIZERS[name])
    modules = {id(pair.optimizer): pair.module, id(pair.plain_optimizer): pair.plain}

    for number in range(3):
        before = pair.module.get_parameter("weight").detach().clone()
        pair.plain.load_state_dict(pair.module.state_dict())
        for optimizer in (pair.plain_optimizer, pair.optimizer):
            module = modules[id(optimizer)]

            def closure(module=module, optimizer=optimizer):
                optimizer.zero_grad()
                loss = module(X).pow(2).sum()
                loss.backward()
                return loss

            torch.manual_seed(number)
            with recorded() as made:
                found = optimizer.step(closure=closure) if is_named else optimizer.step(closure)
            assert found > 0
        frozen = dropped_in(before, made)
        assert torch.equal(
            pair.module.get_parameter("weight"),
            torch.where(frozen, before, pair.plain.get_parameter("weight")),
        )
        assert 15 < frozen.sum() < 50


def test_a_closure_that_is_run_often():
    module = layer()
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    freeze_dropped(optimizer, module)
    before = module.get_parameter("weight").detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = module(X).pow(2).sum()
        loss.backward()
        return loss

    with recorded() as made:
        optimizer.step(closure)
    assert len(made) > 1
    frozen = dropped_in(before, made)
    assert frozen.any()
    assert torch.equal(module.get_parameter("weight")[frozen], before[frozen])
    assert (module.get_parameter("weight") != before)[~frozen].any()


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


def test_a_closure_that_finds_the_weights_moved():
    module = layer()
    optimizer = MovesFirst(module.parameters(), lr=0.1)
    freeze_dropped(optimizer, module)
    before = module.get_parameter("weight").detach().clone()
    with recorded() as made:
        optimizer.step(lambda: trained(module))
    frozen = dropped_in(before, made)
    assert torch.equal(
        module.get_parameter("weight"), torch.where(frozen, before, (before + 1.0) - 1.25)
    )


def test_a_store_of_gradients():
    def run(module):
        store = recoup.GradStore(module.parameters())
        store.backward(module(X).pow(2).sum())
        stores[id(module)] = store

    stores = {}
    pair = Pair(layer())
    modules = {id(pair.optimizer): pair.module, id(pair.plain_optimizer): pair.plain}

    def step(optimizer):
        stores[id(modules[id(optimizer)])].step(optimizer)

    assert sum(pair.step(run, number, step=step) for number in range(3)) > 45
    assert pair.module.get_parameter("weight").grad is None


def test_a_scaler():
    module = layer()
    optimizer = adamw(module.parameters())
    freeze_dropped(optimizer, module)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = module.get_parameter("weight").detach().clone()
    with recorded() as made:
        scaler.scale(module(X).pow(2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(module.get_parameter("weight") == before, dropped_in(before, made))


def test_clipped_gradients():
    def run(module):
        trained(module)
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    assert Pair(layer()).step(run) > 15


def test_a_scheduler_and_hooks_of_others():
    module, called = layer(), []
    optimizer = adamw(module.parameters())
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    handle = freeze_dropped(optimizer, module)
    optimizer.register_step_post_hook(
        lambda *_: called.append(module.get_parameter("weight").detach().clone())
    )
    before = module.get_parameter("weight").detach().clone()
    with recorded() as made:
        trained(module)
    optimizer.step()
    scheduler.step()
    assert called[0] == "before"
    assert torch.equal(called[1] == before, dropped_in(before, made))
    handle.remove()


def test_two_optimizers_each_since_their_own_step():
    model = nn.Sequential(layer(), layer())
    optimizers = [adamw(part.parameters()) for part in model]
    for optimizer in optimizers:
        freeze_dropped(optimizer, model)
    before = [part.get_parameter("weight").detach().clone() for part in model]
    with recorded() as made:
        trained(model)
    optimizers[0].step()
    with recorded() as later:
        trained(model)
    optimizers[1].step()
    of = [entry.reparametrization for entry in recoup.weights.applied(model)]
    first = [each for each in made if each.step is of[0]]
    both = [each for each in (*made, *later) if each.step is of[1]]
    assert torch.equal(model[0].get_parameter("weight") == before[0], dropped_in(before[0], first))
    assert torch.equal(model[1].get_parameter("weight") == before[1], dropped_in(before[1], both))


def test_a_step_that_raises_leaves_the_next_one_right():
    module = layer()
    optimizer = adamw(module.parameters())
    freeze_dropped(optimizer, module)

    def broken():
        raise KeyError("broken")

    with pytest.raises(KeyError):
        optimizer.step(broken)
    before = module.get_parameter("weight").detach().clone()
    with recorded() as made:
        trained(module)
    optimizer.step()
    assert torch.equal(module.get_parameter("weight") == before, dropped_in(before, made))


# -- the handle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["remove", "twice", "block"])
def test_the_end_of_it(way):
    module = layer()
    optimizer = adamw(module.parameters())
    handle = freeze_dropped(optimizer, module)
    if way == "block":
        with handle:
            trained(module)
    else:
        trained(module)
        handle.remove()
        if way == "twice":
            handle.remove()
    before = module.get_parameter("weight").detach().clone()
    optimizer.step()
    assert (module.get_parameter("weight") != before).all()
    assert len(recoup.weights.applied(module)[0].reparametrization.records) == 0


@pytest.mark.parametrize("is_in_order", [False, True])
def test_two_handles_end_one_by_one(is_in_order):
    module = layer()
    optimizer = adamw(module.parameters())
    handles = [freeze_dropped(optimizer, module) for _ in range(2)]
    for handle, are_moved in zip(handles[:: 1 if is_in_order else -1], (False, True), strict=True):
        handle.remove()
        before = module.get_parameter("weight").detach().clone()
        optimizer.zero_grad()
        trained(module)
        optimizer.step()
        assert (module.get_parameter("weight") != before).all() == are_moved


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_was_removed_or_replaced_is_moved(is_replaced):
    module = layer()
    optimizer = adamw(module.parameters())
    freeze_dropped(optimizer, module)
    trained(module)
    optimizer.step()
    if is_replaced:
        module.weight = nn.Parameter(torch.randn(8, 8))
        optimizer.add_param_group({"params": [module.get_parameter("weight")]})
    else:
        recoup.weights.remove(module)
    before = module.get_parameter("weight").detach().clone()
    optimizer.zero_grad()
    trained(module)
    optimizer.step()
    assert (module.get_parameter("weight") != before).all()


# -- refusals --------------------------------------------------------------------------------------


def test_what_is_given_is_checked():
    module = layer()
    optimizer = adamw(module.parameters())
    with pytest.raises(ValueError, match=r"`optimizer` is a Linear, but must be a torch\.optim"):
        freeze_dropped(module, optimizer)
    with pytest.raises(ValueError, match="`optimizer` is a type"):
        freeze_dropped(torch.optim.AdamW, module)
    with pytest.raises(ValueError, match="`module` is AdamW"):
        freeze_dropped(optimizer, optimizer)
    for other in (nn.Linear(8, 8), layer(), recoup.weight_noise(nn.Linear(8, 8))):
        with pytest.raises(ValueError, match="there is nothing to leave alone"):
            freeze_dropped(optimizer, other)
