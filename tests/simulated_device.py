"""An accelerator in Python: tensors that compute on the CPU, and a random stream of their own.

It is that of the whole process, so tests run it in a process of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ATEN = torch.ops.aten
generator = torch.Generator()


class _Module:
    """What torch asks of a device module."""

    def is_initialized(self):
        return True

    is_available = is_initialized

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        generator.manual_seed(seed)

    def get_rng_state(self, device=0):
        return generator.get_state()

    def set_rng_state(self, state, device=0):
        generator.set_state(state)

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class SimulatedTensor(Tensor):
    """A tensor on the device "sim", whose numbers a tensor of the CPU holds."""

    @staticmethod
    def __new__(cls, held):
        return Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device="sim",
        )  # fmt: skip

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = torch.device(kwargs.get("device") or "sim").type
        given = tree_map_only(SimulatedTensor, lambda tensor: tensor.held, (args, kwargs))
        given = tree_map_only(torch.device, lambda _: torch.device("cpu"), given)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            before = torch.get_rng_state()
            torch.set_rng_state(generator.get_state())
        result = func(*given[0], **given[1])
        if draws:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)
        if func is ATEN._to_copy.default and target == "cpu":
            return result
        known = {id(each.held): each for each in args if isinstance(each, SimulatedTensor)}
        return tree_map_only(
            Tensor, lambda t: known[id(t)] if id(t) in known else SimulatedTensor(t), result
        )


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return SimulatedTensor(torch.empty(size, dtype=dtype))


def set_up():
    """Make it the accelerator of this process; return what must stay alive."""
    _setup_privateuseone_for_python_backend("sim", backend_module=_Module())
    torch.autograd.set_multithreading_enabled(False)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    return library


def on_device(tensor):
    """A copy of a tensor, or of the parameters of a module in their places, on the device."""
    if isinstance(tensor, torch.nn.Module):
        for module in tensor.modules():
            for name, value in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(on_device(value)))
        return tensor
    return SimulatedTensor(tensor.detach().clone())
