"""Devices: random states, counts of bytes and streams of the CPU and of any accelerator.

NOTE [ Any device ]

Rule 1. No other file knows what kinds of devices there are. An accelerator is asked through its
        module of torch, such as `torch.cuda` or `torch.xpu`.
Rule 2. A module need not have everything. What draws on a device without a random state, or counts
        the bytes of one that does not count them, is refused by name. A device that makes no
        generators gets draws of the CPU; what could leave for host memory stays on one without
        streams (MPS shares it); host memory that cannot be pinned is ordinary.
Rule 3. The accelerator of a machine is looked up once. It has no random state before it is in use.
Rule 4. While a stream is captured into a CUDA graph, kernels are recorded and do not run. What runs
        again, draws from a seed of ours or leaves needs the host, which a replay would not ask. So
        all three are refused there. A plan that keeps everything is the plain model.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from recoup.errors import RecoupError, ReplayError

T = TypeVar("T")
States = tuple[Tensor, ...]
_CPU = torch.device("cpu")
_cpu_state = torch.default_generator.get_state


@functools.cache
def accelerator() -> torch.device | None:
    """Return the kind of accelerator of this machine, without an index; None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


@functools.cache
def _module_of(kind: str) -> Any:
    """Return the module of a kind of devices; None, which has nothing, if torch has none."""
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has memory and a random state of its own."""
    return device.type not in ("cpu", "meta")


def is_available(device: torch.device) -> bool:
    """Whether this machine has a device."""
    if not is_accelerator(device):
        return device.type == "cpu"
    kind = accelerator()
    if kind is None or kind.type != device.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()


def device_in_use() -> torch.device:
    """Return the kind of accelerator that is in use and counts bytes; else the CPU."""
    kind = accelerator()
    if kind is None or not _is_in_use(kind.type) or not _counts_bytes(_module_of(kind.type)):
        return _CPU
    return kind


def _if_taken(device: torch.device, function: Callable[..., Any]) -> tuple[torch.device, ...]:
    """Return the device if a function takes one: those of MPS, of which there is one, do not."""
    return (device,) if inspect.signature(function).parameters else ()


def _is_in_use(kind: str) -> bool:
    """Whether an accelerator was initialized; MPS always is."""
    module = _module_of(kind)
    return not hasattr(module, "is_initialized") or module.is_initialized()


@functools.cache
def autocast_kinds() -> tuple[str, ...]:
    """Return the kinds of devices whose autocast may affect results here."""
    kind = accelerator()
    return ("cpu",) if kind is None else ("cpu", kind.type)


def refuse_capture() -> None:
    """Raise if a stream is being captured into a CUDA graph (See Rule 4)."""
    kind = accelerator()
    is_capturing = kind and getattr(_module_of(kind.type), "is_current_stream_capturing", None)
    if is_capturing and is_capturing():
        raise RecoupError(
            "A stream is being captured into a CUDA graph, in which nothing can run again, wait in "
            "host memory, or draw from a seed: a replay of the graph would not do it. Capture the "
            "model without it (a plan that keeps everything is captured as the plain model), or "
            "run this code outside of the capture."
        )


# --- the default generators ----------------------------------------------------------------------


class _DefaultGenerator:
    """The default generator of an accelerator, which its module has as a state alone."""

    def __init__(self, device: torch.device) -> None:
        module = _module_of(device.type)
        self._read, self._write = module.get_rng_state, module.set_rng_state
        self._where = _if_taken(device, self._read)

    def get_state(self) -> Tensor:
        return self._read(*self._where)

    def set_state(self, state: Tensor) -> None:
        self._write(state, *self._where)


def can_replay(kind: str) -> bool:
    """Whether devices of a kind have a random state that can be read and set."""
    return kind == "cpu" or hasattr(_module_of(kind), "set_rng_state")


def default_generator(device: torch.device) -> Any:
    """Return the default generator of a device: its `get_state` and `set_state`."""
    return torch.default_generator if device.type == "cpu" else _DefaultGenerator(device)


@functools.cache
def _of_accelerator() -> tuple[_DefaultGenerator, ...]:
    """Return the default generators of the accelerator, which is in use."""
    kind = accelerator()
    if kind is None or not can_replay(kind.type):
        return ()
    num_devices = torch.accelerator.device_count()
    return tuple(_DefaultGenerator(torch.device(kind.type, each)) for each in range(num_devices))


def unrepeated() -> str:
    """Return why draws on the accelerator are not repeated; "" if they are, or none is in use."""
    kind = accelerator()
    if kind is None or can_replay(kind.type) or not _is_in_use(kind.type):
        return ""
    return f"{kind.type} draws other numbers: its torch module has no `set_rng_state`"


def refuse_draws(func: object, device: torch.device) -> None:
    """Raise if what `func` draws on `device` cannot be drawn again."""
    if device.type != "meta" and not can_replay(device.type):
        raise ReplayError(
            f"{func} draws on {device.type}, whose torch module has no `get_rng_state` and "
            "`set_rng_state` to repeat it in backward. Draw before the block, or on the CPU."
        )


def generator_states() -> States:
    """Return the states of the default generators."""
    kind = accelerator()
    if kind is None or not _is_in_use(kind.type):
        return (_cpu_state(),)
    refuse_capture()
    # All devices, since a region may draw on one that is not the current device.
    return (_cpu_state(), *(each.get_state() for each in _of_accelerator()))


def set_generator_states(states: States) -> None:
    """Set the states of the default generators."""
    torch.default_generator.set_state(states[0])
    for generator, state in zip(_of_accelerator(), states[1:], strict=False):
        generator.set_state(state)


def same_states(a: States, b: States) -> bool:
    """Whether two states are equal, so that nothing was drawn in between."""
    # A device that was initialized in between counts as unchanged: it has no state to replay.
    for x, y in zip(a, b, strict=False):
        # torch.equal takes four times as long for the 5 KB of a state, in every region.
        before = ctypes.string_at(x.data_ptr(), x.numel())
        if before != ctypes.string_at(y.data_ptr(), y.numel()):
            return False
    return True


def fingerprint() -> int:
    """Return a hash of the state of the default CPU generator."""
    return hash_of((_cpu_state(),))


def hash_of(states: States) -> int:
    """Return a hash of the states of generators."""
    return hash(tuple(ctypes.string_at(each.data_ptr(), each.numel()) for each in states))


class generators_restored:  # noqa: N801 - it reads as what it does
    """A context after which the default generators have the states from before it."""

    states: States  # that they will have

    def __enter__(self) -> Self:
        self.states = generator_states()
        return self

    def __exit__(self, *error: object) -> None:
        set_generator_states(self.states)


def with_seed(call: Callable[[], T], seed: int) -> T:
    """Run `call` with the default generators seeded with `seed`, and restore them after it."""
    with generators_restored():
        seed_generators(seed)
        return call()


def seed_generators(seed: int) -> None:
    """Seed the default generators."""
    torch.default_generator.manual_seed(seed)
    kind = accelerator()
    if kind is not None and _is_in_use(kind.type):
        module = _module_of(kind.type)
        seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed  # MPS is one
        seed_all(seed)


@functools.cache
def makes_generators(kind: str) -> bool:
    """Whether torch makes generators for devices of a kind."""
    try:
        torch.Generator(kind)
    except RuntimeError:
        return False
    return True


def own_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a new generator with a seed: of the CPU if there are none for `device` (Rule 2)."""
    if accelerator() is not None:
        refuse_capture()
    return torch.Generator(device if makes_generators(device.type) else _CPU).manual_seed(seed)


# --- bytes ---------------------------------------------------------------------------------------


def _counts_bytes(module: Any) -> bool:
    names = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
    return all(hasattr(module, name) for name in names)


def counter_of(device: torch.device) -> Any:
    """Return the module of torch that counts the bytes on an accelerator; raise if none does."""
    module = _module_of(device.type)
    if not _counts_bytes(module):
        raise ValueError(
            f"The bytes on {device} are not counted: its torch module has no `memory_allocated`, "
            "`max_memory_allocated` and `reset_peak_memory_stats`. Measure, or plan, on the CPU or "
            "on a device that counts them."
        )
    return module


class Peaks(NamedTuple):
    """The most bytes on a device at one time, as its allocator counts them."""

    requested: int  # the bytes that were asked for
    allocated: int  # those of the blocks that were handed out for them
    # Those that the allocator has from the device, with its cache; None where it does not tell.
    reserved: int | None = None


NO_PEAKS = Peaks(0, 0)


class MemoryCounts(NamedTuple):
    """The counts of the allocator of an accelerator."""

    requested: int  # the bytes that are in use now, as they were asked for
    allocated: int  # those of their blocks
    peaks: Peaks  # since `reset_peaks`
    num_retries: int  # how often it gave cached memory back to the device and tried again


def memory_counts(device: torch.device) -> MemoryCounts:
    """Return the counts of an accelerator; what it does not tell counts as what is allocated."""
    module = counter_of(device)
    stats: dict[str, int] = module.memory_stats(device) if hasattr(module, "memory_stats") else {}
    if "requested_bytes.all.peak" not in stats:
        now, peak = module.memory_allocated(device), module.max_memory_allocated(device)
        return MemoryCounts(now, now, Peaks(peak, peak), 0)
    kinds = ("requested", "allocated", "reserved")
    return MemoryCounts(
        stats["requested_bytes.all.current"],
        stats["allocated_bytes.all.current"],
        Peaks(*(stats[f"{kind}_bytes.all.peak"] for kind in kinds)),
        stats.get("num_alloc_retries", 0),
    )


def has_fixed_segments(device: torch.device) -> bool:
    """Whether free memory of accelerators like this one lies in segments that cannot grow."""
    module = _module_of(device.type)
    snapshot: Any = getattr(module, "memory_snapshot", list)
    try:
        segments: list[dict[str, Any]] = snapshot()
    except RuntimeError:  # an allocator of another kind
        return False
    return bool(segments) and not any(each.get("is_expandable", True) for each in segments)


def reset_peaks(device: torch.device) -> None:
    """Let the peaks of an accelerator begin anew."""
    counter_of(device).reset_peak_memory_stats(device)


def explain_lack(error: torch.OutOfMemoryError) -> None:
    """Add to an error that there is no memory what may help, once."""
    note = (
        "A step that recoup runs needed this memory. If what is allocated is well below what there "
        "is, free memory is in pieces that are too small: let a plan leave more `headroom`, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before torch starts. Otherwise give "
        "recoup.plan a smaller `budget`."
    )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def free_bytes(device: torch.device) -> float:
    """Return the bytes that an accelerator has room for; infinity if it does not say."""
    module = _module_of(device.type)
    if not hasattr(module, "mem_get_info"):
        return float("inf")
    free, _ = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


# --- copies --------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was asked of it."""
    if is_accelerator(device):
        call = _module_of(device.type).synchronize
        call(*_if_taken(device, call))


def has_streams(device: torch.device) -> bool:
    """Whether a device may copy to host memory while it computes."""
    return is_accelerator(device) and hasattr(_module_of(device.type), "Stream")


@functools.cache
def pins_memory() -> bool:
    """Whether host memory can be pinned for the accelerator."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True
