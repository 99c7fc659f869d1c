"""Weights that ranks share by rows, columns or both: an optimizer updates them as one rank does."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import octavo
from octavo import E4M3, PerTensor
from octavo.optim import SGD, AdamW, Moment
from octavo.optim.in_backward import squared_norms
from octavo.optim.layout import bytes_of_shard, check_layout, place_of, settle_gradient
from octavo.optim.masters import FP8_MASTERS
from octavo.optim.state import largest_gradient
from octavo.weights.fsdp2 import on_this_rank
from tests.support import sharded_weights as cases
from tests.support.byte_counter import REDUCE, ByteCounter
from tests.support.sharded_weights import adamw, differences, held, model, sharded, steps
from tests.support.trained import moments_of

FULL = StateDictOptions(full_state_dict=True)
MESHES = [(2,), (2, 2)]
FP8 = {"moments": "fp8", "master": "split24"}
LAYOUTS: dict[str, Any] = {  # by dimensions of the mesh
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "whole": [Replicate()],
    "rows of columns": [Shard(0), Shard(1)],  # FSDP2 over RowwiseParallel
    "rows of rows": [_StridedShard(0, split_factor=2), Shard(0)],  # FSDP2 over ColwiseParallel
    "rows, replicated": [Shard(0), Replicate()],
}


def placed(whole: Tensor, mesh: Any, placements: Any) -> DTensor:
    """A tensor in this layout; of FSDP2's strided rows this rank's are cut out by hand."""
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    rows = whole.chunk(mesh.size(1))[mesh.get_local_rank(1)].chunk(mesh.size(0))[mesh.get_local_rank(0)]
    of_whole: Any = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(rows.contiguous(), mesh, placements, **of_whole)


def layouts_of(mesh: Any) -> dict[str, Any]:
    return {name: placements for name, placements in LAYOUTS.items() if len(placements) == mesh.ndim}


def mine(whole: Tensor, param: Any) -> Tensor:
    """Return this rank's part of a tensor that is sharded as a parameter is."""
    if not isinstance(param, DTensor):
        return whole
    (chunk, *_) = param.__create_chunk_list__() or [None]
    if chunk is None:
        return whole[:0]
    for dim, (first, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole


def places(mesh: Any) -> tuple[list[str], list[int], list[int]]:
    """Return (layouts with shards at wrong places; bytes of each shard here, and as they are counted)."""
    wrong, sizes, counted = [], [], []
    for name, placements in layouts_of(mesh).items():
        for shape in ((8, 6), (7, 5), (6, 4, 3), (4, 1)):
            param = placed(torch.arange(float(math.prod(shape))).view(shape), mesh, placements)
            (first_row, first_column, row_length), part = place_of(param), on_this_rank(param).flatten(1)
            rows, columns = torch.meshgrid(*map(torch.arange, part.shape), indexing="ij")
            index = (first_row + rows) * row_length + first_column + columns
            if not torch.equal(index.float(), part):
                wrong.append(f"{name} {shape}")
            sizes.append(part.numel() * 4)
            counted.append(bytes_of_shard(param))
    return wrong, sizes, counted


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_shards_are_where_they_are_said_to_be(shape: tuple[int, ...], pool: Any) -> None:
    wrong, sizes, counted = zip(*pool.run(places, shape), strict=True)
    assert not any(wrong) and list(map(max, zip(*sizes, strict=True))) == counted[0]
    assert all(counts == counted[0] for counts in counted) and bytes_of_shard(torch.ones(5, 3)) == 60


def of_muon(params: Any, **options: Any) -> Any:
    """Tensors of three dimensions too, which are experts."""
    return octavo.optim.Muon([{"params": params, "algorithm": "muon"}], **options)


def stepped(mesh: Any, layout: str, options: dict[str, Any], columns: int, of_one: dict[str, Any]) -> list[str]:
    """Return what differs, on this rank, of weights and state from one rank's, which has other options as well.

    The second step of three is skipped; before the third an optimizer that has loaded the first one's state takes its
    place.
    """
    placements, masters = LAYOUTS[layout], options.get("master", "auto")
    dtype = torch.float32 if masters == "auto" else torch.bfloat16
    kind: Any = SGD if "momentum" in options else of_muon if "directions" in options else AdamW
    shapes: list[Any] = [(36, columns), (12, 2, columns // 2)]
    if layout == "rows":  # uneven ones; vectors have no codes on ranks, and are none of Muon's
        shapes = [(37, columns), (5, 2, columns // 2), (1, columns), *([(7,)] if options["moments"] == "bf16" else [])]
    wholes = [torch.randn(shape).to(dtype) for shape in shapes]
    ours = [nn.Parameter(placed(whole, mesh, placements)) for whole in wholes]
    twins, versions = [nn.Parameter(whole.clone()) for whole in wholes], [param._version for param in ours]
    optimizers = [kind(params, lr=0.01, **chosen) for params, chosen in ((ours, options), (twins, options | of_one))]
    for number in range(3):
        for param, twin in zip(ours, twins, strict=True):
            grad = torch.randn(param.shape) * 10**number
            param.grad = placed(grad.to(dtype), mesh, placements)
            twin.grad = grad.to(dtype)
        if number == 2:
            saved = copy.deepcopy(optimizers[0].state_dict())
            optimizers[0] = kind(ours, lr=0.01, **options)
            optimizers[0].load_state_dict(saved)
        for optimizer in optimizers:
            optimizer.skip = torch.tensor(float(number == 1))
            optimizer.step()
    assert all(param._version > version for param, version in zip(ours, versions, strict=True))
    differing = []
    for number, (param, twin) in enumerate(zip(ours, twins, strict=True)):
        pairs = {"weight": (param.detach(), twin.detach())}
        states = optimizers[0].state[param], optimizers[1].state[twin]
        pairs |= {name: (value, states[1][name]) for name, value in states[0].items()}
        for name, (one, other) in pairs.items():
            if one.shape != other.shape or not torch.equal(on_this_rank(one), mine(other, one)):
                differing.append(f"{number} {name}")
    return differing


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("rows", FP8),
        ("rows", {"moments": "fp8", "master": "split32"}),
        ("rows", {"moments": "bf16", "master": None}),
        ("rows", {"moments": "bf16"}),
        ("columns", FP8),
        ("columns", {"moments": "bf16", "master": None, "momentum": 0.9}),
        ("whole", {"moments": "fp8"}),
        ("rows of columns", FP8),
        ("rows of rows", FP8),
        ("rows of columns", {"moments": "fp32", "master": "split32", "skip_nonfinite": True}),
        ("rows of rows", {"moments": "bf16", "gradient_storage": "fp8"}),
        ("rows", FP8 | {"directions": "fp8"}),
        pytest.param("rows", {"moments": "fp32", "directions": "bf16"}, marks=pytest.mark.full),
        pytest.param("rows, replicated", FP8 | {"directions": "bf16"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_whole_blocks_are_those_of_one_rank(layout: str, options: Any, pool: Any) -> None:
    shape = (2,) * len(LAYOUTS[layout])
    assert pool.run(stepped, shape, layout, options, 512, {}) == [[]] * math.prod(shape)


@pytest.mark.parametrize("layout", ["columns", "rows of columns"])
def test_columns_that_cut_blocks_have_moments_in_bf16(layout: str, pool: Any) -> None:
    """Moments are in bf16 where columns cut blocks: two ranks have 150 columns each, a block and a part."""
    shape = (2,) * len(LAYOUTS[layout])
    assert pool.run(stepped, shape, layout, FP8, 300, {"moments": "bf16"}) == [[]] * math.prod(shape)


def loaded_full(mesh: Any, dtype: torch.dtype) -> list[float]:
    """Return relative errors of moments that ranks load from one rank's full state dict, and one again from theirs."""
    options: Any = {"moments": "fp8", "master": "split32"}  # of which 16 bits are sent as bytes
    nets, trained, errors = [nn.Linear(300, 150, dtype=dtype) for _ in range(2)], [], []
    for net in nets:
        trained.append(AdamW(net.parameters(), **options))
        for param in net.parameters():
            param.grad = torch.randn(param.shape).to(dtype)
        trained[-1].step()
        trained[-1].zero_grad()
    alone, back = trained
    for layout in ("rows", "columns"):
        net = copy.deepcopy(nets[0])
        net.weight = nn.Parameter(placed(net.weight.detach(), mesh, LAYOUTS[layout]))
        net.bias = nn.Parameter(placed(net.bias.detach(), mesh, [Shard(0)]))
        on_ranks = AdamW(net.parameters(), **options)
        full = copy.deepcopy(get_optimizer_state_dict(nets[0], alone, options=FULL))
        set_optimizer_state_dict(net, on_ranks, full, options=FULL)
        again = get_optimizer_state_dict(net, on_ranks, options=FULL)
        if mesh.get_rank() == 0:  # torch gathers on the first rank only
            set_optimizer_state_dict(nets[1], back, again, options=FULL)
        for param, of_ranks, other in zip(*(one.parameters() for one in (nets[0], net, nets[1])), strict=True):
            if dtype == torch.bfloat16:
                remainders = alone.state[param]["master_rest"]
                assert remainders.any()
                assert torch.equal(on_this_rank(on_ranks.state[of_ranks]["master_rest"]), mine(remainders, of_ranks))
                assert mesh.get_rank() or torch.equal(back.state[other]["master_rest"], remainders)
            wanted, loaded, read = moments_of(alone, param), moments_of(on_ranks, of_ranks), moments_of(back, other)
            for one, part, all_of_it in zip(wanted, loaded, read, strict=True):
                errors.append(float((part - mine(one, of_ranks)).norm() / part.norm()))
                if mesh.get_rank() == 0:
                    errors.append(float((all_of_it - one).norm() / one.norm()))
    return errors


@pytest.mark.filterwarnings("ignore:the optimizer's state was converted")
def test_full_state_dicts_go_to_ranks_and_back(pool: Any) -> None:
    """Float32 and codes hold codes, bf16 to half a step of it; masters of bf16 weights are the same."""
    assert len(pool.run(loaded_full, (2,), torch.bfloat16)) == 2
    for errors in pool.run(loaded_full, (2,), torch.float32):
        assert max(errors[: len(errors) // 2]) == 0 and 0 < max(errors) < 2.0**-8


def norms(mesh: Any) -> tuple[float, float, float]:
    """Return the global norm of gradients in all layouts by one rank's; the largest; and a NaN's norm."""
    wholes = [torch.randn(6, 10) for _ in layouts_of(mesh)] + [torch.randn(5)]
    gradients: list[Tensor] = [placed(w, mesh, p) for w, p in zip(wholes, layouts_of(mesh).values(), strict=False)]
    gradients.append(wholes[-1])  # of a parameter that is in no plan
    one = torch.cat([whole.flatten() for whole in wholes])
    both = squared_norms(gradients).sum().sqrt(), largest_gradient(gradients)
    if mesh.get_rank() == 1:
        on_this_rank(gradients[1])[0, 0] = torch.nan
    return (float(both[0] / one.norm()), float(both[1] / one.abs().max()), float(largest_gradient(gradients)))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_norms_count_each_element_once(shape: tuple[int, ...], pool: Any) -> None:
    for norm, most, of_a_fault in pool.run(norms, shape):
        assert norm == pytest.approx(1, rel=1e-6) and most == 1 and not math.isfinite(of_a_fault)


def refused(mesh: Any) -> list[str]:
    """Return the errors about weights that are sharded by other dimensions; and about one scale of all rows."""
    said, one = [], (Moment(E4M3, granularity=PerTensor()), Moment("fp32"))
    for dims, *placements in ((3, Replicate(), Shard(2)), (2, Shard(1), Shard(1)), (2, Replicate(), Shard(0))):
        with pytest.raises(ValueError) as caught:
            AdamW([nn.Parameter(placed(torch.ones([4] * dims), mesh, placements))], moments=one)
        said.append(str(caught.value))
    return said


def test_terms_of_a_sum_are_no_weight_and_gradients_of_terms_are_summed(lone_mesh: Any) -> None:
    terms = DTensor.from_local(torch.ones(4, 8), lone_mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="its values are sums over ranks"):
        check_layout(terms)
    param = nn.Parameter(distribute_tensor(torch.ones(4, 8), lone_mesh, [Replicate()]))
    param.grad = DTensor.from_local(torch.full((4, 8), 3.0), lone_mesh, [Partial()], run_check=False)
    gradient = settle_gradient(param)
    assert gradient is param.grad and gradient.placements == (Replicate(),) and (gradient.to_local() == 3).all()


def test_other_layouts_and_one_scale_are_refused(pool: Any) -> None:
    for said in pool.run(refused, (2, 2)):
        assert all("octavo's optimizers take rows" in text for text in said[:2])
        assert "sharded weights do not share" in said[2]


def resolutions(mesh: Any) -> tuple[list[float], list[float]]:
    """Return the sums of weights in several layouts, over a mesh (data, tensor) or data alone, and one rank's."""
    data, rows = mesh["replicate"], [Shard(0)]
    ways = [(data, rows), (mesh, LAYOUTS["rows of columns"]), None, (mesh, [Replicate(), Shard(0)]), (data, rows)]
    values = [torch.randn(4, 8) for _ in ways]
    sums = []
    for on_ranks in (True, False):
        params = []
        for value, way in zip(values, ways, strict=True):
            laid, grad = (placed(x, *way) if way and on_ranks else x.clone() for x in (value, value.sin()))
            params.append(nn.Parameter(laid))
            params[-1].grad = grad
        optimizer = AdamW(params, lr=0.01, moments="fp32")
        optimizer.measure(params)
        optimizer.step()
        sums.append(optimizer.resolution.take().wait()[0].tolist())
    return sums[0], sums[1]


def test_resolutions_count_each_weight_once_however_ranks_share_it(pool: Any) -> None:
    for ranks, alone in pool.run(resolutions, (1, 2)):
        assert ranks == pytest.approx(alone, rel=1e-9) and alone[0] > 0


# Trainings of a model that ``make(seed)`` makes: each returns the tensors that are compared.


def three_steps(make: Any, master: str | None = "auto", moments: Any = "fp8") -> tuple[Any, Any]:
    net = make()
    optimizer = adamw(net, master, moments)
    steps(net, optimizer, 0, 3)
    return net, optimizer


def gradients_of_some(make: Any) -> tuple[Any, Any]:
    """Steps in which one weight has no gradient, each time another."""
    net = make()
    optimizer, params = adamw(net), list(net.parameters())
    for step in range(6):
        cases.gradients(net, step)
        params[step % 3].grad = None
        optimizer.step()
    return net, optimizer


def skipped(make: Any) -> tuple[Any, Any]:
    """A step with a NaN on one rank only."""
    net = make()
    params = list(net.parameters())[:2]  # torch finds no largest value of a gradient without elements
    optimizer = AdamW(params, lr=0.05, skip_nonfinite=True)
    for step in range(3):
        cases.gradients(net, step)
        if step == 1:
            cases.on_this_rank(params[0].grad)[0].fill_(torch.nan)
        optimizer.step()
    return net[:-1], optimizer


def loaded_between(make: Any, plain: bool) -> tuple[Any, Any]:
    """A state dict of another model is loaded between steps: masters begin anew, on all ranks."""
    net, other = make(0), make(1)
    optimizer = adamw(net)
    steps(net, optimizer, 0, 2)
    state = other.state_dict()
    if plain:
        values = octavo.restore(model("dynamic", 1)).state_dict()
        state = {name: cases.like(value, other.get_parameter(name)) for name, value in values.items()}
    net.load_state_dict(state)
    steps(net, optimizer, 2, 4)
    return net, optimizer


def loaded_by_another_master(make: Any) -> tuple[Any, Any]:
    """A state of split24 is loaded into split16: the master begins as the weight, and ranks agree on its amax."""
    net = make()
    before, optimizer = adamw(net, "split24"), adamw(net, "split16")
    steps(net, before, 0, 2)
    with warnings.catch_warnings(action="ignore"):
        optimizer.load_state_dict(before.state_dict())
    steps(net, optimizer, 2, 4)
    return net, optimizer


def beside_whole(mesh: Any, training: str, recipe: str, *options: Any) -> list[str]:
    """Return what differs between a training of a sharded model and of the whole one."""
    makes = (lambda seed=0: sharded(recipe, mesh, seed)), (lambda seed=0: model(recipe, seed))
    return differences(*(held(*globals()[training](make, *options)) for make in makes), mesh["shard"])


CELLS: list[Any] = [((2,), three_steps, "dynamic", master) for master in FP8_MASTERS]
CELLS += [((2,), three_steps, "blockwise", master) for master in ("split16", None)]
CELLS += [
    ((2,), three_steps, "delayed", "auto", "fp32"),
    ((2, 2), three_steps, "dynamic"),  # a replica's ranks agree among themselves
    ((2,), gradients_of_some, "dynamic"),
    ((2,), skipped, "dynamic"),
    *(((2,), loaded_between, "dynamic", plain) for plain in (False, True)),
    ((2,), loaded_by_another_master, "dynamic"),
]
# no ranks share its scales
ONLY_IN_FULL: list[Any] = [((2,), three_steps, "blockwise", master) for master in [*FP8_MASTERS][1:-1]]
# of 5 rows the third rank of 4 has one and the fourth none; of 1 row three ranks have none (of 2 one)
ONLY_IN_FULL += [((4,), three_steps, "dynamic", master) for master in FP8_MASTERS]
ONLY_IN_FULL += [((4,), loaded_between, "dynamic", plain) for plain in (False, True)]


@pytest.mark.parametrize(
    "cell",
    [*CELLS, *(pytest.param(cell, marks=pytest.mark.full) for cell in ONLY_IN_FULL)],
    ids=lambda cell: "-".join(str(getattr(part, "__name__", part)) for part in cell),
)
def test_equal_to_whole_weights(pool, cell):
    shape, training, *options = cell
    assert pool.run(beside_whole, shape, training.__name__, *options, seconds=60) == [[]] * math.prod(shape)


def exchanged(mesh: Any, recipe: str) -> list[tuple[int, int]]:
    """Return (all-reduces, their bytes) of some steps."""
    net = sharded(recipe, mesh)
    optimizer, counts = adamw(net), []
    for step in range(3):
        with ByteCounter() as counter:
            steps(net, optimizer, step, step + 1)
        counts.append((counter.calls[REDUCE], counter.bytes[REDUCE]))
    return counts


def test_one_number_a_weight_in_one_collective(pool):
    """The first step has others before it: ranks have the same options (16 bytes), and masters have begun."""
    assert pool.run(exchanged, (2,), "dynamic", seconds=60) == [[(3, 16 + 24), (1, 12), (1, 12)]] * 2
    assert pool.run(exchanged, (2,), "blockwise", seconds=60) == [[(1, 16), (0, 0), (0, 0)]] * 2
    assert pool.run(exchanged, (1,), "dynamic", seconds=60) == [[(0, 0)] * 3]
