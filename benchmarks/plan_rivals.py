"""Other ways to train in fewer bytes: functions that change a `Case` and return its forward.

What each needs: torch alone for all but two. "transformers" is for models of that library;
"torch_remat" is installed alone by `make bench`, and left out where it is missing.
"""

from collections.abc import Callable
from functools import partial

import torch
from plan_models import Case
from torch import nn
from torch._functorch import config as compiler
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from recoup._core.compile import with_own_code

Forward = Callable[[], torch.Tensor]


class NotForThisError(Exception):
    """A way that does not apply to a model, or that is not installed."""


def plain(case: Case) -> Forward:
    return case.forward


class Around(nn.Module):
    """A block whose call goes through a function of the block and its arguments."""

    def __init__(self, block: nn.Module, call: Callable) -> None:
        super().__init__()
        self.block = block
        self.call = call

    def forward(self, *args, **kwargs):
        return self.call(self.block, *args, **kwargs)


def _around(call: Callable) -> Callable[[Case], Forward]:
    def change(case: Case) -> Forward:
        case.blocks = [Around(block, call) for block in case.blocks]
        return case.forward

    return change


torch_checkpoint = _around(partial(checkpoint, use_reentrant=False))


class InSegments(nn.Module):
    """Run all blocks under `checkpoint_sequential`, which passes on a single tensor."""

    def __init__(self, blocks: list[nn.Module], num_segments: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.num_segments = num_segments

    def forward(self, x, *args, **kwargs):
        calls = [_Bound(block, args, kwargs) for block in self.blocks]
        return checkpoint_sequential(calls, self.num_segments, x, use_reentrant=False)


class _Bound:
    def __init__(self, block, args, kwargs):
        self.block, self.args, self.kwargs = block, args, kwargs

    def __call__(self, x):
        return self.block(x, *self.args, **self.kwargs)


def torch_checkpoint_sequential(num_segments: int) -> Callable[[Case], Forward]:
    def change(case: Case) -> Forward:
        case.blocks = [InSegments(case.blocks, num_segments)]
        return case.forward

    return change


KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
torch_selective = _around(
    partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, KEPT),
    )
)


def transformers(case: Case) -> Forward:
    """Do what the trainer of transformers does for `gradient_checkpointing=True`."""
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(case.model, name):
            getattr(case.model, name)({"use_reentrant": False})
            return case.forward
    raise NotForThisError("It is no model of transformers.")


def compiled(budget: float) -> Callable[[Case], Forward]:
    def change(case: Case) -> Forward:
        # Without isolation the code compiled for the first budget would serve them all.
        forward = torch.compile(case.forward, fullgraph=True, isolate_recompiles=True)

        def run():
            with compiler.patch(activation_memory_budget=budget):
                return forward()

        return run

    return change


def compiled_blocks(budget: float) -> Callable[[Case], Forward]:
    """Compile each block by itself; alike blocks share their code."""

    def change(case: Case) -> Forward:
        call = torch.compile(with_own_code(_call, f"block_{budget}"), fullgraph=True)
        case.blocks = [Around(block, call) for block in case.blocks]

        def run():
            with compiler.patch(activation_memory_budget=budget):
                return case.forward()

        return run

    return change


def _call(block, *args, **kwargs):
    return block(*args, **kwargs)


def torch_remat(*kept: str) -> Callable[[Case], Forward]:
    """Put a region of torch_remat around each block; the children named `kept` are not run again.

    What such a child returns is declared as needed: to leave that out, and so keep less, takes a
    symbol that CPU builds of torch 2.13 lack.
    """

    def change(case: Case) -> Forward:
        try:
            import torch_remat as library
        except ImportError as error:
            raise NotForThisError("It is not installed.") from error

        # Without a hook for them dropout's masks would be drawn anew, in silence.
        hooks = (_Draws(next(case.model.parameters()).device.type),)
        if not all(hasattr(block, name) for block in case.blocks for name in kept):
            raise NotForThisError(f"Its blocks have no {', '.join(kept)}.")
        for block in case.blocks:
            for name in kept:
                setattr(block, name, Around(getattr(block, name), _RematKept(library, name)))
        case.blocks = [
            Around(block, _Remat(library, f"blocks.{index}", hooks))
            for index, block in enumerate(case.blocks)
        ]
        return case.forward

    return change


class _Remat:
    def __init__(self, library, name, hooks):
        self.region = library.checkpoint(region_name=name, recompute_state_hooks=hooks)

    def __call__(self, block, *args, **kwargs):
        return self.region(block)(*args, **kwargs)


class _RematKept:
    def __init__(self, library, name):
        self.library, self.name = library, name

    def __call__(self, module, *args, **kwargs):
        output = self.library.region(module, self.name, recompute=False)(*args, **kwargs)
        for value in output if isinstance(output, tuple) else (output,):
            if value is not None:
                self.library.recompute_needs_tensor(value)
        return output


class _Draws:
    """The state of the default generator, which `torch_remat` leaves to its users."""

    def __init__(self, device: str) -> None:
        self.random = torch.cuda if device == "cuda" else torch

    def snapshot(self):
        return self.random.get_rng_state()

    def restore(self, state):
        self.random.set_rng_state(state)


BUDGETS = (1.0, 0.5, 0.0)
RIVALS: dict[str, Callable[[Case], Forward]] = {
    "no checkpointing": plain,
    "torch checkpoint, each block": torch_checkpoint,
    "torch selective, matmuls kept": torch_selective,
    **{
        f"checkpoint_sequential, {segments}": torch_checkpoint_sequential(segments)
        for segments in (2, 3, 4, 6)
    },
    "transformers": transformers,
    **{f"torch.compile, {budget}": compiled(budget) for budget in BUDGETS},
    "torch_remat": torch_remat(),
    "torch_remat, attention kept": torch_remat("attn"),
    "torch_remat, MLP kept": torch_remat("mlp"),
    "torch_remat, convolutions kept": torch_remat("conv1", "conv2", "conv3"),
}
