"""A report on whether a module keeps the contract of `InvertibleModule`."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recoup._arguments import check_real, check_type, check_whole
from recoup._core.devices import with_seed
from recoup._core.module_marks import Direction, check_pair
from recoup._core.tensors import check_tensors
from recoup.invertible.actnorm import ActNorm
from recoup.invertible.chain import Chain
from recoup.invertible.contract import InvertibleModule
from recoup.invertible.jacobian import Gradients, Point, flat

__all__ = ["Finding", "InvertibleReport", "check_invertible"]

_MODES = ("sqrt", "constant")  # each compared with "linear"
_MOST_SAMPLES = 2  # for the Jacobian: one backward pass per dimension and sample
_SEED = 0

Contexts = tuple[Tensor, ...]  # empty, or a context


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

        def inverse() -> tuple[Tensor, Tensor]:
            return _run(module, "inverse", y, contexts)

        def again() -> Any:
            return _run(module, "forward", inverse()[0], contexts)[0]

        yield _attempt("forward, then inverse", tolerance, lambda: (_error(inverse()[0], x), ""))
        yield _attempt(
            "inverse, then forward", tolerance, lambda: (_error(flat(again()), flat(y)), "")
        )
        yield _attempt(
            "log-det of forward and inverse",
            tolerance,
            lambda: (_error(-inverse()[1], log_det), ""),
        )


def _log_dets(
    module: InvertibleModule, x: Tensor, contexts: Contexts, tolerance: float
) -> Iterator[Finding]:
    def points() -> Iterator[Point]:
        for i in range(min(len(x), _MOST_SAMPLES)):
            sample = x[i : i + 1].clone().requires_grad_()
            own = tuple(c[i : i + 1].clone().requires_grad_() for c in contexts)
            others = dict(zip(("the context",), own, strict=False))
            others |= {name: p for name, p in module.named_parameters() if p.requires_grad}
            yield Point(
                lambda value, own=own: _run(module, "forward", value, own),
                lambda value, own=own: _run(module, "inverse", value, own),
                sample,
                others,
            )

    def values() -> tuple[float, str]:
        pairs = [point.log_dets() for point in points()]
        stated, true = (torch.cat(each) for each in zip(*pairs, strict=True))
        return _error(stated, true), ""

    yield _attempt("log-det and autograd's Jacobian", tolerance, values)
    for name, gradients in (
        ("gradient of the log-det", Point.gradients),
        ("gradient of the inverse's log-det", Point.gradients_of_inverse),
    ):
        yield _attempt(
            name, tolerance, lambda of=gradients: _worst([*map(of, points())], tolerance)
        )


def _worst(samples: Sequence[Gradients], tolerance: float) -> tuple[float, str]:
    """Return the largest error of gradients by name, and a note on which are wrong."""
    errors: dict[str, float] = {}
    missing: set[str] = set()
    for name, (stated, true) in (pair for gradients in samples for pair in gradients.items()):
        error = _error(
            (torch.zeros_like(true) if stated is None else stated).flatten(), true.flatten()
        )
        errors[name] = error if math.isnan(error) else max(errors.get(name, 0.0), error)
        if stated is None and not error <= tolerance:
            missing.add(name)
    wrong = [name for name, e in errors.items() if not e <= tolerance and name not in missing]
    note = _note_of(("wrong", wrong), ("no gradient, though it depends on", sorted(missing)))
    return _largest(errors.values()), note


def _gradients(
    module: InvertibleModule, x: Tensor, contexts: Contexts, mode: str, tolerance: float
) -> Finding:
    def compare() -> tuple[float, str]:
        expected = _gradients_by_name(module, x, contexts, "linear")
        actual = _gradients_by_name(module, x, contexts, mode)
        errors: dict[str, float] = {}
        for name, gradient in expected.items():
            other = actual[name]
            if gradient is None or other is None:
                errors[name] = 0.0 if gradient is other else math.inf
            else:
                errors[name] = _error(other, gradient)
        wrong = [name for name, error in errors.items() if not error <= tolerance]
        unused = [name for name, gradient in expected.items() if gradient is None]
        note = _note_of(("wrong", wrong), ("no gradient in any mode", unused))
        return _largest(errors.values()), note

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
        values = flat(y)
        return (values * torch.randn_like(values)).sum() + (
            log_det * torch.randn_like(log_det)
        ).sum()

    gradients = torch.autograd.grad(
        with_seed(loss, _SEED), list(leaves.values()), allow_unused=True, materialize_grads=False
    )
    return dict(zip(leaves, gradients, strict=True))


def _note_of(*parts: tuple[str, Sequence[str]]) -> str:
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)


def _largest(errors: Iterable[float]) -> float:
    # NaN if any error is NaN: max() alone would depend on the order.
    values = list(errors)
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        raise ValueError(
            f"The result has shape {tuple(actual.shape)}, but must have {tuple(expected.shape)}."
        )
    if expected.numel() == 0:
        return 0.0
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))
