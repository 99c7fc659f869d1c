"""Python's bytecode, read: whether two functions compute the same, and what methods do with a module's layers."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple


def code_within(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_within(constant)


def same_code(candidate: Any, known: Any) -> bool:
    """Whether a candidate is a function with the known one's instructions, arguments and defaults.

    Docstrings don't count, nor does the name of an only argument, nor do defaults of None and False: the forwards of
    known_forwards.py have none, and take an argument left out as None.
    """
    return inspect.isfunction(candidate) and _meaning(inspect.unwrap(candidate)) == _meaning(known)


def _meaning(function: Any) -> tuple[Any, ...]:
    """Return what ``same_code`` compares."""
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    arguments = code.co_varnames[:count] if count > 2 else ()  # an only argument behind self has any name
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    effective = [one for one in defaults if one is not None and one is not False]
    takes_more = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return _portable_instructions(code), count, arguments, effective, takes_more


def _portable_instructions(code: CodeType) -> list[tuple[str, Any]]:
    """Return code's instructions, each with what it reads: a name, a value, a local's number, a jump's aim in the list.

    Python calls torch.rsqrt, say, by other instructions in a file that imports torch than in a notebook's later cell;
    here both are the same.
    """
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("PUSH_NULL", "EXTENDED_ARG")]

    def argument(one: dis.Instruction) -> Any:
        if one.opcode in dis.haslocal:
            return one.arg
        is_jump = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        return sum(other.offset < one.argval for other in instructions) if is_jump else one.argval

    return [("LOAD_ATTR" if one.opname == "LOAD_METHOD" else one.opname, argument(one)) for one in instructions]


# attributes of a layer; code that reads one doesn't call the layer
_LAYER_ATTRIBUTES = {"weight", "bias", "in_features", "out_features"}
# attributes of a weight; code that reads one doesn't read the weight's values
_METADATA = {"dtype", "device", "shape", "size", "dim", "ndim", "numel", "data", "requires_grad", "is_meta", "is_cuda"}


class _Instruction(NamedTuple):
    """An instruction of Python's bytecode, and the name that it reads or writes (two names if it is two loads)."""

    op: str = ""
    argument: Any = ""


@functools.cache  # by code, and not by class: a library may replace a class's methods
def uses_in(codes: tuple[CodeType, ...]) -> dict[str, set[str]]:
    """Return {name: uses} in methods: "read" if ``self.<name>.weight``'s values are read, "called" if it is called."""
    uses_by_name: dict[str, set[str]] = {}
    for code in itertools.chain(*map(code_within, codes)):
        instructions = [_Instruction(each.opname, each.argval) for each in dis.get_instructions(code)]
        padded = [_Instruction(), *instructions, _Instruction(), _Instruction()]
        # such as: LOAD_GLOBAL isinstance, LOAD_FAST self, LOAD_ATTR name, LOAD_ATTR weight, LOAD_ATTR dtype
        for earlier, module, layer, attribute, later in zip(*(padded[start:] for start in range(5)), strict=False):
            last_loaded = module.argument[-1:] if isinstance(module.argument, tuple) else (module.argument,)
            if layer.op not in ("LOAD_ATTR", "LOAD_METHOD") or last_loaded != ("self",):
                continue
            uses = uses_by_name.setdefault(layer.argument, set())
            reads_attribute = attribute.op in ("LOAD_ATTR", "STORE_ATTR") and attribute.argument in _LAYER_ATTRIBUTES
            if layer.op == "LOAD_METHOD" or not reads_attribute:
                uses.add("called")
            elif attribute == ("LOAD_ATTR", "weight") and earlier.argument != "isinstance":
                if later.op != "STORE_ATTR" and later.argument not in _METADATA:
                    uses.add("read")
    return uses_by_name
