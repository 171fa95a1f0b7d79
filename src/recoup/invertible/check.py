"""A report on whether a module keeps the contract of `InvertibleModule`.

NOTE [ Gradients of the log-determinant of an inverse ]

An inverse may round (`Dequantize`) or iterate, so that its own Jacobian is of no use. But x is
known, and by the implicit function theorem a step of Newton's method from it, which does not move
it, has the derivatives of the inverse: ``x(y) = x - J^-1 (F(x) - y)``, J the Jacobian of forward F
at x, taken as a constant. The log-determinant of the inverse is that of forward at ``x(y)``, with
the other sign.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from recoup._arguments import check_real, check_type, check_whole
from recoup._core.devices import with_seed
from recoup._core.modules import Direction, check_pair
from recoup._core.tensors import check_tensors
from recoup.invertible.chain import Chain
from recoup.invertible.channels import ActNorm
from recoup.invertible.contract import InvertibleModule, as_tuple

_MODES = ("sqrt", "constant")  # each compared with "linear"
_MOST_SAMPLES = 2  # for the Jacobian: one backward pass per dimension
_SEED = 0

Contexts = tuple[Tensor, ...]  # empty, or a context
Pairs = dict[str, tuple[Tensor | None, Tensor | None]]  # actual and expected; None: no gradient

Comparisons = dict[str, Callable[[], Pairs]]  # by their names

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
    is in. Each log-determinant, and its gradients for the input, the context and every parameter,
    are compared with ``slogdet`` of autograd's Jacobian, for the first two samples, at one backward
    pass a dimension and by second derivatives of the module.

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
        name = type(module).__name__
        raise ValueError(f"`context` is given, but {name} takes none. Leave it out.")
    check_whole(max_dims=max_dims)
    check_real(tolerance=tolerance)
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"`tolerance` is {tolerance}, but must be at least 0 and finite.")
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
        finding = Finding("what forward returns", math.inf, tolerance, str(error))
        return InvertibleReport(name, (finding,))
    still = copy.deepcopy(started).eval()
    for part in still.modules():
        if isinstance(part, Chain):
            part.memory = "linear"  # the Jacobian runs backward many times over one graph
    comparisons = {**_round_trips(still, x, contexts), **_log_dets(still, x, contexts)}
    for mode in _MODES:
        comparisons[f'gradients, "{mode}" and "linear"'] = _of_memory(started, x, contexts, mode)
    findings = [_finding(of, tolerance, compare) for of, compare in comparisons.items()]
    return InvertibleReport(name, tuple(findings))


def _finding(name: str, tolerance: float, compare: Callable[[], Pairs]) -> Finding:
    """Return the largest error of what `compare` returns, with a note on which values are wrong."""
    try:
        pairs = compare()
        used = {
            key: pair for key, pair in pairs.items() if pair[0] is not None or pair[1] is not None
        }
        errors = {key: _error(*pair) for key, pair in used.items()}
    except Exception as raised:  # noqa: BLE001 - the module under test may raise anything
        return Finding(name, math.inf, tolerance, f"{type(raised).__name__}: {raised}")
    wrong = [key for key, error in errors.items() if not error <= tolerance]
    said = {
        "wrong": [key for key in wrong if pairs[key][0] is not None],
        "no gradient, though it depends on": [key for key in wrong if pairs[key][0] is None],
        "no gradient in any mode": [key for key in pairs if key not in used],
    }
    note = "; ".join(f"{words}: {', '.join(keys)}" for words, keys in said.items() if keys)
    # Unlike that of Python, this maximum is NaN if any error is.
    largest = torch.tensor([0.0, *errors.values()], dtype=torch.float64).max()
    return Finding(name, float(largest), tolerance, note)


def _error(actual: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference, where None stands for zeros."""
    if actual is None or expected is None:
        there = expected if actual is None else actual
        return 0.0 if there is None else _error(there, torch.zeros_like(there))
    if actual.shape != expected.shape:
        got, needed = tuple(actual.shape), tuple(expected.shape)
        raise ValueError(f"The result has shape {got}, but must have {needed}.")
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1))


def _run(module: InvertibleModule, direction: Direction, value: Any, contexts: Contexts) -> Any:
    """Run `module` under the seed of all comparisons; return a value and its log-determinant."""
    call = module if direction == "forward" else module.inverse
    returned = with_seed(lambda: call(value, *contexts), _SEED)
    num_early = module.num_early if direction == "forward" else 0
    num_samples = len(as_tuple(value)[0])
    return check_pair(returned, num_samples, direction, type(module).__name__, num_early=num_early)


def _round_trips(module: InvertibleModule, x: Tensor, contexts: Contexts) -> Comparisons:
    with torch.no_grad():
        y, log_det = _run(module, "forward", x, contexts)

    @torch.no_grad()
    def back() -> tuple[Tensor, Tensor]:
        return _run(module, "inverse", y, contexts)

    @torch.no_grad()
    def again() -> Any:
        return _run(module, "forward", back()[0], contexts)[0]

    return {
        "forward, then inverse": lambda: {"the input": (back()[0], x)},
        "inverse, then forward": lambda: {"the output": (_flat(again()), _flat(y))},
        "log-det of forward and inverse": lambda: {"the log-det": (-back()[1], log_det)},
    }


def _log_dets(module: InvertibleModule, x: Tensor, contexts: Contexts) -> Comparisons:
    """Compare with ``slogdet`` of autograd's Jacobian, for the first samples."""
    first = [each[:_MOST_SAMPLES].clone().requires_grad_() for each in (x, *contexts)]
    x, contexts = first[0], tuple(first[1:])
    others = dict(zip(("the context",), contexts, strict=False))
    others |= {name: p for name, p in module.named_parameters() if p.requires_grad}

    def forward(x: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return what forward returns, and the Jacobians ``(N, D, D)``."""
        y, log_det = _run(module, "forward", x, contexts)
        values = _flat(y).unbind(1)
        if len(values) != x[0].numel():
            raise ValueError(
                f"`forward` maps {x[0].numel()} numbers a sample to {len(values)}; an invertible "
                "layer keeps their number."
            )
        rows = [
            torch.autograd.grad(value.sum(), x, create_graph=True, materialize_grads=True)[0]
            for value in values
        ]
        return y, log_det, torch.stack([row.flatten(1) for row in rows], 1)

    def values() -> Pairs:
        _, stated, jacobian = forward(x)
        return {"the log-det": (stated, _linalg.slogdet(jacobian).logabsdet)}

    def gradients() -> Pairs:
        _, stated, jacobian = forward(x)
        return _compared({"the input": x, **others}, stated, _linalg.slogdet(jacobian).logabsdet)

    def gradients_of_inverse() -> Pairs:
        y, _, jacobian = forward(x)
        latent = _flat(y).detach().requires_grad_()
        sizes = [part[0].numel() for part in as_tuple(y)]
        pieces = cast("Sequence[Tensor]", latent.split(sizes, dim=1))
        parts = [piece.view_as(part) for piece, part in zip(pieces, as_tuple(y), strict=True)]
        given = tuple(parts) if isinstance(y, tuple) else parts[0]
        _, stated = _run(module, "inverse", given, contexts)
        off = (_flat(y) - latent).unsqueeze(2)  # zeros, with derivatives
        step: Tensor = _linalg.solve(jacobian.detach(), off)
        moved = x.detach() - step.view_as(x)
        true = -_linalg.slogdet(forward(moved)[2]).logabsdet
        return _compared({"the input": latent, **others}, stated, true)

    return {
        "log-det and autograd's Jacobian": values,
        "gradient of the log-det": gradients,
        "gradient of the inverse's log-det": gradients_of_inverse,
    }


def _of_memory(
    module: InvertibleModule, x: Tensor, contexts: Contexts, mode: str
) -> Callable[[], Pairs]:
    """Compare the gradients of a step in a memory mode with those in "linear"."""

    def gradients(memory: str) -> dict[str, Tensor | None]:
        trained = copy.deepcopy(module)
        # A stage in front, so that the input of `module` too must be computed by inversion.
        entrance = ActNorm(x.shape[1], device=x.device, dtype=x.dtype)
        entrance.started = True
        stages = [*trained] if isinstance(trained, Chain) else [trained]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that some are recomputed is no finding
            # The guard must not repair a wrong inverse, so that the gradients show it.
            chain = Chain(entrance, *stages, memory=memory, drift="ignore")
        given = [each.clone().requires_grad_() for each in (x, *contexts)]
        leaves = dict(zip(("the input", "the context"), given, strict=False))
        leaves |= {f"a stage before ({name})": p for name, p in entrance.named_parameters()}
        leaves |= {name: p for name, p in trained.named_parameters() if p.requires_grad}

        def loss() -> Tensor:
            y, log_det = chain(*given)
            values = torch.cat([_flat(y), log_det.unsqueeze(1)], dim=1)
            return (values * torch.randn_like(values)).sum()

        return _gradients_of(with_seed(loss, _SEED), leaves)

    def compare() -> Pairs:
        expected, actual = gradients("linear"), gradients(mode)
        return {name: (actual[name], expected[name]) for name in expected}

    return compare


def _compared(leaves: Mapping[str, Tensor], stated: Tensor, true: Tensor) -> Pairs:
    """Pair the gradients of a stated log-determinant with those of the true one."""
    actual = _gradients_of(stated, leaves)
    # So that each has a true gradient, which may be zero.
    expected = _gradients_of(true + sum(0 * leaf.sum() for leaf in leaves.values()), leaves)
    return {name: (actual[name], expected[name]) for name in leaves}


def _gradients_of(output: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    if not output.requires_grad:
        return dict.fromkeys(leaves)
    options: Any = {"retain_graph": True, "allow_unused": True}
    found = torch.autograd.grad(output.sum(), list(leaves.values()), **options)
    return dict(zip(leaves, found, strict=True))


def _flat(y: Any) -> Tensor:
    """Join an output, or a tuple of them, into one tensor of shape ``(N, D)``."""
    return torch.cat([part.flatten(1) for part in as_tuple(y)], dim=1)
