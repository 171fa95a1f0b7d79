"""What a store cannot use: an error that says what to give, before anything has changed."""

from __future__ import annotations

import io
import math
import pickle

import pytest
import torch
from torch import nn

import recoup
from recoup import GradStore
from recoup.errors import GradientError, NotInvertibleError

X = torch.ones(1, 3)
CPU_SCALERS = {scale: lambda s=scale: torch.amp.GradScaler("cpu", init_scale=s) for scale in (2, 8)}


class World:
    """A model, stores of its gradients that are scaled in each way, and what does not belong."""

    def __init__(self):
        self.model, self.stranger = nn.Linear(3, 2), nn.Parameter(torch.ones(4))
        self.weight, self.bias = self.params = [*self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.named_parameters(), lr=1.0)
        self.scaler, self.other_scaler = CPU_SCALERS[8](), CPU_SCALERS[2]()
        self.store = self.collected()
        self.part = GradStore(self.params).add_(self.weight, torch.ones(2, 3))
        self.scaled = self.collected(scaler=self.scaler)
        self.unscaled = self.collected(scaler=self.scaler)
        self.unscaled.unscale_(self.scaler, self.optimizer)
        self.unknown = GradStore().add_(self.stranger, torch.ones(4))
        self.complex = GradStore().add_(nn.Parameter(torch.ones(2) * 1j), torch.ones(2) * 1j)
        self.infinite = GradStore().add_(self.stranger, torch.full((4,), math.inf))
        self.weightless = GradStore().add_(self.stranger, torch.ones(4))
        self.graph = GradStore(self.params)
        self.graph.backward(self.loss().square(), create_graph=True)
        self.inside = self.weight * 1
        self.stores = [each for each in vars(self).values() if isinstance(each, GradStore)]

    def loss(self):
        return self.model(X).sum()

    def collected(self, **settings):
        store = GradStore(self.params)
        store.backward(self.loss(), **settings)
        return store

    def frozen(self):
        self.bias.requires_grad_(requires_grad=False)
        return self.store

    def state(self, key=None, **gradients):
        """A state of the store; with a part or some gradients replaced."""
        state = self.store.state_dict(self.model)
        if key is not None:
            return {**state, **key}
        return {**state, "gradients": {**state["gradients"], **gradients}}

    def load(self, state, **settings):
        self.store.load_state_dict(state, self.model, **settings)

    def content(self):
        gradients = [g.detach().clone() for store in self.stores for g in store.values()]
        weights = [(store.weight, store._scale, len(store)) for store in self.stores]
        return weights, [*gradients, *(each.detach().clone() for each in self.params)]


def never(x):
    raise AssertionError("a segment ran before the arguments were looked at")


def segments(w, fns=None, loss=torch.sum, x=X, **settings):
    return recoup.segments_backward([w.model] if fns is None else fns, x, loss, w.store, **settings)


def dense(*shape, **settings):
    return torch.ones(shape, **settings)


def listed(row):
    """A sparse gradient of the weight, of a row that it may not have."""
    rows, values = torch.tensor([[row]]), torch.ones(1, 3)
    return torch.sparse_coo_tensor(rows, values, (2, 3), check_invariants=False)


def in_inference_mode(w):
    with torch.inference_mode():
        segments(w)


LBFGS = torch.optim.LBFGS
TIED = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
TIED["b"].weight = TIED["a"].weight

# Of each kind: what is called, the argument, and what the error says of it.
REFUSALS = {
    "making a store": [
        (lambda w: GradStore(w.weight), "`params`", r"a tensor of shape .*\[tensor\]"),
        (lambda w: GradStore(w.model), "`params`", r"a Linear.*module\.parameters\(\)"),
        (lambda w: GradStore([1]), "`params`", "a int in it"),
        (lambda w: GradStore(3), "`params`", "a int, but must be tensors"),
        (lambda w: GradStore("ab"), "`params`", "a str, but must be tensors"),
        (lambda w: GradStore({"a": w.weight}), "`params`", "a str in it"),
        (lambda w: GradStore(dtype=torch.int64), "`dtype`", "floating-point"),
        (lambda w: GradStore(dtype=torch.complex64), "`dtype`", "floating-point"),
        (lambda w: GradStore(device="moon"), "`device`", "is 'moon'"),
        (lambda w: GradStore(ddp=w.model), "`ddp`", "must be the DistributedDataParallel"),
        (lambda w: GradStore.from_grad(w.params), "None of the 2 targets", "allow_empty"),
    ],
    "backward": [
        (lambda w: w.store.backward(3.0), "`outputs`", "is 3.0, but must be a tensor"),
        (lambda w: w.store.backward([3.0]), "`outputs`", "is 3.0, but must be a tensor"),
        (lambda w: w.store.backward(w.loss().detach()), "`outputs`", "does not require grad"),
        (lambda w: w.store.backward(w.loss(), weight=0), "`weight`", "is 0, but .* above zero"),
        (lambda w: w.store.backward(w.loss(), weight=math.inf), "`weight`", "is inf"),
        (lambda w: w.store.backward(w.loss(), weight="x"), "`weight`", "is 'x'"),
        (lambda w: w.store.backward(w.loss(), scaler=8), "`scaler`", "is 8, .*GradScaler"),
        (lambda w: w.store.backward(w.model(X)), "`grad_outputs`", r"None for .*\(1, 2\)"),
        (lambda w: w.store.backward([w.model(X)], []), "`grad_outputs`", "0 gradients for 1"),
        (lambda w: w.store.backward(w.loss(), X), "`grad_outputs`", r"\(1, 3\) for .*shape \(\)"),
        (lambda w: w.store.backward(w.loss(), 3), "`grad_outputs`", "has 3 for an output"),
        (lambda w: w.store.backward(w.loss(), mode="x"), "`mode`", "'x', .*auto, grad, harvest"),
        (lambda w: w.store.backward(w.loss(), inputs=X), "`inputs`", "does not require grad"),
        (lambda w: w.store.backward(w.loss(), inputs=w.weight), "`inputs`", "in `params`, too"),
        (lambda w: w.store.backward(w.loss(), params=[w.stranger]), "None of the 1", "copies"),
        (lambda w: w.store.backward(w.loss(), params=[]), "`params`", "nothing to collect"),
        (lambda w: GradStore().backward(w.loss()), "`params`", "missing"),
        (lambda w: w.scaled.backward(w.loss()), "A backward", "autograd made .*scaled by 8"),
        (lambda w: w.unscaled.backward(w.loss(), scaler=w.scaler), "A backward", "are unscaled"),
        (lambda w: w.scaled.collecting().__enter__(), "A backward", "scaled by 8"),
        (
            lambda w: w.store.backward(w.inside.sum(), params=[w.inside], mode="harvest"),
            "`mode`",
            'not a leaf.*Use mode="grad"',
        ),
        (lambda w: w.store.collecting([w.inside]).__enter__(), "`collecting`", "not a leaf"),
    ],
    "a mapping": [
        (lambda w: w.store[X], "no gradient of", r"\(1, 3\)"),
        (lambda w: w.store["x"], "no gradient of", "a str"),
        (lambda w: w.store.pop(X), "no gradient of", r"\(1, 3\)"),
        (lambda w: w.store.__delitem__(X), "no gradient of", r"\(1, 3\)"),
        (lambda w: GradStore().popitem(), "", "empty"),
        (lambda w: w.store.__setitem__(w.weight, dense(3)), "gradient of", r"shape \(3,\)"),
        (lambda w: w.store.__setitem__(w.weight, [1.0]), "`grad`", "a list"),
        (lambda w: w.store.__setitem__("w", dense(2, 3)), "`param`", "a str"),
        (lambda w: w.store.add_(3, X), "`param`", "a int"),
        (lambda w: w.store.add_(w.weight, 3), "`grad`", "a int"),
        (lambda w: w.store.add_(w.weight, X), "gradient of", r"shape \(1, 3\).*the same shape"),
        (lambda w: w.store.add_(w.weight, dense(2, 3) * 1j), "gradient of", "complex"),
        (lambda w: w.store.add_(w.weight, dense(2, 3).long()), "gradient of", "torch.int64"),
        (lambda w: w.store.add_(w.weight, dense(2, 3, device="meta")), "gradient of", "on cpu"),
        (lambda w: w.store.add_(w.weight, dense(2, 3).to_sparse_csr()), "gradient of", "COO"),
        (lambda w: w.store.add_(w.weight, dense(2, 3), alpha="x"), "`alpha`", "'x'"),
        (lambda w: w.store.split(w.params[:1]), "`groups`", "0 of the 1"),
        (lambda w: w.store.split(w.params, w.optimizer), "`groups`", "2 of the 2"),
        (lambda w: w.store.split(w.weight), "`groups`", r"\[tensor\]"),
        (lambda w: w.store.insert, "no `insert`", r"store\[param\] = gradient"),
        (lambda w: w.store.remove, "no `remove`", r"store\.pop\(param\)"),
        (lambda w: w.store.extend, "no `extend`", r"a\.extend_\(b\)"),
        (lambda w: w.store.anything, "no `anything`", r"\.$"),
        (lambda w: pickle.dumps(w.store), "state_dict", r"`store\.state_dict\(module\)`"),
        (lambda w: torch.save(w.store, io.BytesIO()), "state_dict", "load_state_dict"),
    ],
    "algebra": [
        (lambda w: w.store.extend_(3), "`others`", "3, but must be a GradStore"),
        (lambda w: w.store.extend_(w.store, None), "`others`", "None"),
        (lambda w: w.store.dot(3), "`other`", "3"),
        (lambda w: w.store.extend_(w.part, weight=-2), "`weight`", "is -2"),
        (lambda w: w.store.extend_(w.part, weight=2, alpha=2), "`alpha`", "Leave one of them out"),
        (lambda w: w.store.extend_(w.scaled), "goes with", "scaled by 8.*autograd made"),
        (lambda w: GradStore().extend_(w.store, w.unscaled), "goes with", "unscaled"),
        (lambda w: w.scaled + w.unscaled, "goes with", "unscaled.*scaled by 8"),
        (lambda w: w.store.scale_(dense(3)), "`factor`", "single real number"),
        (lambda w: w.store.scale_("2"), "`factor`", "'2'"),
        (lambda w: w.store.scale_(1j), "`factor`", "1j"),
        (lambda w: w.store * w.store, "", "unsupported operand"),
        (lambda w: w.store + 1, "", "unsupported operand"),
        (lambda w: 1 + w.store, "", "unsupported operand"),
        (lambda w: w.store - {}, "", "unsupported operand"),
        (lambda w: w.store / 0, "", "division"),
        (lambda w: w.store.norm(math.nan), "`norm_type`", "is nan"),
        (lambda w: w.store.clip_norm_(1.0, 0), "`norm_type`", "is 0"),
        (lambda w: w.store.clip_norm_(-1.0), "`max_norm`", "is -1.0"),
        (lambda w: w.store.clip_norm_(torch.tensor(-1.0)), "`max_norm`", "at least 0"),
        (lambda w: w.store.clip_norm_("1"), "`max_norm`", "'1'"),
        (lambda w: w.store.clip_value_(math.nan), "`clip_value`", "is nan"),
        (lambda w: w.complex.clip_value_(0.1), "complex", "`clip_norm_`"),
        (lambda w: w.infinite.clip_norm_(1.0, error_if_nonfinite=True), "norm", "is inf"),
        (lambda w: w.weightless.mean_(), "weight of 0", "`scale_`"),
    ],
    "a step": [
        (lambda w: w.store.step(w.params), "`optimizer`", "is a list"),
        (lambda w: recoup.step(w.optimizer), "`stores`", "is empty"),
        (lambda w: recoup.step(w.store, w.optimizer), "`stores`", "must be a GradStore"),
        (lambda w: w.store.step(LBFGS(w.params)), "`optimizer`", "LBFGS.*closure"),
        (lambda w: recoup.step(LBFGS(w.params), w.store, w.part), "`optimizer`", "closure"),
        (lambda w: w.store.step(w.optimizer, missing="none"), "`missing`", "'none'"),
        (lambda w: w.store.step(w.optimizer, unknown="skip"), "`unknown`", "'skip'"),
        (lambda w: w.store.step(w.optimizer, scaler=1), "`scaler`", "GradScaler"),
        (lambda w: w.unknown.step(w.optimizer), "`optimizer`", r"shape \(4,\).*assign=True"),
        (lambda w: w.part.step(w.optimizer, missing="error"), "no gradient of", "`bias`"),
        (lambda w: w.frozen().step(w.optimizer), "`bias`", "was frozen"),
        (lambda w: w.scaled.step(w.optimizer), "scaled by 8", "autograd made"),
        (lambda w: recoup.step(w.optimizer, w.scaled, w.scaled), "scaled by 8", "autograd made"),
        (lambda w: w.scaled.step(w.optimizer, scaler=w.other_scaler), "scaled by 2", "by 8"),
        (lambda w: recoup.step(w.optimizer, w.scaled, w.store, scaler=w.scaler), "goes", "scaled"),
        (lambda w: w.unscaled.step(w.optimizer, scaler=w.other_scaler), "`scaler`", "it again"),
        (lambda w: w.unscaled.unscale_(w.scaler, w.optimizer), "unscaled before", "once"),
        (lambda w: w.scaled.unscale_(w.scaler, w.optimizer), "has unscaled", "Merge stores first"),
        (lambda w: w.scaled.unscale_(w.other_scaler, w.optimizer), "scaled by 2", "by 8"),
        (lambda w: w.scaled.unscale_(w.scaler), "`optimizers`", "0 of the 0"),
        (lambda w: w.scaled.unscale_(None), "`scaler`", "is None"),
        (lambda w: w.scaled.unscale_(w.scaler, w.optimizer, LBFGS(w.params)), "LBFGS", "closure"),
        (
            lambda w: w.scaled.unscale_(w.scaler, *(torch.optim.SGD(w.params) for _ in "ab")),
            "`optimizers`",
            "2 of the 2",
        ),
        (lambda w: w.store.as_grad([w.inside]).__enter__(), "not a leaf", "`differentiable`"),
        (lambda w: w.store.as_grad(w.model).__enter__(), "`params`", r"module\.parameters"),
        (
            lambda w: w.store.step(torch.optim.SGD([w.inside], differentiable=True)),
            "not a leaf",
            "`differentiable`",
        ),
    ],
    "copies and files": [
        (lambda w: w.store.to("meta", pin_memory=True), "`pin_memory`", 'device="cpu"'),
        (lambda w: w.store.to(dtype=torch.int8), "`dtype`", "floating-point"),
        (lambda w: w.store.named(nn.Linear(3, 2)), "no parameter", "Linear.*`filter`"),
        (lambda w: w.store.named(3), "`module`", "3"),
        (lambda w: w.load(w.store.named(w.model)), "no 'gradients'", "`add_`"),
        (lambda w: w.load(w.model), "`state_dict`", r"load_state_dict\(state_dict, module\)"),
        (lambda w: w.store.load_state_dict(w.state(), None), "`module`", "state_dict, module"),
        (lambda w: w.load(w.state(a=X, b=X)), "no parameter 'a', 'b'", "strict=False"),
        (lambda w: w.load(w.state(weight=X)), "`weight`", r"\(1, 3\).*\(2, 3\)"),
        (lambda w: w.load(w.state(weight=dense(2, 3) * 1j)), "gradient of", "complex"),
        (lambda w: w.load(w.state(weight=dense(2, 3).int())), "gradient of", "torch.int32"),
        (lambda w: w.load(w.state(weight=[1.0])), "`weight`", "None"),
        (lambda w: w.load(w.state(weight=listed(7))), "`weight`", "damaged: .*ind"),
        (lambda w: w.load(w.state(weight=listed(-1))), "`weight`", "damaged"),
        (lambda w: w.load(w.state({"gradients": [X]})), "'gradients'", "tensors by name"),
        (lambda w: w.load(w.state({"weight": math.nan})), "'weight'", "nan"),
        (lambda w: w.load(w.state({"weight": -1.0})), "'weight'", "-1.0"),
        (lambda w: w.load(w.state({"weight": "1"})), "'weight'", "'1'"),
        (lambda w: w.load(w.state({"scale": "x"})), "'scale'", "'x'"),
        (lambda w: w.load(w.state({"scale": 0.0})), "'scale'", "0.0"),
        (
            lambda w: GradStore().load_state_dict(
                {**w.state(), "gradients": {"a.weight": dense(2, 3), "b.weight": dense(2, 3)}}, TIED
            ),
            "`b.weight`",
            "another name",
        ),
        (lambda w: w.store.all_reduce_(op="max"), "`op`", "'max'"),
        (lambda w: GradStore().all_reduce_(), "`params`", "order"),
        (lambda w: w.store.all_reduce_(), "no processes", "init_process_group"),
    ],
    "segments": [
        (lambda w: segments(w, []), "`segments`", "is empty"),
        (lambda w: segments(w, [w.model, 3]), r"`segments\[1\]`", "is 3"),
        (lambda w: recoup.segments_backward(3, X, torch.sum, w.store), "`segments`", "give .segm"),
        (
            lambda w: recoup.segments_backward([never], X, torch.sum, w.model),
            "`store`",
            "GradStore",
        ),
        (lambda w: segments(w, [never], 3), "`loss_fn`", "is 3"),
        (lambda w: segments(w, loss=lambda y: 3.0), "`loss_fn`", "returned a float"),
        (lambda w: segments(w, loss=lambda y: (y.sum(), y)), "`loss_fn`", "a tuple.*has_aux=True"),
        (lambda w: segments(w, loss=lambda y: y), "`loss_fn`", r"shape \(1, 2\).*Sum it"),
        (lambda w: segments(w, loss=lambda y: y.sum() * 1j), "`loss_fn`", "real tensor"),
        (lambda w: segments(w, has_aux=True), "`has_aux`", "`loss_fn` returned a tensor"),
        (lambda w: segments(w, [never], mode="x"), "`mode`", "is 'x'"),
        (lambda w: segments(w, [never], weight=-1.0), "`weight`", "is -1.0"),
        (lambda w: segments(w, [never], params=[3]), "`params`", "a int"),
        (lambda w: segments(w, memory="most"), "`memory`", "is 'most'"),
        (lambda w: segments(w, memory="constant"), "Linear", "has no inverse"),
        (lambda w: segments(w, params=[w.stranger]), "None of the 1 targets", "copies"),
        (lambda w: segments(w, loss=lambda y: y.detach().sum()), "`outputs`", "require grad"),
        (in_inference_mode, "inference mode", "no_grad"),
    ],
}
ROWS = [
    pytest.param(call, argument, words, id=f"{kind} {number}")
    for kind, rows in REFUSALS.items()
    for number, (call, argument, words) in enumerate(rows)
]
ERRORS = (GradientError, ValueError, NotInvertibleError, TypeError, KeyError, AttributeError)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("call", "argument", "words"), ROWS)
def test_what_cannot_be_used_is_named_and_changes_nothing(call, argument, words):
    world = World()
    before, tensors = world.content()
    with pytest.raises((*ERRORS, ZeroDivisionError), match=f"(?s)(?=.*{argument}).*{words}"):
        call(world)
    after, now = world.content()
    assert after == before
    assert all(map(torch.equal, now, tensors))
    assert not world.optimizer.state_dict()["state"]
    assert world.store.norm() > 0, "it can be used as before"
