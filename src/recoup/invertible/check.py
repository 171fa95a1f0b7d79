"""A report on whether a module keeps the contract of `InvertibleModule`.

NOTE [ Gradients of the log-determinant of an inverse ]

An inverse may round (`Dequantize`) or iterate, so that its own Jacobian is of no use. Its
log-determinant follows from forward: ``L(y) = -log|det J(x(y))|``, J the Jacobian of forward.
By the implicit function theorem, with ``v = J^-T dlog|det J|/dx``, its gradients are ``-v`` for y,
and ``v dF/dw - dlog|det J|/dw`` for anything else (w) that forward F reads.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from recoup._arguments import check_real, check_type, check_whole
from recoup._core.devices import with_seed
from recoup._core.module_marks import Direction, check_pair
from recoup._core.tensors import check_tensors
from recoup.invertible.chain import Chain
from recoup.invertible.channels import ActNorm
from recoup.invertible.contract import InvertibleModule

_MODES = ("sqrt", "constant")  # each compared with "linear"
_MOST_SAMPLES = 2  # for the Jacobian: one backward pass per dimension and sample
_SEED = 0

Contexts = tuple[Tensor, ...]  # empty, or a context
Pairs = dict[str, tuple[Tensor | None, Tensor | None]]  # actual and expected; None: no gradient

_linalg: Any = torch.linalg  # torch does not type its functions


@dataclass(frozen=True)
class Finding:
    """One comparison of a report.

    Args:
        name: Name of the comparison.
        error: The largest difference, relative for values above 1.
        tolerance: The largest error that passes.
        note: Further details for the reader.

    Example:
        >>> from recoup.invertible import Finding
        >>> Finding("inverse after forward", 2e-16, 1e-8).passed
        True
    """

    name: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        line = f"{'passed' if self.passed else 'FAILED'}  {self.name:<34} error {self.error:.1e}"
        return f"{line}  {self.note}" if self.note else line


@dataclass(frozen=True)
class InvertibleReport:
    """The result of `check_invertible`: true when every comparison passed; print it to read it.

    Args:
        module: Name of the class that was checked.
        findings: The comparisons, in order.

    Example:
        >>> from recoup.invertible import Finding, InvertibleReport
        >>> bool(InvertibleReport("Flip", (Finding("log-determinant", 0.5, 1e-8),)))
        False
    """

    module: str
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        verdict = "passed" if self else "FAILED"
        return "\n  ".join([f"{self.module}: {verdict}", *map(str, self.findings)])


def check_invertible(
    module: InvertibleModule,
    x: Tensor,
    context: Tensor | None = None,
    *,
    tolerance: float = 1e-8,
    max_dims: int = 1024,
) -> InvertibleReport:
    """Check inverse, log-determinants and their gradients, and every memory mode of `module`.

    The check works on double-precision copies: `module`, its gradients, its training mode, a
    data-dependent start still to come, and the random stream do not change. Inverse and
    log-determinant are checked in evaluation mode, gradients of memory modes in the mode the module
    is in. The Jacobian comes from autograd, for the first two samples, at one backward pass a
    dimension. A correct value is not enough for training: the gradient of each log-determinant with
    respect to the input, the context and every parameter is compared with that of ``slogdet`` of
    the Jacobian, which takes second derivatives of the module.

    Args:
        module: The module to check; a `Chain` is also run in the other memory modes.
        x: A batch of typical inputs ``(N, ...)`` of the module, N at least 1.
        context: For a module that takes one, the context ``(N, ...)`` of these inputs.
        tolerance: The largest error that passes, relative for values above 1. An iterative inverse
            needs a larger one than the default.
        max_dims: The largest number D of values in a sample, since the Jacobian has ``D**2``.

    Returns:
        A report that is true if every comparison passed, and prints one line for each.

    Raises:
        ValueError: When `x` holds no sample, or samples of more than `max_dims` values.

    Example:
        >>> import torch
        >>> from recoup.invertible import Flip, check_invertible
        >>> report = check_invertible(Flip(), torch.randn(2, 4))
        >>> bool(report), len(report.findings)
        (True, 8)
    """
    check_type(InvertibleModule, "an InvertibleModule", module=module)
    check_tensors(x=x, **({} if context is None else {"context": context}))
    if context is not None and not getattr(module, "takes_context", False):
        raise ValueError(
            f"`context` is given, but {type(module).__name__} takes none. Leave it out."
        )
    check_whole(max_dims=max_dims)
    check_real(tolerance=tolerance)
    dims = math.prod(x.shape[1:])
    if x.dim() < 2 or x.shape[0] == 0 or dims == 0:
        raise ValueError(f"`x` has shape {tuple(x.shape)}, but a batch (N, ...) is needed, N >= 1.")
    if dims > max_dims:
        raise ValueError(
            f"`x` has {dims} numbers a sample, more than `max_dims` {max_dims}: the Jacobian would "
            f"have {dims**2} entries. Give a smaller `x`, or raise `max_dims`."
        )
    x = x.detach().double()
    contexts = () if context is None else (context.detach().double(),)
    started = copy.deepcopy(module).double()
    with torch.no_grad():  # a data-dependent start happens here, on the copy
        returned = with_seed(lambda: started(x, *contexts), _SEED)
    name = type(module).__name__
    try:
        check_pair(returned, len(x), "forward", name, num_early=module.num_early)
    except ValueError as error:  # without an output nothing can be compared
        return InvertibleReport(
            name, (Finding("what forward returns", math.inf, tolerance, str(error)),)
        )
    still = copy.deepcopy(started).eval()
    for part in still.modules():
        if isinstance(part, Chain):
            part.memory = "linear"  # the Jacobian runs backward many times over one graph
    findings = [
        *_round_trip(still, x, contexts, tolerance),
        *_log_dets(still, x, contexts, tolerance),
    ]
    findings += [_gradients(started, x, contexts, mode, tolerance) for mode in _MODES]
    return InvertibleReport(name, tuple(findings))


def _attempt(name: str, tolerance: float, compare: Callable[[], tuple[float, str]]) -> Finding:
    try:
        error, note = compare()
    except Exception as raised:  # noqa: BLE001 - the module under test may raise anything
        error, note = math.inf, f"{type(raised).__name__}: {raised}"
    return Finding(name, error, tolerance, note)


def _run(module: InvertibleModule, direction: Direction, value: Any, contexts: Contexts) -> Any:
    """Run `module` under the seed of all comparisons; return a value and its log-determinant."""
    call = module if direction == "forward" else module.inverse
    returned = with_seed(lambda: call(value, *contexts), _SEED)
    num_early = module.num_early if direction == "forward" else 0
    first: Tensor = value if isinstance(value, Tensor) else value[0]
    return check_pair(returned, len(first), direction, type(module).__name__, num_early=num_early)


def _round_trip(
    module: InvertibleModule, x: Tensor, contexts: Contexts, tolerance: float
) -> Iterator[Finding]:
    with torch.no_grad():
        y, log_det = _run(module, "forward", x, contexts)

        def back() -> tuple[Tensor, Tensor]:
            return _run(module, "inverse", y, contexts)

        def again() -> Any:
            return _run(module, "forward", back()[0], contexts)[0]

        for name, compare in (
            ("forward, then inverse", lambda: _error(back()[0], x)),
            ("inverse, then forward", lambda: _error(_flat(again()), _flat(y))),
            ("log-det of forward and inverse", lambda: _error(-back()[1], log_det)),
        ):
            yield _attempt(name, tolerance, lambda compare=compare: (compare(), ""))


def _log_dets(
    module: InvertibleModule, x: Tensor, contexts: Contexts, tolerance: float
) -> Iterator[Finding]:
    samples = [
        _Sample(module, x[at : at + 1], tuple(each[at : at + 1] for each in contexts))
        for at in range(min(len(x), _MOST_SAMPLES))
    ]
    for name, pairs_of in (
        ("log-det and autograd's Jacobian", _Sample.log_dets),
        ("gradient of the log-det", _Sample.gradients),
        ("gradient of the inverse's log-det", _Sample.gradients_of_inverse),
    ):
        yield _attempt(name, tolerance, lambda of=pairs_of: _worst([*map(of, samples)], tolerance))


def _gradients(
    module: InvertibleModule, x: Tensor, contexts: Contexts, mode: str, tolerance: float
) -> Finding:
    def compare() -> tuple[float, str]:
        expected = _gradients_by_name(module, x, contexts, "linear")
        actual = _gradients_by_name(module, x, contexts, mode)
        return _worst([{name: (actual[name], expected[name]) for name in expected}], tolerance)

    return _attempt(f'gradients, "{mode}" and "linear"', tolerance, compare)


def _gradients_by_name(
    module: InvertibleModule, x: Tensor, contexts: Contexts, mode: str
) -> dict[str, Tensor | None]:
    module = copy.deepcopy(module)
    stages = [*module] if isinstance(module, Chain) else [module]
    # A stage in front, so that the input of `module` too must be computed by inversion.
    entrance = ActNorm(x.shape[1], device=x.device, dtype=x.dtype)
    entrance.started = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that some are recomputed is no finding
        # The guard must not repair a wrong inverse, so that the gradients show it.
        chain = Chain(entrance, *stages, memory=mode, drift="ignore")
    x = x.clone().requires_grad_()
    contexts = tuple(each.clone().requires_grad_() for each in contexts)
    leaves = dict(zip(("the input", "the context"), (x, *contexts), strict=False))
    leaves |= {f"a stage before ({name})": p for name, p in entrance.named_parameters()}
    leaves |= {name: p for name, p in module.named_parameters() if p.requires_grad}

    def loss() -> Tensor:
        y, log_det = chain(x, *contexts)
        values = torch.cat([_flat(y), log_det.unsqueeze(1)], dim=1)
        return (values * torch.randn_like(values)).sum()

    found = _gradients_of(with_seed(loss, _SEED), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def _worst(samples: Sequence[Pairs], tolerance: float) -> tuple[float, str]:
    """Return the largest error of values by name, and a note on which are wrong."""
    errors: dict[str, float] = {}
    missing: set[str] = set()
    unused: set[str] = set()
    for name, (actual, expected) in (pair for pairs in samples for pair in pairs.items()):
        if actual is None and expected is None:
            unused.add(name)
            continue
        error = _error(*_or_zeros((actual, expected), (expected, actual)))
        errors[name] = error if math.isnan(error) else max(errors.get(name, 0.0), error)
        if actual is None and not error <= tolerance:
            missing.add(name)
    wrong = [name for name, error in errors.items() if not error <= tolerance]
    said = {
        "wrong": [name for name in wrong if name not in missing],
        "no gradient, though it depends on": sorted(missing),
        "no gradient in any mode": sorted(unused),
    }
    note = "; ".join(f"{words}: {', '.join(names)}" for words, names in said.items() if names)
    # NaN if any error is NaN: max() alone would depend on the order.
    is_nan = any(map(math.isnan, errors.values()))
    return math.nan if is_nan else max(errors.values(), default=0.0), note


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        raise ValueError(
            f"The result has shape {tuple(actual.shape)}, but must have {tuple(expected.shape)}."
        )
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


class _Sample:
    """A module at one sample, with the log-determinants and gradients to compare.

    Args:
        module: the module.
        x: the sample, of shape ``(1, ...)``.
        contexts: its context, if any.
    """

    def __init__(self, module: InvertibleModule, x: Tensor, contexts: Contexts) -> None:
        self._module = module
        self._x = x.clone().requires_grad_()
        self._contexts = tuple(each.clone().requires_grad_() for each in contexts)
        self._others: dict[str, Tensor] = dict(zip(("the context",), self._contexts, strict=False))
        self._others |= {name: p for name, p in module.named_parameters() if p.requires_grad}

    @cached_property
    def _forward(self) -> tuple[Any, Tensor]:
        return _run(self._module, "forward", self._x, self._contexts)

    @cached_property
    def _jacobian(self) -> Tensor:
        values = _flat(self._forward[0])[0]
        if values.numel() != self._x.numel():
            raise ValueError(
                f"`forward` maps {self._x.numel()} numbers a sample to {values.numel()}; an "
                "invertible layer keeps their number."
            )
        rows = [
            torch.autograd.grad(value, self._x, create_graph=True, materialize_grads=True)[0]
            for value in values.unbind()
        ]
        return torch.stack([row.flatten() for row in rows])

    @cached_property
    def _gradients(self) -> dict[str, Tensor]:
        """The gradients of the true log-determinant."""
        leaves = {"the input": self._x, **self._others}
        log_det: Tensor = _linalg.slogdet(self._jacobian).logabsdet
        found = _or_zeros(_gradients_of(log_det, list(leaves.values())), leaves.values())
        return dict(zip(leaves, found, strict=True))

    def log_dets(self) -> Pairs:
        """Return the log-determinant that the module states, and the true one."""
        log_det: Tensor = _linalg.slogdet(self._jacobian).logabsdet
        return {"the log-det": (self._forward[1], log_det.unsqueeze(0))}

    def gradients(self) -> Pairs:
        """Return the gradients of the log-determinant of forward."""
        true = self._gradients
        stated = _gradients_of(self._forward[1], [self._x, *self._others.values()])
        return {name: (of, true[name]) for name, of in zip(true, stated, strict=True)}

    def gradients_of_inverse(self) -> Pairs:
        """Return the gradients of the log-determinant of inverse."""
        y, _ = self._forward
        others = list(self._others.values())
        at_x = self._gradients["the input"].flatten()
        pulled: Tensor = _linalg.solve(self._jacobian.detach().T, at_x)
        through = _or_zeros(_gradients_of(_flat(y)[0], others, pulled), others)
        given = [part.detach().requires_grad_() for part in _parts(y)]
        of_y = tuple(given) if isinstance(y, tuple) else given[0]
        _, stated = _run(self._module, "inverse", of_y, self._contexts)
        at_y = _gradients_of(stated, given)
        has_none = all(each is None for each in at_y)
        joined = None if has_none else _flat(tuple(_or_zeros(at_y, given))).flatten()
        pairs: Pairs = {"the input": (joined, -pulled)}
        found = zip(self._others, _gradients_of(stated, others), through, strict=True)
        for name, of_inverse, change in found:
            pairs[name] = (of_inverse, change - self._gradients[name])
        return pairs


def _flat(y: Any) -> Tensor:
    """Join an output, or a tuple of them, into one tensor of shape ``(N, D)``."""
    return torch.cat([part.flatten(1) for part in _parts(y)], dim=1)


def _parts(y: Any) -> tuple[Tensor, ...]:
    return (y,) if isinstance(y, Tensor) else tuple(y)


def _gradients_of(
    output: Tensor, inputs: Sequence[Tensor], seed: Tensor | None = None
) -> list[Tensor | None]:
    if not output.requires_grad or not inputs:
        return [None] * len(inputs)
    seed = torch.ones_like(output) if seed is None else seed
    return list(torch.autograd.grad(output, inputs, seed, retain_graph=True, allow_unused=True))


def _or_zeros(gradients: Iterable[Tensor | None], like: Iterable[Any]) -> list[Tensor]:
    return [
        torch.zeros_like(each) if gradient is None else gradient
        for gradient, each in zip(gradients, like, strict=True)
    ]
