"""The plain run as the oracle: run a step, and compare everything that it leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves

from recoup._core import saved_tensors
from recoup._core.saved_tensors import pair_in_force
from recoup.weights.reparametrization import local


def hooks_in_force():
    """The innermost pair of saved-tensor hooks: None where nobody has left any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def state_of_torch() -> dict[str, Any]:
    """What code may change for a while in torch and in recoup, and must put back."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "hooks": pair_in_force(),
        "dispatch modes": torch._C._len_torch_dispatch_stack() + is_in_torch_dispatch_mode(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "grad mode": torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), nesting),
        "an observer": saved_tensors.current.observer,
        "forwards": [*local.frames, *local.lists],
        "hooks of modules": [
            dict(each) for name, each in vars(module).items() if name.startswith("_global_forward")
        ],
    }


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def loss_of_all(output: Any) -> Tensor:
    """A loss that uses every floating-point value of `output`, each in its own way."""
    parts = [t for t in tensors(output) if t.is_floating_point()]
    return sum(((place + 1.5) * part.double().sin()).sum() for place, part in enumerate(parts))


class Step(NamedTuple):
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    stream: Tensor


def run_step(
    model: nn.Module,
    x: Any,
    *,
    memory: Any = None,
    call: Callable[[Any, Any], Any] = nn.Module.__call__,
    loss: Callable[[Any], Tensor] = loss_of_all,
    seed: int = 11,
) -> Step:
    """Run a step of a copy of `model`, in its own memory mode or in another."""
    model = copy.deepcopy(model)
    if memory is not None:
        model.memory = memory
    inputs = [t for t in tensors(x) if t.requires_grad]
    for value in inputs:
        value.grad = None
    torch.manual_seed(seed)
    output = call(model, x)
    loss(output).backward()
    gradients = {f"input {place}": value.grad for place, value in enumerate(inputs)}
    gradients |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(
        [value.detach().clone() for value in tensors(output)],
        {name: None if g is None else g.clone() for name, g in gradients.items()},
        {name: value.clone() for name, value in model.named_buffers()},
        torch.get_rng_state(),
    )


def assert_same_tensor(
    name: str, got: Tensor | None, want: Tensor | None, rtol: float = 0.0, least: float = 1e-300
):
    """Compare bit by bit, or relative to the largest entry, or to `least` if that is larger."""
    if want is None or got is None:
        assert got is want, f"{name}: {got} for {want}"
        return
    assert got.shape == want.shape, f"{name}: shape {got.shape} for {want.shape}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype} for {want.dtype}"
    if rtol == 0.0 or not want.is_floating_point():
        assert torch.equal(got, want), f"{name}: differs by {(got - want).abs().max()}"
        return
    if want.numel():
        error, scale = (got - want).abs().max(), want.abs().max().clamp_min(least)
        assert error <= rtol * scale, f"{name}: differs by {error / scale} of its largest entry"


def assert_same_tensors(got: dict, want: dict, rtol: float = 0.0):
    assert list(got) == list(want)
    present = [v for v in want.values() if v is not None and v.is_floating_point() and v.numel()]
    # A bias before a norm has a gradient of rounding errors alone.
    least = 1e-3 * max((float(value.double().abs().max()) for value in present), default=1.0)
    for name, value in want.items():
        assert_same_tensor(name, got[name], value, rtol, least)


def assert_same_step(got: Step, want: Step, rtol: float = 0.0):
    """Compare all that two steps left behind (`rtol` is for the gradients alone)."""
    assert_same_tensors(dict(enumerate(got.outputs)), dict(enumerate(want.outputs)))
    assert any(value is not None for value in want.gradients.values())
    assert_same_tensors(got.gradients, want.gradients, rtol)
    assert_same_tensors(got.buffers, want.buffers)
    assert torch.equal(got.stream, want.stream), "the random stream differs"


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def of(self, *names):
        return sum(map(self.names.count, names))
