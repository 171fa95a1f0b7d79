"""Models of other libraries that are planned again for batches of other shapes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from tests.neighbours.planned import assert_same, result_of
from tests.planned_zoo import transformers_or_skip

pytestmark = [pytest.mark.foreign, pytest.mark.slow]

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4,
}  # fmt: skip


def _tokens(num: int, length: int) -> torch.Tensor:
    return torch.randint(3, 64, (num, length), generator=torch.Generator().manual_seed(length))


def bert() -> nn.Module:
    t = transformers_or_skip()
    return t.BertForMaskedLM(t.BertConfig(**_SMALL, max_position_embeddings=128))


def of_bert(num: int, length: int, padding: int = 0) -> dict[str, Any]:
    ids = _tokens(num, length)
    mask = (torch.arange(length) < length - padding).long().expand(num, length)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def t5() -> nn.Module:
    t = transformers_or_skip()
    config = t.T5Config(
        num_layers=3, num_decoder_layers=3, d_model=32, d_ff=64, d_kv=8, num_heads=4, vocab_size=64,
        decoder_start_token_id=0,
    )  # fmt: skip
    return t.T5ForConditionalGeneration(config)


def of_t5(num: int, given: int, made: int) -> dict[str, Any]:
    return {"input_ids": _tokens(num, given), "labels": _tokens(num, made)}


def vit() -> nn.Module:
    t = transformers_or_skip()
    config = t.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        image_size=32, patch_size=8, num_labels=3,
    )  # fmt: skip
    return t.ViTForImageClassification(config)


def of_vit(num: int, size: int = 32) -> dict[str, Any]:
    g = torch.Generator().manual_seed(num)
    images, labels = torch.randn(num, 3, size, size, generator=g), torch.arange(num) % 3
    return {"pixel_values": images, "labels": labels, "interpolate_pos_encoding": size != 32}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def of_encoder(num: int, length: int, padding: int = 0) -> dict[str, Any]:
    x = torch.randn(num, length, 32, generator=torch.Generator().manual_seed(length))
    mask = (torch.arange(length) >= length - padding).expand(num, length)
    return {"src": x, "src_key_padding_mask": mask}


def built(build: Any) -> nn.Module:
    torch.manual_seed(0)
    return build().train()


def loss_of(output: Any) -> torch.Tensor:
    return output.loss if hasattr(output, "loss") else output.abs().sum()


def step(model: nn.Module, given: dict[str, Any], *, is_cast: bool = False, num: int = 1) -> None:
    """Run a step of so many batches."""
    for _ in range(num):
        with torch.autocast("cpu", torch.bfloat16) if is_cast else contextlib.nullcontext():
            loss = loss_of(model(**given))
        loss.backward()


CASES = {
    "padding of other lengths": (
        bert,
        [of_bert(2, 32), of_bert(2, 32, 5), of_bert(4, 24, 3), of_bert(6, 20), of_bert(4, 64)],
    ),
    "two lengths": (
        t5,
        [of_t5(2, 24, 16), of_t5(2, 16, 24), of_t5(4, 12, 30), of_t5(2, 40, 8), of_t5(4, 48, 32)],
    ),
    "images": (vit, [of_vit(4), of_vit(2), of_vit(7), of_vit(3, 48), of_vit(16)]),
    "a mask by name": (
        encoder,
        [of_encoder(2, 64), of_encoder(2, 64, 9), of_encoder(4, 32), of_encoder(4, 96, 40)],
    ),
}


def planned(build: Any, batches: list[dict[str, Any]], *, is_cast: bool = False) -> Any:
    """A model with a plan for the first batch, in a budget for the last one; and one without."""
    model = built(build)
    with torch.autocast("cpu", torch.bfloat16) if is_cast else contextlib.nullcontext():
        points = recoup.plan(model, **batches[-1]).points
        least, most = points[0].peak_bytes * 1.05, points[-1].peak_bytes
        budget = int(least + (most - least) * 0.3)
        plan = recoup.plan(model, **batches[0], budget=budget, replan=True).apply()
    return model, plan, built(build)


def check(model: nn.Module, plan: recoup.Plan, plain: nn.Module, given: Any, **how: Any) -> None:
    """Check that a step has the results of the plain one, and keeps to the budget."""
    runs = [result_of(net, lambda net=net: step(net, given, **how)) for net in (model, plain)]
    assert_same(*runs)
    one = {**how, "num": 1}
    peak = recoup.measure(lambda: step(model, given, **one), device="cpu", repeats=0).peak_bytes
    model.zero_grad()
    assert peak <= plan.budget_bytes


@pytest.mark.parametrize("kind", CASES)
def test_batches_of_many_shapes(kind):
    build, batches = CASES[kind]
    model, plan, plain = planned(build, batches)
    for given in batches:
        check(model, plan, plain, given)
    assert 1 < len(plan.family) < len(batches)
    plan.remove()
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("how", [{"is_cast": True}, {"num": 3}], ids=["autocast", "accumulated"])
def test_batches_of_many_shapes_in_steps_of_other_kinds(how):
    build, batches = CASES["padding of other lengths"]
    model, plan, plain = planned(build, batches, is_cast="is_cast" in how)
    for given in batches:
        check(model, plan, plain, given, **how)


def test_a_life_with_plans():
    """Evaluation, a state_dict, a copy with a plan of its own, steps of an optimizer."""
    build, batches = CASES["padding of other lengths"]
    model, plan, plain = planned(build, batches)
    for net in (model.eval(), plain.eval()):
        with torch.no_grad():
            net(**batches[-1])
    assert plan.family == (plan,)
    check(model.train(), plan, plain.train(), batches[-1])
    other = built(build)
    other.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    assert recoup.applied_plans(copied) == []
    own = recoup.plan(copied, **batches[0], budget=plan.budget_bytes, replan=True).apply()
    check(copied, own, plain, batches[2])
    assert recoup.applied_plans(model) == [plan]
    nets = (model, copied, other, plain)
    steppers = [torch.optim.SGD(net.parameters(), 1e-2) for net in nets]
    for seed, given in enumerate(batches):
        for net, stepper in zip(nets, steppers, strict=True):
            torch.manual_seed(seed)
            stepper.zero_grad()
            step(net, given)
            stepper.step()
    for net in nets[:-1]:
        for name, value in plain.state_dict().items():
            assert torch.equal(net.state_dict()[name], value), name
