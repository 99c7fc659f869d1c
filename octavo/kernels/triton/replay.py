"""Record an op's work on the host at its second call, and from then on do it again without the Python behind it.

Before its launches an op checks its arguments, looks up configurations, lays out tiles, allocates, and Triton searches
for the compiled kernel: as long as a small kernel takes. All of that follows from the arguments' properties apart from
the tensors' values: shapes, strides, dtypes, the device, whether addresses are multiples of 16, by which Triton tells
kernels apart too, and which of them are equal; and whether a delayed scale is known to exist. So a second call with
equal properties is recorded: operators of torch, launches, and ``repeatable`` functions (a stream's scratch, the number
of a backward pass). A function of a few lines, made as text, then allocates, launches and returns the same.

Not replayed are a first call, as sizes may change at every step; ops that torch computes in place of kernels; and calls
while a profiler listens to Triton.

Kernels read memory, in which torch has not computed the lazy negation of a tensor such as ``z.conj().imag``: it is
computed here. Such tensors are parts of complex ones, of which no stride is 1: only replays for such strides ask.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from octavo import private
from octavo.private import TorchDispatchMode

_MOST = 4096  # keys kept, for tensors whose shapes change with each step
# operators of torch that a replay calls: they allocate, copy or are a library's product, whatever autocast would do
_OPS = {"zeros", "new_zeros", "zero_", "add_", "copy_", "clone", "_to_copy", "constant_pad_nd"}
_OPS |= {"_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}

# {(an op, all that its call depends on): a function that does it again, CALLED_ONCE, or None if no function can}; it is
# emptied when it is full, and by launch.py when other configurations are chosen
REPLAYS: dict[tuple[Any, ...], Any] = {}
NOT_CALLED, CALLED_ONCE = "not called", "called once"

P = ParamSpec("P")
R = TypeVar("R")

# this thread's recorder while it records a call, else None
_recorder: ContextVar[CallRecorder | None] = ContextVar("recorder", default=None)
recorder = _recorder.get


def repeatable(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function of tensors and constants that a replay calls again, whatever it does."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if (recording := recorder()) is None:
            return function(*arguments, **named)
        return recording.call(function, arguments, named)

    return call


def replayed(kernel: Callable[..., Any], exists: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """Return an op's kernel, by its flat arguments, that is replayed from its third call of a kind on.

    A kind's first call is noted in REPLAYS, its second recorded, unless that is postponed to a later one.

    Args:
        exists: of the first three arguments, whether a delayed scale among them is known to exist.
    """

    @functools.wraps(kernel)
    def call(*arguments: Any, **named: Any) -> Any:
        scale_is_known = exists is not None and exists(*arguments[:3])
        key = _key_of(kernel, scale_is_known, arguments, named)
        replay = REPLAYS.get(key, NOT_CALLED)
        is_watched = recorder() is not None or is_profiled()
        if callable(replay) and not is_watched:
            return replay(*arguments, **named)
        if _any_is_negated(arguments, named):
            return resolved(arguments, named)
        if replay is CALLED_ONCE and not is_watched:
            recording = CallRecorder(scale_is_known)
            results = recording.record(kernel, arguments, named)
            if not recording.is_postponed:
                replay = recording.replay(arguments, named, results)
                if replay is not None and any(map(_may_be_negated, _tensors(*arguments, *named.values()))):
                    replay = functools.partial(unless_negated, replay)
                REPLAYS[key] = replay
            return results
        if replay is NOT_CALLED and not is_watched:
            if len(REPLAYS) >= _MOST:
                REPLAYS.clear()
            REPLAYS[key] = CALLED_ONCE
        return kernel(*arguments, **named)

    def resolved(arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        arguments, named = private.pytree.tree_map_only(Tensor, Tensor.resolve_neg, (arguments, named))
        return call(*arguments, **named)

    def unless_negated(replay: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return resolved(arguments, named) if _any_is_negated(arguments, named) else replay(*arguments, **named)

    return call


def _any_is_negated(arguments: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether any tensor among a call's arguments is a lazy negation."""
    return any(value.is_neg() for value in _tensors(*arguments, *named.values()))


def _may_be_negated(x: Tensor) -> bool:
    """Whether a tensor like this one, of its dtype and strides, could be a lazy negation."""
    return x.dtype in (torch.float32, torch.float16) and 1 not in x.stride()


def _key_of(kernel: Any, scale_is_known: bool, arguments: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return all that a call depends on but its tensors' values: the key of its replay in REPLAYS."""
    key = [kernel, scale_is_known, arguments[0].get_device(), *named]
    addresses = []
    for argument in (*arguments, *named.values()) if named else arguments:
        if isinstance(argument, Tensor):
            key += argument.shape, argument.stride(), argument.dtype
            addresses.append(argument.data_ptr())
        else:
            key.append(tuple(argument) if type(argument) is list else argument)
    key += [address % 16 == 0 for address in addresses]
    if len({*addresses}) < len(addresses):  # two arguments may be one tensor: their replay counts on it
        key.append(tuple(map(addresses.index, addresses)))
    return tuple(key)


def is_profiled() -> bool:
    """Whether anyone listens to launches, as Triton's profiler does."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@dataclass(eq=False)
class _Recorded:
    """A recorded step: a call of a function, and what it returned.

    ``kind``: "empty", memory; a "view"; another "op" of torch, or a ``repeatable`` function; the "launch" of a kernel.
    """

    kind: str
    function: Any
    arguments: Sequence[Any]
    named: dict[str, Any]
    output: Any


class CallRecorder(TorchDispatchMode):
    """Records the steps of one call of a kernel, from which ``replay`` makes a function that does them again.

    ``scale_is_known``: whether the call's delayed scale was known to exist before it.
    """

    def __init__(self, scale_is_known: bool) -> None:
        super().__init__()
        self.scale_is_known = scale_is_known
        self.fails = False  # no replay would do what this call did
        self.is_postponed = False  # this call does something else than others will: a later one is to be recorded
        self.steps: list[_Recorded] = []

    def record(self, kernel: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Call the kernel, record its steps, and return its results."""
        _recorder.set(self)
        try:
            with self:
                return kernel(*arguments, **named)
        finally:
            _recorder.set(None)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports all of its compiler at the first recording

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if torch.is_inference_mode_enabled():  # composites, as contiguous, arrive whole
            with self:
                parts = function.decompose(*args, **named)
            if parts is not NotImplemented:
                return parts
        output = function(*args, **named)
        if recorder() is self:
            aliases = [returned.alias_info for returned in function._schema.returns]
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            kind = "empty" if "empty" in function._opname else "view" if is_view else "op"
            self.steps.append(_Recorded(kind, function, args, named, output))
            self.fails |= not isinstance(output, Tensor) or (kind == "op" and function._opname not in _OPS)
        return output

    def call(self, function: Callable[..., R], arguments: Sequence[Any], named: dict[str, Any]) -> R:
        """Return the function's result, and record the call as one step; ``launch`` returns the compiled kernel."""
        _recorder.set(None)
        try:
            output = function(*arguments, **named)
        finally:
            _recorder.set(self)
        kind = "launch" if isinstance(output, CompiledKernel) else "op"  # the interpreter compiles none
        self.steps.append(_Recorded(kind, function, arguments, named, output))
        return output

    def assume(self, scale_is_known: bool) -> None:
        """Give the recording up if the scale has come to be known since the call began."""
        self.fails |= scale_is_known != self.scale_is_known

    def replay(self, arguments: Sequence[Any], named: dict[str, Any], results: Any) -> Callable[..., Any] | None:
        """Return a function that does the recorded steps again; None if nothing can."""
        if self.fails:
            return None
        try:
            return _ReplayText(arguments, named).function(_needed(self.steps, results), results)
        except _UnknownTensor:
            return None


class _UnknownTensor(Exception):
    """A step reads a tensor that is neither an argument nor a result of an earlier step."""


def _tensors(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors among values, and in their tuples and lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(*value)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Return where a tensor's memory begins, which is all that a launch takes of it."""
    return x.untyped_storage()._cdata, x.storage_offset() * x.element_size()


def _identity(x: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies and how: equal for tensors that an operator can't tell apart."""
    return *_place(x), x.shape, x.stride(), x.dtype


def _needed(steps: Sequence[_Recorded], results: Any) -> list[_Recorded]:
    """Return the steps without views that only launches read; memory with one whole view is allocated as that view."""
    read_by_ops = [x for step in steps if step.kind == "op" for x in _tensors(*step.arguments, *step.named.values())]
    shaped = {_identity(x) for x in (*_tensors(results), *read_by_ops)}  # of which more counts than where they lie
    needed: list[_Recorded] = []
    views_and_sources = set(shaped)
    for step in reversed(steps):
        if step.kind == "view":
            source, view = _identity(step.arguments[0]), _identity(step.output)
            if view == source or view not in views_and_sources:
                continue
            views_and_sources.add(source)
        needed.insert(0, step)
    for step in [step for step in needed if step.kind == "empty"]:
        while _identity(step.output) not in shaped:
            views = [v for v in needed if v.kind == "view" and _identity(v.arguments[0]) == _identity(step.output)]
            if len(views) != 1 or views[0].output.nbytes != step.output.nbytes:
                break
            needed.remove(views[0])
            step.output = views[0].output
    return needed


def _empty_cpu(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory, as tests of kernels see it: whether it was written before it is read."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


_code = functools.lru_cache(maxsize=1024)(functools.partial(compile, filename="<octavo replay>", mode="exec"))


class _ReplayText:
    """The text of a function that does steps again; numbers too are globals of it, so that texts are compiled once.

    That of ``dequantize`` allocates the result, launches a kernel and returns the result:

        def replay(p0, p1, p2, p3):
            t0 = c1(c2, c3, c4)
            c5.run(c6, 1, 1, driver.active.get_current_stream(c7), c8, c9, None, None, None,
                   c14(p0, c10, c11, c12, c13, ), c19(p1, c15, c16, c17, c18, ), t0, c20, c21, c22, c23)
            return t0

    Here c1 is private.empty_cuda, c2 to c4 are shape, strides and dtype, c5 is the compiled kernel, and c14 the class
    Source, of a pointer, sizes and strides.
    """

    def __init__(self, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        self.constants: dict[str, Any] = {"driver": driver}
        self.names: dict[Any, str] = {}  # of arguments and results of steps, by _identity and by _place
        self.count = itertools.count()
        parameters = [f"p{number}" for number in range(len(arguments))]
        self.parameters = ", ".join((*parameters, *named))
        for name, value in zip((*parameters, *named), (*arguments, *named.values()), strict=True):
            if isinstance(value, Tensor):
                self.name(value, name)

    def name(self, x: Tensor, name: str) -> str:
        """Let a variable of the text stand for a tensor; return the variable's name."""
        self.names[_place(x)] = self.names[_identity(x)] = name
        return name

    def constant(self, value: Any) -> str:
        """Give the text a global of this value; return the global's name."""
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def expression(self, value: Any, identify: Callable[[Tensor], Any] = _identity) -> str:
        """Return an expression for a value; ``identify``: what must be right of a tensor."""
        if isinstance(value, Tensor):
            if (name := self.names.get(identify(value))) is None:
                raise _UnknownTensor
            return name
        if any(True for _ in _tensors(value)):
            parts = "".join(f"{self.expression(part, identify)}, " for part in value)
            if isinstance(value, list):
                return f"[{parts}]"
            return f"{self.constant(type(value))}({parts})" if hasattr(value, "_fields") else f"({parts})"
        return "None" if value is None else self.constant(value)

    def line(self, step: _Recorded) -> str:
        """Return the line of a step."""
        if step.kind == "launch":
            _, programs, launch_arguments, *_ = step.arguments  # of launch.launch, which returns the compiled kernel
            compiled = step.output
            kernel, count = self.constant(compiled), self.constant(programs)
            device = self.constant(next(_tensors(launch_arguments)).get_device())
            function, metadata = self.constant(compiled.function), self.constant(compiled.packed_metadata)
            places = ", ".join(self.expression(argument, _place) for argument in launch_arguments)
            stream = f"driver.active.get_current_stream({device})"
            return f"{kernel}.run({count}, 1, 1, {stream}, {function}, {metadata}, None, None, None, {places})"
        if step.kind == "empty":
            x = step.output
            empty = private.empty_cuda if x.is_cuda else _empty_cpu  # in half the time of torch's own function
            allocate, *kind = map(self.constant, (empty, tuple(x.shape), x.stride(), x.dtype))
            call = f"{allocate}({', '.join(kind)})"
        else:
            arguments = [self.expression(value) for value in step.arguments]
            arguments += [f"{name}={self.expression(value)}" for name, value in step.named.items()]
            call = f"{self.constant(step.function)}({', '.join(arguments)})"
        names = [self.name(x, f"t{next(self.count)}") for x in _tensors(step.output)]
        return f"{', '.join(names)} = {call}" if names else call

    def function(self, steps: Sequence[_Recorded], results: Any) -> Callable[..., Any]:
        """Return the function, of the arguments, that returns the results."""
        lines = [f"def replay({self.parameters}):", *map(self.line, steps), f"return {self.expression(results)}"]
        exec(_code("\n    ".join(lines)), self.constants)
        return self.constants["replay"]
