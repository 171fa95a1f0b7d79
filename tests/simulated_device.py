"""An accelerator in Python: ordinary tensors on a device "sim", whose kernels are those of the CPU.

Memory that is new or free holds NaNs; a copy on a stream is made when somebody waits for it. It
makes no generators and pins no memory, and an error of a saved-tensor hook ends the process, since
torch's guard of such devices does. It is that of the whole process: tests run it in their own.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.caching_allocator import CachingAllocator

ATEN, CPU = torch.ops.aten, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# What moves between devices, and what takes indices of the CPU.
MIXED = {"_copy_from", "index", "index_put_", "_index_put_impl_"}
generator = torch.Generator()


class Stream(torch.Stream):
    """Copies that are made when somebody waits for them, in order."""

    def __new__(cls, device=None):
        number = len(module.streams)
        stream = super().__new__(cls, stream_id=number, device_index=0, device_type=20)
        stream.queue, stream.seen = [], 0
        module.streams.append(stream)
        return stream

    def wait_stream(self, other):
        other.synchronize()
        self.seen = module.time

    def wait_event(self, event):
        event.synchronize()

    def record_event(self):
        return Event(self)

    def synchronize(self):
        while self.queue:
            self.queue.pop(0)()


class Event:
    """The end of what is queued on a stream; every third question finds that it has come."""

    def __init__(self, stream):
        self.stream, self.last, self.num_asked = stream, stream.queue[-1:], 0

    def query(self):
        self.num_asked += 1
        if self.num_asked % 3 == 0:
            self.synchronize()
        return not any(each in self.stream.queue for each in self.last)

    def synchronize(self):
        while any(each in self.stream.queue for each in self.last):
            self.stream.queue.pop(0)()


def _always(value):
    return lambda self, *device: value


class _Bare:
    is_initialized = is_available = _always(True)
    _is_in_bad_fork = _always(False)
    device_count, current_device = _always(1), _always(0)
    get_amp_supported_dtype = _always([torch.float16, torch.bfloat16])
    manual_seed_all = staticmethod(generator.manual_seed)

    def __init__(self):
        self.memory, self.time = CachingAllocator(), 0
        self.streams, self.is_capturing = [], False

    def synchronize(self, device):
        for stream in self.streams:
            stream.synchronize()


class _Full(_Bare):
    """What the modules of most devices have beside it."""

    Stream = Stream

    def get_rng_state(self, device):
        return generator.get_state()

    def set_rng_state(self, state, device):
        generator.set_state(state)

    def memory_stats(self, device=None):
        counts = {"current": self.memory.now, "peak": self.memory.peak}
        return {
            f"{kind}_bytes.all.{which}": count
            for which, kinds in counts.items()
            for kind, count in kinds.items()
        } | {"num_alloc_retries": self.memory.num_retries}

    def memory_allocated(self, device=None):
        return self.memory.now["allocated"]

    def memory_reserved(self, device=None):
        return self.memory.now["reserved"]

    def max_memory_allocated(self, device=None):
        return self.memory.peak["allocated"]

    def reset_peak_memory_stats(self, device=None):
        self.memory.reset_peaks()

    def memory_snapshot(self):
        return [{"is_expandable": self.is_expandable}]

    is_expandable = True

    def mem_get_info(self, device):
        whole = min(2**30, self.memory.limit)
        return whole - self.memory.now["reserved"], whole

    def is_current_stream_capturing(self):
        return self.is_capturing

    def current_stream(self, device):
        return self.current

    @contextmanager
    def stream(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before


module = _Full()
module.current = Stream()

# The memory of each storage, and when a kernel last wrote to it.
_memory, _written = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()


def _on_device(tensor):
    return tensor.device.type == "sim"


def _put(tensor, storage, like):
    place = like.storage_offset(), like.size(), like.stride()
    return ATEN.set_.source_Storage_storage_offset.redispatch(CPU, tensor, storage, *place)


def _wrapped(held):
    """A tensor on the device that has the memory of a tensor of the CPU."""
    memory = held.untyped_storage()
    where, num_bytes = memory.data_ptr(), memory.nbytes()
    device = torch.device("sim", 0)
    storage = torch._C._construct_storage_from_data_pointer(where, device, num_bytes)
    _memory[storage], _written[storage] = memory, module.time
    block = module.memory.allocate(num_bytes)
    if block is None:
        raise torch.OutOfMemoryError(f"sim has no room for {num_bytes} bytes")
    weakref.finalize(storage, _free, memory, block)
    return _put(torch._C._acc.create_empty_tensor([0], held.dtype), storage, held)


def _free(memory, block):
    ctypes.memset(memory.data_ptr(), 0xFF, memory.nbytes())
    module.memory.free(block)


def _held(tensor):
    found = torch.empty(0, dtype=tensor.dtype)
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return found.set_(_memory[tensor.untyped_storage()], *place)


def _changed(value, change):
    if isinstance(value, (tuple, list)):
        return type(value)([_changed(each, change) for each in value])
    return change(value)


def _run(func, *args, **kwargs):
    name, module.time = func.overloadpacket.__name__, module.time + 1
    if name in ("as_strided", "set_"):
        return func.redispatch(CPU, *args, **kwargs)
    held, originals, bases = {}, {}, {}

    def there(value):
        if isinstance(value, torch.Generator):
            raise RuntimeError(f"{func}: expected a generator of sim, but found one of cpu")
        if not isinstance(value, Tensor):
            return torch.device("cpu") if isinstance(value, torch.device) else value
        if not _on_device(value):
            if value.dim() and name not in MIXED:
                raise RuntimeError(f"{func}: expected all tensors on sim, but found one on cpu")
            return value
        if id(value) not in held:
            own = held[id(value)] = _held(value)
            originals[id(own)] = bases[own.untyped_storage()] = value
        return held[id(value)]

    def back(value):
        if not isinstance(value, Tensor) or id(value) in originals:
            return originals.get(id(value), value)
        if value.untyped_storage() in bases:
            place = value.size(), value.stride(), value.storage_offset()
            base = bases[value.untyped_storage()]
            return ATEN.as_strided.default.redispatch(CPU, base, *place)
        if name.startswith("empty"):
            ctypes.memset(value.data_ptr(), 0xFF, value.untyped_storage().nbytes())
        return _wrapped(value)

    given = [_changed(each, there) for each in args]
    named = {key: _changed(value, there) for key, value in kwargs.items()}
    if name == "_copy_from":
        return _copy(*args[:2], *given)
    # A number that torch has made of a tensor is not always taken for one again.
    for place, argument in enumerate(func._schema.arguments[: len(args)]):
        if type(args[place]) is int and str(argument.type) == "Tensor":
            given[place] = torch.tensor(args[place])
    draws = torch.Tag.nondeterministic_seeded in func.tags
    with _drawing() if draws else nullcontext(), torch._C._DisableAutocast():
        result = func(*given, **named)
    for each in originals.values():
        own = held[id(each)]
        if (own.size(), own.stride()) != (each.size(), each.stride()):  # it was resized
            moved = _wrapped(own.clone())
            _put(each, moved.untyped_storage(), moved)
        _written[each.untyped_storage()] = module.time
    return _changed(result, back)


@contextmanager
def _drawing():
    before = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    yield
    generator.set_state(torch.get_rng_state())
    torch.set_rng_state(before)


def _copy(source, target, held_source, held_target, non_blocking=False):
    stream, copy = module.current, partial(held_target.copy_, held_source)
    if non_blocking and stream is not module.streams[0]:
        if _on_device(source) and _written[source.untyped_storage()] > stream.seen:
            raise AssertionError("a stream reads what another stream has not written yet")
        stream.queue.append(copy)
    else:
        copy()
    if _on_device(target):
        _written[target.untyped_storage()] = module.time
    return target


def _convolution_backward(grad, x, weight, *args):
    sizes = [weight.shape[1 if args[3] else 0]]
    return _run(ATEN.convolution_backward.default, grad, x, weight, sizes, *args)


def set_up(*, is_bare=False):
    """Make it the accelerator of this process; return what must stay alive.

    `is_bare`: without a random state that can be set, counts of bytes, and streams.
    """
    module.__class__ = _Bare if is_bare else _Full
    _setup_privateuseone_for_python_backend("sim", module)
    torch.autograd.set_multithreading_enabled(False)
    library = torch.library.Library("aten", "IMPL")
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    for name in {each[6:] for each in kernels if each.startswith("aten::")} | {"_copy_from"}:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(ATEN, packet), overload or "default")
        library.impl(name, partial(_run, func), "PrivateUse1")
    convolution = partial(_run, ATEN.convolution.default)
    library.impl("convolution_overrideable", convolution, "PrivateUse1")
    library.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    library.impl("record_stream", lambda tensor, stream: None, "PrivateUse1")
    settings = torch.library.Library("_", "IMPL")
    settings.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return library, settings
