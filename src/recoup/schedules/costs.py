"""What one stage of a chain costs, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

__all__ = ["Cost", "Thin"]


@dataclass(frozen=True, slots=True)
class Thin:
    """Another tape of a stage: less is kept, and backward pays for what is missing.

    Args:
        tape_bytes: bytes of this tape, the stage's input included, its output left out.
        seconds: what backward pays for it.
        tape_run_bytes: as in `Cost`, for a run that makes this tape.
        reverse_bytes: as in `Cost`, for a backward from this tape.

    Raises:
        ValueError: a cost is negative or not finite.

    Example:
        >>> from recoup.schedules import Thin
        >>> Thin(tape_bytes=5, seconds=0.5).reverse_bytes
        0
    """

    tape_bytes: int
    seconds: float
    tape_run_bytes: int = 0
    reverse_bytes: int = 0

    def __post_init__(self) -> None:
        _require_time("seconds", self.seconds)
        for name in ("tape_bytes", "tape_run_bytes", "reverse_bytes"):
            _require_size(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Cost:
    """What one stage costs. With the first three alone, what a run needs for a moment is free.

    Args:
        seconds: time of one forward run; any other unit of time will do, the same for all.
        state_bytes: bytes of the stage's input.
        tape_bytes: bytes of the stage's tape, its input included. Its output is left out, also
            where the tape has it: the stage after this one counts it.
        run_bytes: the most that a run without a tape has alive at one time beyond the stage's
            input: temporaries and output.
        tape_run_bytes: the same for a run with a tape. An inverse is taken to have as much alive
            beyond the state that it begins with.
        reverse_bytes: the most that backward has alive at one time beyond the tape and beyond
            what was alive before.
        left_bytes: what backward leaves alive: gradients of the stage's parameters, and of its
            input less that of its output. It may be negative.
        beside_bytes: what code between the stage before and this one keeps, from before this
            stage is first run until it is reversed.
        is_linked: whether the input is what the stage before returned, so that running that one
            again, or inverting this one, gives one from the other. Nothing is asked of the first.
        is_fixed: whether the stage can only be taped, when it is first passed.
        is_invertible: whether the stage can be inverted.
        invert_seconds: time of one inverse, which makes the tape on its way.
        offload_seconds: time to move the input to host memory and back; None if it cannot be.
        variants: other tapes, for a stage that is taped in the sweep.
        before_bytes: the most that code before the stage has alive for a moment, in the sweep,
            beyond the stage's input and what lies beside the chain.
        lent_bytes: how much more `reverse_bytes` is if the stage before is taped, whose tape holds
            on to what would go while this stage is reversed.

    Raises:
        ValueError: a cost is negative or not finite, or a tape is smaller than the input.

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
    beside_bytes: int = 0
    is_linked: bool = True
    is_fixed: bool = False
    is_invertible: bool = False
    invert_seconds: float = 0.0
    offload_seconds: float | None = None
    variants: tuple[Thin, ...] = ()
    lent_bytes: int = 0
    before_bytes: int = 0

    def __post_init__(self) -> None:
        _require_time("seconds", self.seconds)
        _require_time("invert_seconds", self.invert_seconds)
        _require_time("offload_seconds", self.offload_seconds or 0.0)
        sizes = ("state_bytes", "run_bytes", "tape_run_bytes", "reverse_bytes", "lent_bytes")
        for name in (*sizes, "beside_bytes", "before_bytes"):
            _require_size(name, getattr(self, name))
        if self.tape_bytes < self.state_bytes:
            raise ValueError(
                f"`tape_bytes` is {self.tape_bytes}, but it must be at least `state_bytes` "
                f"({self.state_bytes}): the stage's input is counted in its tape"
            )
        for number, thin in enumerate(self.variants):
            if thin.tape_bytes < self.state_bytes:
                raise ValueError(
                    f"`variants[{number}].tape_bytes` is {thin.tape_bytes}, but it must be at "
                    f"least `state_bytes` ({self.state_bytes}): the stage's input is counted in it"
                )

    def tape(self, variant: int) -> Thin:
        """The tape of that number: 0 is the whole one, which backward pays nothing for."""
        if variant == 0:
            return Thin(self.tape_bytes, 0.0, self.tape_run_bytes, self.reverse_bytes)
        return self.variants[variant - 1]


def _require_time(name: str, value: float) -> None:
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"`{name}` is {value}, but it must be finite and not negative")


def _require_size(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"`{name}` is {value}, but it must not be negative")
