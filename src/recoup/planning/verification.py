"""A comparison of planned steps with the plain step.

NOTE [ Compared steps ]

Rule 1. Every rehearsal begins with the same state and the same random streams. So the gradients of
        parameters and of example arguments, the buffers and the random streams, those of Python and
        numpy too, must be those of the plain step. What is not finite there is not compared.
Rule 2. The plain step is run once, if there is room for its residuals. Otherwise rehearsals are
        compared with the measured step, which recomputes every block and keeps no products. An
        error that a block makes in every recomputation is then not detected.
Rule 3. Sketches are compared (See NOTE [ A sketch ]), since a second set of gradients may not fit.
        They are taken after the bytes of the step have been read.
Rule 4. Sketches may differ by the rounding of kernels, relative to the tensor, or to a part of the
        largest one: summands may have cancelled in a small gradient. If they differ by more, the
        plain step is run once more. The largest distance between its two runs (from kernels that
        sum in no fixed order) is then allowed as well, as far as it can be rounding: of every
        tensor, since it is chance which of them a run moves. In 16 bits that can be several
        hundredths.
Rule 5. Where a plan inverts blocks, the tolerance of its drift guard is allowed, relative to the
        norm of each gradient.
Rule 6. Parts in tiles, and codes of compiled blocks, sum in another order. That is allowed more
        rounding. Rows that are not independent differ by a thousand times it.
Rule 7. All that follows a compiled block may amplify what it rounds. So the step of the blocks' own
        code is run once more, with each output of a block off by one rounding error. What that
        moves is allowed several times, since a block rounds several times, but never more than an
        eighth of a gradient. A thousandth is always allowed: rounding may turn over the sign of an
        entry before a ReLU, and with it a whole summand.
"""

from __future__ import annotations

import math
import pickle
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recoup._core import devices
from recoup._core.devices import States, generator_states, same_states
from recoup._core.sketch import numbers_of, sketch_of
from recoup._core.tensors import has_values, is_without_values
from recoup.errors import ReplayError

_ROUNDING = 32.0  # in units of the eps of the type; half of it is that of a sketch
_ROUNDING_OF_SUMS = 256.0  # where products over a large vocabulary are cut in tiles
_MOST = 2.0**-6  # a larger relative difference is not rounding, even in 16-bit types
_MOST_OF_SUMS = 2.0**-4
_MOST_OF_HALVES = 2.0**-4  # where two runs of the plain step differ
_MOST_GROWTH = 2.0**-3
_OWN_SPREAD = 4.0
_NUDGES = 8.0
_TURNED_OVER = 2.0**-10  # of a gradient: a summand whose sign rounding turns over
_SUMMANDS = 2.0**-4  # of the largest norm: summands may have cancelled in a small gradient


class DifferentStepError(ReplayError):
    """The results of a planned step differ from those of the plain step."""


class Summary(NamedTuple):
    """A tensor in a few numbers.

    Args:
        norm: the norm of its entries.
        sketch: the numbers of the sketches of its parts; none for no gradient.
        eps: the machine epsilon of its type; 0 for integers.
    """

    norm: float = 0.0
    sketch: tuple[float, ...] = ()
    eps: float = 0.0


class Outcome(NamedTuple):
    """Everything that a step changed, by name where it has one.

    The streams are those of Python and numpy, as far as they are in use.
    """

    gradients: dict[str, Summary]
    buffers: dict[str, Summary]
    states: States
    streams: dict[str, bytes]

    @property
    def of_tensors(self) -> dict[str, Summary]:
        """All summaries."""
        return self.gradients | self.buffers

    def has_streams_of(self, other: Outcome) -> bool:
        """Whether the random streams were left where those of another outcome were."""
        both = self.streams.keys() & other.streams.keys()
        alike = all(self.streams[name] == other.streams[name] for name in both)
        return alike and same_states(self.states, other.states)


def outcome_of(
    model: nn.Module, given: Sequence[Tensor | None], written: Sequence[nn.Parameter] = ()
) -> Outcome:
    """Return the outcome of a step; `given` are gradients of arguments, `written` parameters."""
    states, streams = generator_states(), {"Python": pickle.dumps(random.getstate())}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        streams["numpy"] = pickle.dumps(numpy.get_state())
    with torch.no_grad():
        gradients = {
            f"the gradient of parameter `{name}`": _summary(parameter.grad)
            for name, parameter in model.named_parameters()
        }
        for place, gradient in enumerate(given):
            gradients[f"the gradient of example argument {place}"] = _summary(gradient)
        buffers = {f"buffer `{name}`": _summary(each) for name, each in model.named_buffers()}
        for place, parameter in enumerate(written):
            buffers[f"written parameter {place}"] = _summary(parameter)
    return Outcome(gradients, buffers, states, streams)


class Verification:
    """The comparison of rehearsals of a step with an expected outcome.

    `growth` is what rounding errors grow to in each tensor, relative (See Rule 7); `is_plain` says
    whether the expected outcome is that of the plain step (See Rule 2).
    """

    def __init__(self, growth: Mapping[str, float] | None = None) -> None:
        self.growth = dict(growth or {})
        self.expected: Outcome | None = None
        self.is_plain = False
        self._rounding, self._most, self._least_eps = _ROUNDING, _MOST, 0.0
        self._spread = 0.0  # relative

    def allow_other_sums(self, eps: float) -> None:
        """Allow the rounding of sums that are taken in another order (See Rule 6).

        The `eps` of what is summed may be larger than that of the sums.
        """
        self._rounding, self._most, self._least_eps = _ROUNDING_OF_SUMS, _MOST_OF_SUMS, eps

    def expect(self, outcome: Outcome, *, is_plain: bool) -> None:
        """Set the expected outcome; that of the plain step replaces that of another one."""
        if self.expected is None or is_plain > self.is_plain:
            self.expected, self.is_plain = outcome, is_plain

    def expect_again(self, outcome: Outcome) -> None:
        """Allow the distance of `outcome`, from another run of the expected step (See Rule 4)."""
        if self.expected is None:
            return
        for expected, again in zip(self.expected[:2], outcome[:2], strict=True):
            for name, scale in _scales(expected).items():
                if expected[name].eps and scale:
                    spread = _distance(expected[name], again[name]) / scale
                    if spread <= self._most_noise(expected[name].eps):
                        self._spread = max(self._spread, spread)

    def allow_growth(self, outcome: Outcome, nudged: Outcome) -> None:
        """Allow what a rounding error in each output of a block grows to (See Rule 7)."""
        moved = nudged.of_tensors
        for name, summary in outcome.of_tensors.items():
            if summary.norm > 0:
                growth = _NUDGES * _distance(summary, moved[name]) / summary.norm
                least = _TURNED_OVER if name in outcome.gradients else 0.0
                self.growth[name] = min(max(growth, least), _MOST_GROWTH)

    def difference(self, outcome: Outcome, tolerance: float = 0.0) -> str | None:
        """Return a message if `outcome` differs from the expected one, else None (See Rule 5)."""
        expected = self.expected
        if expected is None:
            return None
        found = self._first(outcome.gradients, expected.gradients, tolerance)
        # Buffers may be much larger than gradients (positions, counts), and say nothing of them.
        found = found or self._first(outcome.buffers, expected.buffers, 0.0)
        if found is None and not outcome.has_streams_of(expected):
            found = "the random stream"
        which = "plain" if self.is_plain else "measured"
        return found and (
            f"A planned step of the model differs from the {which} one in {found}. A block "
            "computes something else when it runs again (does it read Python state that changes, "
            "or a clock, or write to what it is given?), or an operator in it is not what it says, "
            "or, where it is inverted, its inverse does not undo it: leave that block out of "
            "`blocks`. Or the step draws from a generator that no module, loss or argument holds."
        )

    def _most_noise(self, eps: float) -> float:
        """Return the largest distance of two runs that can be rounding, relative."""
        is_half = eps >= torch.finfo(torch.half).eps
        return max(self._most, _MOST_OF_HALVES) if is_half else self._most

    def _first(
        self, summaries: dict[str, Summary], expected: dict[str, Summary], tolerance: float
    ) -> str | None:
        """Return the name of the first tensor that differs, and by how much."""
        scales = _scales(expected)
        for name, summary in summaries.items():
            norm, scale = expected[name].norm, scales[name]
            eps = max(summary.eps, self._least_eps) if summary.eps else 0.0
            spread = min(_OWN_SPREAD * self._spread, self._most_noise(eps))
            noise = max(min(self._rounding * eps, self._most), spread)
            allowed = max(noise if eps else 0.0, tolerance) * scale
            allowed = max(allowed, self.growth.get(name, 0.0) * norm)
            distance = _distance(summary, expected[name])
            if math.isfinite(norm) and distance > allowed:
                return f"{name} by about {distance:.2g} (of {norm:.2g})"
        return None


def _scales(summaries: dict[str, Summary]) -> dict[str, float]:
    """Return what rounding is relative to, of each tensor (See Rule 4)."""
    norms = [each.norm for each in summaries.values() if each.eps and each.norm < math.inf]
    least = _SUMMANDS * max(norms, default=0.0)
    return {name: max(each.norm, least) for name, each in summaries.items()}


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether the system has room for a step that takes so many bytes, and for fragmentation."""
    if is_without_values():
        return True
    num_bytes += num_bytes // 4
    if devices.is_accelerator(device):
        return num_bytes <= devices.free_bytes(device)
    lines = _read("/proc/meminfo").splitlines()
    of_system = [1024 * int(each.split()[1]) for each in lines if each.startswith("MemAvailable:")]
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    of_container = [int(limit) - int(used)] if limit.isdigit() and used.isdigit() else []
    return all(num_bytes <= free for free in of_system + of_container)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""  # not Linux, or in no container


def _distance(a: Summary, b: Summary) -> float:
    if len(a.sketch) != len(b.sketch):
        return math.inf
    distance = math.dist(a.sketch, b.sketch)
    return math.inf if math.isnan(distance) else distance


def _summary(tensor: Tensor | None) -> Summary:
    if tensor is None or not has_values(tensor):
        return Summary()
    values: Any = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    if values.layout is not torch.strided:  # sparse
        values = values.to_sparse().coalesce()
        parts = [values.indices(), values := values.values()]
    else:
        parts = [values]
    is_exact = not (values.is_floating_point() or values.is_complex())
    wide = values.float() if is_exact or values.dtype.itemsize < 4 else values
    norm = float(wide.norm())  # a sketch may be much shorter where all entries are alike
    sketches = [numbers_of(sketch) for sketch in map(sketch_of, parts) if sketch is not None]
    numbers = tuple(number for sketch in sketches for number in sketch)
    eps = 0.0 if is_exact else torch.finfo(values.dtype).eps
    return Summary(norm, numbers, eps)
