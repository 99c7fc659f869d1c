"""A task on two ranks that torchrun starts, as people start their trainers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.pool import free_port, guard_together

ROOT = Path(__file__).parents[2]
RANKS = 2


def on_ranks(task: Callable[..., Any], folder: Path, *arguments: str) -> list[Any]:
    """What ``task(folder, *arguments)`` returns on each rank, as JSON has it."""
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    start = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), *address]
    done = subprocess.run(
        [*start, "-m", "tests.support.torchrun", task.__module__, task.__name__, str(folder), *arguments],
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def let_accelerate_shard_on_cpus() -> None:
    """accelerate shards on accelerators only; told that CPUs are GPUs it does the same there."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    inner = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not AcceleratorState._shared_state:
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        inner(self, *args, **kwargs)

    AcceleratorState.__init__ = init


def main() -> None:
    import torch

    torch.set_num_threads(1)
    guard_together()
    module, task, folder, *arguments = sys.argv[1:]
    found = getattr(importlib.import_module(module), task)(Path(folder), *arguments)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
