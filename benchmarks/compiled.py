"""`recoup.plan(compile=True)` beside the compiler's own budgets: peak and time of a step."""

import time
from collections.abc import Callable, Iterator

import torch
from plan_models import COMPILED, Case
from plan_rivals import compiled
from plans import NOISE, Contestant, timed
from torch import Tensor

import recoup
from recoup.errors import BudgetError
from recoup.planning.plan import Plan

BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.0)
SHARES = (0.14, 0.11)  # of the bytes of the uncompiled step
ROUNDS = 5


def contestants(build: Callable[[str], Case], device: str) -> Iterator[Contestant]:
    """Yield the uncompiled model, the compiler at its budgets, and plans in as many bytes."""
    case = build(device)
    plain = Contestant("eager", case, case.forward)
    plain.gradient()
    plain.measure(device)
    yield plain
    peaks, first = [], None
    for budget in BUDGETS:
        torch.compiler.reset()
        case = build(device)
        contestant = Contestant(f"torch.compile, {budget}", case, compiled(budget)(case))
        gradient = contestant.gradient()
        first = gradient if first is None else first
        # The compiler's budgets draw alike, so what differs by more than rounding is wrong.
        contestant.found["gradient_error"] = _error(gradient, first)
        contestant.measure(device)
        peaks.append(contestant.found["peak_bytes"])
        yield contestant
    of_eager = plain.found["peak_bytes"]
    budgets = {*peaks, *(int(share * of_eager) for share in SHARES)}
    firsts: dict[bool, Tensor] = {}  # what is not compiled draws otherwise
    for budget in sorted(budgets, reverse=True):
        case = build(device)
        start = time.perf_counter()
        try:
            plan = _plan(case, budget)
        except BudgetError as error:
            print("   no plan:", error, flush=True)
            plan = _plan(case, error.least_bytes)
        seconds = time.perf_counter() - start
        plan.apply()
        is_compiled = any("compiled" in row.way for row in plan.blocks)
        found = {"budget_bytes": plan.budget_bytes, "planning_seconds": seconds}
        found |= {"is_compiled": is_compiled}
        contestant = Contestant("recoup", case, case.forward, **found)
        gradient = contestant.gradient()
        wanted = firsts.setdefault(is_compiled, gradient)
        contestant.found["gradient_error"] = _error(gradient, wanted)
        contestant.measure(device)
        yield contestant


def _plan(case: Case, budget: int) -> Plan:
    kwargs = {"loss": case.loss, "holds_output": False, **case.kwargs}
    return recoup.plan(case.model, budget=budget, compile=True, **kwargs)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def rows(model: str, build: Callable[[str], Case], device: str) -> list[dict]:
    found: list[Contestant] = []
    for contestant in contestants(build, device):
        print("  ", *(f"{k}={v}" for k, v in contestant.found.items()), flush=True)
        found.append(contestant)
    return timed(model, found, device, ROUNDS)


def gains(found: list[dict]) -> list[dict]:
    """Return, for each budget of the compiler, our fastest plan in at most as many bytes."""
    made = []
    for rival in found:
        if not rival["name"].startswith("torch.compile"):
            continue
        fitting = [
            row
            for row in found
            if row["model"] == rival["model"]
            and row["name"] == "recoup"
            and row["peak_bytes"] <= rival["peak_bytes"]
        ]
        best = min(fitting, key=lambda row: row["seconds"], default=None)
        over = best and best["seconds"] / rival["seconds"]
        made.append(
            {
                "model": rival["model"],
                "name": rival["name"],
                "peak_bytes": rival["peak_bytes"],
                "ours_bytes": best and best["peak_bytes"],
                "ours_over_rival": over,
                "is_won": over is not None and over <= 1 + NOISE,
            }
        )
    return made


def suite(device: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables, again with each model."""
    found: list[dict] = []
    for model, build in COMPILED.items():
        found = found + rows(model, build, device)
        yield "compiled", found
        yield "gains", gains(found)
