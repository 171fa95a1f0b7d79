"""A wrong argument of a public function is an error that names it, whatever is wrong about it.

Each argument of each call below is replaced by values of other types, out of range, empty and huge.
The call then succeeds, or raises an error of ours that has the argument in backticks; an error of
torch or Python from somewhere within is a failure.
"""

from __future__ import annotations

import inspect
import math
import operator
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup import flows, invertible, memory, schedules, weights
from recoup.integrations.lightning import MemoryBudget as LightningBudget
from recoup.integrations.transformers import MemoryBudget as TransformersBudget
from recoup.memory import Curve, Point

VALUES: dict[str, Any] = {
    "None": None, "a flag": True, "a word": "some", "no word": "", "0": 0, "-1": -1, "3": 3,
    "1.5": 1.5, "nan": math.nan, "inf": math.inf, "huge": 10**30, "an empty list": [],
    "a list of words": ["some"], "a dict": {}, "a tensor": torch.tensor([math.nan]),
    "an object": object(), "a class": nn.Linear,
}  # fmt: skip


def linear(bias: bool = True) -> nn.Module:
    return nn.Linear(4, 4, bias=bias)


def model() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def noisy() -> nn.Module:
    return recoup.weight_noise(recoup.weight_dropout(model(), p=0.5), std=0.1)


def x() -> torch.Tensor:
    return torch.randn(3, 4)


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters(), 0.1)


def collected() -> recoup.GradStore:
    store = recoup.GradStore(MODEL.parameters())
    store.backward(MODEL(x()).sum())
    return store


def flow() -> flows.Flow:
    return flows.NICE((4,), levels=None, num_couplings=2, width=4, depth=1)


def then(call: Callable[..., Any], use: Callable[[Any], Any]) -> Callable[..., Any]:
    def called(*args: Any, **given: Any) -> Any:
        return use(call(*args, **given))

    called.__signature__ = inspect.signature(call)  # pyright: ignore[reportFunctionMemberAccess]
    return called


def enter(context: Any) -> None:
    with context:
        pass


def backward_within(context: Any) -> None:
    with context:
        MODEL(x()).sum().backward()


def after_backward() -> Iterable[torch.Tensor]:
    made = model()
    made(x()).sum().backward()
    return made.parameters()


def halves(*, exact: bool = False) -> invertible.Chain:
    return invertible.Chain(invertible.AdditiveCoupling(nn.Linear(2, 2), exact=exact))


def of_store(name: str) -> Callable[..., Any]:
    """A method of a store, which is another one in each call."""

    def called(*args: Any, **given: Any) -> Any:
        return getattr(collected(), name)(*args, **given)

    signature = inspect.signature(getattr(recoup.GradStore, name))
    of_method = [each for each in signature.parameters.values() if each.name != "self"]
    called.__signature__ = signature.replace(parameters=of_method)  # pyright: ignore[reportFunctionMemberAccess]
    return called


def images() -> torch.Tensor:
    return torch.rand(2, 4, 4, 4)


# A layer, and what makes values on which it can be called, and inverted.
LAYERS: list[tuple[invertible.InvertibleModule, Callable[[], torch.Tensor]]] = [
    (invertible.ActNorm(4), images),
    (invertible.AdditiveCoupling(nn.Conv2d(2, 2, 1)), images),
    (invertible.AffineCoupling(nn.Conv2d(2, 4, 1)), images),
    (invertible.MixtureCoupling(nn.Linear(2, 52)), x),
    (invertible.Chain(invertible.ActNorm(4)), images),
    (invertible.InvertibleConv1x1(4), images),
    (invertible.InvertibleConv1x1LU(4), images),
    (invertible.Normalize(0.5, 0.5), images),
    (invertible.Permute([1, 0, 2, 3]), images),
    (invertible.Squeeze(), images),
]
MODEL, FLOW = model(), flow()
NOWHERE = Path(tempfile.mkdtemp())
CURVE = Curve("some:build", "cpu", (Point(1, "sqrt", 5, 5),))
TIMELINE = recoup.timeline(MODEL, x())
LINE = TIMELINE.lines[0]
FRONTIER = recoup.plan(MODEL, x())
COST = schedules.Cost(1.0, 4, 8)
DRAW = weights.Draw(x(), 5)
Given = Callable[[], dict[str, Any]]
HOMES = [recoup, invertible, schedules, memory]


def named(name: str) -> Callable[..., Any]:
    (home, *_) = (home for home in HOMES if hasattr(home, name.partition(".")[0]))
    return operator.attrgetter(name)(home)


SMALL_FLOW = {"shape": (1, 4, 4), "levels": 17, "num_levels": 1, "num_steps": 1, "width": 4}


def alike(names: str, given: Given, prefix: str = "") -> dict[str, Given]:
    return dict.fromkeys([prefix + name for name in names.split()], given)


# Arguments with which each public function succeeds.
PLAIN: dict[str, Given] = {
    "checkpoint": lambda: {"fn": torch.sin, "args": x()},
    "recompute": lambda: {"fn_or_module": torch.sin, "compare": True},
    "Recompute": lambda: {"fn": torch.sin},
    "recompute_": lambda: {"model": model(), "types": nn.Tanh},
    "Sequential": lambda: {"modules": linear()},
    "measure": lambda: {"fn": lambda: MODEL(x())},
    "residuals": lambda: {"fn": lambda: MODEL(x())},
    "timeline": lambda: {"model": model(), "example_args": x()},
    "format_bytes": lambda: {"num_bytes": 5},
    "parse_bytes": lambda: {"value": "5 MiB"},
    "load_builder": lambda: {"name": "os.path:join"},
    "plan": lambda: {"model": model(), "example_args": x(), "budget": "1 MiB"},
    "largest": lambda: {
        "build_batch": lambda n: torch.randn(n, 4), "model": model(), "budget": "4 KiB", "most": 1},
    "applied_plans": lambda: {"model": model()},
    "estimate": lambda: {"build": lambda: (model(), x()), "budget": "1 MiB"},
    "curve": lambda: {
        "build": "tests.zoo:linear_of", "depths": [1], "memories": [1], "repeats": 0},
    "GradStore": lambda: {"params": MODEL.parameters()},
    "GradStore.from_backward": lambda: {
        "outputs": MODEL(x()).sum(), "params": MODEL.parameters()},
    "GradStore.from_grad": lambda: {"params": after_backward()},
    "step": lambda: {"optimizer": optimizer(MODEL), "stores": collected()},
    "segments_backward": lambda: {
        "segments": [MODEL], "input": x(), "loss_fn": torch.sum, "store": collected()},
    **alike("weight_dropout weight_noise weight_norm", lambda: {"module": model()}),
    **alike("applied remove twin", lambda: {"module": noisy()}, "weights."),
    "weights.apply": lambda: {"module": model(), "fn": lambda w, draw: w},
    "weights.freeze_dropped": lambda: {
        "optimizer": optimizer(dropped := noisy()), "module": dropped},
    "weights.kl_divergence": lambda: {"module": noisy(), "prior_std": 1.0},
    "weights.set_step": lambda: {"module": noisy(), "step": 1},
    "weights.to_plain_names": lambda: {"state_dict": model().state_dict()},
    "weights.update": lambda: {"module": noisy(), "p": 0.1},
    "flows.NICE": lambda: {"shape": (4,), "levels": None, "width": 4},
    **alike("RealNVP Glow FlowPlusPlus IResNet", lambda: {**SMALL_FLOW}, "flows."),
    "flows.Flow": lambda: {"chain": halves(), "shape": (4,)},
    "flows.ConvNetwork": lambda: {"in_channels": 2, "out_channels": 2, "width": 4},
    "flows.DenseNetwork": lambda: {"in_features": 2, "out_features": 2, "width": 4},
    "flows.Logistic": lambda: {"loc": 0.0, "scale": 1.0},
    "flows.fit": lambda: {
        "flow": flow(), "images": torch.randn(20, 4), "epochs": 1, "progress": False},
    "AdditiveCoupling": lambda: {"network": nn.Linear(2, 2), "exact": True},
    "AffineCoupling": lambda: {"network": nn.Linear(2, 4)},
    "MixtureCoupling": lambda: {"network": nn.Linear(2, 52)},
    "Chain": lambda: {"modules": invertible.Flip()},
    "Dequantize": lambda: {"levels": 17},
    "VariationalDequantize": lambda: {"levels": 17, "chain": halves()},
    "Flatten": lambda: {"shape": (4,)},
    **alike("ActNorm InvertibleConv1x1 InvertibleConv1x1LU", lambda: {"num_channels": 4}),
    **alike("DriftGuard Flip LipSwish Logit Split Squeeze", dict),
    "DriftGuard.of": lambda: {"drift": "raise"},
    "InvertibleResidual": lambda: {"network": invertible.LipschitzLinear(4, 4)},
    "LipschitzConv2d": lambda: {"in_channels": 2, "out_channels": 2, "kernel_size": 3},
    "LipschitzLinear": lambda: {"in_features": 2, "out_features": 2},
    "Normalize": lambda: {"mean": 0.5, "std": 0.5},
    "Permute": lambda: {"permutation": [1, 0]},
    "check_invertible": lambda: {"module": invertible.Flip(), "x": torch.randn(2, 4)},
    **alike("linear sqrt log offloaded", lambda: {"n": 4}, "schedules."),
    **alike("binomial revolve num_advances num_sweeps", lambda: {"n": 4, "slots": 2}, "schedules."),
    "schedules.beta": lambda: {"slots": 2, "sweeps": 2},
    "schedules.constant": lambda: {"ways": 4},
    "schedules.frontier": lambda: {"costs": [COST] * 3},
    "schedules.optimal": lambda: {"costs": [COST] * 3, "budget": 100},
    "schedules.simulate": lambda: {"schedule": schedules.sqrt(4)},
    "schedules.trace": lambda: {"schedule": schedules.sqrt(3), "costs": [COST] * 3},
    "Cost": lambda: {"seconds": 1.0, "state_bytes": 4, "tape_bytes": 8},
    "Results": lambda: {"num_bytes": 4, "seconds": 1.0},
    "SelectiveTape": lambda: {"tape_bytes": 4, "seconds": 1.0},
    "Schedule": lambda: {"num_stages": 2, "actions": schedules.sqrt(2).actions},
}  # fmt: skip
# Those of a context succeed where it is entered, those of a method on an object.
WITHIN = alike("recomputing offloading weights.same_draw", dict)
WITHIN |= alike("disabled enabled step", lambda: {"module": noisy()}, "weights.")
OF_STORES: dict[str, Given] = {
    "add_": lambda: {"param": MODEL[0].weight, "grad": torch.ones(4, 4)},
    "backward": lambda: {"outputs": MODEL(x()).sum()},
    "clip_norm_": lambda: {"max_norm": 1.0},
    **alike("cosine dot", lambda: {"other": collected()}),
    "extend_": lambda: {"others": collected()},
    "filter": lambda: {"params": [MODEL[0].weight]},
    "load_state_dict": lambda: {"state_dict": collected().state_dict(MODEL), "module": MODEL},
    **alike("named state_dict", lambda: {"module": MODEL}),
    "norm": dict,
    "scale_": lambda: {"factor": 0.5},
    "split": lambda: {"groups": optimizer(MODEL)},
    "step": lambda: {"optimizer": optimizer(MODEL)},
    "to": lambda: {"device": "cpu"},
}
OF_FLOWS = {
    **alike("log_prob reconstruct forward bits_per_dim parts", lambda: {"x": x()}),
    "sample": lambda: {"n": 2},
    "interpolate": lambda: {"x0": x(), "x1": x(), "steps": 3},
    "inverse": lambda: {"latents": FLOW(x())[0]},
}
METHODS: dict[tuple[Any, str], Given] = {
    **{(FLOW, name): make for name, make in OF_FLOWS.items()},
    (CURVE, "of"): lambda: {"memory": "sqrt"},
    (CURVE, "figure"): lambda: {"path": NOWHERE / "some.svg"},
    (TIMELINE, "page"): lambda: {"path": NOWHERE / "some.html"},
    **{(LINE, name): lambda: {"phase": "backward"} for name in ("peak", "levels", "starts")},
    (FRONTIER, "plan"): lambda: {"budget": "1 MiB"},
    **{(DRAW, name): lambda: {"shape": (2,)} for name in ("normal", "uniform")},
    (DRAW, "bernoulli"): lambda: {"p": 0.5, "shape": (2,)},
    (COST, "tape"): lambda: {"variant": 0},
}
CALLS: dict[str, tuple[Callable[..., Any], Given]] = {
    **{name: (named(name), make) for name, make in PLAIN.items()},
    **{name: (then(named(name), enter), make) for name, make in WITHIN.items()},
    **{f"GradStore.{name}": (of_store(name), make) for name, make in OF_STORES.items()},
    **{f"{type(each).__name__}.{name}": (getattr(each, name), make)
       for (each, name), make in METHODS.items()},
    **{f"{type(layer).__name__}.{way}": (getattr(layer, way), lambda y=y, at=at: {at: y()})
       for layer, y in LAYERS for way, at in (("forward", "x"), ("inverse", "y"))},
    "tiled": (then(recoup.tiled, lambda fn: fn(x())), lambda: {"fn": nn.Tanh(), "dim": 0}),
    "tiled_loss": (then(recoup.tiled_loss, lambda fn: fn(x())),
                   lambda: {"fn": lambda rows: rows.square().mean(), "dim": 0}),
    "GradStore.collecting": (then(of_store("collecting"), backward_within),
                             lambda: {"params": MODEL.parameters()}),
    "Residuals.total_bytes": (recoup.residuals(lambda: MODEL(x())).total_bytes, dict),
    "lightning.MemoryBudget": (LightningBudget, lambda: {"budget": "1 MiB"}),
    "transformers.MemoryBudget": (TransformersBudget, lambda: {"budget": "1 MiB"}),
}  # fmt: skip

# What the code of a user is given as it is.
USERS = {"args", "kwargs", "example_args", "example_kwargs", "options", "segments_backward.input"}
# Layers are called with what another layer returned: a tensor, of whatever shape.
OF_LAYERS = {f"{type(each).__name__}.{way}" for each, _ in LAYERS for way in ("forward", "inverse")}
TENSORS = {str(shape): torch.zeros(shape) for shape in ((), (1,), (0,), (3, 1))}
# By what name an error says it, where several functions say it.
SAID = {
    **{f"{name}.y": "x" for name in OF_LAYERS - {"Squeeze.inverse"}},
    "weights.apply.where": "pattern",
    "DriftGuard.otherwise": "drift",
}


def call(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Call a function with arguments by name; those before `*args` go by their places."""
    parameters = inspect.signature(function).parameters
    several = [name for name, each in parameters.items() if each.kind is each.VAR_POSITIONAL]
    args: list[Any] = []
    if several and several[0] in given:
        for name in parameters:
            args.append(given.pop(name) if name in given else parameters[name].default)
            if name == several[0]:
                break
    function(*args, **given)


def arguments() -> list[tuple[str, str]]:
    return [
        (name, argument)
        for name, (function, _) in CALLS.items()
        for argument in inspect.signature(function).parameters
        if not {argument, f"{name}.{argument}"} & USERS
    ]


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_right(name):
    function, make = CALLS[name]
    call(function, make())


@pytest.mark.sampled(150)
@pytest.mark.parametrize(("name", "argument"), arguments())
def test_a_wrong_argument_is_named(name, argument, tmp_path, monkeypatch):
    if name != "curve":  # whose process finds the builder from here
        monkeypatch.chdir(tmp_path)
    raw = {}
    function, make = CALLS[name]
    said = SAID.get(f"{name}.{argument}", argument)
    for what, value in (TENSORS if name in OF_LAYERS else VALUES).items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(function, make() | {argument: value})
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is looked at
            is_ours = isinstance(error, (ValueError, TypeError, recoup.errors.RecoupError))
            # A class can be called: its own error is that of a user's function.
            is_theirs = "Linear.__init__()" in str(error)
            if not is_theirs and (not is_ours or f"`{said}" not in str(error)):
                raw[what] = f"{type(error).__name__}: {str(error)[:100]}"
    assert not raw
