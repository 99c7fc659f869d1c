"""Sequence parallelism with inputs gathered in FP8: one rank's results, in half of the bytes."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import octavo
from octavo.distributed import ColwiseParallel, Fp8Reduction, PrepareModuleInput, RowwiseParallel
from tests.nn import test_tensor_parallel as fused
from tests.nn.test_tensor_parallel import trained
from tests.support import parallel_tasks as tasks
from tests.support.byte_counter import GATHER, OTHER, SCATTER

BF16 = 2 * 512 * 256  # of what the three layers read, and of what o gives

IN_BF16 = ("gw_hp", "nvfp4", "high_precision")  # whose inputs are sent so


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("recipe", [pytest.param(r, marks=[pytest.mark.full] * (r in IN_BF16)) for r in tasks.RECIPES])
def test_equal_to_one_rank(pool, recipe, shared, shape):
    """Training equals one rank's bit for bit where scales are powers of two, which make sums exact."""
    for (first, second), *_ in pool.run(tasks.sequence_parallel, shape, recipe, shared, torch.float32):
        assert max(second.values()) <= (0.0 if recipe in fused.EXACT else 1e-3)  # a code more or less of what o reads
        assert max(first.values()) <= 1e-3


@pytest.mark.covering(1)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(it, marks=[] if it in ("dynamic", "rowwise", "gw_hp") else pytest.mark.full) for it in tasks.RECIPES],
)
def test_bytes(pool, recipe, shared, exact):
    """Gathers of inputs in forward, and of the gradient of o's output in backward, have the recipe's bytes."""
    counters = pool.run(tasks.sequence_parallel, (2,), recipe, shared, torch.bfloat16, "exact" if exact else "")[0]
    forward, backward = (counter[GATHER] / BF16 for counter in counters[1:])
    times = 1 if shared else 3
    if recipe in IN_BF16 or (exact and recipe not in ("dynamic", "power of two", "delayed")):
        assert (forward, backward) == (times, 1)
    else:
        assert 0.5 <= forward / times <= 0.52 and 0.5 <= backward <= 0.52


@pytest.mark.covering(1)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("recipe", ["dynamic", "rowwise", "gw_hp"])
def test_sums_in_fp8(pool, recipe, shared):
    """Sums of an output, and of the gradient of an input gathered in FP8, are within one rounding of each addend."""
    in_bf16 = 0 if recipe != "gw_hp" else 1 if shared else 3  # inputs
    for (first, _), *counters in pool.run(tasks.sequence_parallel, (2,), recipe, shared, torch.bfloat16, "reduced"):
        assert max(first.values()) < 2**-4
        for counter, calls, plain in zip(counters, (1, (1 if shared else 3) - in_bf16), (0, in_bf16), strict=True):
            assert 0.5 * calls <= counter[OTHER] / BF16 <= 0.52 * calls and counter[SCATTER] == plain * BF16


def test_reductions_that_are_refused():
    reduction = Fp8Reduction()
    for style, layouts in (
        (ColwiseParallel, {}),
        (RowwiseParallel, {"input_layouts": Shard(1)}),
        (PrepareModuleInput, {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}),
    ):
        with pytest.raises(ValueError, match=r"scattered by tokens, but .*_layouts=.*: give Shard"):
            style(reduction=reduction, **layouts)
    with pytest.raises(ValueError, match="give a reduction that rounds to nearest"):
        RowwiseParallel(reduction=Fp8Reduction(stochastic=True), output_layouts=Shard(1))
    assert ColwiseParallel(reduction=Fp8Reduction(format=octavo.E5M2, stochastic=True), input_layouts=Shard(1))


@pytest.mark.parametrize("recipe", ["gw_hp", *(pytest.param(one, marks=pytest.mark.full) for one in ("delayed", "mx"))])
def test_checkpointed_and_frozen(pool, recipe):
    """Forward computed again gives the same gradients; with frozen weights ranks send tokens for other gradients."""
    for again, frozen, gathered in pool.run(tasks.checkpointed_and_frozen, (2,), recipe):
        assert max(again.values()) == 0.0 and frozen == 0.0
        assert BF16 <= gathered <= 1.04 * BF16  # codes of the input and of the gradient


@pytest.mark.full
@pytest.mark.parametrize("recipe", tasks.RECIPES)
@pytest.mark.parametrize("kind", ["RMSNormMLP", "TransformerBlock"])
def test_compiled_under_fsdp2(pool, recipe, kind):
    """Equal modules, which read weights gathered in FP8, share one graph, as eager bit for bit but for a bias's sum."""
    assert pool.run(trained, (2, 2), recipe, kind, seconds=240) == [[[], []]] * 4


class Reader(nn.Module):
    """A module whose input is prepared, and read by a layer and by others that are not its own."""

    def __init__(self, up, *others):
        super().__init__()
        self.up, self.others = up, others

    def forward(self, x):
        return [self.up(x), *(other(x) for other in self.others)]


def test_an_input_gathered_in_fp8_is_refused_by_a_layer_that_it_was_not_gathered_for(lone_mesh):
    up, other = (octavo.nn.Linear(64, 32, recipe=recipe) for recipe in (octavo.recipes.dynamic(), octavo.recipes.mx()))
    column = ColwiseParallel(output_layouts=Replicate())
    prepared = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    model, x = parallelize_module(Reader(up), lone_mesh, {"": prepared, "up": column}), torch.randn(2, 8, 64)
    for input in (x, distribute_tensor(x, lone_mesh, [Shard(1)])):
        assert torch.equal(model.eval()(input)[0], whole_layer(up)(x))
    model.others = (parallelize_module(other, lone_mesh, column),)
    with pytest.raises(ValueError, match=r"gathered in FP8 by .* reached a layer of the recipe 'mx' whose weight is"):
        model(x)


def whole_layer(layer):
    """Return a layer with the values of a sharded one."""
    same = octavo.nn.Linear(layer.in_features, layer.out_features, recipe=layer.recipe).eval()
    same.load_state_dict({name: tasks.whole(value) for name, value in layer.state_dict().items()})
    return same


def test_inputs_that_no_layer_of_octavos_reads_are_prepared_as_torch_does(lone_mesh):
    model, x = Reader(nn.Linear(64, 32), torch.relu), torch.randn(2, 8, 64)
    expected = model(x)
    for layout in (Shard(1), Replicate()):
        prepared = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Replicate(), use_local_output=True)
        parallel = parallelize_module(copy.deepcopy(model), lone_mesh, prepared)
        assert all(type(y) is torch.Tensor for y in parallel(x))
        assert all(map(torch.equal, parallel(x), expected))


def test_an_embedding_by_columns(lone_mesh):
    embedding, tokens = nn.Embedding(51, 64), torch.arange(51)
    expected = embedding(tokens)
    parallelize_module(embedding, lone_mesh, ColwiseParallel(output_layouts=Replicate()))
    assert embedding.weight.placements == (Shard(1),) and torch.equal(embedding(tokens), expected)


def test_inputs_on_another_mesh(pool):
    for said in pool.run(fused.on_another_mesh, (2, 2)):
        assert all("the layers lie on" in one and "give a DTensor on the former" in one for one in said)


def test_delayed_state_begins_with_scales_of_all_ranks(pool):
    """Scales are all ranks' from the first forward on, though parallelize_module's buffers look like committed ones."""
    for differences in pool.run(fused.begun, (2,)):
        assert len(differences) == 2 and max(differences) < 1e-5


def test_a_prepared_input_has_the_scale_of_a_layer_that_reads_it(pool):
    """The input has a reading layer's scale, or after a resume its own: the same but for a rounding."""
    for second_step, resumed, copied in pool.run(fused.of_another_scale, (2,)):
        assert second_step < 1e-5 and 0 < resumed < 0.1 and copied < 1e-5


def test_a_frozen_norm_stays_frozen(pool):
    assert pool.run(fused.frozen_norm, (2,)) == [[False, True]] * 2


@pytest.mark.parametrize("shape", [(2,), pytest.param((4,), marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "recipe", ["power of two", "rowwise", *(pytest.param(one, marks=pytest.mark.full) for one in ("blockwise", "mx"))]
)
def test_features_that_do_not_divide(pool, recipe, shape):
    for differing in pool.run(tasks.uneven, shape, recipe):
        assert max(differing.values()) == 0.0


@pytest.mark.parametrize("recipe", ["power of two", pytest.param("high_precision", marks=pytest.mark.full)])
def test_tied_embeddings_and_a_loss_over_parts_of_the_vocabulary(pool, recipe):
    """51 bytes on 2 ranks."""
    for same, difference, said in pool.run(tasks.tied, (2,), recipe):
        assert same and difference < 1e-5
        assert "tied to another module's, which is sharded S(0)" in said or "sharded Shard(dim=0)" in said
