import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import octavo
from octavo import E4M3, Cast, PerBlock, PerRow, recipes
from octavo.autograd.rows import Rows
from octavo.distributed import expert_parallel
from octavo.private import fsdp_params
from octavo.weights.fsdp2 import GatheredWeight, ShardedWeight, forget_failed_pass, gather_alone
from octavo.weights.gathered import GatherGroup
from octavo.weights.stored import local_stored
from octavo.weights.ways import InFP8, MakeWeight
from tests.distributed.test_fsdp import EVEN, SITUATIONS, batch, built, sharded_blocks
from tests.support.expert_models import built as built_experts
from tests.support.helpers import to_fp8
from tests.support.streams import Stream, notes_of_streams, tensor_on_gpu


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield dist.device_mesh.init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


# a weight in blocks of several rows, of both layouts
IN_TILES = octavo.Recipe(*[(Cast(E4M3, PerRow()), Cast(E4M3, PerBlock(n, 16))) for n in (2, 4)])


def layer(recipe, mesh, rows=512, cols=96, **options):
    return fully_shard(to_fp8(nn.Linear(cols, rows), recipe), mesh=mesh, **options)


@pytest.mark.parametrize(
    ("recipe", "rows", "kind", "why"),
    [
        (recipes.dynamic(), 49, "in FP8", ""),
        (recipes.delayed(), 3, "in FP8", ""),
        (recipes.blockwise(), 512, "in FP8", ""),
        (recipes.blockwise(), 500, "in FP8", ""),
        (recipes.rowwise(), 512, "in FP8", ""),
        (recipes.mx(), 500, "in FP8", ""),
        (IN_TILES, 512, "cast after", "would have to agree on both"),
        (recipes.high_precision(), 512, "as it is", "high precision"),
        (octavo.Recipe(output=recipes.dynamic().output), 512, "as it is", "high precision"),
    ],
)
def test_how_a_weight_is_gathered(mesh, recipe, rows, kind, why):
    linear = layer(recipe, mesh, rows)
    way = linear.fp8.gather.way(linear)
    assert way.kind == kind and why in way.why and bool(way.why) == bool(why)


def test_what_can_not_be_gathered_in_fp8(mesh):
    from transformers.pytorch_utils import Conv1D  # here, as ranks import this file too, for their tasks

    by_columns = layer(recipes.dynamic(), mesh, shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1))
    assert by_columns.fp8.gather.way(by_columns).why == "it is not sharded by rows"
    alone = fully_shard(octavo.nn.Linear(64, 64), mesh=mesh)
    assert "octavo.convert(model, recipe) before fully_shard" in alone.fp8.gather.way(alone).why
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    model[1].weight = model[0].weight
    fully_shard(to_fp8(model, recipes.dynamic()), mesh=mesh)
    assert model[1].fp8.gather.way(model[1]).why == "another module shares it"
    transposed = fully_shard(to_fp8(Conv1D(64, 32), recipes.dynamic()), mesh=mesh)
    assert re.fullmatch(r"\w*Conv1D stores it transposed", transposed.fp8.gather.way(transposed).why)
    experts = fully_shard(built_experts("octavo", "blockwise", 6).experts, mesh=mesh)
    assert experts.down.fp8.gather.way(experts.down).why.startswith("of 6 experts 4 ranks do not have as many each")


def test_a_weight_that_stays_gathered_after_an_evaluation_begins_a_training_with_its_delayed_scale(mesh):
    linear = layer(recipes.delayed(), mesh)
    linear.fp8.state.scale.fill_(3.0)
    linear.eval()(torch.randn(4, 96))
    assert not linear.fp8.gather.for_training and linear.fp8.gather.way(linear).delayed_scale is None
    linear.train()(torch.randn(4, 96))
    assert linear.fp8.gather.for_training and linear.fp8.gather.way(linear).delayed_scale.tolist() == [3.0] * 3


def test_on_a_gpu_a_gather_waits_for_the_casts_and_what_is_read_outlives_the_readers_stream(monkeypatch):
    notes = notes_of_streams(monkeypatch)
    group = GatherGroup()
    group.wait_for_casts()
    assert notes == []
    group._last_casts = Stream("the last casts", notes)
    group.wait_for_casts()
    hook = MakeWeight((1, 1), "", lambda received: notes.append("read"), [tensor_on_gpu("scales", notes)])
    with pytest.raises(AttributeError):  # nothing was read
        hook((), torch.float32, None)
    assert notes == ["the current stream waits for the last casts", "scales outlives the current stream", "read"]


def test_weights_over_two_dimensions_of_a_mesh_are_gathered_as_they_are(mesh):
    two = dist.device_mesh.DeviceMesh("cpu", [[mesh.get_rank()]], mesh_dim_names=("rows", "columns"))
    values = torch.randn(32, 16)
    sharded = DTensor.from_local(values.clone().as_subclass(ShardedWeight), two, [Shard(0), Shard(1)], run_check=False)
    whole = gather_alone(sharded, octavo.nn.Linear(16, 32), None)
    assert type(whole) is torch.Tensor and torch.equal(whole, values)


def test_a_torch_that_can_not_forget_a_failed_pass_says_so(mesh, monkeypatch):
    linear = layer(recipes.dynamic(), mesh)
    monkeypatch.setattr(FSDPModule, "reset_iter_state", lambda module: None, raising=False)
    assert forget_failed_pass(linear)
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    assert not forget_failed_pass(linear)


def test_summary_says_how(mesh):
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    to_fp8(model, octavo.RecipeMap(recipes.blockwise(), {"1": IN_TILES}))
    assert [m.gathered for m in octavo.summary(model).modules] == ["", ""]
    fully_shard(model, mesh=mesh)
    first, second = octavo.summary(model).modules
    assert first.gathered == "in FP8" and re.match(r"cast after \(its two layouts", second.gathered)
    assert "recipe blockwise, gathered in FP8\n" in str(octavo.summary(model))


def test_what_was_sharded_before_conversion_is_left_alone(mesh):
    plain = fully_shard(nn.Linear(512, 512), mesh=mesh)
    with pytest.warns(UserWarning, match="call octavo.convert before fully_shard"):
        model = to_fp8(nn.Sequential(plain, nn.Linear(8, 8)), recipes.dynamic())
    first, second = octavo.summary(model).modules
    assert first.kind == second.kind == "Linear"
    assert first.reason == "not selected, or sharded before octavo.convert"
    assert second.recipe is not None
    model = fully_shard(nn.Sequential(octavo.convert(nn.Linear(512, 512)), fully_shard(nn.Linear(512, 8), mesh=mesh)))
    assert octavo.summary(model).left_alone[0].reason.startswith("8 x 512 features; the default select")


def test_a_layer_sharded_itself_is_restored_to_high_precision(mesh):
    linear = octavo.restore(layer(recipes.dynamic(), mesh))
    assert linear.recipe.is_high_precision and isinstance(linear, torch.distributed.fsdp.FSDPModule)


def test_the_sharded_parameter_is_an_ordinary_one(mesh):
    linear = layer(recipes.dynamic(), mesh, rows=49)
    assert type(linear.weight._local_tensor) is ShardedWeight
    assert type(linear.state_dict()["weight"]._local_tensor) is torch.Tensor
    assert linear.state_dict()["weight"]._local_tensor.data_ptr() == linear.weight._local_tensor.data_ptr()
    assert type(torch.zeros_like(linear.weight)._local_tensor) is torch.Tensor
    with pytest.raises(ValueError, match="no layer's weight can be kept"):
        octavo.nn.KeptWeights(linear)


def test_codes_are_fresh_for_one_gather_of_a_forward(mesh, monkeypatch):
    """The table of GatherGroup: casts and gathers of two micro-batches, with the weights that are fresh after each."""
    model = to_fp8(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), recipes.dynamic())
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    names, notes, group = dict(zip(model, "AB", strict=True)), [], model[0].fp8.gather.group

    def fresh():
        ways = [(layer, name, layer.fp8.gather.way(layer)) for layer, name in names.items()]
        return [name for layer, name, way in ways if way.fresh_key == way.key_now(layer, group.backwards)]

    def noting(kind, method):
        original = getattr(kind, method)

        def noted(self, module_or_mesh, what):
            result = original(self, module_or_mesh, what)
            notes.append((names[module_or_mesh] if kind is InFP8 else "cast", *fresh()))
            return result

        monkeypatch.setattr(kind, method, noted)

    noting(InFP8, "send")
    noting(GatherGroup, "_cast_all")
    x = torch.randn(16, 512)
    for micro_batch in range(2):
        model(x).sum().backward()
        assert notes == [("cast", "A", "B"), ("A", "B"), ("B",), ("B",), ("A",)], micro_batch
        notes.clear()
    model[0](x)
    assert fresh() == ["B"]
    model.eval()
    assert fresh() == []
    model.train()
    assert fresh() == ["B"]
    octavo.nn.invalidate(model[1])
    assert fresh() == []


def test_a_move_leaves_a_sharded_weight_to_be_gathered(mesh):
    linear = layer(recipes.dynamic(), mesh)
    for move in (nn.Module.bfloat16, lambda linear: linear.to("meta"), lambda linear: linear.to_empty(device="cpu")):
        move(linear)
        assert type(linear.weight._local_tensor) is ShardedWeight and linear.fp8.gather.parameter is linear.weight
        assert linear.fp8.gather.way(linear).kind == "in FP8"


@pytest.mark.parametrize("kind", ["stored", "stored transposed"])
def test_products_read_a_ranks_stored_experts_themselves(kind, mesh):
    net = built_experts(kind, "dynamic", 8, storage="fp8")
    expert_parallel(net, mesh, exact=True)
    for part in (net.experts.gate_up, net.experts.down):
        stored, tensors = local_stored(part.weight_parameter), part.layer_tensors()
        ends = torch.tensor([4, 8], dtype=torch.int32)
        operands = part.layer_of(torch.randn(8, tensors[0].shape[-1]), tensors, True, Rows(ends)).weight
        assert all(pair[0].data_ptr() == stored.qdata.data_ptr() for pair in (operands.as_is, operands.transposed))
        assert operands.as_is[0].shape == tensors[0].shape


def refused(mesh):
    """A part of a group that changes alone, two recipes of one weight, a weight tied across groups."""
    net = sharded_blocks(built(EVEN, "dynamic"), mesh)
    net(batch(EVEN, 0, 0, 0)).sum().backward()
    octavo.set_recipe(net.blocks[0].fc1, recipes.high_precision())
    with pytest.raises(RuntimeError, match=r"call octavo\.set_recipe on the module that fully_shard was applied to"):
        net(batch(EVEN, 0, 0, 0))
    net = built(SITUATIONS["tied"], "dynamic")
    octavo.set_recipe(net.blocks[1].fc1, recipes.rowwise())
    fully_shard(net, mesh=mesh)
    with pytest.raises(RuntimeError, match="layers that share a weight need one recipe"):
        net(batch(EVEN, 0, 0, 0))
    net = built(SITUATIONS["tied"], "dynamic")
    with pytest.raises(ValueError, match="fully_shard was applied to two modules that share a weight"):
        sharded_blocks(net, mesh)
        net(batch(EVEN, 0, 0, 0))


def test_what_ranks_refuse(pool):
    pool.run(refused, (2,))


def restored(mesh):
    net = sharded_blocks(built(EVEN, "dynamic"), mesh)
    net(batch(EVEN, 0, 0, 0)).sum().backward()
    octavo.restore(net)
    return torch.equal(net(batch(EVEN, 1, 0, 0)), built(EVEN, "high_precision")(batch(EVEN, 1, 0, 0)))


def test_restore(pool):
    assert pool.run(restored, (2,)) == [True, True]


def codes_of(weight):
    return weight.qdata, weight.transposed_qdata


def storage_after_forward(mesh):
    """Bytes that gathered weights hold before forward, after it, and while unsharded."""
    net = sharded_blocks(built(EVEN, "mx"), mesh)
    held, seen = {}, []

    def note(module, *args):
        held[module] = module.weight
        seen.append(sum(part.untyped_storage().size() for part in codes_of(module.weight)))

    for block in net.blocks:
        block.fc1.register_forward_hook(note)
    net(batch(EVEN, 0, 0, 0))
    after = [part.untyped_storage().size() for weight in held.values() for part in codes_of(weight)]
    return all(isinstance(weight, GatheredWeight) for weight in held.values()), min(seen), max(after)


def test_resharding_frees_the_codes(pool):
    for gathered, while_used, after in pool.run(storage_after_forward, (2,)):
        assert gathered and while_used == 2 * 512 * 256 and after == 0


# --- a group's scales


def test_copies_find_their_scales_in_a_group_of_their_own():
    model = to_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), recipes.dynamic())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        groups = {id(m.fp8.gather.group) for m in copied}
        assert len(groups) == 1 and groups != {id(model[0].fp8.gather.group)}


def two_in_flight(mesh):
    """Return the error of an input's gradient, of a forward whose weight was cast by another scale since."""
    torch.manual_seed(0)
    layer = octavo.convert(nn.Sequential(nn.Linear(256, 64)), recipes.delayed(), select=lambda module, name: True)
    fully_shard(layer, mesh=mesh)
    layer(torch.randn(8, 256)).sum().backward()
    layer.zero_grad()
    layer[0].delayed_scale[1] /= 4  # codes are smaller than the weight's own amax would make them
    x = torch.randn(8, 256, requires_grad=True)
    first = layer(x)
    layer[0].reset_delayed_state()
    layer(x)
    (grad,) = torch.autograd.grad(first.sum(), x)
    wanted = torch.ones(8, 64) @ layer[0].weight.full_tensor()
    return float((grad - wanted).norm() / wanted.norm())


def test_backward_reads_a_scale_with_its_codes(pool):
    assert max(pool.run(two_in_flight, (2,))) < 0.1


def test_modules_that_are_sharded_together_take_another_recipe(mesh):
    """As transformers shards the last norm and the head: both have the parameters of one FSDP2 group."""
    model = to_fp8(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipes.dynamic())
    fully_shard([*model], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert len([*fsdp_params(model)]) == len([*model.parameters()])
    model(torch.randn(16, 64))
    octavo.set_recipe(model, recipes.delayed())
    assert model[1].recipe == recipes.delayed() and model(torch.randn(16, 64)).shape == (16, 64)
