"""From what was measured to the costs of a chain.

NOTE [ A step as a chain ]

Rule 1. Calls of blocks are the stages; what follows the last one, with the loss, is one more stage,
        which can only be taped. What lies between two blocks is beside the chain.
Rule 2. The costs are such that `simulate` gives back the bytes that were measured at every border,
        for the step in which each block is run again. So what they leave out cancels.
Rule 3. What a block saves of its own output it holds longer than the block after it is reversed;
        when that one was measured its input went on the way. So that much is added to the worst
        moment of its backward, if the block before keeps its residuals.
Rule 4. A block that draws writes the random state down if it runs again. That counts as beside the
        chain, and the tape that needs none is smaller by it (but by no more than all of it, so for
        residuals that are smaller than a random state running again seems cheaper than it is).
Rule 5. Another tape of a block keeps what its costly operators made, those with the most work a
        byte first, and not those after the last residual, which no second run gets to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from recoup.planning.measuring import Measured, MeasuredCall
from recoup.schedules import Cost, Thin

__all__ = ["chosen_products", "price"]

_MOST_VARIANTS = 5
# Work of moving a byte to host memory and back, in bytes moved on the device: the bandwidth of its
# memory over that of the bus. From host memory there is nowhere to go.
_MOVED = {"cuda": 2 * 60.0}


def price(measured: Measured, device: torch.device) -> list[Cost]:
    """Return the costs of the calls, and of what follows them."""
    moved = _MOVED.get(device.type)
    beside = _beside(measured)
    beside = [*(b + _drawn(c) for b, c in zip(beside, measured.calls, strict=False)), beside[-1]]
    shared = [0, *(call.shared_bytes for call in measured.calls)]
    costs = [
        _cost(call, beside_bytes, min(before, call.state_bytes) if call.is_linked else 0, moved)
        for call, beside_bytes, before in zip(measured.calls, beside, shared, strict=False)
    ]
    last = measured.calls[-1]
    end = last.forward.end_bytes
    state, between = last.output_bytes, measured.between
    tail = Cost(
        seconds=0.0,
        state_bytes=state,
        tape_bytes=state,
        tape_run_bytes=max(between.peak_bytes - end, 0),
        left_bytes=between.end_bytes - end + state + beside[-1],
        beside_bytes=beside[-1],
        is_fixed=True,
    )
    return [*costs, tail]


def _beside(measured: Measured) -> list[int]:
    """Bytes that are kept beside the chain, from each border on."""
    calls = measured.calls
    states = [_state_bytes(call) for call in calls]
    kept = [0, *accumulate(states)]
    drawn = [0, *accumulate(call.drawn_bytes if call.until_again else 0 for call in calls)]
    alive = [call.before.end_bytes - call.state_bytes for call in calls]
    alive.append(calls[-1].forward.end_bytes - calls[-1].output_bytes)
    alive = [a - d for a, d in zip(alive, drawn, strict=True)]  # See Rule 4
    # What goes away again on the way is taken to stay.
    until = accumulate((a - k for a, k in zip(alive, kept, strict=True)), max)
    levels = [0, *(max(level, 0) for level in until)]
    return [b - a for a, b in pairwise(levels)]


def _state_bytes(call: MeasuredCall) -> int:
    return 0 if call.until_again is None else call.state_bytes


def _cost(call: MeasuredCall, beside_bytes: int, lent_bytes: int, moved: float | None) -> Cost:
    """The cost of a call whose input is held by the tape of the one before, in part (Rule 3)."""
    run_bytes = call.forward.peak_bytes - call.before.end_bytes - _drawn(call)
    run_bytes = max(run_bytes, call.output_bytes)
    before_bytes = call.before.peak_bytes - call.before.end_bytes
    if call.until_again is None:  # no gradient goes through it
        return Cost(
            seconds=call.work,
            state_bytes=0,
            tape_bytes=0,
            run_bytes=call.state_bytes + run_bytes,  # nobody else counts its input
            tape_run_bytes=call.state_bytes + run_bytes,
            beside_bytes=beside_bytes,
            is_linked=call.is_linked,
            before_bytes=call.state_bytes + before_bytes,
        )
    begin, own = call.until_again.end_bytes, call.own_bytes
    tape_bytes = call.state_bytes + own - _drawn(call)
    return Cost(
        seconds=call.work,
        state_bytes=call.state_bytes,
        tape_bytes=tape_bytes,
        run_bytes=run_bytes,
        tape_run_bytes=max(call.again.peak_bytes - begin, 0),
        reverse_bytes=max(call.after.peak_bytes - begin - own, 0) + _drawn(call),
        lent_bytes=lent_bytes,
        offload_seconds=None if moved is None else moved * call.state_bytes,
        left_bytes=call.after.end_bytes - begin + call.state_bytes + beside_bytes,
        beside_bytes=beside_bytes,
        is_linked=call.is_linked,
        before_bytes=before_bytes,
        variants=tuple(_thin(call, own, run_bytes, chosen) for chosen in chosen_products(call)),
    )


def _drawn(call: MeasuredCall) -> int:
    """Bytes that running a block again keeps from its random draws (See Rule 4)."""
    return min(call.drawn_bytes, call.own_bytes)


def _thin(call: MeasuredCall, own: int, run_bytes: int, chosen: Sequence[int]) -> Thin:
    """The tape that keeps what these operators made."""
    kept = sum(call.products[i].num_bytes for i in chosen)
    in_tape = sum(call.products[i].num_bytes for i in chosen if call.saved[i])
    begin = 0 if call.until_again is None else call.until_again.end_bytes
    missing = max(own + call.shared_bytes + call.alive_bytes - in_tape, 0)
    reverse = call.after.peak_bytes - call.residuals.end_bytes
    again = call.again.peak_bytes - begin - in_tape
    extra = kept - in_tape  # which goes where the second run has used it
    return Thin(
        tape_bytes=call.state_bytes + kept,
        seconds=max(call.work - sum(call.products[i].work for i in chosen), 0.0),
        tape_run_bytes=run_bytes + kept,
        reverse_bytes=max(missing + reverse - extra, again, 0),
    )


def chosen_products(call: MeasuredCall) -> list[tuple[int, ...]]:
    """Return which operators' results each of the other tapes keeps, the smallest tape first."""
    if len(call.saved) != len(call.products):
        return []  # the second run was not the first one over again
    needed = [i for i, product in enumerate(call.products) if product.is_needed]
    ranked = sorted(needed, key=lambda i: -_worth(call, i))
    whole = call.residuals.end_bytes - (call.until_again.end_bytes if call.until_again else 0)
    found: list[tuple[int, ...]] = []
    for length in range(1, len(ranked) + 1):
        chosen = tuple(sorted(ranked[:length]))
        if sum(call.products[i].num_bytes for i in chosen) < whole:
            found.append(chosen)
    step = max(len(found) / _MOST_VARIANTS, 1.0)
    places = sorted({len(found) - 1 - int(step * i) for i in range(_MOST_VARIANTS)})
    return [found[place] for place in places if place >= 0]


def _worth(call: MeasuredCall, index: int) -> float:
    product = call.products[index]
    return product.work / max(product.num_bytes, 1)
