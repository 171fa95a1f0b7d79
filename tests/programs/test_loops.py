"""Models of other libraries in a loop of one's own: adapters, low precision, diffusion."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup._core.storage_tracking import Allocations
from tests.oracle import assert_same_tensors
from tests.plan_oracle import Made, ways_of
from tests.programs.programs import VOCABULARY, llama

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def tokens():
    torch.manual_seed(3)
    drawn = torch.randint(4, len(VOCABULARY), (4, 32))
    return {"input_ids": drawn, "labels": drawn, "use_cache": False}


def adapted(base, targets="all-linear", **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(2)
    options = {"lora_dropout": 0.1, "task_type": "CAUSAL_LM"} | options
    config = peft.LoraConfig(r=4, target_modules=targets, **options)
    return peft.get_peft_model(base, config), tokens()


def lora_on_inputs_with_gradients():
    base = llama()
    base.enable_input_require_grads()
    return adapted(base)


def torchao(name):
    return pytest.importorskip(f"torchao.{name}", reason="torchao is not installed")


def int8_weights():
    base = llama()
    torchao("quantization").quantize_(base, torchao("quantization").Int8WeightOnlyConfig(version=2))
    return adapted(base, ["q_proj", "v_proj"], lora_dropout=0.0)


def fake_quantized():
    qat = torchao("quantization.qat")
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=16)
    inputs = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    model = llama()
    config = qat.QATConfig(activation_config=inputs, weight_config=weights, step="prepare")
    torchao("quantization").quantize_(model.model.layers, config)
    return model, tokens()


def observed():
    """The fused kernel of torch's own fake quantization writes ranges without a new version."""
    torch.manual_seed(0)
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(5)]
    body = nn.Sequential(*(nn.Sequential(*each) for each in layers))
    model = Made(lambda m, x: {"loss": m.body(x).square().mean()}, body=body)
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model), {"x": torch.randn(8, 8, 16, 16)}


def diffusion():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=16, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(16, 32), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    images, noise = torch.randn(2, 4, 1, 16, 16)
    batch = {"images": images, "noise": noise, "times": torch.arange(4)}

    def forward(model, images, noise, times):
        return {"loss": F.mse_loss(model.unet(images + noise, times).sample, noise)}

    return Made(forward, unet=unet), batch


def accelerated():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(llama()), tokens()


PROGRAMS = [
    lora_on_inputs_with_gradients, int8_weights, fake_quantized, observed, diffusion, accelerated,
]  # fmt: skip


def train(model, batch):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(4)
    losses, peaks = [], []
    for _ in range(3):
        optimizer.zero_grad()
        levels = []
        with Allocations(levels):
            loss = model(**batch)["loss"]
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        peaks.append(max(levels))
    return losses, peaks


def values_of(model):
    named = model.state_dict().items()
    return {name: value.dequantize() for name, value in named if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_training_within_the_budget(program):
    (plain, batch), (planned, _) = program(), program()
    plain.train(), planned.train()
    frontier = recoup.plan(planned, **batch, holds_output=False, loss=lambda out: out["loss"])
    budget = (frontier.points[0].peak_bytes + frontier.points[-1].peak_bytes) // 2
    plan = frontier.plan(budget).apply()
    wanted, plain_peaks = train(plain, batch)
    found, peaks = train(planned, batch)
    assert found == wanted
    assert_same_tensors(values_of(planned), values_of(plain))
    assert max(peaks) <= budget < max(plain_peaks)
    assert ways_of(plan) != {"keep"}


def test_a_store_waits_while_accelerate_accumulates():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    trainer = accelerate.Accelerator(gradient_accumulation_steps=4, cpu=True)
    # Whole numbers: the precision of another trainer is that of all in a process.
    data, plain = torch.randint(-4, 5, (4, 3, 2)).float(), nn.Linear(2, 1, bias=False)
    expected = plain.weight.detach() - data.mean(0).sum(0)
    model, optimizer = trainer.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    store = recoup.GradStore(model.parameters())
    for x in data:
        with trainer.accumulate(model):
            store.backward(model(x).sum() / 4)
            store.step(optimizer)
    torch.testing.assert_close(model.weight.detach(), expected)
    assert not len(store)
