"""What changes under a plan, or is not what was measured: right, or an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup._core.kept_products import _KeptTensor as KeptTensor
from recoup._core.surroundings import Surroundings
from recoup.errors import ReplayError
from recoup.planning import priced_blocks
from recoup.planning.verification import Verification, outcome_of
from tests.neighbours.planned import Block, fresh, loss_of, plan_for, result_of
from tests.plan_oracle import Made, assert_as_plain, in_a_row, ways_of


def stepping(model: nn.Module, *args: Any) -> Callable[[], None]:
    return lambda: loss_of(model(*args)).backward()


def scaled(block: Any, x: Tensor, *, shift: Tensor, items: dict[str, list[Tensor]]) -> Tensor:
    y = block.down(torch.tanh(block.up(x * block.scale)))
    return block.norm(x + y * torch.sin(x * shift) * torch.sin(x * items["inner"][0]))


def stack() -> Any:
    """Blocks with a buffer and a norm, which take a tensor by name, and one within others."""

    def block() -> Any:
        layers = {"up": nn.Linear(32, 128), "down": nn.Linear(128, 32), "norm": nn.BatchNorm1d(32)}
        made = Made(scaled, **layers)
        made.register_buffer("scale", torch.ones(32))
        return made

    def forward(model: Any, x: Tensor) -> Tensor:
        return in_a_row([partial(each, **model.given) for each in model.blocks], x)

    model: Any = Made(forward, blocks=[block() for _ in range(4)])
    model.given = {"shift": torch.randn(32), "items": {"inner": [torch.randn(32)]}}
    return model


def other_memory(model: Any) -> None:
    model.blocks[0].up.weight.data = 2 * model.blocks[0].up.weight.data


IN_PLACE, AGAIN = "modified by an inplace operation|changed in place", "block `blocks.0` again"
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {  # the change, and the error if it is one
    "step": (lambda m: [p.detach().sub_(0.1) for p in m.parameters()], IN_PLACE),
    "keyword": (lambda m: m.given["shift"].add_(1), IN_PLACE),
    "mode": (lambda m: m.eval(), ""),
    "buffer": (lambda m: m.blocks[0].scale.mul_(2), AGAIN),
    "other forward": (
        lambda m: setattr(m.blocks[0].up, "forward", lambda x: x.repeat(1, 4)), AGAIN
    ),
    "other item": (lambda m: m.given["items"]["inner"].insert(0, torch.zeros(32)), ""),
    "other layer": (
        lambda m: setattr(m.blocks[0], "up", nn.Linear(32, 128)),
        "block `blocks.0` .* a module in it was replaced",
    ),
    "other memory": (other_memory, AGAIN),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The first step of a Made")  # a change takes memory, too
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_in_a_planned_model(what: str):
    torch.manual_seed(0)
    model, x, (change, text) = stack(), torch.randn(64, 32), CHANGES[what]
    stepping(model, x)()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with plan_for(model, x, share=0.0).applied() as plan:
        assert plan.blocks[0].way != "keep"
        loss = loss_of(model(x))
        change(model)
        if text:
            with pytest.raises(RuntimeError, match=text):
                loss.backward()
            return
        loss.backward()
    assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("of_arguments", [False, True])
def test_products_that_are_kept_wrong_are_not_planned(of_arguments: bool, monkeypatch: Any):
    """As if a write to what is kept had gone unseen; with gradients of arguments alone, too."""
    model, x = fresh()
    model.requires_grad_(not of_arguments)
    x.requires_grad_(of_arguments)
    plain = result_of(model, stepping(model, x))
    x.grad = None
    plan = plan_for(model, x)
    assert "keep products" in ways_of(plan)
    get = KeptTensor.get
    monkeypatch.setattr(KeptTensor, "get", lambda self: get(self).mul_(1.01))
    monkeypatch.setattr(Surroundings, "decides_anew", lambda self: False)
    with pytest.warns(UserWarning, match="keeps no results of products"):
        plan = recoup.plan(model, x, budget=plan.budget_bytes, loss=loss_of)
    assert x.grad is None
    assert "keep products" not in ways_of(plan)
    assert_as_plain(plan, stepping(model, x), plain)


calls = itertools.count()


class Counts(Block):
    """Reads Python state that changes from run to run, where nobody looks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 0.1 * (next(calls) % 97))


@pytest.mark.parametrize("has_room", [True, False])
def test_a_model_whose_steps_differ_is_refused(has_room: bool, monkeypatch: Any):
    """Without room for a plain step it is the measured one that a step is compared with."""
    words = r"gradient of parameter `.*` by about .* leave that"
    if not has_room:
        monkeypatch.setattr(priced_blocks, "has_room", lambda device, num_bytes: False)
        words = "differs from the measured one"
        plan_for(*fresh())
    with pytest.raises(ReplayError, match=words):
        plan_for(*fresh(block=Counts))


def test_gradients_that_are_missing_sparse_or_complex():
    module = nn.Embedding(20, 4, sparse=True)
    module.other = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    for change, words in (
        (lambda: module(torch.tensor([1, 2])).sum().backward(), "gradient of parameter `weight`"),
        (lambda: module.other.conj().real.sum().backward(), "gradient of parameter `other`"),
        (lambda: module.count.add_(1), "buffer `count`"),
        (lambda: torch.rand(()), "the random stream"),
    ):
        verification = Verification()
        verification.expect(outcome_of(module, ()), is_plain=True)
        change()
        assert words in (verification.difference(outcome_of(module, ())) or "")
