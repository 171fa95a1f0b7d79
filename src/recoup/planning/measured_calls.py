"""What was measured of a step: of each call of a block, and of the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from recoup.memory.timeline import Span
from recoup.planning.compiling import BlockCode
from recoup.planning.verification import Outcome
from recoup.planning.work import Product

__all__ = ["Measured", "MeasuredCall"]


@dataclass
class MeasuredCall:
    """The measured costs of one call of a block; spans are those of the timeline of the step.

    Args:
        name: the qualified name of the block.
        module: the block.
        is_linked: whether one of its arguments is an output of the call before it.
        state_bytes: bytes of its arguments (of the linked ones, if there are some), except those
            that an earlier call was given.
        output_bytes: bytes of its output.
        unheld_bytes: the part of `state_bytes` that its residuals do not hold; 0 for blocks' own
            code (Rule 3 of NOTE [ Measured steps ]).
        work: the counted work of one forward; once it is timed, the seconds of a second run.
        num_operators: the operators of one forward.
        seconds_in_mode: what the mode that keeps products takes in both runs.
        before: the span that ends when the call begins.
        forward: the span of its forward.
        until_again: the span that ends when its second run begins in backward; None if there is no
            second run.
        again: the span of its second run, at the end of which its output is alive.
        residuals: the span that ends when that output has been freed.
        after: the span from there to the next second run, or to the end.
        again_bytes: bytes of the output of its second run.
        alive_bytes: bytes of its residuals that other code holds (a cache).
        drawn_bytes: bytes of the random states that its recomputation needs.
        holders: names of attributes within the block that are tensors with a graph.
        products: the costly operators in its forward.
        saved: for each of them, whether its output is a residual.
        is_invertible: whether its input can be made from its output, by `inverse` of the block.
        is_estimated: whether the call was not measured, but is estimated from another one.
        again_seconds: the time of its second run.
        backward_seconds: the time from there to the next second run, or to the end.
        codes: the code of each tape of the cost of the call; none if all are the block's own.
        code_again: the code of the call if it is run again.
    """

    name: str
    module: nn.Module
    is_linked: bool
    state_bytes: int
    output_bytes: int = 0
    unheld_bytes: int = 0
    work: float = 0.0
    num_operators: int = 0
    seconds_in_mode: float = 0.0
    before: Span = field(default_factory=Span)
    forward: Span = field(default_factory=Span)
    until_again: Span | None = None
    again: Span = field(default_factory=Span)
    residuals: Span = field(default_factory=Span)
    after: Span = field(default_factory=Span)
    again_bytes: int = 0
    alive_bytes: int = 0
    drawn_bytes: int = 0
    holders: tuple[str, ...] = ()
    products: list[Product] = field(default_factory=list[Product])
    saved: list[bool] = field(default_factory=list[bool])
    is_invertible: bool = False
    is_estimated: bool = False
    again_seconds: float = 0.0
    backward_seconds: float = 0.0
    codes: tuple[BlockCode, ...] = ()
    code_again: BlockCode | None = None

    @property
    def own_bytes(self) -> int:
        """Bytes of its residuals, without the shared ones and those that other code holds."""
        if self.until_again is None:
            return 0
        begin, residuals = self.until_again.end_bytes, self.residuals.end_bytes
        return max(residuals - begin - self.shared_bytes - self.alive_bytes, 0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of its output that its own residuals hold."""
        return max(self.again_bytes - (self.again.end_bytes - self.residuals.end_bytes), 0)


@dataclass
class Measured:
    """The measurements of a step.

    Args:
        calls: the calls of blocks, in the order of forward.
        between: the span from the end of the last call to the first second run.
        seconds_per_work: the seconds of a unit of counted work; 1 until the step is timed.
        outcome: the outcome of the step.
    """

    calls: list[MeasuredCall] = field(default_factory=list[MeasuredCall])
    between: Span = field(default_factory=Span)
    seconds_per_work: float = 1.0
    outcome: Outcome | None = None
