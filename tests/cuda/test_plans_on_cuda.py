"""Plans on a CUDA device: the same step, in the bytes that torch's allocator counts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map_only

import recoup
from recoup.planning import options
from recoup.schedules import Offload
from tests.planned_zoo import MODELS, Case

pytestmark = pytest.mark.cuda
WIDE = 2048  # so that activations are larger than what libraries allocate


@pytest.fixture(params=["sequential", "resnet", "gpt2", "t5"])
def case(request: pytest.FixtureRequest) -> Case:
    made = MODELS[request.param]()
    move = tree_map_only(torch.Tensor, lambda t: t.cuda(), (made.args, made.kwargs))
    return made._replace(model=made.model.cuda(), args=move[0], kwargs=move[1])


def step(case: Case) -> None:
    output = case.model(*case.args, **case.kwargs)
    (output.loss if case.loss is None else case.loss(output)).backward()


def gradients(case: Case) -> dict[str, torch.Tensor]:
    case.model.zero_grad()
    torch.manual_seed(1)
    step(case)
    found = {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}
    case.model.zero_grad()
    return found


def assert_kept(case: Case, num_budgets: int, wanted, is_close, **options):
    """Every budget is kept, with the same gradients; returns in which ways blocks run."""
    options |= {"loss": case.loss, **case.kwargs}
    whole, ways = recoup.plan(case.model, *case.args, budget="8 GiB", **options), set()
    for k in range(num_budgets):
        share = (whole.most_bytes - whole.least_bytes) * k // (num_budgets - 1)
        plan = recoup.plan(case.model, *case.args, budget=whole.least_bytes + share, **options)
        ways |= {row.way for row in plan.blocks}
        with plan.applied():
            found = gradients(case)
            peak = recoup.measure(lambda: step(case), device="cuda", repeats=0).peak_bytes
            case.model.zero_grad()
        assert [name for name, value in wanted.items() if not is_close(found[name], value)] == []
        assert peak <= plan.budget_bytes
    return ways


def test_every_budget_is_kept_with_the_same_gradients(case: Case):
    step(case)  # workspaces of libraries stay
    assert_kept(case, 5, gradients(case), partial(torch.allclose, rtol=1e-4, atol=1e-5))


@pytest.mark.filterwarnings("ignore")  # of the compiler, as an error of which it would fail
def test_compiled_blocks_keep_every_budget_with_the_same_masks():
    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer
    model = torch.nn.Sequential(*(block(512, 8, batch_first=True) for _ in range(4))).cuda()
    x, wanted_output = torch.randn(2, 16, 512, 512, device="cuda")
    made = Case(model, (x,), {}, lambda y: (y - wanted_output).square().mean(), 4)
    step(made)
    whole = recoup.plan(model, x, budget="8 GiB", loss=made.loss, compile=True)
    with whole.applied():
        wanted = gradients(made)
    # The compiler's kernels add in another order.
    is_close = lambda got, want: (got - want).norm() <= 1e-3 * want.norm()  # noqa: E731
    ways = assert_kept(made, 3, wanted, is_close, compile=True) | {row.way for row in whole.blocks}
    assert any("compiled" in way for way in ways)  # where that is faster


def test_inputs_that_wait_in_host_memory(monkeypatch):
    # Other tests share the bus, so its speed is not measured here.
    monkeypatch.setattr(options, "_measured_per_byte", lambda *_: 1e-11)
    torch.manual_seed(0)
    # Long to run again, and few bytes to move: products with frozen weights keep nothing.
    frozen = [torch.nn.Linear(WIDE, WIDE).requires_grad_(False) for _ in range(8)]
    layers = [[*frozen, torch.nn.Linear(WIDE, WIDE), torch.nn.Tanh()] for _ in range(12)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(*block) for block in layers)).cuda()
    x = torch.randn(4 * WIDE, WIDE, device="cuda")
    frontier = recoup.plan(model, x)
    least, most = frontier.least_bytes, frontier.points[-1].peak_bytes
    plans = [frontier.plan(least + (most - least) * k // 16) for k in range(16)]
    offloads = [any(isinstance(each, Offload) for each in plan.actions) for plan in plans]
    plan = plans[offloads.index(True)]
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(model(x).sum(), trained)
    with plan.applied():
        found = torch.autograd.grad(model(x).sum(), trained)
    for each, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, value)
