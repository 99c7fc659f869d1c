"""PTX that Triton emits, run by numpy: a register is an array with an element a thread, every access is checked.

    parse.py         text to instructions, operands and registers
    values.py        numbers: rounding, NaN, fused multiply-add, FP8, approximate functions
    tensor_cores.py  how each architecture's tensor cores add
    memory.py        global and shared memory: bounds, alignment, unwritten bytes, races, copies under way, counts
    machine.py       threads that run together: their registers, how an instruction reads and writes them
    arithmetic.py, accesses.py, matrices.py   instructions, each a function and the types of its operands
    schedules.py     which threads run next: all together, or programs or warps in a random order

What is modelled and what is not: docs/emulator.md. It knows numpy and nothing of octavo; the driver that hands Triton's
launches to it is tests/support/emulated.py.
"""

from emulator import accesses, arithmetic, matrices  # noqa: F401  their instructions
from emulator.machine import Options
from emulator.parse import Fault, Program, Unsupported, parse
from emulator.schedules import run

__all__ = ["Fault", "Options", "Program", "Unsupported", "parse", "run"]
