"""Forward and backward of a chain into a store, with the activations of one segment at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from recoup._arguments import check_callable, check_choice, check_flag, check_type
from recoup._core.drift_guard import DriftGuard
from recoup._core.executor import Otherwise, executor_for, run_through, value_of, ways_of
from recoup._core.pytree import flatten
from recoup._core.saved_tensors import grad_mode
from recoup.gradients.accumulation import described
from recoup.gradients.collecting import MODES, Mode
from recoup.gradients.container import tensors_in, weight_in
from recoup.gradients.store import GradStore
from recoup.planning.budget import Budget, is_bytes
from recoup.schedules.memory import Memory

Returned = TypeVar("Returned")  # the loss, or the loss and another value


def segments_backward(
    segments: Iterable[Callable[[Any], Any]],
    input: Any,
    loss_fn: Callable[[Any], Returned],
    store: GradStore,
    *,
    has_aux: bool = False,
    memory: Memory = "inputs",
    otherwise: Otherwise = None,
    params: Iterable[Tensor] | None = None,
    weight: float = 1.0,
    scaler: Any = None,
    mode: Mode = "auto",
) -> Returned:
    """Run segments one after the other and add the gradients of the loss to a store.

    Kept: the inputs of the segments, and the residuals of one segment while backward is in it;
    other choices of `memory` keep less. Backward pays one more forward of each segment but the
    last. The gradients are those of the whole chain, bit for bit: segments may share parameters,
    draw, and have batch norms. No parameter changes; step once, afterwards.

    After an error the store is as before. For that, new gradients for a store that is not empty
    are collected apart and added at the end, which takes their bytes once more.

    Args:
        segments: modules or functions, called in order; values passed from one to the next may be
            tensors in tuples, lists and dicts. One may occur several times.
        input: the input of the first segment.
        loss_fn: a function from the output of the last segment to the loss, a scalar; with
            `has_aux`, to the loss and any other value.
        store: the store for the gradients. The gradient of `input` goes there, too, if it is one of
            `params`.
        has_aux: whether `loss_fn` returns ``(loss, aux)``, as in ``torch.func.grad``. Backward runs
            from the loss, and `aux` is returned without a graph.
        memory: as for `recoup.Sequential`: "inputs", "linear", "sqrt", "log", "constant", a number
            of slots, bytes with a unit, or a `recoup.schedules.Schedule`. Bytes are for a step of
            these segments and the loss, without what the store holds before it; the segments must
            be modules. The plan is made in the first call, which runs a few steps more, and belongs
            to the store: use one store for all steps. Within
            ``torch.autograd.graph.save_on_cpu()``, the kept tensors are offloaded.
        otherwise: as for `recoup.Sequential`.
        params: as in `GradStore.backward`.
        weight: as in `GradStore.backward`.
        scaler: as in `GradStore.backward`.
        mode: as in `GradStore.backward`.

    Returns:
        The loss, without a graph; with `has_aux` ``(loss, aux)``.

    Raises:
        ValueError: there is no segment, an argument is not valid, or `loss_fn` did not return a
            scalar.
        BudgetError: no plan keeps to the bytes.
        ChangedError: in backward, when something that a segment used has changed since.
        ReplayError: when a segment does something that cannot be repeated.
        GradientError: as in `GradStore.backward`.

    Example:
        >>> import recoup, torch
        >>> cell = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> store = recoup.GradStore(cell.parameters())
        >>> x = torch.ones(2, 8)
        >>> loss = recoup.segments_backward([cell] * 16, x, lambda y: y.square().mean(), store)
        >>> store.step(torch.optim.AdamW(cell.parameters()))

    Source: https://github.com/huggingface/candle/pull/1483.
    """
    check_callable(loss_fn=loss_fn)
    check_flag(has_aux=has_aux)
    check_type(GradStore, "a GradStore: GradStore(model.parameters())", store=store)
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "`segments_backward` was called in inference mode, which has no backward. Leave the "
            "mode, or use torch.no_grad() for the code around."
        )
    # Arguments are checked before anything runs: segments may draw, and count batches.
    named = _named(segments)
    weight = weight_in(weight)
    check_choice(*MODES, mode=mode)
    params = None if params is None else tensors_in("params", params)

    def loss_alone(output: Any) -> Tensor:
        return _loss_in(loss_fn(output), has_aux=has_aux)[0]

    with grad_mode(True):
        if is_bytes(memory):
            output = _planned_for(store, named, memory).run(input, loss_alone)
        else:
            output = _run(named, input, memory, otherwise)
        loss, aux = _loss_in(loss_fn(output), has_aux=has_aux)
        with store._unchanged_by_errors() as collected:
            collected.backward(loss, params=params, weight=weight, scaler=scaler, mode=mode)
    loss = loss.detach()
    return cast("Any", (loss, aux) if has_aux else loss)


def _loss_in(returned: Any, *, has_aux: bool) -> tuple[Tensor, Any]:
    """Return the loss and the auxiliary value, without a graph, from the result of `loss_fn`."""
    if has_aux and not (type(returned) in (tuple, list) and len(returned) == 2):
        raise ValueError(
            f"`has_aux` is True, but `loss_fn` returned {described(returned)}. Return the loss and "
            "one other value: (loss, aux)."
        )
    loss, aux = returned if has_aux else (returned, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise ValueError(
            f"`loss_fn` returned {described(loss)} as the loss, which must be a real tensor of one "
            "number. Sum it, or take its mean; pass has_aux=True if it returns more than the loss."
        )
    tensors, tree = flatten(aux)
    return loss, tree.unflatten(tuple(tensor.detach() for tensor in tensors))


def _named(segments: Iterable[object]) -> dict[str, Any]:
    if isinstance(segments, Tensor):  # one without dimensions cannot be iterated over
        raise ValueError(f"`segments` is {described(segments)}, but must be a list: [segment].")
    check_type(Iterable, "a sequence: give [segment]", segments=segments)
    named: dict[str, Any] = {}
    for index, segment in enumerate(segments):
        check_callable(**{f"segments[{index}]": segment})
        called = getattr(segment, "__qualname__", None) or type(segment).__name__
        named[f"segment {index} ({called})"] = segment
    if not named:
        raise ValueError("`segments` is empty, but there must be at least one.")
    return named


def _run(segments: Mapping[str, Any], value: Any, memory: Memory, otherwise: Otherwise) -> Any:
    ways_of({}, otherwise)  # raises if it is unknown
    ways = ways_of(segments, otherwise) if memory == "constant" else None
    if memory != "linear":
        return run_through(executor_for(memory, segments, ways, DriftGuard()), segments, value)
    for segment in segments.values():
        value = value_of(segment, segment(value), value)
    return value


# -- within a number of bytes ----------------------------------------------------------------------


class _Planned:
    """Segments that keep to a number of bytes, and their plan."""

    def __init__(self, segments: Mapping[str, Any], memory: str) -> None:
        self.segments, self.memory = segments, memory
        self.chain = nn.ModuleList(segments.values())
        self.budget, self.guard = Budget(), DriftGuard()
        self.budget.bound(memory)

    def run(self, input: Any, loss: Callable[[Any], Any]) -> Any:
        """Return the output of the last segment."""
        call = functools.partial(_run, self.segments, memory="linear", otherwise=None)
        return self.budget.run(self.chain, call, (input,), self.chain, self.guard, loss)


# Stores hold the last segments that were given with them; equal ones are the same for all stores.
_of_store: WeakKeyDictionary[GradStore, _Planned] = WeakKeyDictionary()
_of_key: WeakValueDictionary[tuple[object, ...], _Planned] = WeakValueDictionary()


def _planned_for(store: GradStore, segments: dict[str, Any], memory: str) -> _Planned:
    for name, segment in segments.items():
        if not isinstance(segment, nn.Module):
            raise ValueError(
                f"`memory` is {memory!r}, but {name} is no module, and a plan is for modules. Make "
                "it the forward of a torch.nn.Module, or choose another `memory`."
            )
    ids = [*map(id, segments.values())]  # the modules are held
    found = _of_key.setdefault((memory, *ids), _Planned(segments, memory))
    for other in list(_of_key.values()):
        if other is not found and not set(map(id, other.chain)).isdisjoint(ids):
            other.budget.bound(other.memory)  # without a plan: a module follows one at a time
    _of_store[store] = found
    return found
