"""The cost of a stage of a chain, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar, cast

from recoup._arguments import check_flag, check_type, is_real, is_whole, shown

_T = TypeVar("_T")
_MOST = 2**63 - 1  # bytes


@dataclass(frozen=True, slots=True)
class SelectiveTape:
    """A tape that keeps a part of the whole tape of a stage; backward recomputes the rest.

    Args:
        tape_bytes: bytes of this tape, with the stage's input and without its output.
        seconds: the time that backward pays for it.
        tape_run_bytes: as in `Cost`, for a run that makes this tape.
        reverse_bytes: as in `Cost`, for a backward from this tape.
        stopped_run_bytes: as `tape_run_bytes`, for a run whose output is not needed, so that it
            ends with the tape; None if it takes as much.

    Raises:
        ValueError: a cost is negative or not finite.

    Example:
        >>> from recoup.schedules import SelectiveTape
        >>> SelectiveTape(tape_bytes=5, seconds=0.5).reverse_bytes
        0
    """

    tape_bytes: int
    seconds: float
    tape_run_bytes: int = 0
    reverse_bytes: int = 0
    stopped_run_bytes: int | None = None

    def __post_init__(self) -> None:
        require_time("seconds", self.seconds)
        for name in ("tape_bytes", "tape_run_bytes", "reverse_bytes"):
            require_size(name, getattr(self, name))
        if self.stopped_run_bytes is not None:
            require_size("stopped_run_bytes", self.stopped_run_bytes)

    def run_bytes(self, *, goes_on: bool) -> int:
        """Return the most bytes beyond the stage's input of a run to its output, or to the tape."""
        stopped = self.stopped_run_bytes
        return self.tape_run_bytes if goes_on or stopped is None else stopped


@dataclass(frozen=True, slots=True)
class Results:
    """Results of operators that a run without a tape may keep for the run that makes the tape.

    Args:
        num_bytes: their bytes.
        seconds: the time of that later run, which is given them.
        taped_bytes: those of the bytes that the tape holds, too.
        holds_output: whether the stage's output, if the tape holds it, is held with them, so that
            the later run need not make it. It is the input of the stage after this one, which
            counts it as long as it keeps that input itself: it does not if it is inverted or if
            its input is offloaded, so such results are not chosen then.

    Raises:
        ValueError: a cost is negative or not finite, or the tape holds more of them than there are.

    Example:
        >>> from recoup.schedules import Results
        >>> Results(num_bytes=4, seconds=0.5).taped_bytes
        0
    """

    num_bytes: int
    seconds: float
    taped_bytes: int = 0
    holds_output: bool = False

    def __post_init__(self) -> None:
        require_time("seconds", self.seconds)
        check_flag(holds_output=self.holds_output)
        for name in ("num_bytes", "taped_bytes"):
            require_size(name, getattr(self, name))
        if self.taped_bytes > self.num_bytes:
            raise ValueError(
                f"`taped_bytes` is {self.taped_bytes}, but it must be at most `num_bytes` "
                f"({self.num_bytes}): the tape holds a part of the results"
            )


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one stage. By default, only time, states and tapes count.

    Args:
        seconds: time of one forward run, in any unit of time that is the same for all stages.
        state_bytes: bytes of the stage's input.
        tape_bytes: bytes of the stage's tape, its input included. Its output is not counted, even
            if the tape holds it: the stage after this one counts it.
        run_bytes: the most that a run without a tape has alive at one time beyond the stage's
            input: temporaries and output.
        tape_run_bytes: the same for a run with a tape. An inverse is assumed to need as much beyond
            its input.
        reverse_bytes: the most that backward has alive at one time beyond the tape and beyond
            what was alive before.
        left_bytes: bytes that backward leaves alive: gradients of the stage's parameters, plus that
            of its input, minus that of its output. It may be negative.
        between_bytes: bytes that code between the stage before and this one keeps, from before this
            stage is first run until it is reversed.
        is_linked: whether the input is the output of the stage before, so that it can be made by
            running that stage again, and that output by inverting this stage. It has no effect on
            the first stage.
        is_fixed: whether the stage can only be taped, when it is first passed.
        is_invertible: whether the stage can be inverted.
        invert_seconds: time of one inverse, which makes the tape on its way.
        invert_bytes: the most that an inverse, and the backward after it, have alive at one time
            beyond the stage's output; None to count `tape_run_bytes`, and then the whole tape.
        offload_seconds: time to move the input to host memory and back; None if that is impossible.
        variants: other tapes, for a stage that is taped in the sweep.
        results: what the run of the sweep may keep where the stage is taped in backward.
        again: the tape that a run in backward makes, if it is another one than the whole (a stage
            of which other code runs where it is run again); None for the whole one.
        between_run_bytes: the most temporary memory of code before the stage, in the sweep, beyond
            the stage's input and `between_bytes`.
        lent_bytes: how much larger `reverse_bytes` is if the stage before is taped, because that
            tape holds memory that would otherwise be freed while this stage is reversed.
        cached_bytes: bytes that a run without a tape leaves in a cache until the sweep has ended
            (weights that autocast has cast); a tape counts them itself.

    Raises:
        ValueError: a cost is negative, not finite or no whole number of bytes, a flag is no bool,
            or a tape is smaller than the input.

    Example:
        >>> from recoup.schedules import Cost
        >>> Cost(seconds=1.0, state_bytes=1, tape_bytes=17).tape_bytes
        17
    """

    seconds: float
    state_bytes: int
    tape_bytes: int
    run_bytes: int = 0
    tape_run_bytes: int = 0
    reverse_bytes: int = 0
    left_bytes: int = 0
    between_bytes: int = 0
    is_linked: bool = True
    is_fixed: bool = False
    is_invertible: bool = False
    invert_seconds: float = 0.0
    offload_seconds: float | None = None
    variants: tuple[SelectiveTape, ...] = ()
    results: tuple[Results, ...] = ()
    lent_bytes: int = 0
    between_run_bytes: int = 0
    again: SelectiveTape | None = None
    invert_bytes: int | None = None
    cached_bytes: int = 0

    def __post_init__(self) -> None:
        check_flag(
            is_linked=self.is_linked, is_fixed=self.is_fixed, is_invertible=self.is_invertible
        )
        require_time("seconds", self.seconds)
        require_time("invert_seconds", self.invert_seconds)
        if self.offload_seconds is not None:
            require_time("offload_seconds", self.offload_seconds)
        sizes = ("state_bytes", "run_bytes", "tape_run_bytes", "reverse_bytes", "lent_bytes")
        for name in (*sizes, "tape_bytes", "between_bytes", "between_run_bytes", "cached_bytes"):
            require_size(name, getattr(self, name))
        if self.invert_bytes is not None:
            require_size("invert_bytes", self.invert_bytes)
        if not is_whole(self.left_bytes, -_MOST, _MOST):
            left = shown(self.left_bytes)
            raise ValueError(f"`left_bytes` is {left}, but it must be a whole number of bytes")
        for name, kind in (("variants", SelectiveTape), ("results", Results)):
            expected, given = f"a tuple of `{kind.__name__}`", getattr(self, name)
            check_type((tuple, list), expected, **{name: given})
            for each in given:
                check_type(kind, expected, **{name: each})
        check_type((SelectiveTape, type(None)), "a `SelectiveTape`, or None", again=self.again)
        tapes = {f"variants[{at}].tape_bytes": each for at, each in enumerate(self.variants)}
        tapes |= {"tape_bytes": self.tape(0), "again.tape_bytes": self.tape_again}
        for name, tape in tapes.items():
            if tape.tape_bytes < self.state_bytes:
                raise ValueError(
                    f"`{name}` is {tape.tape_bytes}, but it must be at least `state_bytes` "
                    f"({self.state_bytes}): the stage's input is counted in its tape"
                )

    def tape(self, variant: int) -> SelectiveTape:
        """Return a tape by its number: 0 is the whole one, for which backward pays nothing."""
        if variant == 0:
            return SelectiveTape(self.tape_bytes, 0.0, self.tape_run_bytes, self.reverse_bytes)
        return _numbered("variant", variant, self.variants)

    def kept(self, number: int) -> Results:
        """Return results by their number: 0 for none, which leaves a whole run to backward."""
        return _numbered("number", number, self.results) if number else Results(0, self.seconds)

    @property
    def tape_again(self) -> SelectiveTape:
        """The tape that a run in backward makes."""
        return self.again or self.tape(0)


def _numbered(name: str, number: int, values: tuple[_T, ...]) -> _T:
    """Return the value with a number, from 1."""
    try:
        return values[number - 1 if number > 0 else len(values)]
    except (IndexError, TypeError) as error:
        raise ValueError(
            f"`{name}` is {shown(number)}, but must be from 0 to {len(values)}."
        ) from error


def require_time(name: str, value: float) -> None:
    """Raise a ValueError unless a time is finite and not negative."""
    if not (is_real(value) and isfinite(value) and value >= 0):
        raise ValueError(f"`{name}` is {shown(value)}, but it must be finite and not negative")


def require_size(name: str, value: int) -> None:
    """Raise a ValueError unless it is a whole number of bytes, and not negative."""
    if not is_whole(value, 0, _MOST):
        is_less = is_real(value) and value < 0
        needed = "not be negative" if is_less else "be a whole number of bytes"
        raise ValueError(f"`{name}` is {shown(value)}, but it must {needed}")


def require_costs(costs: Any) -> None:
    """Raise a ValueError unless `costs` is a list of costs, one for each of some stages."""
    given = cast("Sequence[object]", costs if isinstance(costs, Sequence) else [costs])
    if not all(isinstance(each, Cost) for each in given):
        got = shown(cast("object", costs))
        raise ValueError(f"`costs` is {got}, but must be a `Cost` for each stage")
    if not given:
        raise ValueError("`costs` is empty, but a chain has at least one stage")
