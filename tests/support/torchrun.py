"""Tasks on ranks that torchrun's engine starts, and starts again.

torchrun gives its agent a program, and each start takes seconds of imports; here the agent gets a function, and ranks
are forked from its process, which is forked from one that has imported octavo.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.pool import guard_together, prepare


def _rank(task: Callable[..., Any], folder: Path, arguments: Any) -> Any:
    import torch

    torch.set_num_threads(1)
    guard_together()
    return task(folder, *arguments)


def _agent(task: Callable[..., Any], folder: Path, ranks: int, restarts: int, arguments: Any) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    (folder / "logs").mkdir(parents=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=restarts,
        monitor_interval=0.02,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(str(folder / "logs"), redirects=Std.ALL),
    )
    results = elastic_launch(config, _rank)(task, folder, arguments)
    (folder / "found.json").write_text(json.dumps([results[rank] for rank in range(ranks)]))
    sys.exit(0)


def on_ranks(task: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2, restarts: int = 0) -> list[Any]:
    """Return the results of ``task(folder, *arguments)`` on each rank, as JSON has them.

    Raises:
        AssertionError: the run did not end well; with what its ranks wrote last.
    """
    process = prepare().Process(target=_agent, args=(task, folder, ranks, restarts, arguments))
    process.start()
    process.join(1800)
    process.kill()
    logs = [f"{path}: {path.read_text()[-2000:]}" for path in sorted(folder.rglob("std*.log"))[-2 * ranks :]]
    assert process.exitcode == 0, "\n".join(logs)
    return json.loads((folder / "found.json").read_text())


def let_accelerate_shard_on_cpus() -> None:
    """Make accelerate shard on CPUs, as it does on accelerators, by telling it that they are GPUs."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    inner = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not AcceleratorState._shared_state:
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        inner(self, *args, **kwargs)

    AcceleratorState.__init__ = init
