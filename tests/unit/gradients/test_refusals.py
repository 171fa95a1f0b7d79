"""What a store cannot use: an error that says what to give, before anything has changed."""

from __future__ import annotations

import math
import pickle  # noqa: F401

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup import GradStore
from recoup.errors import GradientError, NotInvertibleError
from tests.unit.gradients.cases import scaler_of

X = torch.ones(1, 3)


class World:
    """A model, stores of its gradients that are scaled in each way, and what does not belong."""

    def __init__(self):
        self.model, self.stranger = nn.Linear(3, 2), nn.Parameter(torch.ones(4))
        self.weight, self.bias = self.params = [*self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.named_parameters(), lr=1.0)
        self.scaler, self.other_scaler = scaler_of(8.0), scaler_of(2.0)
        self.store = self.collected()
        self.part = GradStore(self.params).add_(self.weight, torch.ones(2, 3))
        self.scaled = self.collected(scaler=self.scaler)
        self.unscaled = self.collected(scaler=self.scaler)
        self.unscaled.unscale_(self.scaler, self.optimizer)
        self.unknown = GradStore().add_(self.stranger, torch.ones(4))
        self.infinite = GradStore().add_(self.stranger, torch.full((4,), math.inf))
        self.inside = self.weight * 1
        self.stores = [each for each in vars(self).values() if isinstance(each, GradStore)]

    def loss(self):
        return self.model(X).sum()

    def reentrant(self):
        return checkpoint(self.model, X.clone().requires_grad_(), use_reentrant=True).sum()

    def collected(self, **settings):
        store = GradStore(self.params)
        store.backward(self.loss(), **settings)
        return store

    def frozen(self):
        self.bias.requires_grad_(requires_grad=False)
        return self.store

    def state(self, parts=None, **gradients):
        state = self.store.state_dict(self.model)
        return {**state, **(parts or {"gradients": {**state["gradients"], **gradients}})}

    def load(self, state):
        self.store.load_state_dict(state, self.model)

    def content(self):
        gradients = [g.detach().clone() for store in self.stores for g in store.values()]
        weights = [(store.weight, store._scale, len(store)) for store in self.stores]
        return weights, [*gradients, *(each.detach().clone() for each in self.params)]


def segments(w, fns=None, loss=torch.sum, x=X, **settings):
    return recoup.segments_backward([w.model] if fns is None else fns, x, loss, w.store, **settings)


def dense(*shape, **settings):
    return torch.ones(shape, **settings)


def listed(row):
    rows, values = torch.tensor([[row]]), torch.ones(1, 3)
    return torch.sparse_coo_tensor(rows, values, (2, 3), check_invariants=False)


LBFGS = torch.optim.LBFGS
TIED = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
TIED["b"].weight = TIED["a"].weight
OF_TIED = {"a.weight": dense(2, 3), "b.weight": dense(2, 3)}

# What is called, what the error names and says; tests/api/test_wrong_arguments.py has more values.
REFUSALS = r"""
# making a store
GradStore(w.model) -> `params` -> a Linear.*module\.parameters\(\)
GradStore(dtype=torch.int64) -> `dtype` -> floating-point
GradStore.from_grad(w.params) -> None of the 2 targets -> allow_empty
# backward
w.store.backward(w.loss().detach()) -> `outputs` -> does not require grad
w.store.backward(w.loss(), weight=0) -> `weight` -> is 0, but .* above zero
w.store.backward(w.model(X)) -> `grad_outputs` -> None for .*\(1, 2\)
w.store.backward(w.loss(), X) -> `grad_outputs` -> \(1, 3\) for .*shape \(\)
w.store.backward(w.loss(), mode="x") -> `mode` -> 'x', .*auto, grad, harvest
w.store.backward(w.loss(), inputs=w.weight) -> `inputs` -> in `params`, too
w.store.backward(w.loss(), params=[w.stranger]) -> None of the 1 -> copies
GradStore().backward(w.loss()) -> `params` -> missing
w.store.backward(w.reentrant(), create_graph=True) -> `create_graph` -> reentrant.*Leave one
w.scaled.backward(w.loss()) -> A backward -> autograd made .*scaled by 8
w.scaled.collecting().__enter__() -> A backward -> scaled by 8
w.unscaled.backward(w.loss(), scaler=w.scaler) -> A backward -> are unscaled
w.store.backward(w.inside.sum(), params=[w.inside], mode="harvest") -> `mode` -> not a leaf.*"grad"
# a mapping
w.store[X] -> no gradient of -> \(1, 3\)
w.store.add_(w.weight, dense(2, 3) * 1j) -> gradient of -> complex
w.store.add_(w.weight, dense(2, 3, device="meta")) -> gradient of -> on cpu
w.store.add_(w.weight, dense(2, 3).to_sparse_csr()) -> gradient of -> COO
w.store.add_(w.weight, dense(2, 3), alpha=math.inf) -> `alpha` -> is inf.*finite
w.store.split(w.params, w.optimizer) -> `groups` -> 2 of the 2
pickle.dumps(w.store) -> state_dict -> `store\.state_dict\(module\)`
# algebra
w.store.extend_(w.part, weight=2, alpha=2) -> `alpha` -> Leave one of them out
w.store.extend_(w.scaled) -> goes with -> scaled by 8.*autograd made
GradStore().extend_(w.store, w.unscaled) -> goes with -> unscaled
w.store.scale_(math.inf) -> `factor` -> is inf.*finite
w.infinite.clip_norm_(1.0, error_if_nonfinite=True) -> norm -> is inf
w.unknown.mean_() -> weight of 0 -> `scale_`
# a step
recoup.step(w.optimizer) -> `stores` -> is empty
w.store.step(LBFGS(w.params)) -> `optimizer` -> LBFGS.*closure
w.unknown.step(w.optimizer) -> `optimizer` -> shape \(4,\).*assign=True
w.part.step(w.optimizer, missing="error") -> no gradient of -> `bias`
w.frozen().step(w.optimizer) -> `bias` -> was frozen
w.scaled.step(w.optimizer) -> scaled by 8 -> autograd made
w.scaled.step(w.optimizer, scaler=w.other_scaler) -> scaled by 2 -> by 8
w.scaled.unscale_(w.other_scaler, w.optimizer) -> scaled by 2 -> by 8
w.unscaled.step(w.optimizer, scaler=w.other_scaler) -> `scaler` -> it again
recoup.step(w.optimizer, w.scaled, w.store, scaler=w.scaler) -> goes -> scaled
w.store.step(w.optimizer, missing="none") -> `missing` -> 'none'
w.unscaled.unscale_(w.scaler, w.optimizer) -> unscaled before -> once
w.scaled.unscale_(w.scaler, w.optimizer) -> has unscaled -> Merge stores first
w.store.as_grad([w.inside]).__enter__() -> not a leaf -> `differentiable`
# copies and files
w.store.named(nn.Linear(3, 2)) -> no parameter -> Linear.*`filter`
w.load(w.store.named(w.model)) -> no 'gradients' -> `add_`
w.load(w.state(a=X, b=X)) -> no parameter 'a', 'b' -> strict=False
w.load(w.state(weight=X)) -> `weight` -> \(1, 3\).*\(2, 3\)
w.load(w.state(weight=listed(7))) -> `weight` -> damaged: .*ind
w.load(w.state({"weight": math.nan})) -> 'weight' -> nan
w.load(w.state({"scale": 0.0})) -> 'scale' -> 0.0
GradStore().load_state_dict(w.state({"gradients": OF_TIED}), TIED) -> 'b.weight' -> another name
w.store.all_reduce_() -> no processes -> init_process_group
# segments
segments(w, []) -> `segments` -> is empty
segments(w, loss=lambda y: (y.sum(), y)) -> `loss_fn` -> a tuple.*has_aux=True
segments(w, loss=lambda y: y) -> `loss_fn` -> shape \(1, 2\).*Sum it
segments(w, [lambda x: 1 / 0], weight=-1.0) -> `weight` -> is -1.0
segments(w, memory="constant") -> Linear -> has no inverse
torch.inference_mode()(segments)(w) -> inference mode -> no_grad
"""
ROWS = [line.split(" -> ") for line in REFUSALS.splitlines() if " -> " in line]
ERRORS = (GradientError, ValueError, NotInvertibleError, TypeError, KeyError, AttributeError)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("call", "named", "words"), ROWS, ids=[row[0] for row in ROWS])
def test_what_cannot_be_used_is_named_and_changes_nothing(call, named, words):
    world = World()
    before, tensors = world.content()
    with pytest.raises(ERRORS, match=f"(?s)(?=.*{named}).*{words}"):
        eval(call, globals(), {"w": world})
    after, now = world.content()
    assert after == before
    assert all(map(torch.equal, now, tensors))
    assert not world.optimizer.state_dict()["state"]
    assert world.store.norm() > 0
