"""Every kernel once, small, under compute-sanitizer: accesses, races in shared memory, reads of unwritten memory.

What is launched is what tests/kernels/triton/test_compiled.py launches, and must be its reference there too. Each
tensor is an allocation of its own, or the tools would not see where one ends. With --toy the emulator takes a GPU's and
the tools' place: it looks for the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from octavo.tune.timing import ON_GPU, describe
from tests.kernels.triton import test_compiled
from tests.support import triton_kernels
from tests.support.emulated import emulating

TAKES = "a GPU; 5 minutes"
MEASURES = ("octavo/kernels/triton",)

TOOLS = ("memcheck", "racecheck", "initcheck")
FOUND = 86  # the exit status of a process in which a tool found a fault
CASES = [name for capability, name in test_compiled.ALL_CASES if capability == 90]


def launch_all(kernels: triton_kernels.TritonKernels) -> list[str]:
    """Run the cases; return a line for each that is wrong."""
    wrong = []
    for name in CASES:
        try:
            test_compiled.check(name, kernels)
        except Exception as error:
            wrong.append(f"FAILED: {name}: {describe(error)}")
    print(*wrong, f"{len(CASES) - len(wrong)} of {len(CASES)} cases are their reference", sep="\n", flush=True)
    return wrong


def under(tool: str, sanitizer: str) -> str:
    """Return the fault of a process that launches all kernels under a tool; "" for none."""
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)]
    command = [sanitizer, *options, sys.executable, "-m", "benchmarks", "sanitizer", "--launch"]
    run = subprocess.run(command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, check=False)
    return "" if run.returncode == 0 else "found faults" if run.returncode == FOUND else f"status {run.returncode}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sanitizer", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="by the emulator, without a GPU")
    parser.add_argument("--launch", action="store_true", help="without a tool")
    options = parser.parse_args(arguments)
    if options.toy:
        with emulating(90) as done:
            wrong = launch_all(triton_kernels.load(False))
        print(f"emulated sm_90: {len(done)} launches of {len({one.kernel for one in done})} kernels")
        return int(bool(wrong))
    if not ON_GPU:
        parser.error("compute-sanitizer needs an NVIDIA GPU; --toy runs the kernels in the emulator")
    if options.launch:
        with triton_kernels.running() as kernels:
            return int(bool(launch_all(kernels)))
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        print("there is no compute-sanitizer here (it comes with the CUDA toolkit): nothing was checked")
        return 1
    problems = {tool: under(tool, sanitizer) for tool in TOOLS}
    print(*(f"{tool}: {problem or 'ok'}" for tool, problem in problems.items()), sep="\n")
    return int(any(problems.values()))
