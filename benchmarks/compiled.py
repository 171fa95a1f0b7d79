"""`recoup.plan(compile=True)` beside the compiler's own budgets and other ways to save bytes."""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from plan_models import COMPILED, Case
from plan_rivals import RIVALS, NotForThisError, compiled, compiled_blocks
from plans import Contestant, gains, timed
from torch import Tensor

import recoup
from recoup.errors import BudgetError
from recoup.planning.frontier import Frontier
from recoup.planning.plan import Plan

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.0)
SHARES = (0.14, 0.11)  # of the bytes of the uncompiled step
NUM_BUDGETS = 20
ROUNDS = 5
EAGER = {name: way for name, way in RIVALS.items() if not name.startswith("torch.compile")}
# The compiler takes longer over this whole model than anybody would wait.
BLOCK_BY_BLOCK = {"ResNet-50"}


def rivals(model: str, build: Callable[[str], Case], device: str) -> Iterator[Contestant]:
    """Yield the eager ways, the model as it is first, and then the compiler at its budgets."""
    first = None
    for name, change in EAGER.items():
        case = build(device)
        try:
            contestant = Contestant(name, case, change(case))
        except NotForThisError as error:
            print(f"   {model}, {name}: left out. {error}", flush=True)
            continue
        gradient = contestant.gradient()
        first = gradient if first is None else first
        yield _measured(contestant, gradient, first, device)
    whole = compiled_blocks if model in BLOCK_BY_BLOCK else compiled
    first = None
    for budget in BUDGETS:
        case = build(device)
        contestant = Contestant(f"torch.compile, {budget}", case, whole(budget)(case))
        gradient = contestant.gradient()
        # The compiler's budgets draw alike, so what differs by more than rounding is wrong.
        first = gradient if first is None else first
        yield _measured(contestant, gradient, first, device)


class Planned:
    """The plans of one model from one frontier, and what their steps take."""

    def __init__(self, build: Callable[[str], Case], device: str) -> None:
        self.case = build(device)
        self.device = device
        kwargs = {"loss": self.case.loss, "holds_output": False, **self.case.kwargs}
        start = time.perf_counter()
        self.frontier: Frontier = recoup.plan(self.case.model, compile=True, **kwargs)
        self.measuring_seconds = time.perf_counter() - start
        print(self.frontier, f"\n   measured in {self.measuring_seconds:.0f} s", flush=True)
        self._first: dict[bool, Tensor] = {}  # what is not compiled draws otherwise
        self._known: dict[object, Contestant] = {}
        self._of_points: dict[int, Contestant] = {}

    def contestants(self, budgets: Iterable[int]) -> dict[int, Contestant]:
        """Return the plan for each budget, measured; the same object for the same plan.

        Of budgets with the same fastest point on the frontier only the smallest is planned.
        """
        found = {}
        for budget in sorted(budgets):
            num_points = sum(point.peak_bytes <= budget for point in self.frontier.points)
            if num_points not in self._of_points:
                self._of_points[num_points] = self._contestant(budget)
            found[budget] = self._of_points[num_points]
        return found

    def _contestant(self, budget_bytes: int) -> Contestant:
        start = time.perf_counter()
        try:
            plan = self.frontier.plan(budget_bytes)
        except BudgetError as error:
            print("   no plan:", error, flush=True)
            plan = self.frontier.plan(error.least_bytes)
        key = (plan.actions, tuple(row.way for row in plan.blocks))
        if key in self._known:
            return self._known[key]
        found = {
            "budget_bytes": plan.budget_bytes,
            "predicted_bytes": plan.predicted_peak_bytes,
            "planning_seconds": time.perf_counter() - start,
            "is_compiled": any("compiled" in row.way for row in plan.blocks),
            "num_forwards": sum(row.num_forwards for row in plan.blocks),
        }
        contestant = Contestant("recoup", self.case, self._under(plan), **found)
        gradient = contestant.gradient()
        first = self._first.setdefault(found["is_compiled"], gradient)
        self._known[key] = _measured(contestant, gradient, first, self.device)
        return contestant

    def _under(self, plan: Plan) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with plan.applied():
                return self.case.forward()

        return forward


def _measured(contestant: Contestant, gradient: Tensor, wanted: Tensor, device: str) -> Contestant:
    contestant.found["gradient_error"] = float((gradient - wanted).norm() / wanted.norm())
    contestant.measure(device)
    print("  ", *(f"{k}={v}" for k, v in contestant.found.items()), flush=True)
    return contestant


def tables(
    model: str, build: Callable[[str], Case], device: str, rounds: int = ROUNDS
) -> dict[str, list[dict]]:
    """Return the rows of all ways, and those of plans at equally spaced budgets."""
    torch.compiler.reset()
    found = list(rivals(model, build, device))
    peaks = {contestant.found["peak_bytes"] for contestant in found}
    most = found[0].found["peak_bytes"]
    planned = Planned(build, device)
    wanted = {*peaks, *(int(share * most) for share in SHARES)}
    wanted = {max(each, planned.frontier.least_bytes) for each in wanted}
    least = planned.frontier.least_bytes
    spaced = [least + (most - least) * i // (NUM_BUDGETS - 1) for i in range(NUM_BUDGETS)]
    ours = planned.contestants([*wanted, *spaced])
    found += dict.fromkeys(ours.values())
    budgets = [{"model": model, **ours[each].found, "budget_bytes": each} for each in spaced]
    rows = timed(model, found, device, rounds)
    return {"compiled": rows, "gains": gains(rows), "budgets": budgets}


def suite(device: str, models: Sequence[str] | None = None) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables, again with each model."""
    found: dict[str, list[dict]] = {}
    for model in models or COMPILED:
        for name, rows in tables(model, COMPILED[model], device).items():
            found[name] = found.get(name, []) + rows
        yield from found.items()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*COMPILED], help="models")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    for each in arguments.names:
        for row in tables(each, COMPILED[each], "cpu", arguments.rounds)["gains"]:
            print(row)
