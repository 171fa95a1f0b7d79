"""The oracle: plain torch, run with the very weights that a forward was given."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from recoup._core import rng as seeds
from recoup.weights import applied, draws, row_draws
from recoup.weights.dropout import WeightDropout
from recoup.weights.function import Draw, WeightFunction
from recoup.weights.noise import WeightNoise, root_mean_square
from recoup.weights.norm import WeightNorm
from recoup.weights.reparametrization import Drawn
from tests.oracle import loss_of_all, tensors

_MODULES = [importlib.import_module(f"recoup.weights.{name}") for name in ("steps", "weight")]


@contextmanager
def recorded() -> Iterator[list[Drawn]]:
    """Record what is drawn within, an entry for each reparametrization and forward."""
    made: list[Drawn] = []

    def record(*args):
        made.append(Drawn(*args))
        return made[-1]

    for each in _MODULES:
        each.Drawn = record
    try:
        yield made
    finally:
        for each in _MODULES:
            each.Drawn = Drawn


@contextmanager
def counted_seeds() -> Iterator[list[int]]:
    """Record the seeds that are taken from the default generator within."""
    taken: list[int] = []
    fresh = seeds._fresh_seed

    def record():
        taken.append(fresh())
        return taken[-1]

    seeds._fresh_seed = record
    try:
        yield taken
    finally:
        seeds._fresh_seed = fresh


def mask(weight: Tensor, drawn: Drawn, axes: tuple[int, ...] = ()) -> Tensor:
    """What a dropout multiplied `weight` with."""
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(weight.shape))
    if drawn.step.draws_by_row:
        ones = torch.ones(shape, dtype=weight.dtype, device=weight.device)
        return row_draws.dropped(ones, drawn.seed, drawn.magnitude, axes=axes)
    return draws.scales(
        shape, drawn.seed, drawn.magnitude, dtype=weight.dtype, device=weight.device
    )


def reparametrized(
    weight: Tensor,
    drawn: Drawn,
    norms: Tensor | None = None,
    own: dict[str, Tensor] | None = None,
    std: Tensor | None = None,
) -> Tensor:
    """What a reparametrization makes of a weight, by differentiable operators of torch."""
    step = drawn.step
    if isinstance(step, WeightFunction):
        given = (weight, Draw(weight, drawn.seed))
        return functional_call(step.function, own, given) if own else step.function(*given)
    if isinstance(step, WeightNorm):
        if weight.dim() == 0:
            return weight * (norms / weight.abs())
        return torch._weight_norm(weight, norms, step.axis)
    if drawn.magnitude == 0:
        return weight
    if isinstance(step, WeightNoise):
        noise = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        if std is None and not step.relative:
            add_noise = row_draws.noised if step.draws_by_row else draws.noised
            return weight + add_noise(noise, drawn.seed, drawn.magnitude)
        noise = draws.noised(noise, drawn.seed, 1.0)
        if step.relative:
            noise = noise * root_mean_square(weight)
        return weight + (noise * (drawn.magnitude if std is None else std)).to(weight.dtype)
    assert isinstance(step, WeightDropout)
    return weight * mask(weight, drawn, step.axes)


def raw_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by each of their names."""
    return dict(module.named_parameters(remove_duplicate=False))


def weights_used(module: nn.Module, made: list[Drawn], raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that the last forward of `made` was given, as functions of `raw`."""
    drawn = {each.step: each for each in made}
    used = dict(raw)
    # A magnitude or a deviation before the weight that it belongs to.
    for entry in sorted(applied(module), key=lambda each: not each.name.endswith(("_g", "_std"))):
        if entry.reparametrization in drawn:
            step = entry.reparametrization
            prefix = f"{entry.name}_{type(getattr(step, 'function', None)).__name__.lower()}."
            own = {k.removeprefix(prefix): v for k, v in raw.items() if k.startswith(prefix)}
            norms, std = used.get(f"{entry.name}_g"), used.get(f"{entry.name}_std")
            used[entry.name] = reparametrized(used[entry.name], drawn[step], norms, own, std)
    return used


class PlainRun:
    """A plain module beside a reparametrized one, on the same numbers.

    Args:
        module: the plain module; `apply` is given a copy of it.
        apply: puts reparametrizations on a module.
    """

    def __init__(self, module: nn.Module, apply: Any) -> None:
        self.plain = module
        self.module = copy.deepcopy(module)
        apply(self.module)

    def compare(self, *inputs: Any, loss: Any = loss_of_all) -> list[Drawn]:
        """Run forward and backward of both, compare bit by bit, and return what was drawn."""
        raw = {name: p.detach().clone() for name, p in raw_parameters(self.module).items()}
        leaves = {id(p): name for name, p in reversed(raw_parameters(self.module).items())}
        # Two names of one parameter are one leaf here too.
        for name, p in raw_parameters(self.module).items():
            raw[name] = raw[leaves[id(p)]].requires_grad_(p.requires_grad)
        theirs = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors(inputs)]
        state = torch.get_rng_state()
        with recorded() as made:
            output = self.module(*inputs)
        after = torch.get_rng_state()
        used = weights_used(self.module, made, raw)
        names = set(raw_parameters(self.plain))
        torch.set_rng_state(state)
        want = functional_call(
            self.plain,
            {name: value for name, value in used.items() if name in names},
            tuple(theirs),
            tie_weights=False,
        )
        torch.set_rng_state(after)
        for a, b in zip(tensors(output), tensors(want), strict=True):
            assert torch.equal(a, b), f"output differs by {(a - b).abs().max()}"
        self.module.zero_grad()
        for x in tensors(inputs):
            x.grad = None
        loss(output).backward()
        loss(want).backward()
        for name, p in raw_parameters(self.module).items():
            same(f"gradient of {name}", p.grad, raw[name].grad)
        for place, (x, y) in enumerate(zip(tensors(inputs), theirs, strict=True)):
            same(f"gradient of input {place}", x.grad, y.grad)
        return made


def same(what: str, got: Tensor | None, want: Tensor | None) -> None:
    """Compare two tensors bit by bit."""
    if got is None or want is None:
        assert got is want, f"{what}: {got} for {want}"
        return
    assert got.layout is want.layout, f"{what}: {got.layout} for {want.layout}"
    got, want = (x.to_dense() if x.is_sparse else x for x in (got, want))
    assert torch.equal(got, want), f"{what} differs by {(got - want).abs().max()}"
