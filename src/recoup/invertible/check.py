"""One report on whether a module is what an InvertibleModule promises to be."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recoup.invertible.actnorm import ActNorm
from recoup.invertible.chain import Chain
from recoup.invertible.contract import InvertibleModule
from recoup.residuals.seeds import with_seed

__all__ = ["Finding", "InvertibleReport", "check_invertible"]

_MODES = ("sqrt", "constant")  # each against "linear"
_MOST_SAMPLES = 2  # for the Jacobian: one backward pass a dimension and sample
_SEED = 0

Given = tuple[Tensor, ...]  # nothing, or a context


@dataclass(frozen=True)
class Finding:
    """One comparison of a report.

    Args:
        name: What was compared.
        error: The largest difference, relative to values above 1.
        tolerance: The largest error that passes.
        note: What else there is to say.

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
    """What `check_invertible` found: true when every comparison passed; print it to read it.

    Args:
        module: The class that was checked.
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
    """Check inverse, log-determinant and the gradients of every memory mode of `module`.

    Works on double-precision copies: `module`, its gradients, its training mode, a start that it
    has not made yet, and the random stream stay as they are. Inverse and log-determinant are
    checked in evaluation mode, gradients in the mode the module is in. The Jacobian is that of
    autograd, of the first two samples, and costs one backward pass a dimension.

    Args:
        module: What to check; a `Chain` is also run in the other memory modes.
        x: A batch of inputs ``(N, ...)`` such as the module is made for, N at least 1.
        context: For a module that takes one, the context ``(N, ...)`` of these inputs.
        tolerance: The largest error that passes, relative to values above 1. An iterative inverse
            needs a larger one than the default.
        max_dims: The most numbers a sample may have, since the Jacobian has their square.

    Returns:
        A report that is true if all is well, and prints as one line a comparison.

    Raises:
        ValueError: When `x` holds no sample, or samples of more than `max_dims` numbers.

    Example:
        >>> import torch
        >>> from recoup.invertible import Flip, check_invertible
        >>> report = check_invertible(Flip(), torch.randn(2, 4))
        >>> bool(report), len(report.findings)
        (True, 6)
    """
    dims = math.prod(x.shape[1:])
    if x.dim() < 2 or x.shape[0] == 0 or dims == 0:
        raise ValueError(f"`x` has shape {tuple(x.shape)}, but a batch (N, ...) is needed, N >= 1.")
    if dims > max_dims:
        raise ValueError(
            f"`x` has {dims} numbers a sample, more than `max_dims` {max_dims}: the Jacobian would "
            f"have {dims**2} entries. Give a smaller `x`, or raise `max_dims`."
        )
    x = x.detach().double()
    given = () if context is None else (context.detach().double(),)
    started = copy.deepcopy(module).double()
    with torch.no_grad():
        with_seed(
            lambda: started(x, *given), _SEED
        )  # a data-dependent start happens here, on the copy
    still = copy.deepcopy(started).eval()
    for part in still.modules():
        if isinstance(part, Chain):
            part.memory = "linear"  # the Jacobian runs backward many times over one graph
    findings = [*_round_trip(still, x, given, tolerance), _jacobian(still, x, given, tolerance)]
    findings += [_gradients(started, x, given, mode, tolerance) for mode in _MODES]
    return InvertibleReport(type(module).__name__, tuple(findings))


def _attempt(name: str, tolerance: float, compare: Callable[[], tuple[float, str]]) -> Finding:
    try:
        return Finding(name, *_reordered(tolerance, *compare()))
    except Exception as error:  # noqa: BLE001 - of a module that is to be checked, whatever it is
        return Finding(name, math.inf, tolerance, f"{type(error).__name__}: {error}")


def _reordered(tolerance: float, error: float, note: str) -> tuple[float, float, str]:
    return error, tolerance, note


def _round_trip(
    module: InvertibleModule, x: Tensor, given: Given, tolerance: float
) -> Iterator[Finding]:
    with torch.no_grad():
        y, log_det = with_seed(lambda: module(x, *given), _SEED)

        def inverse() -> tuple[Tensor, Tensor]:
            return with_seed(lambda: module.inverse(y, *given), _SEED)

        def again() -> Any:
            return with_seed(lambda: module(inverse()[0], *given)[0], _SEED)

        yield _attempt("forward, then inverse", tolerance, lambda: (_error(inverse()[0], x), ""))
        yield _attempt(
            "inverse, then forward", tolerance, lambda: (_error(_flat(again()), _flat(y)), "")
        )
        yield _attempt(
            "log-det of forward and inverse",
            tolerance,
            lambda: (_error(-inverse()[1], log_det), ""),
        )


def _jacobian(module: InvertibleModule, x: Tensor, given: Given, tolerance: float) -> Finding:
    def compare() -> tuple[float, str]:
        samples = [slice(i, i + 1) for i in range(min(len(x), _MOST_SAMPLES))]
        pairs = [_log_dets(module, x[one], tuple(c[one] for c in given)) for one in samples]
        stated, true = (torch.cat(values) for values in zip(*pairs, strict=True))
        return _error(stated, true), ""

    return _attempt("log-det and autograd's Jacobian", tolerance, compare)


def _log_dets(module: InvertibleModule, x: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    """Return the log-determinant that `module` states for one sample, and the true one."""
    x = x.clone().requires_grad_()
    y, log_det = with_seed(lambda: module(x, *given), _SEED)
    values = _flat(y)[0]
    if values.numel() != x.numel():
        raise ValueError(f"{x.numel()} numbers a sample become {values.numel()}.")
    rows = [torch.autograd.grad(v, x, retain_graph=True)[0].flatten() for v in values.unbind()]
    linalg: Any = torch.linalg
    true: Tensor = linalg.slogdet(torch.stack(rows)).logabsdet
    return log_det.detach(), true.reshape(1)


def _gradients(
    module: InvertibleModule, x: Tensor, given: Given, mode: str, tolerance: float
) -> Finding:
    def compare() -> tuple[float, str]:
        expected = _gradients_by_name(module, x, given, "linear")
        actual = _gradients_by_name(module, x, given, mode)
        errors: dict[str, float] = {}
        for name, gradient in expected.items():
            other = actual[name]
            if gradient is None or other is None:
                errors[name] = 0.0 if gradient is other else math.inf
            else:
                errors[name] = _error(other, gradient)
        wrong = [name for name, error in errors.items() if not error <= tolerance]
        unused = [name for name, gradient in expected.items() if gradient is None]
        notes = [
            f"{what}: {', '.join(names)}"
            for what, names in (("wrong", wrong), ("no gradient in any mode", unused))
            if names
        ]
        # Any NaN must come out as one: max() alone would keep whatever it saw first.
        values = list(errors.values())
        return math.nan if any(map(math.isnan, values)) else max(values), "; ".join(notes)

    return _attempt(f'gradients, "{mode}" and "linear"', tolerance, compare)


def _gradients_by_name(
    module: InvertibleModule, x: Tensor, given: Given, mode: str
) -> dict[str, Tensor | None]:
    module = copy.deepcopy(module)
    stages = [*module] if isinstance(module, Chain) else [module]
    # A stage in front, so that the input of `module` too must be had by inversion.
    entrance = ActNorm(x.shape[1], device=x.device, dtype=x.dtype)
    entrance.started = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some are recomputed under "constant" is no finding
        # Nothing mends what an inverse gets wrong: that is to show in the gradients.
        chain = Chain(entrance, *stages, memory=mode, drift="ignore")
    x = x.clone().requires_grad_()
    given = tuple(context.clone().requires_grad_() for context in given)
    wanted = dict(zip(("the input", "the context"), (x, *given), strict=False))
    wanted |= {f"a stage before ({name})": p for name, p in entrance.named_parameters()}
    wanted |= {name: p for name, p in module.named_parameters() if p.requires_grad}

    def loss() -> Tensor:
        y, log_det = chain(x, *given)
        values = _flat(y)
        return (values * torch.randn_like(values)).sum() + (
            log_det * torch.randn_like(log_det)
        ).sum()

    gradients = torch.autograd.grad(
        with_seed(loss, _SEED), list(wanted.values()), allow_unused=True, materialize_grads=False
    )
    return dict(zip(wanted, gradients, strict=True))


def _flat(y: Any) -> Tensor:
    """Put an output, or a tuple of them, in one tensor of shape ``(N, D)``."""
    parts: tuple[Tensor, ...] = (y,) if isinstance(y, Tensor) else tuple(y)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        raise ValueError(f"Shape {tuple(actual.shape)}, but {tuple(expected.shape)} is needed.")
    if expected.numel() == 0:
        return 0.0
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))
