"""The code by which blocks run: their own, compiled at several budgets, or nudged.

NOTE [ Compiled blocks ]

Rule 1. The compiler traces forward and backward of a block as one graph, and its partitioner cuts
        the graph in two. It keeps as much as fits in a share of the bytes that it would keep for
        the least time (the `activation_memory_budget` of torch.compile), and computes the rest
        again in backward. Each share gives other code, here a `CompiledCode`.
Rule 2. What draws random numbers is kept (with inductor, that is a seed for each draw). Left alone,
        the partitioner may draw seeds anew in backward, for a share of 0 always, and the gradients
        are then those of other masks than forward's. So these operators are marked as saved. For a
        share of exactly 0 the partitioner looks at no marks, so a tiny one stands in for it.
Rule 3. Codes of one block save different tensors, and the runs of a region must save the same. So
        all runs of a call are by the code of the first one.
Rule 4. The compiler compiles nothing under a dispatch mode, and skips that function for good. So a
        call whose first run is under a mode is not compiled.
Rule 5. Blocks of one structure share a function, which is compiled once. Blocks of another one have
        another function, since the compiler bounds how often it compiles a function again. Where a
        graph breaks, the compiler compiles functions of the block itself, for all codes; so the
        bound is raised. A block that is compiled again and again (for a counter of its
        own) would meet that bound between two runs of a call, so it runs by its own code before.
        Compiled code looks for hooks within a block only if it is told to.
"""

from __future__ import annotations

import logging
import math
import operator
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from recoup._core.compile import with_own_code
from recoup._core.operators import compiles_nothing
from recoup._core.pytree import flatten
from recoup._core.storage_tracking import storages_of
from recoup.planning.forwards import Args, Forward, Kwargs

SHARES = (1.0, 0.8, 0.5, 0.1, 0.0)
_RECOMPILE_LIMIT = 128
_TINY_SHARE = 1e-6
_logger = logging.getLogger(__name__)


class BlockCode:
    """The code that blocks run by: their own. It is a follower of blocks that keep residuals."""

    name = "eager"

    def of_call(self, module: nn.Module, forward: Forward) -> Forward:
        """Return what all runs of one call of a block are by, given its bound forward."""
        del module
        return forward

    def called(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a block, which keeps its residuals."""
        return self.of_call(module, forward)(*args, **kwargs)


class CompiledCode(BlockCode):
    """What torch.compile makes of blocks at one share of the bytes it would keep (See Rule 1).

    The backend is "inductor", or "aot_eager" for graphs that are partitioned alike, but whose
    operators run one by one. `failed` are the structures of blocks that cannot be compiled; this
    code adds those that it finds.
    """

    def __init__(
        self, share: float, backend: str = "inductor", failed: set[object] | None = None
    ) -> None:
        self.share = share
        self.name = f"compiled {share:g}"
        self._graphs: list[None] = []  # that were compiled; the compiler keeps it
        self._backend = backend
        self._failed = set() if failed is None else failed
        self._functions: dict[object, Forward] = {}  # by structure
        self._num_compiled: Counter[object] = Counter()  # how often each structure was compiled
        self._structures: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()

    def of_call(self, module: nn.Module, forward: Forward) -> Forward:
        function: Forward | None = None  # that all runs are by (See Rule 3)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal function
            if function is not None:
                return function(forward, args, kwargs)
            function, result = self._first_run(module, forward, args, kwargs)
            return result

        return call

    @property
    def num_graphs(self) -> int:
        """The number of graphs that were compiled."""
        return len(self._graphs)

    def compiles(self, module: nn.Module) -> bool:
        """Whether a block was compiled."""
        structure = self._structure_of(module)
        return structure in self._functions and structure not in self._failed

    def _first_run(
        self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs
    ) -> tuple[Forward, Any]:
        """Run a call, and return what it was run by, a function of the forward and its arguments.

        Under a mode, and where the compiler fails, that is the block's own code (See Rule 4).
        """
        structure = self._structure_of(module)
        too_often = self._num_compiled[structure] > _RECOMPILE_LIMIT // 2  # See Rule 5
        if too_often and structure not in self._failed:
            why = "the compiler compiles it again and again (TORCH_LOGS=recompiles says why)"
            self._fail(structure, module, f"runs as it is from now on: {why}.")
        if compiles_nothing() or structure in self._failed:
            return _call, forward(*args, **kwargs)
        if structure not in self._functions:
            function = with_own_code(_call, f"block_{self.share:g}")
            compiler = partial(_compiled, self._backend, self.share, self._graphs)
            self._functions[structure] = _compiling(function, compiler)
        from torch._dynamo.exc import TorchDynamoException

        num_graphs, begin = self.num_graphs, time.perf_counter()
        try:
            result = self._functions[structure](forward, args, kwargs)
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            why, *_ = str(cause).strip().splitlines() or [""]
            what = f"cannot be compiled, so it is planned as it is. {type(cause).__name__}: {why}"
            self._fail(structure, module, what)
            return _call, forward(*args, **kwargs)
        if self.num_graphs > num_graphs:
            self._num_compiled[structure] += 1
            seconds = time.perf_counter() - begin
            _logger.info("%s: %s in %.1f s", type(module).__name__, self.name, seconds)
        return self._functions[structure], result

    def _fail(self, structure: object, module: nn.Module, what: str) -> None:
        self._failed.add(structure)
        warnings.warn(f"A {type(module).__name__} {what}", stacklevel=2)

    def _structure_of(self, module: nn.Module) -> object:
        if module not in self._structures:
            parameters = ((name, p.shape, p.dtype) for name, p in module.named_parameters())
            kinds = (type(each) for each in module.modules())
            self._structures[module] = tuple(kinds), tuple(parameters)
        return self._structures[module]


class CodeByModule(BlockCode):
    """A code for each of some blocks, by their ids; all others run by their own."""

    def __init__(self, codes: dict[int, BlockCode]) -> None:
        self._codes = codes

    def of_call(self, module: nn.Module, forward: Forward) -> Forward:
        return self._codes.get(id(module), BlockCode()).of_call(module, forward)


def _compiling(function: Forward, backend: Any) -> Forward:
    """Return a function that is compiled when it is called (See Rule 5)."""
    from torch._dynamo import config as found

    config: Any = found
    compiled = cast("Any", torch).compile(function, backend=backend)
    changes = {"skip_nnmodule_hook_guards": False, "recompile_limit": _RECOMPILE_LIMIT}

    def call(forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        with config.patch(changes):
            return compiled(forward, args, kwargs)

    return call


def _call(forward: Forward, args: Args, kwargs: Kwargs) -> Any:
    return forward(*args, **kwargs)


# -- backends --------------------------------------------------------------------------------------


def _partitioned(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
    """Return the graphs of forward and backward; what draws is kept (See Rule 2)."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for node in graph.graph.nodes:
        if node.op == "call_function" and _draws(node, graph):
            # Of several outputs each is saved by itself: a tuple cannot be.
            parts = [user for user in node.users if user.target is operator.getitem]
            for saved in (node, *parts):
                saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(graph, inputs, **kwargs)


def _draws(node: Node, graph: GraphModule) -> bool:
    """Whether a node draws random numbers, or a graph within it does (that of a branch)."""
    called: list[Any] = [node.target, *node.args]  # its own operator, or one that it wraps
    if any(torch.Tag.nondeterministic_seeded in getattr(each, "tags", ()) for each in called):
        return True
    inner = (each for each in node.all_input_nodes if each.op == "get_attr")
    graphs = (getattr(graph, str(each.target), None) for each in inner)
    return any(
        each.op == "call_function" and _draws(each, found)
        for found in graphs
        if isinstance(found, GraphModule)
        for each in found.graph.nodes
    )


class _SavingDraws:
    """`_partitioned`, as inductor takes it."""

    def __call__(self, gm: Any, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
        return _partitioned(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "recoup, draws are kept, 4"  # the key of its results in the compiler's cache


def _inductor(graph: Any, inputs: Sequence[Any]) -> Any:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(_SavingDraws)  # no subclass: to import it imports the compiler
    return compile_fx(graph, inputs, config_patches={"custom_partitioner_fn": _SavingDraws()})


def _aot_eager(graph: Any, inputs: Sequence[Any]) -> Any:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def as_it_is(graph: Any, inputs: Sequence[Any]) -> Any:
        del inputs
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=as_it_is, partition_fn=_partitioned, keep_inference_input_mutations=True
    )
    return backend(graph, inputs)


def _compiled(
    name: str, share: float, graphs: list[None], graph: Any, inputs: Sequence[Any]
) -> Any:
    """Compile a graph at a share, and count it. The compiler keeps this for longer than a code."""
    from torch._functorch import config

    graphs.append(None)
    with config.patch(activation_memory_budget=max(share, _TINY_SHARE)):  # See Rule 2
        return _BACKENDS[name](graph, inputs)


_BACKENDS = {"inductor": _inductor, "aot_eager": _aot_eager}


def backend_of(compile: bool | str) -> str | None:  # noqa: A002
    """Return the backend by which blocks are compiled; None if they are not."""
    if isinstance(compile, bool):
        return "inductor" if compile else None
    if not isinstance(compile, str) or compile not in _BACKENDS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"`compile` is {compile!r}, but must be True, False or the name of a backend that "
            f"partitions graphs: {', '.join(map(repr, _BACKENDS))}."
        )
    return compile


_GOLDEN = (math.sqrt(5) - 1) / 2
_PERIOD = 4099  # a prime number, so that rows of a tensor are nudged in different places


class NudgedCode(BlockCode):
    """The blocks' own code, whose outputs are off by one rounding error, up or down.

    That shows what rounding grows to: in deep networks with batch norms, before training, two right
    codes of a block make gradients that differ by percents. Nothing is drawn: an output is nudged
    alike whenever its block runs again. What a block was given and passes on (a mask) stays as it
    is.
    """

    name = "nudged"

    def of_call(self, module: nn.Module, forward: Forward) -> Forward:
        del module

        def nudged(*args: Any, **kwargs: Any) -> Any:
            given = set(storages_of(flatten((args, kwargs))[0]))

            def is_made(tensor: Tensor) -> bool:
                return given.isdisjoint(storages_of((tensor,)))

            output = forward(*args, **kwargs)
            return tree_map_only(Tensor, lambda t: _nudged(t) if is_made(t) else t, output)

        return nudged


def _nudged(tensor: Tensor) -> Tensor:
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if not is_plain or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return tensor
    eps = torch.finfo(tensor.dtype).eps
    places = torch.arange(_PERIOD, device=tensor.device, dtype=torch.float32)
    factors = torch.where((places * _GOLDEN).frac() < 0.5, 1 - eps, 1 + eps).to(tensor.dtype)
    num_periods = -(-tensor.numel() // _PERIOD)
    nudged = tensor * factors.repeat(num_periods)[: tensor.numel()].view(tensor.shape)
    return torch.where(nudged.isinf(), tensor, nudged)  # the largest number stays finite
