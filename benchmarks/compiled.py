"""`recoup.plan(compile=True)` beside the compiler's own budgets and other ways to save bytes."""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from plan_models import COMPILED, Case
from plan_rivals import RIVALS, compiled, compiled_blocks
from plans import Contestant, frontier_of, gains, rivals, timed
from torch import Tensor

from recoup.errors import BudgetError
from recoup.planning.frontier import Frontier

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.0)
SHARES = (0.14, 0.11)  # of the bytes of the uncompiled step
NUM_BUDGETS = 20
ROUNDS = 5
EAGER = {name: way for name, way in RIVALS.items() if not name.startswith("torch.compile")}
# The compiler takes longer over this whole model than anybody would wait.
BLOCK_BY_BLOCK = {"ResNet-50"}


def others(model: str, device: str) -> Iterator[Contestant]:
    """Yield the eager ways, the model as it is first, and then the compiler at its budgets."""
    whole = compiled_blocks if model in BLOCK_BY_BLOCK else compiled
    budgets = {f"torch.compile, {budget}": whole(budget) for budget in BUDGETS}
    # The compiler's budgets draw alike, so what differs by more than rounding is wrong.
    for ways in (EAGER, budgets):
        first = None
        for contestant in rivals(model, COMPILED[model], ways, device, []):
            gradient = contestant.gradient()
            first = gradient if first is None else first
            yield _measured(contestant, gradient, first, device)


def planned(
    case: Case, frontier: Frontier, budgets: Iterable[int], device: str
) -> dict[int, Contestant]:
    """Return the plan for each budget, measured; the same object for the same plan.

    Of budgets with the same fastest point on the frontier only the smallest is planned.
    """
    first: dict[bool, Tensor] = {}  # what is not compiled draws otherwise
    known: dict[object, Contestant] = {}
    of_points: dict[int, Contestant] = {}
    found = {}
    for budget in sorted(budgets):
        num_points = sum(point.peak_bytes <= budget for point in frontier.points)
        if num_points not in of_points:
            key, contestant = _planned(case, frontier, budget)
            if key not in known:
                gradient = contestant.gradient()
                wanted = first.setdefault(contestant.found["is_compiled"], gradient)
                known[key] = _measured(contestant, gradient, wanted, device)
            of_points[num_points] = known[key]
        found[budget] = of_points[num_points]
    return found


def _planned(case: Case, frontier: Frontier, budget_bytes: int) -> tuple[object, Contestant]:
    """Return what tells a plan from others, and the model under it."""
    start = time.perf_counter()
    try:
        plan = frontier.plan(budget_bytes)
    except BudgetError as error:
        print("   no plan:", error, flush=True)
        plan = frontier.plan(error.least_bytes)
    found = {
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "planning_seconds": time.perf_counter() - start,
        "is_compiled": any("compiled" in row.way for row in plan.blocks),
        "num_forwards": sum(row.num_forwards for row in plan.blocks),
    }
    key = (plan.actions, tuple(row.way for row in plan.blocks))
    return key, Contestant("recoup", case, case.forward, plan.applied, **found)


def _measured(contestant: Contestant, gradient: Tensor, wanted: Tensor, device: str) -> Contestant:
    contestant.found["gradient_error"] = float((gradient - wanted).norm() / wanted.norm())
    contestant.measure(device)
    print("  ", *(f"{k}={v}" for k, v in contestant.found.items()), flush=True)
    return contestant


def rounding_of(case: Case) -> float:
    """How far the gradients move, relative, if an input is off by one rounding error."""
    plain = Contestant("", case, case.forward).gradient()
    for name, given in case.kwargs.items():
        if given.is_floating_point():  # not of tokens
            case.kwargs[name] = given * (1 + torch.finfo(given.dtype).eps)
    moved = Contestant("", case, case.forward).gradient()
    return float((moved - plain).norm() / plain.norm())


def tables(model: str, device: str, rounds: int = ROUNDS) -> dict[str, list[dict]]:
    """Return the rows of all ways, and those of plans at equally spaced budgets."""
    torch.compiler.reset()
    found = list(others(model, device))
    found[0].found["rounding"] = rounding_of(COMPILED[model](device))
    peaks = {contestant.found["peak_bytes"] for contestant in found}
    most = found[0].found["peak_bytes"]
    case = COMPILED[model](device)
    frontier = frontier_of(case, compile=True)
    print(frontier, flush=True)
    least = frontier.least_bytes
    wanted = {max(each, least) for each in {*peaks, *(int(share * most) for share in SHARES)}}
    spaced = [least + (most - least) * i // (NUM_BUDGETS - 1) for i in range(NUM_BUDGETS)]
    ours = planned(case, frontier, [*wanted, *spaced], device)
    found += dict.fromkeys(ours.values())
    budgets = [{"model": model, **ours[each].found, "budget_bytes": each} for each in spaced]
    rows = timed(model, found, device, rounds)
    return {"compiled": rows, "gains": gains(rows), "budgets": budgets}


def suite(device: str, models: Sequence[str] | None = None) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables, again with each model."""
    found: dict[str, list[dict]] = {}
    for model in models or COMPILED:
        for name, rows in tables(model, device).items():
            found[name] = found.get(name, []) + rows
        yield from found.items()
