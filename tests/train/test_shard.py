"""Runs on many ranks: in processes that stay (fast), and as torchrun starts them, with ranks that are killed (slow)."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from octavo.distributed.checkpoint import checkpoints_in
from octavo.distributed.ranks import RankError, Ranks
from octavo.train import DataConfig, Hooks, ModelConfig, RanksConfig, RunConfig, TrainConfig, TrainError, compare, run
from octavo.train import shard as sharding
from octavo.train.loop import trained_model
from octavo.train.shard import device_name, joined, ranks_for_saves, require_even_batches
from octavo.train.trainer import build_model, require_memory
from octavo.weights.stored import StoredWeight
from tests.support.combinations import in_full
from tests.support.helpers import thread_pool
from tests.support.pool import free_port
from tests.support.processes import ROOT


def changed(config: TrainConfig, **parts: Any) -> TrainConfig:
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in parts.items()})


def curve(result: Any) -> list[tuple[float, float | None]]:
    """Losses and validation losses, where there are some; comparable with ==."""
    return [(row.loss, None if math.isnan(row.val_loss) else row.val_loss) for row in result.rows]


def train_on(
    mesh: Any, config: TrainConfig, recipe: str = "dynamic", stop_after: int | None = None, poisoned: int | None = None
) -> tuple[Any, ...]:
    """A run's curve and the model's norm of gradients as it says; or the error's type and text."""
    ranks = Ranks(mesh.get_group())
    seen: list[Any] = []
    modules: list[int] = []

    def on_model(model: Any) -> None:
        modules.append(sum(isinstance(module, FSDPModule) for module in model.modules()))
        if poisoned == ranks.rank:
            model.head.register_forward_hook(lambda module, args, out: out * math.nan if len(seen) == 3 else out)

    def should_stop() -> bool:
        return ranks.rank == 1 and stop_after is not None and len(seen) >= stop_after

    hooks = Hooks(on_model=on_model, on_step=seen.append, should_stop=should_stop)
    try:
        result = run(config, recipe, hooks=hooks, ranks=ranks)
    except Exception as error:
        return type(error).__name__, str(error)
    return curve(result), result.interrupted, modules


def stop_after(count: int) -> Hooks:
    """Hooks that stop a run once it did that many steps."""
    seen: list[Any] = []
    return Hooks(on_step=seen.append, should_stop=lambda: len(seen) >= count)


def nearly(first: Any, second: Any, rel: float) -> bool:
    numbers, others = ([value for pair in one for value in pair if value is not None] for one in (first, second))
    return numbers == pytest.approx(others, rel=rel)


@pytest.mark.parametrize(("ranks", "micro_batches", "windows"), [(2, 2, 6), *in_full((4, 1, 5))])
def test_the_curve_is_that_of_one_process(pool, config, ranks, micro_batches, windows):
    config = changed(config, data={"micro_batches": micro_batches, "eval_windows": windows}, run={"dtype": "float32"})
    config = changed(config, optimizer={"steps": 2})
    alone = curve(run(changed(config, data={"micro_batches": 1})))
    curves = {}
    for shard in ("fsdp", "ddp"):
        answers = pool.run(train_on, (ranks,), changed(config, ranks={"shard": shard}), "baseline")
        assert all(answer[0] == answers[0][0] for answer in answers)
        curves[shard] = answers[0][0]
        assert nearly(curves[shard], alone, 1e-4)
        assert answers[0][2] == [2 if shard == "fsdp" else 0]  # a block and the root
    config = changed(config, run={"dtype": "bfloat16"}, ranks={"shard": "fsdp"})
    ((fp8, *_), *_) = pool.run(train_on, (ranks,), config, "dynamic")
    assert nearly(fp8, alone, 0.05) and not nearly(fp8, curves["fsdp"], 1e-6)


COMPACT = {"moments": "fp8", "master": "split24"}
STORED = COMPACT | {"weight_storage": "fp8", "master": "split16"}
PHASES = {"schedule": "fp8-then-bf16@0.25-then-fp8@0.75"}
IN_BACKWARD = {"update_in_backward": "4KB"}


@pytest.mark.parametrize(
    ("recipe", "experts", "rel", "compiled", "state"),
    [
        ("blockwise", 4, 1e-6, False, {}),
        *in_full(
            ("dynamic", 0, 1e-3, True, {}),
            ("blockwise", 4, 5e-3, True, {}),
            ("delayed", 4, 0.01, False, STORED),
            ("delayed", 0, 0.01, False, STORED | PHASES),
            ("delayed", 4, 0.01, False, COMPACT | {"update_in_backward": "0"}),
        ),
    ],
    ids=str,
)
def test_the_curve_under_tensor_parallelism_is_that_of_one_process(pool, config, recipe, experts, rel, compiled, state):
    """The curve is one process's up to the order of additions; a tensor's scale is each pair of ranks' own.

    Random bits of layers with named splits are others, and codes of columns that ranks share.
    """
    config = changed(config, model={"experts": experts}, optimizer={"steps": 4 if state else 2}, state=state)
    config = changed(config, run={"eval_every": 3} if state else {"eval_every": 3, "dtype": "float32"})
    alone = curve(run(config, recipe))
    config = changed(config, run={"compile": compiled}, ranks={"shard": "fsdp", "tensor_parallel": 2})
    answers = pool.run(train_on, (4,), config, recipe, seconds=300 if compiled else 120, whole=True)
    assert all(answer[0] == answers[0][0] for answer in answers)
    assert nearly(answers[0][0], alone, rel)


def size_of(mesh):
    return mesh.size()


def test_refusals_under_tensor_parallelism(pool, config):
    assert pool.run(size_of, (4,)) == [4] * 4  # there are four ranks, and so two are not all
    for kind, text in pool.run(train_on, (2,), changed(config, ranks={"shard": "fsdp", "tensor_parallel": 2})):
        assert kind == "TrainError" and "takes all ranks that were started" in text
    with pytest.raises(ValueError, match="tensor_parallel 2 with shard ddp: choose shard fsdp"):
        changed(config, ranks={"shard": "ddp", "tensor_parallel": 2})
    with pytest.raises(ValueError, match=r"tensor_parallel 3 does not divide \{'heads': 2"):
        changed(config, ranks={"shard": "fsdp", "tensor_parallel": 3})
    with pytest.raises(ValueError, match=r"tensor_parallel 2 does not divide \{'experts': 3\}"):
        changed(config, model={"experts": 3}, ranks={"shard": "fsdp", "tensor_parallel": 2})
    with pytest.raises(TrainError, match="3 ranks do not divide by tensor_parallel 2"):
        require_even_batches(changed(config, ranks={"shard": "fsdp", "tensor_parallel": 2}), SimpleNamespace(size=3))


@pytest.fixture
def short(config):
    return changed(config, optimizer={"steps": 4}, run={"eval_every": 2})


@pytest.mark.parametrize(
    ("shard", "recipe", "tensor_parallel", "state"),
    [
        ("fsdp", "delayed", 1, STORED | PHASES | IN_BACKWARD),  # it is stopped in the second phase
        *in_full(("ddp", "delayed", 1, {}), ("fsdp", "blockwise", 1, {}), ("fsdp", "delayed", 2, STORED | PHASES)),
    ],
    ids=str,
)
def test_a_run_stopped_on_one_rank_goes_on_exactly(pool, short, shard, recipe, tensor_parallel, state, tmp_path):
    """A stopped run goes on exactly, and nearly so in one process, which can read its model too."""
    parts = {"shard": shard, "tensor_parallel": tensor_parallel}
    short = changed(short, state=state)
    on_ranks = partial(pool.run, train_on, (2 * tensor_parallel,), whole=tensor_parallel > 1)
    config = changed(short, ranks=parts, run={"out": tmp_path / "whole"})
    ((whole, *_), *_) = on_ranks(config, recipe)
    assert nearly(whole, curve(run(short, recipe)), 0.05)
    config = changed(config, run={"out": tmp_path / "parts"})
    for part, interrupted, _ in on_ranks(config, recipe, 2):
        assert interrupted and [loss for loss, _ in part] == [loss for loss, _ in whole[:2]]
    shutil.copytree(tmp_path / "parts", tmp_path / "half")
    config = changed(config, run={"resume": True})
    for again, interrupted, _ in on_ranks(config, recipe):
        assert not interrupted and again == whole
    assert rows(tmp_path / "whole" / recipe) == rows(tmp_path / "parts" / recipe) and len(whole) == 4
    remaining_names = sorted(path.name for path in (tmp_path / "parts" / recipe).iterdir())
    assert remaining_names == [".lock", "checkpoint", "config.json", "log.csv"]
    config = changed(config, run={"out": tmp_path / "half"}, ranks={"shard": "none", "tensor_parallel": 1})
    again = curve(run(config, recipe))
    assert nearly(again, whole, 0.05) and [loss for loss, _ in again[:2]] == [loss for loss, _ in part]
    model = trained_model(tmp_path / "half" / recipe)
    assert not model.training and model(torch.zeros(1, 4, dtype=torch.uint8)).isfinite().all()
    layer = model.blocks[0].mlp.fc2
    stored = "weight_storage" in state
    assert isinstance(layer.weight, StoredWeight) == stored
    assert stored or recipe != "delayed" or layer.delayed_scale.all()


def test_a_run_of_one_process_goes_on_on_ranks(pool, short, tmp_path):
    config = changed(short, run={"out": tmp_path, "dtype": "float32"})
    assert run(changed(config, ranks={"async_save": True, "keep": 2}), "delayed", hooks=stop_after(2)).interrupted
    config = changed(config, run={"resume": True}, ranks={"shard": "fsdp"})
    ((resumed, interrupted, _), *_) = pool.run(train_on, (2,), config, "delayed")
    alone = curve(run(changed(config, run={"out": None, "resume": False}, ranks={"shard": "none"}), "delayed"))
    assert not interrupted and resumed[:2] == alone[:2] and nearly(resumed, alone, 0.01)


def test_faults_are_those_of_all_ranks(pool, config, tmp_path):
    config = changed(config, ranks={"shard": "fsdp"}, run={"out": tmp_path, "checkpoint_every": 2})
    for kind, text in pool.run(train_on, (2,), changed(config, data={"batch": 6, "micro_batches": 2})):
        says = "batch 6 does not divide into 2 ranks x 2 micro_batches: choose a batch of 8"
        assert kind == "TrainError" and says in text
    for kind, text in pool.run(train_on, (2,), config, "dynamic", None, 1):
        assert kind == "DivergedError" and "the loss became nan in step 4; the checkpoint of step 2 is kept" in text
    (mine, first), (other, second) = pool.run(train_on, (2,), config)
    assert mine == "RunCheckpointError" and "already holds a run: add --resume" in first
    assert other == "RankError" and second == f"rank 0 failed: {first}"
    (last,) = checkpoints_in(tmp_path / "dynamic" / "checkpoint")
    (last / "octavo.pt").write_text("junk")
    for _, text in pool.run(train_on, (2,), changed(config, run={"resume": True})):
        assert "octavo.pt is damaged" in text and "move" in text


def write_differs(mesh, config, folder):
    rank = mesh.get_rank()
    path = Path(folder) / f"text{rank}.py"
    path.write_text(f"x = {rank}\n" * 500)
    return train_on(mesh, changed(config, data={"data": path}))


def full(mesh, config):
    """Rank 0 cannot write the log."""
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank() == 0:
            error = OSError(28, "No space left on device")
            patch.setattr("octavo.train.checkpoint.StepRow.csv", lambda row: (_ for _ in ()).throw(error))
        return train_on(mesh, config)


def test_what_one_rank_lacks_stops_all(pool, config, tmp_path):
    config = changed(config, ranks={"shard": "ddp"})
    (good, text), (bad, own_error) = pool.run(write_differs, (2,), config, str(tmp_path))
    assert (good, bad) == ("RankError", "TrainError")
    assert text == f"rank 1 failed: {own_error}" and "another text here than on rank 0" in own_error
    (bad, own_error), (good, text) = pool.run(full, (2,), changed(config, run={"out": tmp_path}))
    assert (bad, good) == ("RunCheckpointError", "RankError")
    assert text.startswith(f"rank 0 failed: {own_error}")


def test_what_was_not_started_so_is_refused(config, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    sharded = changed(config, ranks={"shard": "fsdp"})
    with pytest.raises(TrainError, match=r"torchrun --nproc-per-node 2 -m octavo train --shard fsdp"), joined(sharded):
        pass
    with pytest.raises(TrainError, match="needs a process group"):
        run(sharded)
    with pytest.raises(TrainError, match="compare trains in one process"):
        compare(sharded, ["bf16"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainError, match="2 processes were started, but shard is none"), joined(config):
        pass
    with pytest.raises(TrainError, match="compare trains in one process"):
        compare(config, ["bf16"])


def test_a_group_of_one(config, monkeypatch, tmp_path):
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    config = changed(config, optimizer={"steps": 4})
    sharded = changed(config, ranks={"shard": "ddp"}, run={"out": tmp_path})
    with joined(sharded) as ranks:
        assert ranks.group is not None and ranks.size == 1
        of_group = run(sharded, "delayed")
        saving = ranks_for_saves(changed(sharded, ranks={"async_save": True}), ranks)
        assert saving.size == 1 and saving.group is not ranks.group  # collectives of both may run at a time
        assert ranks_for_saves(sharded, ranks) is None
    assert curve(of_group) == curve(run(config, "delayed"))
    with joined(config) as ranks:
        assert ranks.group is None


@pytest.fixture
def rendezvous(monkeypatch):
    """A store in which threads meet that are called by their ranks, of three."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, of_thread.rank, 3)]))
    return store


of_thread = threading.local()


def fresh_store(rank, seconds=60.0):
    of_thread.rank = rank
    return sharding._fresh_store(timedelta(seconds=seconds))


def test_ranks_of_a_start_meet_beside_those_of_an_earlier_one(rendezvous):
    """torchrun's store still holds the question of a rank that was killed, which rank 0 answers."""
    rendezvous.set("octavo/question/1", "of an earlier start")
    with thread_pool(3) as threads:
        first = threads.submit(fresh_store, 0)
        rendezvous.wait(["octavo/answer/of an earlier start"], timedelta(seconds=60))
        assert not first.done()
        others = [threads.submit(fresh_store, rank) for rank in (1, 2)]
        stores, ranks, sizes = zip(*(each.result(60) for each in (first, *others)), strict=True)
    assert (ranks, sizes) == ((0, 1, 2), (3, 3, 3))
    stores[1].set("address", "of rank 1")
    assert [store.get("address") for store in stores] == [b"of rank 1"] * 3 and not rendezvous.check(["address"])


def test_ranks_that_do_not_join_are_named(rendezvous, config, monkeypatch):
    with pytest.raises(dist.DistStoreError, match=r"timeout: ranks \[1, 2\] did not join"):
        fresh_store(0, 0.0)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    clock = iter([0.0, 1e6])
    monkeypatch.setattr(sharding.time, "monotonic", lambda: next(clock))
    with pytest.raises(RankError, match="another rank did not answer in time"):
        with joined(changed(config, ranks={"shard": "fsdp"})):
            pass
    assert not dist.is_initialized()


@pytest.mark.parametrize("experts", [0, 4])
def test_the_layout_and_the_compiled_modules_under_tensor_parallelism(config, experts, monkeypatch):
    """Experts on several ranks end graphs, so a block that has some is compiled but for them."""
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    config = changed(config, model={"experts": experts}, ranks={"shard": "fsdp", "tensor_parallel": 2})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        model = build_model(config.model, "dynamic", 0, config.state)
        called, of_data = sharding.shard(model, changed(config, run={"compile": True}), Ranks(dist.group.WORLD))
        (block,) = model.blocks
        assert called is model and of_data.size == 2
        compiled = [name for name, module in block.named_modules() if module._compiled_call_impl is not None]
        assert compiled == (["attention"] if experts else [""])
        in_rows = [name for name, p in block.named_parameters() if p.placements[-1] == Shard(0)]
        in_columns = [name for name, p in block.named_parameters() if p.placements[-1] == Shard(1)]
        if not experts:
            of_qkv = [f"attention.qkv.linear.{part}.weight" for part in ("query", "key", "value")]
            assert in_rows == [*of_qkv, "mlp.fc1.gate.weight", "mlp.fc1.up.weight"]
            assert in_columns == ["attention.out.weight", "mlp.fc2.weight"]
    finally:
        dist.destroy_process_group()


def test_devices_and_memory_of_each_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    fsdp = RanksConfig("fsdp")
    names = [device_name(TrainConfig(run=RunConfig(device=d), ranks=fsdp)) for d in ("cuda", "cpu", "cuda:1")]
    assert names == ["cuda:3", "cpu", "cuda:1"] and device_name(TrainConfig(run=RunConfig(device="cuda"))) == "cuda"
    large = TrainConfig(model=ModelConfig(width=10**6, heads=1), ranks=fsdp)
    with pytest.raises(TrainError, match="GiB"):
        require_memory(large, torch.device("cpu"), 4)
    of_many = replace(large, data=DataConfig(batch=2**20), model=ModelConfig(layers=1))
    require_memory(of_many, torch.device("cpu"), 2**10)


TINY = "--width 32 --layers 2 --heads 2 --context 16 --batch 4 --eval-windows 6 --eval-every 5 --device cpu".split()
SECONDS = 300  # within which a run that lost a rank must end; far more than --timeout


def environment():
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return variables | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def rows(folder):
    """Return the number of steps in a run's log, and all of the log but the speeds."""
    path = folder / "log.csv"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return len(lines), [line.split(",")[:3] + line.split(",")[4:] for line in lines]


def wait_for(folder, step, ranks):
    """Wait until the log has that many steps."""
    deadline = time.monotonic() + SECONDS
    while rows(folder)[0] < step and time.monotonic() < deadline:
        if any(process.poll() is not None for process in ranks.processes):
            break
        time.sleep(0.002)
    ended = [process.communicate() for process in ranks.processes if process.poll() is not None]
    assert rows(folder)[0] >= step, ended


@pytest.mark.full
def test_a_rank_that_hangs_ends_the_others(text_file, tmp_path):
    """A hanging rank ends the others, in processes of their own without torchrun, which would end them itself."""
    arguments = ["--data", text_file, "--shard", "fsdp", "--steps", "4000", "--timeout", "5", "--out", tmp_path]
    command = [sys.executable, "-m", "octavo", "train", *TINY, *map(str, arguments)]
    shared = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, **pipes) for rank in "01"]
    try:
        wait_for(tmp_path / "dynamic", 3, SimpleNamespace(processes=ranks))
        ranks[1].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        _, err = ranks[0].communicate(timeout=SECONDS)
        assert time.monotonic() - begin < 30 and ranks[0].returncode == 2 and "Traceback" not in err
        (line,) = [line for line in err.splitlines() if line.startswith("octavo: error: ")]
        assert "another rank did not answer in time" in line
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
