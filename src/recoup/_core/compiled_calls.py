"""Functions that are compiled as a user asked for, and run as they are where that fails.

NOTE [ Compiled for each kind ]

Rule 1. The compiler keeps what it compiles with the code of a function, and stops at eight versions
        of one code. So a function that is compiled for modules of many kinds gets a code of its own
        for each kind. Whether a version fits is for the compiler's guards to say, not for the kind.
Rule 2. The compiler would look at each call whether the functions, classes and modules that the
        code of torch and of recoup names are still the same: half of what it looks at, and a tenth
        of a small step. Nobody replaces those; what user code names is looked at.
Rule 3. If compiling fails, the function runs as it is. If that fails too, it is the user's mistake
        and nobody's limitation, and the next call is compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, Self

import torch

from recoup._core.compile import callback_in_force, with_own_code
from recoup._core.dispatch_modes import compiles_nothing

__all__ = ["CompileSettings", "Compiled", "is_compilable_here", "reason_of"]

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - torch's stubs do not know it


_why_disabled: Callable[[], str | None]
_why_disabled = _autograd._saved_tensors_hooks_get_disabled_error_message
_enable_hooks: Callable[[], None] = _autograd._saved_tensors_hooks_enable


class CompileSettings(NamedTuple):
    """The arguments of `torch.compile`, in a form that can be compared.

    Args:
        backend: the backend: a name, or a function.
        options: the options of the backend and what its mode stands for, as pairs.
        dynamic: whether sizes are symbols.
        fullgraph: whether code that cannot be compiled is an error.
    """

    backend: Any = "inductor"
    options: tuple[tuple[str, Any], ...] = ()
    dynamic: bool | None = None
    fullgraph: bool = False

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Return the settings for the arguments of `torch.compile`.

        Raises:
            TypeError: one of them is no argument of `torch.compile`.
            ValueError: `torch.compile` does not take their values.
        """
        try:
            torch.compile(lambda: None, **settings)
        except TypeError:
            raise
        except Exception as error:
            raise ValueError(f"`torch.compile` does not take {settings}: {error}") from error
        dynamic, mode = settings.get("dynamic"), settings.get("mode")
        options = dict(settings.get("options") or {})
        if mode is not None:
            inductor: Any = importlib.import_module("torch._inductor")
            options = {**inductor.list_mode_options(mode, dynamic), **options}
        return cls(
            settings.get("backend", "inductor"),
            tuple(sorted(options.items())),
            dynamic,
            settings.get("fullgraph", False),
        )

    @classmethod
    def in_force(cls) -> Self:
        """Return the settings of the `torch.compile` that looks at the frames of this thread."""
        backend = callback_in_force()
        while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
            backend = inner
        name = getattr(backend, "compiler_name", None)
        if name is None:
            return cls(backend)
        # Inductor's wrapper has its options, that of any other backend the keywords for it.
        if name == "inductor":
            return cls(name, tuple(sorted(backend.config.items())), backend.dynamic)
        options: dict[str, Any] = backend.kwargs.get("options") or {}
        return cls(backend.compiler_fn, tuple(sorted(options.items())), backend.dynamic)

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` compiled."""
        return torch.compile(
            fn,
            fullgraph=True,
            dynamic=self.dynamic,
            backend=self.backend,
            options={"guard_filter_fn": _worth_guarding, **dict(self.options)},
        )


class Compiled:
    """A function that is compiled for one kind of modules (See Rule 1).

    Args:
        fn: the function.
        settings: the settings.

    Attributes:
        failure: Why it runs as it is; None while it is compiled.
    """

    def __init__(self, fn: Callable[..., Any], settings: CompileSettings) -> None:
        self._plain = fn
        self._compiled = settings.apply(with_own_code(fn, fn.__name__))
        self._raises = settings.fullgraph
        self.failure: Exception | None = None

    def __call__(self, *args: Any) -> Any:
        """Call the function, compiled if possible (See Rule 3)."""
        if self.failure is not None:
            return self._plain(*args)
        message = _why_disabled()
        try:
            return self._compiled(*args)
        except _failures() as error:
            if message is None:
                _enable_hooks()  # a transform that is cut off in a trace leaves hooks disabled
            if self._raises:
                raise
            failure = error
        result = self._plain(*args)
        self.failure = failure.with_traceback(None)
        return result

    @property
    def reason(self) -> str:
        """Why it runs as it is."""
        return "" if self.failure is None else reason_of(self.failure)


def reason_of(error: Exception) -> str:
    """Return the type and the first line of what made the compiler fail."""
    cause = getattr(error, "inner_exception", error)
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


def is_compilable_here() -> bool:
    """Whether the compiler works here: under a dispatch mode code runs as it is."""
    return not compiles_nothing() and not torch.compiler.is_compiling()


def _worth_guarding(entries: Sequence[Any]) -> list[bool]:
    """Return which guards of the compiler are checked in each call (See Rule 2)."""
    return [not (entry.is_global and _is_lasting(entry)) for entry in entries]


def _is_lasting(entry: Any) -> bool:
    is_of_function = any(part in entry.name for part in _PARTS_OF_FUNCTIONS)
    if not entry.has_value or not (is_of_function or isinstance(entry.value, _LASTING)):
        return False
    # A global of the code itself, of torch, or of recoup; not of a module or a namespace of others.
    _, is_of_others, name = entry.name.partition("G['__")
    return not is_of_others or name.startswith(_OURS)


_OURS = ("import_torch_dot_", "import_recoup_dot_", "builtins_dict__")
_PARTS_OF_FUNCTIONS = (".__defaults__", ".__kwdefaults__", ".__closure__")
_LASTING = (type, ModuleType, FunctionType, BuiltinFunctionType)


def _failures() -> tuple[type[Exception], ...]:
    errors: Any = importlib.import_module("torch._dynamo.exc")
    return errors.TorchDynamoException, errors.FailOnRecompileLimitHit
