"""Models that one rank can't hold: made on the meta device and sharded there, they get values part by part."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import octavo
import octavo.distributed as ours
from octavo import recipes
from octavo.export import load_fp8
from octavo.weights.fsdp2 import on_this_rank
from octavo.weights.stored import local_stored
from tests.support.helpers import every_layer, to_fp8

safetensors = pytest.importorskip("safetensors.torch")

SENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
BF16 = {"dtype": torch.bfloat16}
ANY_SCALES = recipes.blockwise(power_of_two=False)


def shard(net: Any, mesh: Any) -> Any:
    """Shard under FSDP2; of a mesh of two dimensions the last is tensor parallelism's."""
    if mesh.ndim == 2:
        plan = {name: ours.ColwiseParallel() for name in ("0",) if name in net._modules}
        parallelize_module(net, mesh["shard"], plan | ({"1": ours.RowwiseParallel()} if "1" in net._modules else {}))
        mesh = mesh["replicate"]
    for layer in net.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def held(net: nn.Module) -> list[torch.Tensor]:
    """All that training begins with, of this rank."""
    tensors = []
    for parameter in net.parameters():
        stored = local_stored(parameter)
        values = (on_this_rank(parameter),) if stored is None else (stored.pair().dequantize(), stored.before_cast())
        tensors += values if stored is None else [stored.qdata.view(torch.uint8), stored.scale_inv, *values]
    return [one.detach().clone() for one in tensors]


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(held(one), held(other), strict=True))


def trains_alike(*nets: Any) -> bool:
    """Whether a step of an optimizer that is made now leaves the same."""
    for net in nets:
        net(torch.ones(2, 256, **BF16)).sum().backward()
        octavo.optim.AdamW(net.parameters(), lr=0.1).step()
    return equal(*nets)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def two_layers(recipe: Any, storage: Any, trained: bool, width: int = 320, experts: bool = False) -> nn.Module:
    """Return two layers on the meta device."""
    with torch.device("meta"):
        layers = [nn.Linear(256, width, **BF16), nn.Linear(width, 256, **BF16)]
        if experts:
            layers = [octavo.nn.GroupedLinear(4, 256, 128, bias=False, **BF16, recipe=recipe)]
    return octavo.convert(nn.Sequential(*layers).requires_grad_(trained), recipe, every_layer, storage)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: Any) -> Any:
    """Write checkpoints of such layers; return their folder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    net, wide = (nn.Sequential(nn.Linear(256, n, **BF16), nn.Linear(n, 256, **BF16)) for n in (320, 512))
    models = {"codes": (wide, ANY_SCALES), "powers": (wide, recipes.blockwise()), "blocks": (net, recipes.blockwise())}
    models |= {"rows": (net, recipes.rowwise()), "own rows": (net, recipes.rowwise()), "own 32": (net, recipes.mx())}
    for name, (model, recipe) in models.items():
        layout = "fine-grained" if "blockwise" in recipe.name else "compressed-tensors"
        octavo.export.to_safetensors(to_fp8(copy.deepcopy(model), recipe), folder / name, layout)
    experts = octavo.nn.GroupedLinear(4, 256, 128, bias=False, recipe=recipes.blockwise(), **BF16)
    octavo.export.to_safetensors(nn.Sequential(experts), folder / "experts")
    for name, model in (("values", net), ("wide values", wide)):
        (folder / name).mkdir()
        safetensors.save_file(model.state_dict(), folder / name / "model.safetensors")
        (folder / name / "config.json").write_text("{}")
    return folder


CASES = {
    "codes": (ANY_SCALES, "fp8", False, 512),
    "powers": (recipes.blockwise(), "fp8", True, 512),
    "blocks": (recipes.dynamic(), "fp8", True),  # 160 rows a rank are no whole blocks
    "rows": (recipes.delayed(), "fp8", True),
    "own rows": (recipes.rowwise(), "fp8", False),
    "own 32": (recipes.mx(), "fp8", False),
    "values": (recipes.dynamic(), "fp8", True),
    "wide values": (recipes.blockwise(), "fp8", True, 512),
    "experts": (recipes.blockwise(), "fp8", True, 0, True),
}


def passed(net: Any) -> list[torch.Tensor]:
    """An output, and the gradient that passes frozen weights."""
    x = torch.linspace(-1, 1, 512, **BF16).view(2, 256).requires_grad_()
    y = net(x)
    y.square().sum().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


def wrong_loads(mesh: Any, folder: Any, parallel: bool) -> list[str]:
    """Return the checkpoints of which shards get other values than the shards of a model that loads them whole."""
    warnings.simplefilter("ignore")
    wrong = []
    for name, options in CASES.items():
        if parallel and name in ("powers", "wide values", "experts", "own rows"):
            continue
        net = shard(two_layers(*options), mesh)
        load_fp8(net.to_empty(device="cpu") if name in ("codes", "rows") else net, folder / name)
        whole = shard(load_fp8(two_layers(*options), folder / name), mesh)
        can_train = options[2] and name != "experts"
        if not equal(net, whole) or (can_train and not trains_alike(net, whole)):
            wrong.append(name)
        if not parallel and not options[2]:
            alone = passed(load_fp8(two_layers(*options), folder / name))
            wrong += [f"{name}: gradients"] * (not all(map(torch.equal, passed(net), alone)))
    if not parallel:
        net = shard(two_layers(recipes.mx(), None, True), mesh)
        whole = shard(load_fp8(two_layers(recipes.mx(), None, True), folder / "values"), mesh)
        wrong += ["kept in bf16"] * (not trains_alike(load_fp8(net, folder / "values"), whole))
    return wrong


@pytest.mark.filterwarnings("ignore:2 layers have sizes:UserWarning")
@pytest.mark.parametrize("parallel", [False, True], ids=["FSDP2", "tensor parallel"])
def test_shards_hold_what_loading_the_whole_and_sharding_gives(pool, checkpoints, parallel):
    assert pool.run(wrong_loads, (1, 2) if parallel else (2,), checkpoints, parallel) == [[], []]


def codes_of_columns(mesh: Any) -> str:
    with torch.device("meta"):
        net = octavo.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipes.dynamic(), every_layer, "fp8")
    codes = {key: torch.ones(p.shape, dtype=p.dtype) for key, p in net.state_dict().items()}
    net = shard(net, mesh).to_empty(device="cpu")
    with pytest.raises(octavo.UnsupportedOpError) as caught:
        set_model_state_dict(net, codes if dist.get_rank() == 0 else {}, options=SENT)
    return str(caught.value)


def test_codes_that_torch_cuts_wrongly_are_refused(pool):
    for said in pool.run(codes_of_columns, (1, 2), whole=True):
        assert "this weight is sharded by columns. Give its values" in said
