"""The code of a compiled step: modules in sequence, forward, inverse, and gradients.

NOTE [ Gradients in one graph ]

Rule 1. Inverse and gradients of a module are one graph: the inverse evaluates its networks for
        `torch.func.vjp`, and forward, which is differentiated at the input that the inverse found,
        gets the values that the networks returned (NOTE [ One evaluation ]). The inputs of these
        evaluations are differentiated apart, last evaluation first.
Rule 2. A network that is evaluated twice is ambiguous. Nothing is shared then.
Rule 3. Operators of backward do not cast under autocast, as in autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from recoup._core.autocast_off import without_autocast
from recoup._core.log_det_pairs import check_pair
from recoup._core.shared_evaluation import answer_with
from recoup.invertible.contract import InvertibleModule
from recoup.invertible.rearrange import Split

__all__ = ["Part", "compute", "compute_both", "compute_gradients", "compute_inputs"]

Parameters = dict[str, Tensor]
_vjp: Any = torch.func.vjp


class Part(nn.Module):
    """One module of a step, so that any code can be called with other parameters in its place.

    Args:
        module: the module.
        name: its name in error messages.
        takes_context: whether it is handed the context.
    """

    module: InvertibleModule

    def __init__(self, module: InvertibleModule, name: str, *, takes_context: bool) -> None:
        super().__init__()
        self.module = module
        self.name = name
        self.takes_context = takes_context

    def forward(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what `call` returns."""
        return call(*args)

    def map(self, x: Tensor, context: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return ``((y, *early), log_det)``."""
        call: Callable[..., Any] = cast("Any", self.module)
        returned = call(x, context) if self.takes_context else call(x)
        num_early = self.module.num_early
        y, log_det = check_pair(returned, x.shape[0], "forward", self.name, num_early=num_early)
        if not num_early:
            return (y,), log_det
        return (tuple(y) if isinstance(self.module, Split) else (y[-1], *y[:-1])), log_det

    def undo(self, values: Sequence[Tensor], context: Tensor | None) -> Tensor:
        """Return ``x`` for ``(y, *early)``."""
        module: Any = self.module
        y: Any = values[0]
        if module.num_early:
            y = tuple(values) if isinstance(self.module, Split) else (*values[1:], values[0])
        returned = module.inverse(y, context) if self.takes_context else module.inverse(y)
        return check_pair(returned, values[0].shape[0], "inverse", self.name)[0]

    def learned(self) -> Parameters:
        """Return the parameters that get a gradient, by the names that `functional_call` needs."""
        named = self.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}


def compute(parts: Sequence[Part], x: Tensor, context: Tensor | None) -> tuple[Tensor, ...]:
    """Return ``(y, *early, log_det)``."""
    early: list[Tensor] = []
    total: Tensor | None = None
    for part in parts:
        (x, *more), log_det = part.map(x, context)
        early += more
        total = log_det if total is None else total + log_det
    return x, *early, cast("Tensor", total)


def compute_inputs(
    parts: Sequence[Part], values: Sequence[Tensor], context: Tensor | None
) -> Tensor:
    """Return ``x`` for ``(y, *early)``."""
    x, early = values[0], list(values[1:])
    for part in reversed(parts):
        num_early = part.module.num_early
        x = part.undo((x, *early[len(early) - num_early :]), context)
        del early[len(early) - num_early :]
    return x


def compute_both(
    parts: Sequence[Part],
    values: Sequence[Tensor],
    context: Tensor | None,
    gradients: Sequence[Tensor],
    wants_context: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Return ``x``, and the gradients of ``x``, of the context and of the parameters.

    Args:
        parts: the modules.
        values: ``(y, *early)``.
        context: the context.
        gradients: those of ``(y, *early, log_det)``.
        wants_context: whether the context gets a gradient.
    """
    x, early = values[0], list(values[1:])
    of_y, of_early, of_log_det = gradients[0], list(gradients[1:-1]), gradients[-1]
    return _walked(parts, x, early, None, context, (of_y, of_early, of_log_det), wants_context)


def compute_gradients(
    parts: Sequence[Part],
    x: Tensor,
    context: Tensor | None,
    gradients: Sequence[Tensor],
    wants_context: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Return ``x``, and the gradients of ``x``, of the context and of the parameters.

    Args:
        parts: the modules.
        x: the input of the first.
        context: the context.
        gradients: those of ``(y, *early, log_det)``.
        wants_context: whether the context gets a gradient.
    """
    inputs = [x]
    for part in parts[:-1]:
        inputs.append(part.map(inputs[-1], context)[0][0])
    of_y, of_early, of_log_det = gradients[0], list(gradients[1:-1]), gradients[-1]
    return _walked(parts, x, [], inputs, context, (of_y, of_early, of_log_det), wants_context)


def _walked(
    parts: Sequence[Part],
    x: Tensor,
    early: list[Tensor],
    inputs: list[Tensor] | None,
    context: Tensor | None,
    gradients: tuple[Tensor, list[Tensor], Tensor],
    wants_context: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Go from the last part to the first; the input of each is found, or one of `inputs`."""
    of_x, of_early, of_log_det = gradients
    of_context: Tensor | None = None
    of_parts: list[list[Tensor]] = []
    for place, part in reversed(list(enumerate(parts))):
        num_early = part.module.num_early
        given = ((of_x, *of_early[len(of_early) - num_early :]), of_log_det)
        del of_early[len(of_early) - num_early :]
        shared: list[_Shared] = []
        if inputs is not None:
            x = inputs[place]
        else:
            values = (x, *early[len(early) - num_early :])
            del early[len(early) - num_early :]
            x, shared = _undone(part, values, context)
        wants = wants_context and part.takes_context
        of_x, of_this, of_parameters = _differentiated(part, x, context, shared, given, wants)
        if of_this is not None:
            of_context = of_this if of_context is None else of_context + of_this
        of_parts.append(of_parameters)
    of_parts.reverse()
    return x, of_x, of_context, [each for of_part in of_parts for each in of_part]


class _Shared(NamedTuple):
    """An evaluation that the inverse made.

    Args:
        network: the network.
        value: what the evaluation returned.
        pull: returns the gradients of parameters and inputs for that of the value.
    """

    network: nn.Module
    value: Any
    pull: Callable[[Any], tuple[Parameters, Any]]


def _evaluated(part: Part, network: nn.Module, inputs: tuple[Tensor, ...], then: Any) -> _Shared:
    """Evaluate a network of `part` so that it can be differentiated."""

    def call(*given: Tensor) -> Any:
        output = network(*given)
        return output if then is None else then(output)

    used = part.learned()  # `then` may read any
    if then is None:
        own = list(network.parameters())
        used = {name: p for name, p in used.items() if any(p is each for each in own)}

    def run(parameters: Parameters, *given: Tensor) -> Any:
        return functional_call(part, parameters, (call, *given))

    def pulled(gradient: Any) -> Any:
        return _pulled(pull, gradient, value)

    value, pull = _vjp(run, used, *inputs)
    return _Shared(network, value, pulled)


def _undone(
    part: Part, values: Sequence[Tensor], context: Tensor | None
) -> tuple[Tensor, list[_Shared]]:
    """Return the input of `part`, and the evaluations that the inverse made (See Rule 1)."""
    shared: list[_Shared] = []

    def evaluate(network: nn.Module, inputs: tuple[Tensor, ...], then: Any) -> Any:
        shared.append(_evaluated(part, network, inputs, then))
        return shared[-1].value

    answer_with(evaluate)
    x = part.undo(values, context)
    answer_with(None)
    for place, one in enumerate(shared):
        if any(one.network is other.network for other in shared[:place]):  # See Rule 2
            return x, []
    return x, shared


def _differentiated(
    part: Part,
    x: Tensor,
    context: Tensor | None,
    shared: Sequence[_Shared],
    gradients: tuple[tuple[Tensor, ...], Tensor],
    wants_context: bool,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return the gradients of ``x``, of the context and of the parameters of `part`."""
    learned = part.learned()
    contexts = (context,) if wants_context else ()
    num_contexts = len(contexts)

    order: list[int] = []  # of the evaluations, in forward

    def run(parameters: Parameters, values: Sequence[Any], *inputs: Any) -> Any:
        """Run forward on the values of the networks; return its result and their inputs."""
        seen: list[Any] = [None] * len(shared)
        order.clear()

        def recall(network: nn.Module, given: tuple[Tensor, ...], then: Any) -> Any:
            for place, one in enumerate(shared):
                if one.network is network:
                    seen[place] = given
                    order.append(place)
                    return values[place]
            raise RuntimeError("the inverse did not evaluate a network that forward evaluates")

        answer_with(recall if shared else None)
        its_context = inputs[1] if wants_context else context
        result = functional_call(part, parameters, (part.map, inputs[0], its_context))
        answer_with(None)
        return result, seen

    values = [one.value for one in shared]
    primals = (learned, values, x, *contexts)
    result, pull = _vjp(partial(_result_of, run), *primals)
    of_learned, of_values, *of_inputs = _pulled(pull, gradients, result)
    for place in reversed(list(order)):
        of_network, *of_seen = shared[place].pull(of_values[place])
        of_learned = _summed(of_learned, of_network)
        seen, pull = _vjp(partial(_seen_at, run, place), *primals)
        of_run = _pulled(pull, tuple(of_seen), seen)
        of_learned = _summed(of_learned, of_run[0])
        of_values = [_added(a, b) for a, b in zip(of_values, of_run[1], strict=True)]
        of_inputs = [a + b for a, b in zip(of_inputs, of_run[2:], strict=True)]
    of_context = of_inputs[1] if num_contexts else None
    return of_inputs[0], of_context, [of_learned[name] for name in learned]


def _result_of(run: Callable[..., Any], *primals: Any) -> Any:
    return run(*primals)[0]


def _seen_at(run: Callable[..., Any], place: int, *primals: Any) -> Any:
    return run(*primals)[1][place]


def _pulled(pull: Callable[[Any], Any], gradients: Any, outputs: Any) -> Any:
    """Call `pull` outside of autocast (See Rule 3)."""
    device = next(iter(_leaves(outputs))).device
    with without_autocast(device.type):
        return pull(gradients)


def _leaves(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in cast("Iterable[Any]", values):
            yield from _leaves(value)


def _summed(all_of: Parameters, some: Parameters) -> Parameters:
    return {name: each + some[name] if name in some else each for name, each in all_of.items()}


def _added(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor):
        return a + b
    return type(a)(_added(one, other) for one, other in zip(a, b, strict=True))
