"""What recoup costs where the networks are small, and Python, not arithmetic, takes the time.

Processor time of one thread; the contestants of a table take short turns, and a ratio is the median
of those of the rounds, so that what else the machine does falls on all of them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from flow_rivals import GLOWS
from flows import images, made, training_step
from rivals import installed
from timing import in_turn, ratio
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import recoup
from recoup.flows import Glow
from recoup.schedules import sqrt
from recoup.schedules.actions import groups_of

Steps = Mapping[str, Callable[[], Any]]


def rows_of(steps: Steps, rounds: int, calls: int, reference: str) -> list[dict]:
    """Return a row for each step: its fastest turn, and its time over that of `reference`.

    Each round is a turn of `calls` calls of every step. The ratio is the median of the rounds'.
    """
    for step in steps.values():
        for _ in range(3):
            step()
    turns = in_turn(steps, rounds, clock=time.process_time, calls=calls)
    return [
        {
            "name": name,
            "microseconds": 1e6 * min(taken),
            f"over_{reference}": ratio(taken, turns[reference]),
        }
        for name, taken in turns.items()
    ]


# --- regions -------------------------------------------------------------------------------------


def body(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


def region() -> list[dict]:
    """Measure forward and backward of three small operations as one region."""
    x = torch.randn(4, 4, requires_grad=True)
    calls: Steps = {
        "recoup.checkpoint": lambda: recoup.checkpoint(body, x),
        "torch checkpoint": lambda: checkpoint(body, x, use_reentrant=False),
        "torch checkpoint, no RNG": lambda: checkpoint(
            body, x, use_reentrant=False, preserve_rng_state=False
        ),
    }
    steps: dict[str, Callable[[], Any]] = {"plain": lambda: body(x).sum().backward()}
    steps |= {name: lambda call=call: call().sum().backward() for name, call in calls.items()}
    steps["second run"] = lambda: body(x)
    found = rows_of(steps, 400, 10, "plain")
    over_plain = {row["name"]: row["over_plain"] for row in found}
    beyond = {name: over_plain[name] - 1 - over_plain["second run"] for name in calls}
    for row in found:
        if row["name"] in calls:
            row["beyond_over_torchs"] = beyond[row["name"]] / beyond["torch checkpoint"]
    return found


def sequential(num_blocks: int = 20) -> list[dict]:
    """Measure a step of small blocks in segments."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_blocks)]
    x = torch.randn(4, 8, requires_grad=True)
    plain, ours = nn.Sequential(*blocks), recoup.Sequential(*blocks, memory="sqrt")
    num_segments = sum(len(group) > 1 for group in groups_of(sqrt(num_blocks))) + 1
    segments = partial(checkpoint_sequential, plain, use_reentrant=False)
    steps = {
        "plain": lambda: plain(x).sum().backward(),
        "recoup sqrt": lambda: ours(x).sum().backward(),
        # Its segments are of one length; with these its peak is nearest to ours.
        f"torch checkpoint_sequential, {num_segments} segments": lambda: (
            segments(num_segments, input=x).sum().backward()
        ),
    }
    return rows_of(steps, 200, 3, "plain")


# --- weights, gradients --------------------------------------------------------------------------


def weights() -> list[dict]:
    """Measure a step of one linear layer whose weight is noisy, dropped or both."""
    x = torch.randn(4, 64, requires_grad=True)
    layers = {
        "plain": nn.Linear(64, 64),
        "noise": recoup.weight_noise(nn.Linear(64, 64)),
        "dropout": recoup.weight_dropout(nn.Linear(64, 64)),
        "dropout and noise": recoup.weight_dropout(recoup.weight_noise(nn.Linear(64, 64))),
    }
    steps = {name: lambda layer=layer: layer(x).sum().backward() for name, layer in layers.items()}
    return rows_of(steps, 300, 10, "plain")


def store(num_parameters: int = 400) -> list[dict]:
    """Measure backward and optimizer step with many small parameters."""
    parameters = [nn.Parameter(torch.randn(8)) for _ in range(num_parameters)]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def loss() -> Tensor:
        return torch.stack([p.square().sum() for p in parameters]).sum()

    def plain() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    def ours() -> None:
        gradients = recoup.GradStore(parameters)
        gradients.backward(loss())
        recoup.step(optimizer, gradients)

    return rows_of({"plain": plain, "recoup": ours}, 60, 1, "plain")


# --- flows ---------------------------------------------------------------------------------------


def glow(num_steps: int = 16) -> list[dict]:
    """Measure a step of the demo's Glow in each memory mode."""
    x = torch.randint(17, (64, 1, 8, 8), dtype=torch.uint8)
    steps = {}
    for memory in ("linear", "sqrt", "constant"):
        torch.manual_seed(0)
        flow = Glow((1, 8, 8), levels=17, num_steps=num_steps, width=64, memory=memory)
        steps[memory] = partial(_flow_step, flow, x)
    return rows_of(steps, 30, 1, "linear")


def _flow_step(flow: Glow, x: Tensor) -> None:
    flow.zero_grad()
    flow.bits_per_dim(x).mean().backward()


def glow_of_others(num_steps: int = 8) -> list[dict]:
    """Measure a training step of one Glow in linear memory beside the fastest other library."""
    x = images("cpu")
    names = ("recoup linear", "recoup linear, fixed rotations", "FrEIA", "FrEIA, fixed rotations")
    steps = {}
    for name, builder in installed({name: GLOWS[name] for name in names}).items():
        contestant = made(partial(builder, num_steps=num_steps), "cpu", x)
        contestant.module.train()
        steps[name] = partial(training_step, contestant, x)
    return rows_of(steps, 40, 1, "recoup linear")


# --- models of transformers ----------------------------------------------------------------------


def transformers_models() -> list[dict]:
    """Measure a step of small models with their own checkpointing: torch's, and recoup's."""
    found: list[dict] = []
    for name, builder in _models().items():
        steps = {}
        for way, fn in {
            "plain": None,
            "torch checkpoint": partial(checkpoint, use_reentrant=False),
            "recoup.checkpoint": recoup.checkpoint,
        }.items():
            torch.manual_seed(0)
            model, inputs = builder()
            model.train()
            if fn is not None:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=fn)
            steps[way] = partial(_model_step, model, inputs)
        found += [{"model": name} | row for row in rows_of(steps, 40, 1, "torch checkpoint")]
    return found


def _model_step(model: Any, inputs: dict[str, Tensor]) -> None:
    model.zero_grad()
    output = model(**inputs)
    found = output.loss if getattr(output, "loss", None) is not None else output[0].square().mean()
    found.backward()


def _models() -> dict[str, Callable[[], tuple[Any, dict[str, Tensor]]]]:
    import transformers

    ids = torch.randint(64, (2, 16))
    few: dict[str, Any] = {"vocab_size": 64, "use_cache": False}

    def llama() -> tuple[Any, dict[str, Tensor]]:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
        config = transformers.LlamaConfig(**few, **sizes, num_attention_heads=4)
        return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}

    def t5() -> tuple[Any, dict[str, Tensor]]:
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4}
        config = transformers.T5Config(**few, **sizes, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}

    def swin() -> tuple[Any, dict[str, Tensor]]:
        config = transformers.SwinConfig(
            image_size=32, patch_size=2, embed_dim=24, depths=[2, 2], num_heads=[2, 4],
            window_size=4,
        )  # fmt: skip
        return transformers.SwinModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}

    def mamba() -> tuple[Any, dict[str, Tensor]]:
        config = transformers.MambaConfig(**few, hidden_size=32, num_hidden_layers=4, state_size=8)
        return transformers.MambaForCausalLM(config), {"input_ids": ids, "labels": ids}

    return {"Llama": llama, "T5": t5, "Swin": swin, "Mamba": mamba}


TABLES: dict[str, Callable[[], list[dict]]] = {
    "region": region,
    "sequential": sequential,
    "weights": weights,
    "store": store,
    "glow": glow,
    "glow_of_others": glow_of_others,
    "transformers": transformers_models,
}


def suite(device: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables, of a processor whatever the device is."""
    del device
    for name, table in TABLES.items():
        yield name, table()


if __name__ == "__main__":
    import sys

    torch.set_num_threads(1)
    for title in sys.argv[1:] or TABLES:
        print(title)
        for row in TABLES[title]():
            print("  ", {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
