"""Other ways to train in fewer bytes: functions that change a `Case` and return its forward.

What each needs: torch alone for all but three. "transformers" is for models of that library,
"accelerate" comes with it; "torch_remat" is installed alone by `make bench`, and left out where it
is missing.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

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


def transformers(every_n_layers: int = 1, *, offload: bool = False) -> Callable[[Case], Forward]:
    """Do what the trainer of transformers does for `gradient_checkpointing=True`.

    Args:
        every_n_layers: the first of so many layers is a checkpoint, the others keep all.
        offload: whether what checkpoints keep waits in pinned host memory.
    """

    def change(case: Case) -> Forward:
        if not hasattr(case.model, "activation_checkpointing_enable"):
            raise NotForThisError("It is no model of transformers.")
        if offload and case.device.type == "cpu":
            raise NotForThisError("It pins memory, for which torch needs an accelerator.")
        case.model.activation_checkpointing_enable(
            {"use_reentrant": False}, every_n_layers=every_n_layers, offload=offload
        )
        return case.forward

    return change


def accelerate(*, offload: bool) -> Callable[[Case], Forward]:
    """Do what accelerate does for `activation_checkpointing` with FSDP2, without the shards."""

    def change(case: Case) -> Forward:
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        _require_no_draws(case)
        plugin = SimpleNamespace(
            auto_wrap_policy=transformer_auto_wrap_policy,
            transformer_cls_names_to_wrap=sorted({type(block).__name__ for block in case.blocks}),
            activation_checkpointing_offload=offload,
        )
        fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), case.model)
        return case.forward

    return change


def _require_no_draws(case: Case) -> None:
    """Raise for a model with dropout, whose gradients would be of other masks than its loss."""
    if any(isinstance(each, nn.Dropout) and each.p for each in case.model.modules()):
        raise NotForThisError("It restores no random state: with dropout its gradients are wrong.")


class _OffloadedCheckpoint(torch.autograd.Function):
    """A block that runs again in backward, from an input that waits in host memory.

    Written anew in the style of `Unsloth_Offloaded_Gradient_Checkpointer` of
    https://github.com/unslothai/unsloth-zoo, which needs a GPU. On a CPU neither copies anything.
    """

    @staticmethod
    def forward(ctx, call, x):
        ctx.call, ctx.device = call, x.device
        ctx.save_for_backward(x.to("cpu", non_blocking=True))
        return call(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.to(ctx.device, non_blocking=True).detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.call(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def unsloth(case: Case) -> Forward:
    """Put a checkpoint in the style of Unsloth around each block."""
    _require_no_draws(case)

    def call(block, x, *args, **kwargs):
        return _OffloadedCheckpoint.apply(lambda x: block(x, *args, **kwargs), x)

    return _around(call)(case)


def compiled(budget: float) -> Callable[[Case], Forward]:
    def change(case: Case) -> Forward:
        # Without isolation the code compiled for the first budget would serve them all.
        forward = torch.compile(case.forward, fullgraph=True, isolate_recompiles=True)

        def run():
            with compiler.patch(activation_memory_budget=budget):
                return forward()

        return run

    return change


def compiled_blocks(budget: float, backend: str = "inductor") -> Callable[[Case], Forward]:
    """Compile each block by itself; alike blocks share their code."""

    def change(case: Case) -> Forward:
        own = with_own_code(_call, f"block_{budget}")
        call = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
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
        hooks = (_Draws(case.device.type),)
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
    "transformers": transformers(),
    **{f"transformers, every {n}": transformers(n) for n in (2, 3)},
    "transformers, offload": transformers(offload=True),
    "accelerate": accelerate(offload=False),
    "accelerate, offload": accelerate(offload=True),
    "Unsloth's style": unsloth,
    **{f"torch.compile, {budget}": compiled(budget) for budget in BUDGETS},
    "torch_remat": torch_remat(),
    "torch_remat, attention kept": torch_remat("attn"),
    "torch_remat, MLP kept": torch_remat("mlp"),
    "torch_remat, convolutions kept": torch_remat("conv1", "conv2", "conv3"),
}
