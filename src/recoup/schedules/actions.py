"""Actions on the states and the tapes of a chain, and schedules, which consist of them.

A chain of ``n`` stages has the states ``x_0 ... x_n``; stage ``i`` makes ``x_{i+1}`` from
``x_i``. Its *tape* is everything that its backward needs. At any time there is one *working
state*. A kept state occupies memory until it is dropped, a tape until its stage is reversed. An
offloaded state occupies host memory instead.

NOTE [ The order of actions ]

Rule 1. A schedule begins with the working state ``x_0`` and runs forward until the working
        state is ``x_n``: that part is the *sweep*, executed while the model computes its output.
Rule 2. The actions after the sweep are executed in backward, with one `Reverse` for each stage,
        from ``n - 1`` down to 0.
Rule 3. A stage must have a tape when it is reversed; a stage is taped only once.
Rule 4. A working state from which no stage is left to run or to invert is released: in backward,
        when a stage of a lower number is reversed.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

__all__ = [
    "Action",
    "Advance",
    "Drop",
    "Invert",
    "Keep",
    "Load",
    "Offload",
    "Reverse",
    "Schedule",
    "Tape",
]


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the working state, which must be ``x_index``."""

    index: int

    def __str__(self) -> str:
        return f"keep x_{self.index}"


@dataclass(frozen=True, slots=True)
class Offload:
    """Keep the working state, which must be ``x_index``, in host memory."""

    index: int

    def __str__(self) -> str:
        return f"offload x_{self.index}"


@dataclass(frozen=True, slots=True)
class Drop:
    """Release the state ``x_index``, which is kept or offloaded."""

    index: int

    def __str__(self) -> str:
        return f"drop x_{self.index}"


@dataclass(frozen=True, slots=True)
class Load:
    """Make the state ``x_index`` the working state; it stays kept, or offloaded."""

    index: int

    def __str__(self) -> str:
        return f"load x_{self.index}"


@dataclass(frozen=True, slots=True)
class Advance:
    """Run stages ``start ... stop - 1`` without a tape, from ``x_start`` to ``x_stop``."""

    start: int
    stop: int

    def __str__(self) -> str:
        last = self.stop - 1
        return f"run {self.start}" if self.start == last else f"run {self.start} to {last}"


@dataclass(frozen=True, slots=True)
class Tape:
    """Run stage ``index`` with a tape, from ``x_index`` to ``x_{index+1}``.

    Variant 0 is the whole tape, variant ``v`` is ``variants[v - 1]`` of the stage's `Cost`.
    """

    index: int
    variant: int = 0

    def __str__(self) -> str:
        return f"tape {self.index}" + (f" (variant {self.variant})" if self.variant else "")


@dataclass(frozen=True, slots=True)
class Invert:
    """Invert stage ``index`` from ``x_{index+1}`` to ``x_index``, making its tape on the way."""

    index: int

    def __str__(self) -> str:
        return f"invert {self.index}"


@dataclass(frozen=True, slots=True)
class Reverse:
    """Run the backward of stage ``index``, and release its tape."""

    index: int

    def __str__(self) -> str:
        return f"reverse {self.index}"


Action = Keep | Offload | Drop | Load | Advance | Tape | Invert | Reverse


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: the actions that run a chain forward and restore its tapes in backward.

    Args:
        num_stages: number of stages of the chain.
        actions: the actions of the sweep, then of backward; see NOTE [ The order of actions ].
        name: the name in reports.

    Example:
        >>> from recoup.schedules import Keep, Reverse, Schedule, Tape
        >>> schedule = Schedule(2, (Tape(0), Tape(1), Reverse(1), Reverse(0)), name="by hand")
        >>> print(schedule)
        by hand, 2 stages
        sweep: tape 0, tape 1
        backward: reverse 1, reverse 0
    """

    num_stages: int
    actions: tuple[Action, ...]
    name: str = "schedule"

    def __str__(self) -> str:
        stages = "stage" if self.num_stages == 1 else "stages"
        lines = [f"{self.name}, {self.num_stages} {stages}"]
        begins = self._backward_begins()
        for title, part in (("sweep", self.actions[:begins]), ("backward", self.actions[begins:])):
            words = f"{title}: " + ", ".join(map(str, part))
            # Lines are wrapped only between actions.
            words = words.replace(" ", "\0").replace(",\0", ", ").replace(":\0", ": ")
            wrapped = wrap(words, width=100, subsequent_indent=" " * (len(title) + 2))
            lines += [line.replace("\0", " ") for line in wrapped]
        return "\n".join(lines)

    def _backward_begins(self) -> int:
        """Return the position of the first action of backward (NOTE [ The order of actions ])."""
        swept = False
        for position, action in enumerate(self.actions):
            if swept:
                return position + (action == Keep(self.num_stages))
            match action:
                case Tape(index):
                    swept = index + 1 == self.num_stages
                case Advance(_, stop):
                    swept = stop == self.num_stages
                case _:
                    pass
        return len(self.actions)
