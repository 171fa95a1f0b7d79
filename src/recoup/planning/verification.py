"""A comparison of planned steps with the plain step.

NOTE [ Compared steps ]

Rule 1. Every rehearsal begins with the same state and the same random streams. So the gradients of
        parameters and of example arguments, the buffers and the random streams must be those of the
        plain step.
Rule 2. The plain step is run once, if there is room for its residuals. Otherwise rehearsals are
        compared with the measured step, which recomputes every block and keeps no products. An
        error that a block makes in every recomputation is then not detected.
Rule 3. Sketches are compared, since a second set of gradients may not fit. The sketch of a tensor
        is its norm, its largest entry and sums under random signs, in which two different tensors
        agree only by chance. Sketches are taken after the bytes of the step have been read.
Rule 4. Sketches may differ by the rounding of kernels, relative to the tensor, or to a part of the
        largest one: summands may have cancelled in a small gradient. Buffers are no measure for
        gradients, which may be much smaller. If sketches differ by more, the plain step is
        run once more. The distance between its two runs (from kernels that sum in no fixed order)
        is then allowed as well, as far as it can be rounding.
Rule 5. Where a plan inverts blocks, the tolerance of its drift guard is allowed, relative to the
        norm of each gradient.
Rule 6. Parts in tiles sum in another order than the plain step, in products whose sums are long.
        That is allowed more rounding. Rows that are not independent differ by a thousand times it.
Rule 7. Codes of compiled blocks round otherwise than each other and than the blocks' own, and all
        that follows may amplify that. So the step of the blocks' own code is run once more, with
        each output of a block off by one rounding error. What that moves is allowed several times,
        since a block rounds several times, but never more than an eighth of a gradient. Whatever
        it moves, a thousandth of a gradient is allowed: rounding may turn over the sign of an entry
        before a ReLU, and with it a whole summand. Sums within a block are allowed the rounding of
        Rule 6.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recoup._core.generators import States, generator_states, same_states
from recoup.errors import ReplayError

__all__ = ["DifferentStepError", "Outcome", "Verification", "has_room", "outcome_of"]

_NUM_SUMS = 8
_ROW = 2**12  # entries whose signs are drawn; rows differ by a factor
_NUM_ROWS = 64  # at a time
_GOLDEN = (math.sqrt(5) - 1) / 2
_ROUNDING = 16.0  # in units of the eps of the type
_ROUNDING_OF_SUMS = 256.0  # where products over a large vocabulary are cut in tiles
_MOST = 2.0**-6  # a larger relative difference is not rounding, even in 16-bit types
_MOST_OF_SUMS = 2.0**-4  # in 16-bit types, where sums are taken in another order
_MOST_GROWTH = 2.0**-3
_EPS_OF_16_BITS = 2.0**-10
_OWN_SPREAD = 4.0
_NUDGES = 8.0
_TURNED_OVER = 2.0**-10  # of a gradient: a summand whose sign rounding turns over
_SUMMANDS = 2.0**-4  # of the largest norm: summands may have cancelled in a small gradient


class DifferentStepError(ReplayError):
    """The results of a planned step differ from those of the plain step."""


class Sketch(NamedTuple):
    """A few numbers that distinguish a tensor from others.

    Args:
        shape: the shape of the tensor; None stands for no gradient.
        norm: the norm of its entries.
        numbers: sums under random signs, and the largest entry.
        eps: the machine epsilon of its type; 0 for integers.
    """

    shape: tuple[int, ...] | None
    norm: float
    numbers: tuple[float, ...]
    eps: float


class Outcome(NamedTuple):
    """Sketches of everything that a step changed.

    Args:
        sketches: the sketches of gradients and buffers, by name.
        states: the states of the random generators.
    """

    sketches: dict[str, Sketch]
    states: States


def outcome_of(model: nn.Module, given: Sequence[Tensor | None]) -> Outcome:
    """Return the outcome of a step from `model` and from `given`, the argument gradients."""
    states = generator_states()
    found: dict[str, Sketch] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found[f"the gradient of parameter `{name}`"] = _sketch(parameter.grad)
        for place, gradient in enumerate(given):
            found[f"the gradient of example argument {place}"] = _sketch(gradient)
        for name, buffer in model.named_buffers():
            found[f"buffer `{name}`"] = _sketch(buffer)
    return Outcome(found, states)


class Verification:
    """The comparison of rehearsals of a step with an expected outcome."""

    def __init__(self) -> None:
        self._expected: Outcome | None = None
        self._is_plain = False
        self._rounding, self._least_eps = _ROUNDING, 0.0
        self._spread: dict[str, float] = {}
        self._growth: dict[str, float] = {}  # relative

    @property
    def has_expected(self) -> bool:
        """Whether there is an expected outcome."""
        return self._expected is not None

    @property
    def is_plain(self) -> bool:
        """Whether the expected outcome is that of the plain step (See Rule 2)."""
        return self._is_plain

    def allow_other_sums(self, eps: float) -> None:
        """Allow the rounding of sums that are taken in another order (See Rule 6).

        Args:
            eps: the machine epsilon of what is summed, which may be larger than that of the sums.
        """
        self._rounding, self._least_eps = _ROUNDING_OF_SUMS, eps

    def expect(self, outcome: Outcome, *, is_plain: bool) -> None:
        """Set the expected outcome.

        Args:
            outcome: the outcome of a step.
            is_plain: whether nothing was recomputed in that step. Its outcome then replaces that of
                a step with recomputation.
        """
        if self._expected is None or is_plain > self._is_plain:
            self._expected, self._is_plain = outcome, is_plain

    def expect_again(self, outcome: Outcome) -> None:
        """Allow the distance of `outcome`, from another run of the expected step (See Rule 4)."""
        if self._expected is None:
            return
        for name, sketch in outcome.sketches.items():
            spread = _distance(sketch, self._expected.sketches[name])
            self._spread[name] = max(self._spread.get(name, 0.0), spread)

    def allow_growth(self, outcome: Outcome, nudged: Outcome) -> None:
        """Allow what rounding errors grow to (See Rule 7).

        Args:
            outcome: the outcome of a step.
            nudged: its outcome with each output of a block off by one rounding error.
        """
        for name, sketch in outcome.sketches.items():
            if sketch.norm > 0:
                moved = _NUDGES * _distance(sketch, nudged.sketches[name]) / sketch.norm
                least = _TURNED_OVER if _is_gradient(name) else 0.0
                self._growth[name] = min(max(moved, least), _MOST_GROWTH)

    def inherit(self, other: Verification) -> None:
        """Allow what rounding grows to as another verification of such a step does."""
        self._growth |= other._growth

    def difference(self, outcome: Outcome, tolerance: float = 0.0) -> str | None:
        """Return a message if `outcome` differs from the expected one, else None.

        Args:
            outcome: the outcome of a planned step.
            tolerance: the relative difference that inverses may make (See Rules 4 and 5).
        """
        if self._expected is None:
            return None
        return self._first_difference(outcome, self._expected, tolerance)

    def _first_difference(
        self, outcome: Outcome, expected: Outcome, tolerance: float
    ) -> str | None:
        scales = _scales(expected)
        for name, sketch in outcome.sketches.items():
            other, scale = expected.sketches[name], scales[name]
            eps = max(sketch.eps, self._least_eps) if sketch.eps else 0.0
            most = _MOST_OF_SUMS if self._least_eps >= _EPS_OF_16_BITS else _MOST
            spread = self._rounding * eps * scale + _OWN_SPREAD * self._spread.get(name, 0.0)
            distance = _distance(sketch, other)
            allowed = self._growth.get(name, 0.0) * other.norm
            if _is_gradient(name):
                allowed = max(allowed, tolerance * scale)
            if distance > max(min(spread, most * scale), allowed):
                return self._message(name, f" by about {distance:.2g} (of {other.norm:.2g})")
        if not same_states(outcome.states, expected.states):
            return self._message("the random stream")
        return None

    def _message(self, name: str, by: str = "") -> str:
        which = "plain" if self._is_plain else "measured"
        return (
            f"A planned step of the model differs from the {which} one in {name}{by}. A block "
            "computes something else when it runs again (does it read Python state that changes, "
            "or a clock, or write to what it is given?), or an operator in it is not what it says, "
            "or, where it is inverted, its inverse does not undo it. "
            "Leave that block out of `blocks`."
        )


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether `num_bytes` can be allocated, according to the system."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return num_bytes <= free + idle
    free_bytes = [_free_of_system(), _free_of_container()]
    return all(free is None or num_bytes <= free for free in free_bytes)


def _free_of_system() -> int | None:
    found = [line.split() for line in _read("/proc/meminfo").splitlines()]
    return next((1024 * int(words[1]) for words in found if words[0] == "MemAvailable:"), None)


def _free_of_container() -> int | None:
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""  # not Linux, or in no container


def _is_gradient(name: str) -> bool:
    return name.startswith("the gradient")


def _scales(outcome: Outcome) -> dict[str, float]:
    """Return what differences are relative to, by name.

    Buffers may be much larger than gradients (positions, counts), and say nothing of them.
    """
    largest = {True: 0.0, False: 0.0}  # of gradients, and of buffers
    for name, sketch in outcome.sketches.items():
        if sketch.eps and sketch.norm < math.inf:
            largest[_is_gradient(name)] = max(largest[_is_gradient(name)], sketch.norm)
    return {
        name: max(sketch.norm, _SUMMANDS * largest[_is_gradient(name)])
        for name, sketch in outcome.sketches.items()
    }


def _distance(a: Sketch, b: Sketch) -> float:
    if a.shape != b.shape:
        return math.inf
    return max((_between(x, y) for x, y in zip(a.numbers, b.numbers, strict=True)), default=0.0)


def _between(x: float, y: float) -> float:
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    distance = abs(x - y)
    return math.inf if math.isnan(distance) else distance


def _sketch(tensor: Tensor | None) -> Sketch:
    if tensor is None:
        return Sketch(None, 0.0, (), 0.0)
    eps = torch.finfo(tensor.dtype).eps if _is_inexact(tensor) else 0.0
    sums, others = None, None
    num_rows = 0
    for rows in _rows(_parts(tensor)):
        places = torch.arange(num_rows, num_rows + len(rows), device=rows.device)
        num_rows += len(rows)
        factors = 1 + (places.to(torch.float64) * _GOLDEN).frac()  # so that swaps of rows show
        more = factors @ (rows @ _signs(rows.device)[: rows.shape[1]])
        sums = more if sums is None else sums + more
        both = torch.stack([rows.square().sum(), rows.abs().max()])
        others = both if others is None else torch.cat([others, both])
    if sums is None or others is None:
        return Sketch(tuple(tensor.shape), 0.0, (), eps)
    largest, norm = others[1::2].max(), others[::2].sum().sqrt()
    numbers = [float(number) for number in torch.cat([sums, torch.stack([largest, norm])])]
    return Sketch(tuple(tensor.shape), numbers[-1], tuple(numbers[:-1]), eps)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors that a gradient consists of."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if local.layout is torch.sparse_coo:
        whole = local.coalesce()
        yield from (whole.indices(), whole.values())
    elif local.layout is torch.strided:
        yield torch.view_as_real(local) if local.is_complex() else local
    else:
        yield local.to_dense()


def _rows(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield matrices of `_ROW` columns; the rest of a part follows as one shorter row."""
    for part in parts:
        flat = part.detach().reshape(-1)
        whole = len(flat) // _ROW * _ROW
        for start in range(0, whole, _NUM_ROWS * _ROW):
            stop = min(start + _NUM_ROWS * _ROW, whole)
            yield _double(flat[start:stop]).view(-1, _ROW)
        if whole < len(flat):
            yield _double(flat[whole:])[None]


def _double(values: Tensor) -> Tensor:
    has_doubles = values.device.type in ("cpu", "cuda")
    return (values if has_doubles else values.cpu()).to(torch.float64)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20)  # leaves the default one to the model
    drawn = torch.randint(
        0, 2, (_ROW, _NUM_SUMS), generator=generator, dtype=torch.float64, device="cpu"
    )
    return (2 * drawn - 1).to(device)
