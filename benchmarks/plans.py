"""`recoup.plan` beside other ways to train in fewer bytes: peak and time of a step."""

import functools
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from couplings import peak_and_held
from plan_heads import HEADS, NUM_TILES
from plan_models import MANY_WORDS, MODELS, SMALL, Case
from plan_rivals import RIVALS, Forward, NotForThisError
from timing import seconds_of
from torch import Tensor

import recoup
from recoup.errors import BudgetError
from recoup.planning.frontier import Frontier, FrontierPoint

Around = Callable[[], AbstractContextManager]
# What each of our ways gives `recoup.plan`, and how many equally spaced budgets it is measured at
# beside the peaks of the others.
OURS: dict[str, dict] = {"recoup": {}, "recoup, blocks compiled": {"compile": True}}
NUM_BUDGETS = {"recoup": 4, "recoup, blocks compiled": 2}
# Where a loss in pieces saves most of the bytes; the other logits are small.
MORE_RIVALS = {MANY_WORDS: HEADS}
OPTIONS = {MANY_WORDS: {"tiles": NUM_TILES}}
# The compiler takes longer over this whole model than anybody would wait.
NOT_COMPILED = {"ResNet-50"}
SEED = 1
ROUNDS = 4
# Relative to the norm of plain's gradients. The compiler rounds otherwise.
TOLERANCE, COMPILER_TOLERANCE = 1e-5, 1e-3
# How much the fastest rounds of one and the same step differ: less is neither gain nor loss.
NOISE = 0.02


def clock() -> float:
    """Return wall time, or the processor time of one thread, which others on it disturb less."""
    is_alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if is_alone else time.perf_counter()


class Contestant:
    """A model under one way to train it: its step, and the measurements."""

    def __init__(
        self, name: str, case: Case, forward: Forward, around: Around = nullcontext, **found
    ) -> None:
        self.name = name
        self.case = case
        self.forward = forward
        self.around = around  # enters what holds for a step, its backward included
        self.found = {"name": name, **found}
        self.seconds: list[float] = []

    def step(self) -> None:
        torch.manual_seed(SEED)
        with self.around():
            self.forward().backward()

    def clear(self) -> None:
        self.case.model.zero_grad()
        gc.collect()

    def gradient(self) -> Tensor:
        """All gradients of a step in one vector; a way may rename parameters, not reorder them."""
        self.step()
        found = torch.cat([each.grad.flatten() for each in self.case.model.parameters()])
        self.clear()
        return found

    def measure(self, device: str) -> None:
        """Return the peak of a step, after one that is not measured."""
        self.found["peak_bytes"] = peak_and_held(self.step, device)[0]
        self.clear()

    def time(self, device: str) -> None:
        self.seconds.append(seconds_of(self.step, device, clock))
        self.clear()


# -- rivals ----------------------------------------------------------------------------------------


def rivals(
    model: str,
    build: Callable[[str], Case],
    ways: Mapping[str, Callable[[Case], Forward]],
    device: str,
    left_out: list[dict],
) -> Iterator[Contestant]:
    """Yield the other ways, and write down why others are left out."""
    for name, change in ways.items():
        case = build(device)
        try:
            yield Contestant(name, case, change(case))
        except NotForThisError as error:
            print(f"   {model}, {name}: left out. {error}", flush=True)
            left_out.append({"model": model, "name": name, "reason": str(error)})


def _takes_too_long(case: Case) -> Forward:
    del case
    raise NotForThisError("It takes too long to compile.")


def ways_of(model: str) -> dict[str, Callable[[Case], Forward]]:
    """Return the other ways to train a model."""
    ways = RIVALS | MORE_RIVALS.get(model, {})
    if model in NOT_COMPILED:
        ways |= {name: _takes_too_long for name in ways if name.startswith("torch.compile")}
    return ways


def check(contestant: Contestant, model: str, expected: Tensor, device: str) -> None:
    """Raise an AssertionError unless the way gives plain's gradients.

    Compiled code draws otherwise: it is checked on few blocks without dropout.
    """
    is_compiled = "compile" in contestant.name
    found = contestant.gradient()  # run in any case, since it warms up
    if is_compiled:
        error = _small_error(contestant.name, model, device)
    else:
        error = float((found - expected).norm() / expected.norm())
    bound = COMPILER_TOLERANCE if is_compiled else TOLERANCE
    assert error <= bound, f"{model}, {contestant.name}: gradients differ by {error:.1e}."
    contestant.found["gradient_error"] = error


@functools.cache
def _small_error(name: str, model: str, device: str) -> float:
    case = SMALL[model](device)
    expected = Contestant("", case, case.forward).gradient()
    case = SMALL[model](device)
    if name in RIVALS:
        contestant = Contestant("", case, RIVALS[name](case))
    else:
        frontier = frontier_of(case, **OURS[name])
        least, most = frontier.points[0].peak_bytes, frontier.points[-1].peak_bytes
        plan = frontier.plan((least + most) // 2)
        contestant = Contestant("", case, case.forward, plan.applied)
    return float((contestant.gradient() - expected).norm() / expected.norm())


# -- ours ------------------------------------------------------------------------------------------


def ours(name: str, model: str, device: str, rivals_bytes: list[int]) -> Iterator[Contestant]:
    """Yield plans at budgets from the least to the most, and at the peak of each other way.

    All are of one model and one frontier; equal plans for several budgets are yielded once.
    """
    case = MODELS[model](device)
    frontier = frontier_of(case, **OURS[name], **OPTIONS.get(model, {}))
    print(frontier, flush=True)
    most = frontier.points[-1].peak_bytes
    wanted = budgets(frontier.least_bytes, most, NUM_BUDGETS[name], rivals_bytes)
    known = set()
    for budget in one_for_each_point(wanted, frontier.points):
        start = time.perf_counter()
        try:
            plan = frontier.plan(budget)
        except BudgetError as error:  # at our own least: it shows in `gains`
            print(f"   {model}, {name}: no plan. {error}", flush=True)
            continue
        found = {
            "budget_bytes": budget,
            "predicted_bytes": plan.predicted_peak_bytes,
            "planning_seconds": time.perf_counter() - start,
        }
        if OURS[name] and not any("compiled" in row.way for row in plan.blocks):
            continue  # one of those that are measured without these options
        key = (plan.actions, tuple(row.way for row in plan.blocks), plan.rehearsed_peak_bytes)
        if key not in known:
            known.add(key)
            yield Contestant(name, case, case.forward, plan.applied, **found)


def one_for_each_point(budgets: list[int], points: Sequence[FrontierPoint]) -> list[int]:
    """Return the budgets, but of those with the same fastest point on the frontier the smallest."""
    found: dict[int, int] = {}
    for budget in sorted(budgets):
        found.setdefault(sum(point.peak_bytes <= budget for point in points), budget)
    return list(found.values())


def budgets(least: int, most: int, num: int, rivals_bytes: list[int]) -> list[int]:
    """Return equally spaced budgets, and the other ways' peaks that differ by over a hundredth."""
    spaced = [least + (most - least) * i // (num - 1) for i in range(num)]
    found = spaced
    for each in sorted(rivals_bytes):
        if least <= each <= most and not any(lower <= each < 1.01 * lower for lower in found):
            found = [*found, each]
    return sorted(set(found))


def frontier_of(case: Case, **options) -> Frontier:
    kwargs = {"loss": case.loss, "holds_output": False, **options, **case.kwargs}
    return recoup.plan(case.model, **kwargs)


# -- all of it -------------------------------------------------------------------------------------


def tables(model: str, device: str, rounds: int = ROUNDS) -> dict[str, list[dict]]:
    """Return the rows of all ways, what a plan gains, and which ways are left out and why."""
    contestants: list[Contestant] = []
    left_out: list[dict] = []

    case = MODELS[model](device)
    expected = Contestant("", case, case.forward).gradient()

    def add(contestant: Contestant) -> None:
        check(contestant, model, expected, device)
        contestant.measure(device)
        print("  ", *(f"{k}={v}" for k, v in contestant.found.items()), flush=True)
        contestants.append(contestant)

    for contestant in rivals(model, MODELS[model], ways_of(model), device, left_out):
        add(contestant)
    peaks = [contestant.found["peak_bytes"] for contestant in contestants]
    for name in OURS:
        if model in NOT_COMPILED and "compile" in OURS[name]:
            continue
        for contestant in ours(name, model, device, peaks):
            add(contestant)
    found = timed(model, contestants, device, rounds)
    return {"plans": found, "gains": gains(found), "left_out": left_out}


def timed(model: str, contestants: list[Contestant], device: str, rounds: int) -> list[dict]:
    """Time all contestants in turn, and return a row for each; the first one is plain."""
    shuffle = random.Random(0).shuffle
    order = list(contestants)
    for _ in range(rounds):
        shuffle(order)  # who comes after one that frees much memory waits for it
        for contestant in order:
            contestant.time(device)
    # The fastest round of each: what disturbs one only delays it.
    plain = min(contestants[0].seconds)
    return [
        {
            "model": model,
            **contestant.found,
            "seconds": min(contestant.seconds),
            "ratio": min(contestant.seconds) / plain,
        }
        for contestant in contestants
    ]


def gains(rows: list[dict], prefix: str = "recoup") -> list[dict]:
    """Return our fastest plan that fits in each other way's peak, and the least peaks.

    `ours_over_rival` is of seconds, and of bytes in the rows named "least peak"; missing where no
    plan of ours fits. `is_won` if it is at most 1, give or take the noise of a time.
    """
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        ours = [row for row in of_model if row["name"].startswith(prefix)]
        theirs = [row for row in of_model if not row["name"].startswith("recoup")]
        for rival in theirs:
            fitting = [row for row in ours if row["peak_bytes"] <= rival["peak_bytes"]]
            best = min(fitting, key=lambda row: row["seconds"], default=None)
            over = best and best["seconds"] / rival["seconds"]
            found.append(
                {
                    "model": model,
                    "name": rival["name"],
                    "peak_bytes": rival["peak_bytes"],
                    "ours": best and best["name"],
                    "ours_bytes": best and best["peak_bytes"],
                    "ours_over_rival": over,
                    "is_won": over is not None and over <= 1 + NOISE,
                }
            )
        least = min(theirs, key=lambda row: row["peak_bytes"])
        our_least = min(ours, key=lambda row: row["peak_bytes"], default=None)
        over = our_least and our_least["peak_bytes"] / least["peak_bytes"]
        found.append(
            {
                "model": model,
                "name": f"least peak: {least['name']}",
                "peak_bytes": least["peak_bytes"],
                "ours": our_least and our_least["name"],
                "ours_bytes": our_least and our_least["peak_bytes"],
                "ours_over_rival": over,
                "is_won": over is not None and over <= 1,
            }
        )
    return found


def suite(device: str, models: Sequence[str] = tuple(MODELS)) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables, again with each model."""
    found: dict[str, list[dict]] = {}
    for model in models:
        for name, rows in tables(model, device).items():
            found[name] = found.get(name, []) + rows
        yield from found.items()
