"""Modules that are recomputed: the same numbers, names and types, and fewer bytes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from tests.alive import held_after
from tests.oracle import tensors

WIDTH, HIDDEN, BATCH = 16, 64, 32
HIDDEN_BYTES = BATCH * HIDDEN * 4
CHOSEN = (nn.GELU, nn.Dropout, nn.LayerNorm)


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(), nn.Linear(HIDDEN, WIDTH)
    )


def normed():
    return nn.Sequential(nn.LayerNorm(WIDTH), *perceptron(), nn.LayerNorm(WIDTH))


def batch():
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(5))


def left_by(model, x=None, call=None):
    """All that a step of `model` leaves behind."""
    x = batch() if x is None else x
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    model.zero_grad()
    torch.manual_seed(1)
    output = model(x) if call is None else call(model, x)
    output = output.logits if hasattr(output, "logits") else tensors(output)[0]
    output.float().square().sum().backward()
    left = {"output": output.detach().as_subclass(torch.Tensor), "stream": torch.get_rng_state()}
    left |= {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
    left |= {name: each.clone() for name, each in model.named_buffers()}
    return left if x.grad is None else {**left, "gradient of x": x.grad}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (value is None and got[name] is None) or torch.equal(got[name], value), name


def recomputed(model, *types):
    return recoup.recompute_(copy.deepcopy(model), *types)


def held(model, x=None):
    """The bytes that a forward leaves, beside its output."""
    x = batch() if x is None else x
    of_outputs = sum(each.nbytes for each in tensors(model(x)))
    return held_after(lambda: model(x)).num_bytes - of_outputs


# -- bytes -----------------------------------------------------------------------------------------


def test_outputs_are_not_held():
    model = perceptron()
    # The output of the first layer, the mask of the dropout, and what the last layer is given.
    assert held(model) >= 3 * HIDDEN_BYTES
    assert held(recomputed(model, nn.GELU, nn.Dropout)) == HIDDEN_BYTES
    layers = (nn.Linear(WIDTH, HIDDEN), recoup.Recompute(F.gelu), recoup.Recompute(nn.Dropout()))
    assert held(nn.Sequential(*layers, nn.Linear(HIDDEN, WIDTH))) == HIDDEN_BYTES


def test_residuals_name_the_modules():
    census = recoup.residuals(lambda: recomputed(perceptron(), nn.GELU, nn.Dropout)(batch()))
    assert "recompute" in str(census)


# -- the same numbers ------------------------------------------------------------------------------

AROUND = {
    "plain": None,
    "checkpoint of torch": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "checkpoint": lambda model, x: recoup.checkpoint(model, x),
    "recompute": lambda model, x: recoup.recompute(model)(x).sin(),
    "autocast": lambda model, x: torch.autocast("cpu", torch.bfloat16)(model)(x),
    **{
        f"Sequential {memory}": lambda model, x, memory=memory: recoup.Sequential(
            *model, memory=memory
        )(x)
        for memory in ("linear", "inputs", "sqrt", "log", 2)
    },
}


@pytest.mark.parametrize("around", AROUND)
def test_a_step_is_the_plain_one(around):
    model = normed()
    other = recomputed(model, *CHOSEN)
    for _ in range(2):
        got = left_by(other, call=AROUND[around])
        assert_same(got, left_by(model, call=AROUND[around]))


def in_place(*layers):
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), *layers, nn.Linear(HIDDEN, WIDTH))


MODELS = {
    "batch norm": (lambda: in_place(nn.BatchNorm1d(HIDDEN), nn.ReLU()), (nn.BatchNorm1d, nn.ReLU)),
    "in place": (lambda: in_place(nn.ReLU(inplace=True)), (nn.ReLU,)),
    "before one in place": (
        lambda: in_place(nn.BatchNorm1d(HIDDEN), nn.ReLU(inplace=True)),
        (nn.BatchNorm1d,),
    ),
    "nothing to do": (
        lambda: in_place(nn.Identity(), nn.Flatten(), nn.Dropout(0.0)),
        (nn.Identity, nn.Flatten, nn.Dropout),
    ),
    "within one another": (lambda: normed(), (nn.Sequential, nn.Dropout)),
    "all": (lambda: normed(), (nn.Module,)),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(WIDTH, WIDTH)), (nn.LSTM,)),
    # Its attention is given one tensor three times.
    "attention": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, HIDDEN), (nn.MultiheadAttention,)),
    "a buffer that forward changes": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        (nn.Linear,),
    ),
    "evaluation": (lambda: normed().eval(), CHOSEN),
    "used twice": (lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH), nn.GELU()] * 2), (nn.GELU,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_of_many_kinds(name):
    make, types = MODELS[name]
    torch.manual_seed(0)
    model = make()
    other = recomputed(model, *types)
    for _ in range(2):
        assert_same(left_by(other), left_by(model))


def test_models_of_transformers():
    """Their activations are modules of their own."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=31, intermediate_size=32, **sizes)
    model, ids = transformers.BertForMaskedLM(config).train(), torch.randint(31, (4, 16))
    kinds = {type(part) for part in model.modules() if "GELU" in type(part).__name__}
    other = recomputed(model, nn.Dropout, nn.LayerNorm, *kinds)
    assert_same(left_by(other, ids), left_by(model, ids))
    held_bytes = [held_after(lambda each=each: each(ids)).num_bytes for each in (other, model)]
    assert held_bytes[0] < held_bytes[1]


def test_a_plan_for_it():
    torch.manual_seed(0)
    model = nn.Sequential(*(normed() for _ in range(4)))
    other, x = recomputed(model, *CHOSEN), batch()
    budget = f"{recoup.plan(other, x, budget='1 GiB').least_bytes} B"
    recoup.plan(other, x, budget=budget).apply()
    assert_same(left_by(other), left_by(model))
    with pytest.raises(ValueError, match=r"Sequential whose `forward` was replaced"):
        recoup.recompute_(other, nn.Sequential)


# -- with reparametrized weights -------------------------------------------------------------------


def noise(model):
    return recoup.weight_noise(model, r".*weight", std=0.1)


def again(model):
    return recoup.recompute_(model, nn.LayerNorm, nn.Linear)


def dropout(model):
    return recoup.weight_dropout(recoup.weight_noise(model, "0.bias", std=0.1), r"1\.weight", p=0.3)


ORDERS = {
    "before": (again, noise, dropout),
    "between": (noise, again, dropout),
    "after": (noise, dropout, again),
}


@pytest.mark.parametrize("order", ORDERS)
def test_with_noise_on_its_weights(order):
    model, other = normed(), normed()
    for apply in ORDERS[order]:
        apply(other)
        if apply is not again:
            apply(model)
    want = left_by(model)
    for each in (other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert_same(left_by(each), want)
        assert list(map(repr, recoup.weights.applied(each))) == list(
            map(repr, recoup.weights.applied(model))
        )
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)  # one graph: one forward
    assert_same(left_by(compiled._orig_mod, call=lambda _, x: compiled(x)), left_by(model))
    for each in (model, other):
        recoup.weights.remove(each)
    assert_same(left_by(other), left_by(model))
    assert held(other) < held(model)
    plain = again(normed())
    assert [type(part) for part in other.modules()] == [type(part) for part in plain.modules()]


# -- what it leaves as it was ----------------------------------------------------------------------


def test_names_and_types_stay():
    model = normed()
    other = recomputed(model, *CHOSEN)
    other.load_state_dict(model.state_dict(), strict=True)
    for part, plain in zip(other.modules(), model.modules(), strict=True):
        assert isinstance(part, type(plain))
        assert type(part).__name__ == type(plain).__name__
        assert type(part).__module__ == type(plain).__module__
        assert (type(part) is not type(plain)) == isinstance(plain, CHOSEN)
    assert repr(recoup.recompute_(nn.GELU(), nn.GELU)) == "GELU(approximate='none', recomputed)"
    kinds = [type(part) for part in other.modules()]
    assert recoup.recompute_(other, nn.GELU) is other  # a second call changes nothing
    assert [type(part) for part in other.modules()] == kinds


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how):
    model = recomputed(normed(), *CHOSEN)
    other = COPIES[how](model)
    assert [type(part) for part in other.modules()] == [type(part) for part in model.modules()]
    assert_same(left_by(other), left_by(model))
    layers = (nn.Linear(WIDTH, WIDTH), recoup.Recompute(F.gelu), recoup.Recompute(nn.LayerNorm(16)))
    module = nn.Sequential(*layers)
    assert_same(left_by(COPIES[how](module)), left_by(module))
    assert held(COPIES[how](module)) == held(module)


def test_hooks_are_called_as_before():
    seen, model = [], perceptron()
    model[1].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    left_by(recoup.recompute_(model, nn.GELU))
    assert seen == ["forward", "backward"]


def test_derived_types():
    class Wider(nn.Dropout):
        pass

    model = recoup.recompute_(nn.Sequential(Wider(0.5)), nn.Dropout)
    assert isinstance(model[0], Wider)
    assert_same(left_by(model), left_by(nn.Sequential(nn.Dropout(0.5))))


def test_a_twin_of_it():
    model = recoup.weight_dropout(recomputed(normed(), *CHOSEN), r".*weight")
    twin = recoup.weights.twin(model)
    left_by(model)
    assert type(twin[2]) is type(model[2])
    x = batch()
    assert torch.equal(twin(x), model.eval()(x))


def test_a_graph_is_the_plain_one():
    model, x = recomputed(normed(), *CHOSEN).eval(), batch()
    targets = [
        [node.target for node in torch.export.export(each, (x,)).graph.nodes]
        for each in (model, normed().eval())
    ]
    assert targets[0] == targets[1]
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), recoup.Recompute(nn.GELU()))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))


# -- Recompute -------------------------------------------------------------------------------------


def test_the_module_form():
    module = recoup.Recompute(nn.LayerNorm(WIDTH))
    assert list(module.state_dict()) == ["fn.weight", "fn.bias"]
    assert not module.eval().fn.training
    assert repr(recoup.Recompute(F.gelu)) == "Recompute(gelu)"
    assert "(fn): LayerNorm" in repr(module)
    pair = recoup.Recompute(lambda x, *, scale: (x.sin() * scale, {"x": x.cos()}))
    x = batch().requires_grad_()
    first, others = pair(x, scale=2.0)
    (first * others["x"]).sum().backward()
    assert torch.allclose(x.grad, 2 * (2 * x).cos(), atol=1e-5)


# -- errors ----------------------------------------------------------------------------------------


def replaced():
    model = perceptron()
    model[1].forward = torch.tanh
    return model


REFUSED = [
    (perceptron, (), "`types` is empty"),
    (perceptron, (nn.Conv2d,), r"Conv2d, but Sequential has no module of that type. There are: Dr"),
    (perceptron, (F.gelu,), r"gelu.*, but must be types of modules"),
    (perceptron, (nn.GELU(),), r"GELU\(.*, but must be types of modules"),
    (lambda: nn.GELU, (nn.GELU,), r"`model` is .*must be an nn.Module"),
    (lambda: nn.Sequential(torch.jit.trace(nn.GELU(), batch())), (torch.jit.ScriptModule,),
     "TracedModule whose `forward` was replaced"),
    (replaced, (nn.Dropout, nn.GELU), r"GELU whose `forward` was replaced"),
    (lambda: nn.ModuleList([nn.GELU()]), (nn.GELU, nn.ModuleList), r"ModuleList, which has no for"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(("make", "types", "message"), REFUSED)
def test_what_is_refused(make, types, message):
    model = make()
    kinds = [type(part) for part in model.modules()] if isinstance(model, nn.Module) else []
    with pytest.raises(ValueError, match=message):
        recoup.recompute_(model, *types)
    if kinds:  # nothing was changed
        assert [type(part) for part in model.modules()] == kinds


@pytest.mark.parametrize("fn", [nn.GELU, 3])
def test_what_cannot_be_called(fn):
    with pytest.raises(ValueError, match=r"`fn` is .*must be a function or a module"):
        recoup.Recompute(fn)
