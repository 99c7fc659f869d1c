from __future__ import annotations

import functools
import os
import pickle
import random
import shutil
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.distributed import checkpoint
from octavo.distributed.checkpoint import (
    MetadataReader,
    TensorPlanner,
    async_save_checkpoint,
    load_checkpoint,
    load_extra,
    save_checkpoint,
)
from octavo.distributed.ranks import CheckpointError, Ranks
from octavo.optim import Moment
from octavo.optim.state import as_fp32
from tests.support import sharded_weights as stored
from tests.support.damage import damaged_bytes, with_another
from tests.support.helpers import stepped
from tests.support.sharded_weights import held, sharded, steps

# The names alone count; Inductor would be imported, for seconds.
compiled = functools.partial(torch.compile, backend="eager")


def wrapped(mesh: Any, folder: str) -> list[str]:
    """Return what differs after a checkpoint of a model in DistributedDataParallel, then compiled, then in both."""
    differing, ranks = [], Ranks(mesh.get_group())
    parallel = functools.partial(DistributedDataParallel, process_group=mesh.get_group())
    for number, wrap in enumerate((parallel, compiled, lambda net: parallel(compiled(net)))):
        nets = [stored.model("dynamic"), stored.model("dynamic", seed=1)]
        optimizers = [stored.adamw(net) for net in nets]
        steps(nets[0], optimizers[0], 0, 2)
        save_checkpoint(f"{folder}/{number}", wrap(nets[0]), optimizers[0], ranks=ranks)
        load_checkpoint(f"{folder}/{number}", wrap(nets[1]), optimizers[1], ranks=ranks)
        differing += differences_of_whole(*map(held, nets, optimizers))
    return differing


def one_fails(mesh: Any, folder: str, failing: int) -> tuple[list[str], list[str]]:
    """Return each rank's errors where one can't load into an optimizer without a state; then what differs."""
    ranks = Ranks(mesh.get_group())
    saved, net = (sharded("dynamic", mesh, seed=seed) for seed in range(2))
    optimizers = stored.adamw(saved), stored.adamw(net)
    steps(saved, optimizers[0], 0, 1)
    save_checkpoint(folder, saved, optimizers[0], ranks=ranks)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError(2, "No such file")  # a node's view of the disk is old, say

    said = []
    for name in ("_read_content", "_model_to_fill", "_optimizer_to_fill", "set_optimizer_state_dict"):
        with pytest.MonkeyPatch.context() as patch:
            if mesh.get_rank() == failing:
                patch.setattr(checkpoint, name, fail)
            try:
                load_checkpoint(folder, net, stored.adamw(net), ranks=ranks)
            except CheckpointError as error:
                said.append(str(error))
    load_checkpoint(folder, net, optimizers[1], ranks=ranks)
    return said, differences_of_whole(held(net, optimizers[1]), held(saved, optimizers[0]))


def differences_of_whole(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not value.equal(actual[name])]


WIDTH, HIDDEN, OUTPUTS = 32, 49, 3  # on four ranks uneven, and one has none
DELAYED = {"delayed": lambda: octavo.recipes.delayed(history_length=3), "dynamic": octavo.recipes.dynamic}


def build(recipe="delayed", seed=0, outputs=OUTPUTS, dtype=torch.float32):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, outputs, bias=False)).to(dtype)
    return model if recipe is None else octavo.convert(model, DELAYED[recipe](), select=lambda module, name: True)


def shared(model, mesh):
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model, optimizer, first, last, ranks=None):
    """Losses of some steps; each rank sees its part of the step's batch."""
    ranks, losses = ranks or Ranks(), []
    for step in range(first, last):
        batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        losses.append(stepped(optimizer, model(batch.chunk(ranks.size)[ranks.rank]).float().square().mean()))
    return losses


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def everything(model, optimizer):
    """All that training depends on."""
    tensors = {name: whole(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        tensors |= {f"{name}.{key}": whole(value) for key, value in optimizer.state.get(p, {}).items()}
    return tensors | octavo.nn.delayed_state_dict(model)


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# --- across ranks -----------------------------------------------------------------------------------------------------


def convert_between(mesh, folder):
    """A plain bf16 model's checkpoint into a converted sharded one, and back; by DCP alone, too."""
    ranks = Ranks(mesh.get_group())
    plain = build(None, dtype=torch.bfloat16)
    save_checkpoint(folder + "/plain", plain, ranks=ranks)
    model = shared(build(seed=1), mesh)
    load_checkpoint(folder + "/plain", model, ranks=ranks)
    same = [torch.equal(whole(a), b.float()) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    model(torch.randn(4, WIDTH)).sum().backward()  # gathers the loaded values, not the codes of an earlier cast
    save_checkpoint(folder + "/sharded", model, ranks=ranks)
    back = build(None, seed=2, dtype=torch.bfloat16)
    load_checkpoint(folder + "/sharded", back, ranks=ranks)
    same += [torch.equal(a, b) for a, b in zip(back.parameters(), plain.parameters(), strict=True)]
    options = {"process_group": ranks.group}
    dcp.save(plain.state_dict(), checkpoint_id=folder + "/torch", **options)
    model = shared(build(seed=3), mesh)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder + "/torch", **options)
    set_model_state_dict(model, state)
    same += [torch.equal(whole(a), b.float()) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    return same


def test_plain_models_and_converted_ones_read_each_other(pool, tmp_path):
    assert pool.run(convert_between, (2,), str(tmp_path)) == [[True] * 9] * 2


def from_step_0(mesh: Any, folder: str) -> list[str]:
    """Return what differs two steps after a checkpoint from before the first: on these ranks, and on one."""
    ranks = Ranks(mesh.get_group())
    nets = sharded("dynamic", mesh), sharded("dynamic", mesh, seed=1), stored.model("dynamic", seed=2)
    optimizers = [stored.adamw(net, "fp16_scaled") for net in nets]
    save_checkpoint(folder, nets[0], optimizers[0], ranks=ranks)
    load_checkpoint(folder, nets[1], optimizers[1], ranks=ranks)
    load_checkpoint(folder, nets[2], optimizers[2], ranks=Ranks())
    for net, optimizer in zip(nets, optimizers, strict=True):
        steps(net, optimizer, 0, 2)
    expected, of_ranks, of_one = (held(*pair) for pair in zip(nets, optimizers, strict=True))
    return differences_of_whole(of_ranks, expected) + stored.differences(expected, of_one, mesh)


def test_ranks_go_on_from_a_checkpoint_of_before_the_first_step(pool, tmp_path):
    assert pool.run(from_step_0, (2,), str(tmp_path), seconds=60) == [[]] * 2


def test_names_and_weights_in_fp8_of_wrapped_models(pool, tmp_path):
    assert pool.run(wrapped, (2,), str(tmp_path), seconds=60) == [[]] * 2


def fail(mesh, folder, failing):
    ranks = Ranks(mesh.get_group())
    model = shared(build(), mesh)
    optimizer = adamw(model)
    train(model, optimizer, 0, 2, ranks)
    save_checkpoint(folder, model, optimizer, 2, ranks=ranks)
    before = everything(model, optimizer)
    train(model, optimizer, 2, 3, ranks)
    said = []
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == failing:
            patch.setattr(dcp.FileSystemWriter, "write_data", lambda *args: (_ for _ in ()).throw(OSError(28, "Full")))
        try:
            save_checkpoint(folder, model, optimizer, 3, ranks=ranks)
        except CheckpointError as error:
            said.append(str(error))
    extra = load_checkpoint(folder, model, optimizer, ranks=ranks)
    same = equal(everything(model, optimizer), before)
    if ranks.rank == 0:
        damaged = next(Path(folder).glob(f"save-*/__{failing}_0.distcp"))
        data = bytearray(damaged.read_bytes())
        data[len(data) // 3 : 2 * len(data) // 3] = data[len(data) // 3 : 2 * len(data) // 3][::-1]
        damaged.write_bytes(data)
    ranks.from_rank_0(lambda: None)
    try:
        load_checkpoint(folder, model, optimizer, ranks=ranks)
    except CheckpointError as error:
        said.append(str(error))
    return extra, same, said


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.full)])
def test_what_fails_on_one_rank_fails_on_all_and_keeps_the_one_before(pool, failing, tmp_path):
    for extra, same, (wrote, read) in pool.run(fail, (2,), str(tmp_path), failing):
        assert extra == 2 and same
        why = f"cannot write a checkpoint to {tmp_path}: rank {failing} failed: Full; what was saved before is kept"
        assert why in wrote
        assert f"cannot read the checkpoint in {tmp_path}" in read and "failed" in read
        assert f"save-00000001/__{failing}_0.distcp: " in read and "is damaged" in read


def fail_later(mesh, folder, failing):
    """Return the errors of a save in the background where a rank can't write, what is left; then of one held back."""
    ranks = Ranks(dist.new_group([*range(mesh.size())], use_local_synchronization=True))
    model = shared(build(), mesh)
    optimizer = adamw(model)
    train(model, optimizer, 0, 2, ranks)
    async_save_checkpoint(folder, model, optimizer, 2, ranks=ranks).result()
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == failing:
            patch.setattr(dcp.FileSystemWriter, "write_data", lambda *args: (_ for _ in ()).throw(OSError(28, "Full")))
        error = async_save_checkpoint(folder, model, optimizer, 3, ranks=ranks).exception(60)
    remaining_files = ranks.from_rank_0(lambda: [path.name for path in Path(folder).iterdir()])
    extra, before = {"list": [4]}, everything(model, optimizer)
    with stored.save_later(folder, model, optimizer, extra, ranks=ranks, keep=2):
        train(model, optimizer, 2, 3, Ranks(mesh.get_group()))
        extra["list"][0] = 5
    extra = load_checkpoint(folder, model, optimizer, ranks=ranks)
    return type(error), str(error), remaining_files, extra, equal(everything(model, optimizer), before)


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_save_in_the_background_says_its_faults_and_what_it_saves_does_not_change(pool, failing, tmp_path):
    for kind, text, remaining_files, extra, same in pool.run(fail_later, (2,), str(tmp_path), failing, whole=True):
        assert kind is CheckpointError and f"rank {failing} failed: Full; what was saved before is kept" in text
        assert remaining_files == ["save-00000001"] and extra == {"list": [4]} and same
    assert len(list(tmp_path.iterdir())) == 2
    message = pool.run(on_the_group_that_trains, (2,), str(tmp_path), whole=True)[0]
    assert "training uses the default process group meanwhile" in message


def on_the_group_that_trains(mesh, folder):
    try:
        async_save_checkpoint(folder, build(), ranks=Ranks.of_process())
    except ValueError as error:
        return str(error)


def test_where_one_rank_cannot_load_all_say_why(pool, tmp_path):
    for said, differs in pool.run(one_fails, (2,), str(tmp_path), 1, seconds=60):
        assert len(said) == 4 and all("No such file" in one for one in said)
        assert differs == []


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    model = build()
    train(model, adamw(model), 0, 2)
    return model


CUTS = {
    "folder made": ("octavo.distributed.checkpoint.dcp.save", 1),
    "tensors written": ("octavo.distributed.checkpoint.Writer.finish", 1),
    ".metadata written": ("octavo.distributed.checkpoint.replacing", 1),
    "all written": ("octavo.distributed.checkpoint._publish", 1),
    "older ones not yet gone": ("shutil.rmtree", 2),
}


@pytest.mark.parametrize("when", CUTS)
def test_a_save_cut_off_anywhere_leaves_one_that_loads(when, model, tmp_path, monkeypatch):
    """A save that is killed anywhere leaves a checkpoint that loads; one that fails leaves nothing partial."""
    optimizer, (place, counts) = adamw(model), CUTS[when]
    failed, killed = tmp_path / "failed", tmp_path / "killed"
    train(model, optimizer, 2, 4)
    save_checkpoint(failed, model, optimizer, 1)
    first = everything(model, optimizer)
    train(model, optimizer, 4, 5)

    def cut(*args, **kwargs):
        shutil.copytree(failed, killed)
        raise OSError(28, "Full")

    fails = pytest.raises(CheckpointError, match="Full; what was saved before is kept")
    with monkeypatch.context() as patch, fails if counts == 1 else nullcontext():
        patch.setattr(place, cut)
        save_checkpoint(failed, model, optimizer, 2)
    assert counts == 2 or [path.name for path in failed.iterdir()] == ["save-00000001"]
    for folder in (failed, killed):
        extra = load_checkpoint(folder, model, optimizer)
        assert extra == counts and (extra == 2 or equal(everything(model, optimizer), first))
        save_checkpoint(folder, model, optimizer, 3)
        assert load_checkpoint(folder, model, optimizer) == load_extra(folder) == 3
        assert [path.name for path in folder.iterdir()] == [f"save-{counts + 1:08}"]


def test_the_newest_whole_ones_are_kept_and_found(model, tmp_path):
    for number in range(1, 5):
        save_checkpoint(tmp_path, model, extra=number, keep=3)
    assert [path.name for path in checkpoint.checkpoints_in(tmp_path)] == [f"save-{n:08}" for n in (4, 3, 2)]
    (tmp_path / "save-00000004" / ".metadata").unlink()
    shutil.copytree(tmp_path / "save-00000003", tmp_path / "save-00000009.partial")
    assert load_extra(tmp_path) == load_checkpoint(tmp_path, model) == 3
    save_checkpoint(tmp_path, model, extra=5, keep=2)
    for keep in (0, -3):
        with pytest.raises(ValueError, match=f"keep={keep} must be at least 1"):
            save_checkpoint(tmp_path, model, keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"save-{n:08}" for n in (3, 4, 5)]  # 4 is not whole
    assert load_extra(tmp_path) == 5


def test_before_the_first_step_and_without_an_optimizer(tmp_path):
    model = build()
    optimizer = adamw(model)
    save_checkpoint(tmp_path, model, optimizer)
    assert not optimizer.state
    losses = train(model, optimizer, 0, 2)
    assert load_checkpoint(tmp_path, model, optimizer) is None
    assert not optimizer.state and train(model, optimizer, 0, 2) == losses
    save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, build(seed=1), None)
    assert optimizer.state
    load_checkpoint(tmp_path, model, optimizer)
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore:the optimizer's state was converted:UserWarning")
@pytest.mark.parametrize("moments", ["bf16", "fp32"])
def test_moments_are_read_by_an_optimizer_of_others(moments, tmp_path):
    model = build()
    optimizer = octavo.optim.AdamW(model.parameters(), 1e-2, moments="fp8")
    train(model, optimizer, 0, 2)
    save_checkpoint(tmp_path, model, optimizer)
    other, beside = (octavo.optim.AdamW(model.parameters(), 1e-2, moments=moments) for _ in range(2))
    beside.load_state_dict(optimizer.state_dict())
    load_checkpoint(tmp_path, model, other)
    assert other.state_dict()["state"].keys() == beside.state_dict()["state"].keys()
    for index, state in beside.state_dict()["state"].items():
        assert equal(other.state_dict()["state"][index], state)


class Extra(nn.Linear):
    """A layer whose state is more than tensors."""

    said = "nothing"

    def get_extra_state(self):
        return {"said": self.said}

    def set_extra_state(self, state):
        self.said = state["said"]


def test_what_is_no_tensor_of_a_models_state_comes_back(tmp_path):
    model, other = Extra(4, 4), Extra(4, 4)
    model.said = "a word"
    save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, other)
    assert other.said == "a word" and torch.equal(other.weight, model.weight)


KINDS = [(kind, None) for kind in (torch.optim.SGD, torch.optim.AdamW, octavo.optim.SGD, octavo.optim.AdamW)]
KINDS += [(octavo.optim.AdamW, "fp8"), (octavo.optim.Muon, "fp8")]


@pytest.mark.parametrize(("kind", "storage"), KINDS)
def test_training_goes_on_bit_for_bit_from_step_0(kind, storage, tmp_path):
    def built(seed, lr):
        torch.manual_seed(seed)
        layers = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, OUTPUTS, bias=False)
        model = octavo.convert(nn.Sequential(*layers).bfloat16(), octavo.recipes.dynamic(), lambda *_: True, storage)
        return model, kind(model.parameters(), lr=lr)

    (model, optimizer), (again, its_optimizer) = built(0, 1e-2), built(1, 1e-3)
    save_checkpoint(tmp_path, model, optimizer)
    assert not optimizer.state
    load_checkpoint(tmp_path, again, its_optimizer)
    assert its_optimizer.param_groups[0]["lr"] == 1e-2
    for one, its in ((model, optimizer), (again, its_optimizer)):
        for step in range(2):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
            stepped(its, one(x).float().square().mean())
    assert_equal_states(model.state_dict(), again.state_dict())
    states = [its.state_dict()["state"] for its in (optimizer, its_optimizer)]
    for ours, theirs in zip(*(state.values() for state in states), strict=True):
        assert_equal_states(ours, theirs)


def assert_equal_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert [*ours] == [*theirs]
    assert not [name for name, value in ours.items() if value is not None and not torch.equal(value, theirs[name])]


def test_the_groups_of_the_optimizer_come_back_and_frozen_weights_have_no_state(tmp_path):
    def built(seed):
        model = build(seed=seed)
        model[2].requires_grad_(False)
        groups = [{"params": [model[0].weight], "weight_decay": 0.3}, {"params": [model[0].bias]}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    model, optimizer = built(0)
    train(model, optimizer, 0, 2)
    optimizer.param_groups[1]["lr"] = 3e-4
    save_checkpoint(tmp_path, model, optimizer)
    again, its_optimizer = built(1)
    load_checkpoint(tmp_path, again, its_optimizer)
    assert equal(everything(again, its_optimizer), everything(model, optimizer))
    assert [(g["lr"], g["weight_decay"]) for g in its_optimizer.param_groups] == [(1e-2, 0.3), (3e-4, 1e-2)]


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_gradients_are_dropped_where_an_optimizers_state_is_loaded(with_optimizer, model, tmp_path):
    optimizer = adamw(model) if with_optimizer else None
    save_checkpoint(tmp_path, model, optimizer)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    load_checkpoint(tmp_path, model, optimizer)
    assert all((weight.grad is None) == with_optimizer for weight in model.parameters())


def test_delayed_state_without_a_place_or_of_another_length(model, tmp_path):
    save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, build("dynamic"))
    longer = octavo.convert(build(None), octavo.recipes.delayed(history_length=5), select=lambda module, name: True)
    train(longer, adamw(longer), 0, 2)
    load_checkpoint(tmp_path, longer)
    assert not any(value.any() for value in octavo.nn.delayed_state_dict(longer).values())
    assert all(value.any() for value in octavo.nn.delayed_state_dict(model).values())


def test_names_are_those_of_the_plain_model(model, tmp_path):
    save_checkpoint(tmp_path, compiled(model))
    again = build(seed=1)
    load_checkpoint(tmp_path, again)
    assert equal(again.state_dict(), model.state_dict())
    assert equal(octavo.nn.delayed_state_dict(again), octavo.nn.delayed_state_dict(model))
    again = compiled(build(seed=1))
    load_checkpoint(tmp_path, again)
    assert octavo.nn.delayed_state_dict(again)["_orig_mod.0.delayed_scale"].all()


def fill(folder, name, data):
    (folder / "save-00000001" / name).write_bytes(data)


def replaced(folder, **changes):
    """Put values into octavo.pt; leave out keys whose value is None."""
    path = folder / "save-00000001" / "octavo.pt"
    content = torch.load(path, weights_only=True) | changes
    torch.save({name: value for name, value in content.items() if value is not None or name not in changes}, path)


def moved(folder, name, link):
    """Move a file out of its folder, to which a link leads then, or else the name in .metadata."""
    save = folder / "save-00000001"
    shutil.move(save / name, folder / name)
    if link is not None:
        (save / link).symlink_to(folder / name)
        return
    metadata = pickle.loads((save / ".metadata").read_bytes())
    for shard in metadata.storage_data.values():
        shard.relative_path = f"../{name}"
    fill_metadata(folder, metadata)


def fill_metadata(folder, metadata, crc32=None):
    """Write metadata, and into octavo.pt its CRC-32, or another."""
    fill(folder, ".metadata", pickled := pickle.dumps(metadata))
    replaced(folder, metadata_crc32=zlib.crc32(pickled) if crc32 is None else crc32)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: shutil.rmtree(folder / "save-00000001"), "holds no whole checkpoint: give the folder"),
        (lambda folder: (folder / "save-00000001" / ".metadata").unlink(), "holds no whole checkpoint"),
        (lambda folder: fill(folder, "octavo.pt", b"junk"), "octavo.pt is damaged or not octavo's"),
        (lambda folder: fill(folder, "octavo.pt", pickle.dumps(Evil())), "octavo.pt is damaged or not octavo's"),
        (lambda folder: fill(folder, ".metadata", b""), ".metadata is damaged"),
        (lambda folder: fill_metadata(folder, Evil()), "mkdir, which no checkpoint needs"),
        (lambda folder: fill_metadata(folder, Evil(), crc32=0), "it is not what was written, by its CRC-32"),
        (lambda folder: fill(folder, "__0_0.distcp", b"short"), "__0_0.distcp: model.0.bias is damaged"),
        (lambda folder: (folder / "save-00000001" / "octavo.pt").unlink(), "octavo.pt is damaged or not octavo's"),
        (lambda folder: replaced(folder, extra=None), "octavo.pt is damaged or not octavo's (it has no ['extra'])"),
        (lambda folder: replaced(folder, delayed=[]), "cannot read the checkpoint"),
        (lambda folder: replaced(folder, others=7), "cannot read the checkpoint in"),
        (lambda folder: moved(folder, "octavo.pt", "octavo.pt"), "octavo.pt leads out of the folder"),
        (lambda folder: moved(folder, ".metadata", ".metadata"), ".metadata leads out of the folder"),
        (lambda folder: moved(folder, "__0_0.distcp", "__0_0.distcp"), "__0_0.distcp leads out of the folder"),
        (lambda folder: moved(folder, "__0_0.distcp", None), "../__0_0.distcp leads out of the folder"),
    ],
)
def test_a_damaged_one_is_said_so_and_runs_nothing(spoil, says, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "kept", model)
    spoil(tmp_path / "kept")
    with pytest.raises(CheckpointError) as fault:
        load_checkpoint(tmp_path / "kept", model)
    assert says in str(fault.value) and "\n" not in str(fault.value)
    assert not (tmp_path / "evil").exists()


def test_damage_is_an_error_or_changes_nothing(model, tmp_path):
    """Damage of any file, in weights, moments, scales or sizes, is an error or changes nothing."""
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    save_checkpoint(tmp_path, model, optimizer, {"step": 1})
    expected, fresh = everything(model, optimizer), build(seed=1)
    its_optimizer, errors = adamw(fresh), dict[str, list[str]]()
    for path in tmp_path.glob("save-*/*"):
        data = path.read_bytes()
        for seed in range(16):
            path.write_bytes(damaged_bytes(data, seed))
            try:
                extra = load_checkpoint(tmp_path, fresh, its_optimizer)
            except CheckpointError as error:
                errors.setdefault(path.name, []).append(str(error))
            else:
                assert extra == {"step": 1} and equal(everything(fresh, its_optimizer), expected), (path, seed)
        path.write_bytes(data)
    assert errors.keys() == {".metadata", "octavo.pt", "__0_0.distcp"} and min(map(len, errors.values())) > 8
    assert all(name in error for name, said in errors.items() for error in said)


def test_a_flipped_bit_of_a_weight_is_said_with_its_name(model, tmp_path):
    save_checkpoint(tmp_path, model)
    path, weight = tmp_path / "save-00000001" / "__0_0.distcp", model[2].weight.detach().numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(weight) + 5] ^= 1
    path.write_bytes(data)
    before = model[2].weight.clone()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: model\.2\.weight is damaged .*remove its folder to"):
        load_checkpoint(tmp_path, model)
    assert torch.equal(model[2].weight, before)


def test_what_a_stranger_wrote_is_a_checkpoint_error_or_loads(model, tmp_path):
    """octavo.pt and .metadata of other values, with their CRC-32s."""
    optimizer = octavo.optim.AdamW(model.parameters())
    train(model, optimizer, 0, 1)
    save_checkpoint(tmp_path, model, optimizer)
    path, draw = tmp_path / "save-00000001" / "octavo.pt", random.Random(0)
    content = torch.load(path, weights_only=True)
    metadata = (path.parent / ".metadata").read_bytes()

    def loads():
        try:
            load_checkpoint(tmp_path, model, optimizer)
        except CheckpointError:
            return 0
        return 1

    assert loads()
    read = 0
    for seed in range(20):
        (path.parent / ".metadata").write_bytes(damaged := damaged_bytes(metadata, seed))
        torch.save(content | {"metadata_crc32": zlib.crc32(damaged)}, path)
        read += loads()
    (path.parent / ".metadata").write_bytes(metadata)
    for _ in range(20):
        torch.save(with_another(content, draw), path)
        read += loads()
    assert 0 < read < 30


def test_another_model_or_optimizer_is_refused_before_anything_is_touched(model, tmp_path):
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    save_checkpoint(tmp_path, model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wider = build(outputs=8)
    for other, says in ((nn.Sequential(model), r"has no \['model.0.0.bias'"), (wider, "Size mismatch")):
        with pytest.raises(CheckpointError, match=says):
            load_checkpoint(tmp_path, other)
    for other in (torch.optim.SGD(model.parameters(), momentum=0.9), adamw(model[0])):
        with pytest.raises(CheckpointError, match=r"its optimizer kept \['exp_avg', 'exp_avg_sq', 'step'\] of"):
            load_checkpoint(tmp_path, model, other)
    assert equal(before, model.state_dict())


def test_what_cannot_be_written_or_read_back_leaves_what_there_is(model, tmp_path):
    save_checkpoint(tmp_path / "folder", model, extra=1)
    with pytest.raises(CheckpointError, match="extra, or a group of the optimizer, holds more than"):
        save_checkpoint(tmp_path / "folder", model, extra={"path": Path("x")})
    assert load_extra(tmp_path / "folder") == 1 and len(list((tmp_path / "folder").iterdir())) == 1
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*file"):
        save_checkpoint(tmp_path / "file", model)


# moments that another layout of ranks keeps otherwise


def test_what_was_saved_as_it_is_kept_is_filled_in_place():
    codes, scales = torch.zeros(4, 300, dtype=torch.uint8), torch.ones(4, 3)
    state = {"m_codes": codes, "m_scale_inv": scales, "step": torch.zeros(())}
    sizes = {name: value.shape for name, value in state.items()}
    assert checkpoint._moment_to_fill("m", state, sizes) == checkpoint._moment_to_fill("v", state, sizes) == {}
    tensors = checkpoint._moment_to_fill("m", state, {"m": torch.Size((4, 300))})
    assert tensors.keys() == {"m"} and tensors["m"].shape == (4, 300) and tensors["m"].dtype == torch.float32
    # one scale, of experts one each
    tensors = checkpoint._moment_to_fill("m", state, sizes | {"m_scale_inv": torch.Size((4, 1))})
    assert tensors["m_codes"] is not codes
    tensors["m_codes"].fill_(0x38)
    tensors["m_scale_inv"].copy_(torch.arange(4.0).view(4, 1))
    values = as_fp32("m", Moment(octavo.E4M3, granularity=octavo.PerTensor()), tensors)
    assert torch.equal(values, torch.arange(4.0).view(4, 1).expand(4, 300))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_tensors_come_back_and_nothing_else_does(tmp_path):
    options = {"no_dist": True}
    dcp.save({"w": torch.arange(6.0), "text": "a"}, storage_writer=dcp.FileSystemWriter(tmp_path), **options)
    tensors, crc32 = {"w": torch.zeros(6)}, zlib.crc32((tmp_path / ".metadata").read_bytes())
    dcp.load(tensors, storage_reader=MetadataReader(str(tmp_path), crc32), planner=TensorPlanner(), **options)
    assert tensors["w"].tolist() == list(range(6))
    with pytest.raises(BaseException, match="is no tensor in this checkpoint"):
        dcp.load({"text": "b"}, storage_reader=MetadataReader(str(tmp_path), crc32), planner=TensorPlanner(), **options)
