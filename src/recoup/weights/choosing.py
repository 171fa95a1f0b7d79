"""Choosing parameters of a tree: by patterns, types of modules, functions, or lists of these."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.nn.parameter import is_lazy

from recoup._arguments import check_type
from recoup._core.modules import check_has_own_forward, is_gathered
from recoup.weights.module import check_is_plain, weights_of
from recoup.weights.reparametrization import Reparametrization
from recoup.weights.weight import ParametrizedWeight

ANY_WEIGHT = r"(.*[._])?weight(_[^.]*)?"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Where = str | type[nn.Module] | Callable[[str, nn.Parameter, nn.Module], bool] | Sequence[Any]


class Named(NamedTuple):
    """A parameter by its qualified name, and by its name in the module that owns it."""

    name: str
    owner: nn.Module
    key: str
    parameter: nn.Parameter


def matching(module: nn.Module, where: Where, argument: str = "pattern") -> list[Named]:
    """Return the parameters that `where` chooses, those of a shared module once."""
    return [each for each, _ in _chosen(module, where, argument)]


def reparametrized(
    module: nn.Module, where: Where, argument: str
) -> list[tuple[Named, ParametrizedWeight]]:
    """Return the reparametrized weights that `where` chooses, or raise if there are none."""
    chosen = matching(module, where, argument)
    found = [(e, weights_of(e.owner)[e.key]) for e in chosen if e.key in weights_of(e.owner)]
    if not found:
        raise ValueError(
            f"`{argument}` {where!r} matches no parameter of {type(module).__name__} to which "
            "anything is applied. See recoup.weights.applied(module)."
        )
    return found


def suited(module: nn.Module, where: Where) -> list[Named]:
    """Return the parameters to reparametrize.

    A pattern or a type leaves out what has no floating-point type, is frozen, or was added by a
    reparametrization. A parameter that a name in full or a function chooses is meant.
    """
    chosen = _chosen(module, where, "pattern")
    found = [each for each, is_meant in chosen if is_meant or _unsuited(each) is None]
    if not found:
        each = chosen[0][0]
        raise ValueError(
            f"`{each.name}` {_unsuited(each)}, and `pattern` matches nothing else. Choose "
            "floating-point parameters that require a gradient, or give the name in full."
        )
    return found


def _unsuited(each: Named) -> str | None:
    if not each.parameter.requires_grad:
        return "requires no gradient"
    return "belongs to a reparametrization" if _is_added(each) else _unfit(each)


def _unfit(each: Named) -> str | None:
    """Return why nothing can be applied to a parameter, even if it is meant; None if it can."""
    if each.parameter.dtype not in _DTYPES:
        return f"is {each.parameter.dtype}, and must be of a floating-point type of 16 bits or more"
    name, _, end = each.key.rpartition("_")
    if end in ("orig", "g", "v") and isinstance(vars(each.owner).get(name), Tensor):
        return (
            "is what torch's pruning, or an old norm of torch, computes a weight from in a hook. "
            "What they write back when they are removed would be a sample of the noise: use "
            "torch.nn.utils.parametrizations, or end the pruning (`prune.remove`)"
        )
    return None


def _chosen(module: nn.Module, where: Where, argument: str) -> list[tuple[Named, bool]]:
    """Return what `where` chooses, and whether it means just that parameter."""
    check_is_module(module)
    if any(type(part).__name__ == "RFModuleAsPTModule" for part in module.modules()):
        raise ValueError(
            "`module` is what RETURNN makes of a model of its frontend, whose layers read their "
            "own parameters, and not those of the module: nothing would be noisy. Use "
            "recoup.recomputing() within the model (docs/from-returnn.md)."
        )
    candidates = [*named(module)]
    entries: list[Any] = [*cast("Any", where)] if isinstance(where, (list, tuple)) else [where]
    found: dict[Named, bool] = {}
    for entry in entries:
        chooses = _chooses(entry, argument)
        chosen = [each for each in candidates if chooses(each)]
        if not chosen:
            names = ", ".join(each.name for each in candidates[:8]) or "none"
            raise ValueError(
                f"`{argument}` {getattr(entry, '__name__', repr(entry))} matches no parameter of "
                f"{type(module).__name__}. It must match the whole of a qualified name; there are: "
                f"{names}{', ...' if len(candidates) > 8 else ''}"
            )
        for each in chosen:
            found[each] = found.get(each, False) or _is_function(entry) or entry == each.name
    if not found:
        raise ValueError(f"`{argument}` is {where!r}, which chooses nothing. Give one pattern.")
    uses: dict[tuple[int, str], tuple[Named, bool]] = {}
    for each in candidates:
        if each in found:
            uses.setdefault((id(each.owner), each.key), (each, found[each]))
    return [*uses.values()]


def _chooses(entry: Any, argument: str) -> Callable[[Named], bool]:
    """Return, as a function, whether an entry of `where` chooses a parameter."""
    given: object = entry
    if isinstance(given, type) and issubclass(given, nn.Module):
        kind = given
        is_weight = re.compile(ANY_WEIGHT).fullmatch
        return lambda e: isinstance(e.owner, kind) and bool(is_weight(e.key)) and not _is_added(e)
    if _is_function(entry):
        return lambda each: bool(entry(each.name, each.parameter, each.owner))
    try:
        pattern: re.Pattern[str] = re.compile(cast("str", entry))
        pattern.fullmatch("")  # a pattern of bytes compiles, too
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`{argument}` is {entry!r}, but must be a regular expression, a type of modules, a "
            f"function of (name, parameter, module), or a list of these: {error}."
        ) from None
    return lambda each: pattern.fullmatch(each.name) is not None


def _is_function(entry: object) -> bool:
    return callable(entry) and not isinstance(entry, type)


def _is_added(each: Named) -> bool:
    """Whether it is the magnitude of a weight norm, or the deviation of a weight's noise."""
    weights = weights_of(each.owner).values()
    return any(each.key == step.added(weight.key) for weight in weights for step in weight.steps)


def named(module: nn.Module) -> Iterator[Named]:
    """Yield the parameters of a tree, each under all of its names."""
    named_modules = cast("Any", module.named_modules)  # torch's annotation is incomplete
    modules: Iterator[tuple[str, nn.Module]] = named_modules(remove_duplicate=False)
    for prefix, owner in modules:
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                yield Named(f"{prefix}.{key}" if prefix else key, owner, key, parameter)


# -- checks ------------------------------------------------------------------------------------


def check_is_module(module: object) -> None:
    """Raise if `module` is not a module."""
    check_type(nn.Module, "an nn.Module (an instance, not a class)", module=module)


_sharing: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]]
_sharing = weakref.WeakKeyDictionary()  # the modules that have the same parameters, by each of them


def note_sharing(module: nn.Module, other: nn.Module) -> None:
    """Note that two modules have their dictionaries of parameters in common."""
    _sharing.setdefault(module, weakref.WeakSet()).add(other)
    _sharing.setdefault(other, weakref.WeakSet()).add(module)


def fit(step: Reparametrization, each: Named, module: nn.Module) -> None:
    """Fit `step` to a parameter of the tree `module`, or raise if it cannot be applied to it."""
    name, owner, key, parameter = each
    for part in (module, owner):
        check_has_own_forward(part)
    wrong = "has no shape yet: run a batch through it" if is_lazy(parameter) else _unfit(each)
    if wrong:
        raise ValueError(f"`{name}` {wrong}. Or let `pattern` leave it out.")
    if step.adds_parameters or not any(map(is_gathered, module.modules())):
        check_is_plain(parameter, name)
    is_in_ddp = any(isinstance(part, Ddp) for part in module.modules())
    if step.adds_parameters and (is_in_ddp or _sharing.get(owner)):
        raise ValueError(
            f"{step.kind} adds a parameter to `{name}`, which DistributedDataParallel would not "
            "reduce, and a twin (recoup.weights.twin) would not use. Apply it before you make them."
        )
    if step.added(key) and hasattr(owner, step.added(key)):
        raise ValueError(
            f"`{step.added(name)}` exists already, which is what {step.kind} would call what it "
            "adds. Rename it, or let `pattern` leave this weight out."
        )
    weight = weights_of(owner).get(key)
    for other in () if weight is None else weight.steps:
        if step.is_same_as(other):
            raise ValueError(
                f"`{name}` has {other!r} already. Change it by recoup.weights.update, or call "
                "recoup.weights.remove first."
            )
    step.fit(owner, key, name)
    if getattr(owner, "max_norm", None) is not None and not step.draws_by_row:
        raise ValueError(
            f"`{name}` is of an {type(owner).__name__} with `max_norm`, which writes to "
            "what it reads, and that is made anew here. Drop whole rows (`axes=(1,)` of an "
            "Embedding), leave `max_norm` out, or let `pattern` leave the weight out."
        )
