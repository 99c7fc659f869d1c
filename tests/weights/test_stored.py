import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import octavo
from octavo import E4M3, PerBlock, PerRow, PerTensor, UnsupportedOpError, quantize, recipes
from octavo.numerics import scale_inv_dtype
from octavo.tensor.scaled_tensor import ScaledTensor
from octavo.weights.storable import FROZEN_ONLY, STORABLE
from octavo.weights.stored import StoredWeight, local_stored, put_into, store
from tests.support.helpers import saved_and_loaded
from tests.support.sharded_weights import adamw, batch, differences, held, like, model, on_meta, shard, steps

N, K = 200, 300

each_granularity = pytest.mark.parametrize("granularity", STORABLE + FROZEN_ONLY, ids=str)


def stored(granularity=STORABLE[0], dtype=torch.bfloat16, shape=(N, K)):
    return StoredWeight.cast(torch.randn(shape, dtype=dtype), granularity)


def parameter(**options):
    return nn.Parameter(stored(**options))


def holder(weight):
    module = nn.Module()
    module.register_parameter("weight", weight)
    return module


def same(a, b):
    return (
        isinstance(a, StoredWeight)
        and isinstance(b, StoredWeight)
        and (a.dtype, a.device) == (b.dtype, b.device)
        and torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
        and torch.equal(a.scale_inv.float(), b.scale_inv.float())
    )


@each_granularity
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (N, K), (256, 256)], ids=str)
def test_the_facade(shape, dtype, granularity):
    x = torch.randn(shape, dtype=dtype)
    weight = StoredWeight.cast(x, granularity)
    assert weight.shape == shape and weight.dtype == dtype and weight.device == x.device and weight.ndim == 2
    assert not weight.requires_grad and weight.is_leaf and weight.numel() == x.numel()
    assert weight.qdata.dtype == torch.float8_e4m3fn and weight.qdata.is_contiguous() and weight.qdata.shape == shape
    assert weight.scale_inv.dtype == scale_inv_dtype(granularity.tile, power_of_two=True)
    assert weight.scale_inv.shape == granularity.scale_shape(shape)
    assert (torch.log2(weight.scale_inv.float()) % 1 == 0).all()
    one = weight.scale_inv.numel() == 1 and granularity in STORABLE
    assert weight.granularity == (PerTensor() if one else granularity)
    pair = quantize(x, E4M3, granularity, power_of_two=True)
    assert isinstance(weight.pair(), ScaledTensor) and weight.pair().qdata.data_ptr() == weight.qdata.data_ptr()
    assert torch.equal(weight.dequantize(), pair.dequantize()) and type(weight.dequantize()) is torch.Tensor
    assert ((weight.dequantize() - x).abs() <= x.abs() * 2.0**-4 + x.abs().max() * 2.0**-17).all()
    assert repr(weight) == f"StoredWeight({tuple(shape)}, {dtype}, {weight.granularity})"


@pytest.mark.parametrize("granularity", [PerRow(dim=-2), PerBlock(1, 128), PerBlock(64, 64)], ids=str)
def test_other_granularities_are_refused(granularity):
    with pytest.raises(ValueError, match=r"per tensor or in blocks of 128 x 128, not Per.*serve the forward product"):
        stored(granularity)


def test_other_dtypes_are_refused():
    for x in (torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int32)):
        with pytest.raises(TypeError, match="bfloat16, float16 and float32"):
            StoredWeight.cast(x)


def test_a_strided_and_an_empty_weight():
    x = torch.randn(K, N)
    assert torch.equal(StoredWeight.cast(x.t()).dequantize(), StoredWeight.cast(x.t().contiguous()).dequantize())
    assert stored(shape=(0, 8)).dequantize().shape == (0, 8)


def test_detach_shares_and_clone_does_not():
    weight = parameter()
    for alias in (weight.detach(), weight.data):
        assert same(alias, weight) and not alias.requires_grad
        assert alias.qdata.data_ptr() == weight.qdata.data_ptr()
        assert alias.scale_inv.data_ptr() == weight.scale_inv.data_ptr()
    clone = weight.detach().clone()
    assert same(clone, weight) and clone.qdata.data_ptr() != weight.qdata.data_ptr()
    assert clone.scale_inv.data_ptr() != weight.scale_inv.data_ptr()


def test_a_copy_has_the_gradient_too():
    weight = parameter()
    weight.grad = torch.ones(N, K, dtype=torch.bfloat16)
    assert torch.equal(copy.deepcopy(holder(weight)).weight.grad, weight.grad)
    for dtype in (torch.float32, None):
        weight.grad = None
        weight.grad_dtype, weight.grad = dtype, torch.ones(N, K)
        copied = copy.deepcopy(weight)
        assert copied.grad_dtype == dtype and torch.equal(copied.grad, weight.grad)


def test_copies_of_modules_share_what_the_modules_share():
    weight = parameter()
    first, second = copy.deepcopy([holder(weight), holder(weight)])
    assert first.weight is second.weight is not weight and same(first.weight, weight)
    with pytest.raises(RuntimeError, match=r"only weights that are leaves .* detach\(\) it first"):
        copy.deepcopy(weight.clone())


def test_shared_memory():
    weight = StoredWeight.cast(torch.randn(N, K), keep_extra_bits=True)
    before = weight.clone()
    assert not weight.is_shared() and weight.share_memory_() is weight and weight.is_shared() and same(weight, before)
    assert all(tensor.is_shared() for tensor in (weight.qdata, weight.scale_inv, weight.extra_bits))
    weight.extra_bits = None
    assert same(weight.share_memory_(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_module_of_another_dtype_keeps_the_codes(dtype):
    module = holder(parameter(granularity=PerBlock(128, 128)))
    before = module.weight.detach().clone()
    module.to(dtype)
    assert module.weight.dtype == dtype and isinstance(module.weight, nn.Parameter) and module.weight.requires_grad
    assert same(module.weight.detach(), before.moved(torch.clone, dtype))
    assert module.weight.qdata.dtype == torch.float8_e4m3fn and module.weight.scale_inv.dtype == torch.float32
    module.weight.dequantize().sum().backward()
    assert module.weight.grad.dtype == dtype


def test_to_and_copies_of_itself():
    weight = stored()
    assert same(weight.to("cpu"), weight) and same(weight.cpu(), weight) and same(weight.contiguous(), weight)
    assert same(weight.to(torch.float32, copy=True), weight.moved(torch.clone, torch.float32))


@each_granularity
def test_copy_from_a_plain_weight_casts(granularity):
    weight, x = nn.Parameter(stored(granularity)), 1000 * torch.randn(N, K)
    addresses, version = (weight.qdata.data_ptr(), weight.scale_inv.data_ptr()), weight._version
    with torch.no_grad():
        assert weight.copy_(x) is weight
    assert torch.equal(weight.qdata.view(torch.uint8), StoredWeight.cast(x, granularity).qdata.view(torch.uint8))
    assert torch.equal(weight.scale_inv, StoredWeight.cast(x, granularity).scale_inv) and weight.dtype == torch.bfloat16
    assert (weight.qdata.data_ptr(), weight.scale_inv.data_ptr()) == addresses and weight._version > version


def test_a_copy_of_the_values_that_it_has_changes_no_scale():
    """A cast of them would have the least scale that holds them, and an optimizer's rest would be of another scale."""
    weight = StoredWeight(torch.full((N, K), 8.0).to(E4M3.dtype), torch.full((1, 1), 2.0**-3))
    weight.copy_(torch.ones(N, K))
    assert weight.scale_inv.item() == 2.0**-3 and (weight.dequantize() == 1).all()
    weight.copy_(torch.full((N, K), 2.0))
    assert weight.scale_inv.item() == 2.0**-7 and (weight.dequantize() == 2).all()


@each_granularity
@pytest.mark.parametrize("source", STORABLE, ids=str)
def test_copy_from_a_stored_weight(source, granularity):
    weight, other = stored(granularity), stored(source)
    weight.copy_(other)
    if source == granularity:
        assert same(weight, other)
    else:
        assert weight.granularity == granularity
        assert same(weight, StoredWeight.cast(other.dequantize(), granularity))


@each_granularity
def test_initialization_is_the_plain_weights_then_cast(granularity):
    for init in (nn.init.zeros_, nn.init.normal_, nn.init.kaiming_uniform_, lambda x: nn.init.constant_(x, 0.3)):
        weight, plain = parameter(granularity=granularity), torch.empty(N, K, dtype=torch.bfloat16)
        for tensor in (weight, plain):
            torch.manual_seed(0)
            init(tensor)
        assert same(weight, StoredWeight.cast(plain, granularity))
    nn.init.normal_(weight.to("meta"))
    with pytest.raises(UnsupportedOpError, match=r"write it with .copy_\(values\)"):
        nn.init.orthogonal_(weight)


def test_its_address_is_its_codes():
    """A weight's address is its codes', by which accelerate finds an optimizer's parameters after fully_shard."""
    first, second = parameter(), parameter()
    assert first.data_ptr() == first.qdata.data_ptr() == first.detach().data_ptr() != second.data_ptr()


def test_a_plain_tensor_does_not_take_a_stored_one_silently():
    with pytest.raises(UnsupportedOpError, match="copy_"):
        torch.empty(N, K).copy_(stored())


@each_granularity
def test_parts_are_views_with_the_scales_of_their_rows(granularity):
    weight = stored(granularity, shape=(512, K))
    first, second = weight.chunk(2)
    assert first.is_shard and second.is_shard and first.granularity == second.granularity == granularity
    assert torch.equal(torch.cat([first.dequantize(), second.dequantize()]), weight.dequantize())
    assert second.qdata.data_ptr() == weight.qdata[256:].data_ptr()
    scales = weight.scale_inv if granularity == PerTensor() else weight.scale_inv.chunk(2)[1]
    assert second.scale_inv.data_ptr() == scales.data_ptr() and torch.equal(second.scale_inv.float(), scales.float())
    assert [tuple(part.shape) for part in stored(shape=(5, K)).chunk(4)] == [(2, K), (2, K), (1, K)]


def test_what_a_part_can_not_be_is_refused():
    part, _ = stored(PerBlock(128, 128), shape=(256, 128)).chunk(2)
    with pytest.raises(UnsupportedOpError, match=r"first get \(128, 128\) and the last nothing: shard over fewer"):
        part.new_empty((0, 128))
    assert type(stored().chunk(2)[1].new_empty((0, K))) is Tensor
    for refused, name in (
        (lambda: part.new_zeros((128, 128), dtype=torch.float64), "new_zeros"),
        (lambda: nn.functional.pad(part, (0, 0, 0, 1)), "constant_pad_nd"),
        (lambda: nn.functional.pad(stored(), (0, 0, 0, 1), value=1.0), "constant_pad_nd"),
    ):
        with pytest.raises(UnsupportedOpError, match=rf"aten\.{name}.* of a weight that is stored in FP8"):
            refused()


def test_a_part_that_is_one_block_stays_of_blocks():
    part, _ = stored(PerBlock(128, 128), shape=(256, 128)).chunk(2)
    for cut in (part, part.detach(), part.clone(), part.float(), part[:128], pickle.loads(pickle.dumps(part))):
        assert cut.scale_inv.shape == (1, 1) and cut.granularity == PerBlock(128, 128) and cut.is_shard


@pytest.mark.parametrize(("rows", "ranks"), [(320, 2), (384, 2), (500, 4), (512, 8)])
def test_blocks_do_not_reach_over_parts(rows, ranks):
    with pytest.raises(UnsupportedOpError, match=rf"\({rows}, {K}\) .*in blocks of 128 x 128 .* over {ranks} ranks"):
        stored(PerBlock(128, 128), shape=(rows, K)).chunk(ranks)
    assert len(stored(PerBlock(128, 128), shape=(rows, K)).chunk(1)) == 1


@pytest.mark.parametrize(("granularity", "columns"), [(PerRow(), 256), (PerBlock(1, 32), 96)], ids=str)
def test_rows_are_whole_and_so_are_blocks_of_32(granularity, columns):
    weight = stored(granularity, shape=(7, columns))
    for dim, ranks in ((0, 4), (1, 2)):
        with pytest.raises(UnsupportedOpError, match=rf"stored Per.* can't be sharded over {ranks} ranks by its"):
            weight.split(-(-weight.shape[dim] // ranks), dim)


@each_granularity
def test_zeros_to_copy_a_part_into(granularity):
    part = stored(granularity, shape=(512, K)).chunk(2)[1]
    zeros = part.new_zeros(256, K)
    assert zeros.is_shard and (zeros.dequantize() == 0).all() and zeros.granularity == granularity
    assert granularity != PerTensor() or torch.equal(zeros.scale_inv, part.scale_inv)  # also where nothing is copied
    zeros.narrow(0, 0, 256).copy_(part)
    assert same(zeros, part) and zeros.qdata.data_ptr() != part.qdata.data_ptr()
    empty = zeros.narrow(0, 0, 0)
    assert empty.shape == (0, K) and empty.is_shard
    for size in ((256,), (256, K + 1)):
        with pytest.raises(UnsupportedOpError, match=r"new_zeros|sharded by rows"):
            part.new_zeros(size)
    if granularity == PerBlock(128, 128):
        with pytest.raises(UnsupportedOpError, match="no whole blocks"):
            part[:100]


def test_a_part_in_a_row_is_the_same_codes():
    part = stored().chunk(2)[0]
    flat = part.view(-1)
    assert isinstance(flat, StoredWeight) and flat.shape == (N // 2 * K,)
    assert flat.qdata.data_ptr() == part.qdata.data_ptr()


def test_a_part_with_one_scale_notes_that_other_parts_may_have_others():
    part, other = stored().chunk(2)
    part.copy_(other)
    assert same(part, other) and not part.facts.scale_is_local
    for values in (torch.ones(N // 2, K), stored(shape=(N // 2, K)), StoredWeight(part.qdata, part.scale_inv * 3)):
        part.facts.scale_is_local = False
        assert part.copy_(values).facts.scale_is_local
    blocks = stored(PerBlock(128, 128), shape=(512, K)).chunk(2)[0]
    assert same(blocks.copy_(torch.ones(256, K)), StoredWeight.cast(torch.ones(256, K).bfloat16(), PerBlock(128, 128)))


def test_empty_ones_have_a_scale():
    empty = torch.empty_like(stored())
    assert (empty.scale_inv == 1).all() and empty.shape == (N, K)


def test_pinned_memory(monkeypatch):
    part = stored().chunk(2)[0]
    assert not part.is_pinned()
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.clone)  # which needs a GPU
    assert same(torch.ops.aten._pin_memory.default(part), part)


def test_which_weight_is_stored():
    weight = parameter()
    assert local_stored(weight) is weight and local_stored(torch.ones(2)) is None and local_stored(None) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_dequantize(dtype):
    weight, factor = parameter(dtype=dtype), torch.randn(N, K, dtype=dtype)
    for times in (1, 2):
        (weight.dequantize() * factor).sum().backward()
        assert type(weight.grad) is torch.Tensor and weight.grad.dtype == dtype
        assert torch.equal(weight.grad, times * factor)
    assert weight.is_leaf and weight.dequantize().grad_fn is not None
    assert weight.detach().dequantize().grad_fn is None
    called = []
    weight.register_post_accumulate_grad_hook(called.append)
    weight.dequantize().sum().backward()
    assert called == [weight] or called[0] is weight


def test_zeros_like_is_plain():
    weight = parameter()
    for plain, value in ((torch.zeros_like(weight), 0), (torch.ones_like(weight), 1)):
        assert type(plain) is torch.Tensor and plain.dtype == weight.dtype and (plain == value).all()
    assert torch.zeros_like(weight, dtype=torch.float32, memory_format=torch.preserve_format).dtype == torch.float32


def test_torchs_optimizers_are_told_the_remedy():
    for options in ({"foreach": True}, {"fused": True}):
        weight = parameter()
        before, optimizer = weight.detach().clone(), torch.optim.AdamW([weight], **options)
        weight.grad = torch.ones(N, K, dtype=torch.bfloat16)
        says = r"(?s)aten\..*octavo\.optim\.AdamW.*torch\.optim can't.*dequantize"
        with pytest.raises(UnsupportedOpError, match=says):
            optimizer.step()
        assert same(weight.detach(), before)


def test_a_weight_is_stored_and_put_back_to_all_that_is_known_of_it():
    weight = nn.Parameter(torch.randn(200, 300))
    before = weight.detach().clone()
    for granularity in (PerTensor(), PerBlock(128, 128)):
        store(weight, granularity)
        assert isinstance(weight, StoredWeight) and weight.granularity == granularity
    store(weight, None)
    assert type(weight) is nn.Parameter
    torch.testing.assert_close(weight.detach(), before, rtol=2.0**-10, atol=float(before.abs().max()) * 2.0**-26)


def begun_apart(mesh: Any, recipe: str, way: str) -> list[str]:
    """Return what differs, after steps, from a whole model of each rank's rows, where ranks began with other values."""
    of_rank, *others = (octavo.restore(model(recipe, seed)) for seed in (mesh.get_rank(), 0, 1))
    with torch.no_grad():
        for p, *of in zip(*(net.parameters() for net in (of_rank, *others)), strict=True):
            of[1].mul_(64)  # of another scale
            of[0].copy_(torch.cat([q.chunk(2)[i] for i, q in enumerate(of) if i < len(q.chunk(2))]))
            p.copy_(of[0] if way == "written" else p * 64 ** mesh.get_rank())

    def stored(net: nn.Module) -> nn.Module:
        return octavo.convert(net, getattr(recipes, recipe)(), lambda module, name: True, "fp8")

    if way == "written":
        net = shard(on_meta(recipe), mesh).to_empty(device="cpu")
        with torch.no_grad():
            for p, q in zip(net.parameters(), of_rank.parameters(), strict=True):
                p.copy_(like(q, p))
    else:
        net = shard(stored(of_rank), mesh)
    whole = stored(others[0])
    if way == "saved":
        full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(full[name], value) for name, value in whole.state_dict().items())
    y = net(batch(0, 0)), whole(batch(0, 0))
    optimizers = adamw(net), adamw(whole)
    for each, optimizer in zip((net, whole), optimizers, strict=True):
        steps(each, optimizer, 0, 2)
    return ["output"] * (not torch.equal(*y)) + differences(held(net, optimizers[0]), held(whole, optimizers[1]), mesh)


@pytest.mark.parametrize("way", ["seeds", "written", pytest.param("saved", marks=pytest.mark.full)])
def test_ranks_that_began_with_other_values_agree_on_a_scale(pool, way):
    assert pool.run(begun_apart, (2,), "dynamic", way, seconds=60) == [[], []]


def test_the_same_values_of_another_dtype_or_without_data_are_taken():
    weight = parameter()
    values = weight.dequantize()
    weight.data = weight.detach().to(torch.float32)
    assert weight.dtype == torch.float32 and torch.equal(weight.dequantize(), values.float())
    on_meta = nn.Parameter(weight.detach().to("meta"))
    on_meta.data = on_meta.detach().to(torch.bfloat16)
    assert on_meta.is_meta and on_meta.dtype == torch.bfloat16
    for other in (weight, stored(shape=(N, K + 1)).to("meta")):
        with pytest.raises(UnsupportedOpError, match=r"weight\.data = "):
            on_meta.data = other.detach()


# --- another tensor in a parameter that stays the same object


def test_the_parameter_its_hooks_its_gradient_and_its_attributes_stay_there_and_back():
    weight = nn.Parameter(torch.randn(128, 128))
    weak, calls = weakref.ref(weight), []
    weight.owner = "layer 1"
    first = weight.register_hook(lambda gradient: calls.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda param: calls.append(param is weight))
    weight.grad = torch.ones(128, 128)
    for tensor, kind in ((StoredWeight.cast(weight), StoredWeight), (torch.eye(128), nn.Parameter)):
        put_into(weight, tensor)
        assert type(weight) is kind and isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
        assert weak() is weight and weight.owner == "layer 1" and float(weight.grad.sum()) == 128 * 128
        (weight.dequantize() if kind is StoredWeight else weight).sum().backward()
        assert calls == ["gradient", True] and float(weight.grad.sum()) == 2 * 128 * 128
        calls.clear()
        weight.grad = torch.ones(128, 128)
        assert type(copy.deepcopy(weight)) is kind
    first.remove()
    (weight * 2).sum().backward()
    assert calls == [True] and vars(weight) == {"owner": "layer 1"}


def test_its_own_attributes_are_all_that_are_annotated_or_set():
    annotated = {name for kind in StoredWeight.__mro__ for name in getattr(kind, "__annotations__", ())}
    classwide = {"RULES", "REMEDY"} | set(getattr(torch.Tensor, "__annotations__", ()))
    assert annotated - classwide <= StoredWeight.OWN_ATTRIBUTES
    weight = nn.Parameter(StoredWeight.cast(torch.randn(64, 64), keep_extra_bits=True))
    assert vars(weight).keys() <= StoredWeight.OWN_ATTRIBUTES


def test_nothing_keeps_the_old_values():
    weight = nn.Parameter(torch.randn(64, 64))
    old = torch.multiprocessing.reductions.StorageWeakRef(weight.untyped_storage())
    put_into(weight, StoredWeight.cast(weight))
    gc.collect()
    assert old.expired()


def test_a_backward_pass_of_the_old_values_is_refused():
    weight = nn.Parameter(torch.randn(64, 64))
    loss = (weight * 2).sum()
    put_into(weight, StoredWeight.cast(weight))
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()


def test_a_sum_of_gradients_in_another_dtype_goes_on_and_a_frozen_parameter_stays_frozen():
    weight = nn.Parameter(torch.randn(64, 64).bfloat16(), requires_grad=True)
    weight.grad_dtype = torch.float32
    weight.grad = torch.ones(64, 64)
    put_into(weight, StoredWeight.cast(weight))
    assert weight.grad_dtype == weight.grad.dtype == torch.float32
    frozen = nn.Parameter(torch.randn(64, 64), requires_grad=False)
    put_into(frozen, StoredWeight.cast(frozen))
    assert not frozen.requires_grad and frozen.grad is None


def test_experts_are_viewed_in_inference_mode():
    experts = StoredWeight.cast(torch.randn(2, 16, 32))
    with torch.inference_mode():
        same, laid = experts.view_as(experts), experts.mT
        with pytest.raises(UnsupportedOpError, match="stored in FP8"):
            experts.relu()
    assert laid.shape == (2, 32, 16) and laid.qdata.data_ptr() == same.qdata.data_ptr() == experts.qdata.data_ptr()


def test_steps_of_trunc_normal_are_refused_with_the_remedy():
    """timm's, and torch's before 2.13."""
    weight = parameter()
    says = r"\.copy_\(values\).*before octavo\.convert.*trunc_normal_"
    with torch.no_grad(), pytest.raises(UnsupportedOpError, match=says):
        weight.uniform_(-1, 1).erfinv_()
    values = torch.zeros_like(weight)
    nn.init.trunc_normal_(values, std=0.02)
    with torch.no_grad():
        weight.copy_(values)
    assert same(weight, StoredWeight.cast(values))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="takes steps that test_steps_of_trunc_normal_ shows refused")
@pytest.mark.parametrize("granularity", STORABLE, ids=str)
def test_truncated_normals_of_torch_are_the_plain_weights_then_cast(granularity):
    weight, plain = parameter(granularity=granularity), torch.empty(N, K, dtype=torch.bfloat16)
    for tensor in (weight, plain):
        torch.manual_seed(0)
        nn.init.trunc_normal_(tensor, std=0.02, a=-0.03, b=0.03)
    assert same(weight, StoredWeight.cast(plain, granularity))


def test_files_and_pickles_are_read():
    weights = [parameter(), parameter().detach().shard(0, N // 2)]
    for loaded in (saved_and_loaded(weights), pickle.loads(pickle.dumps(weights))):
        assert all(map(same, loaded, weights)) and loaded[1].is_shard


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda w: StoredWeight(w.qdata, torch.ones(1, 1), w.dtype, w.granularity), r"\(1, 1\).*needs \(2, 3\)"),
        (lambda w: StoredWeight(w.qdata.float().to(torch.float8_e5m2), w.scale_inv), "e5m2 is no weight in FP8, E4M3"),
        (
            lambda w: StoredWeight(w.qdata, torch.ones(2, 2), w.dtype, PerBlock(128, 200)),
            "is no weight in FP8",
        ),
        (lambda w: StoredWeight(w.qdata, w.scale_inv.half(), w.dtype, w.granularity), "scale_inv is torch.float16"),
        (lambda w: StoredWeight(w.qdata, w.scale_inv, torch.float64, w.granularity), "not torch.float64"),
    ],
)
def test_a_file_whose_codes_and_scales_do_not_fit_is_refused(made, says):
    """Kernels read as many scales as the codes' shape says."""
    with pytest.raises((TypeError, ValueError), match=says):
        saved_and_loaded(made(stored(PerBlock(128, 128))))


def test_extra_bits_of_a_file_fit_its_codes():
    weight = StoredWeight.cast(torch.randn(N, K), keep_extra_bits=True)
    weight.extra_bits = weight.extra_bits[:1]
    with pytest.raises(ValueError, match=r"has extra bits torch.int8 \(1, 300\)"):
        saved_and_loaded(weight)


def test_extra_bits_of_a_row_that_is_written_to_all_rows():
    weight, row = stored(), StoredWeight.cast(torch.randn(1, K).bfloat16(), keep_extra_bits=True)
    weight.copy_(row)
    weight.validate()
    assert torch.equal(weight.before_cast(), row.before_cast().expand(N, K))


def test_scales_of_no_granularity_are_refused():
    with pytest.raises(ValueError, match=r"scales \(3, 7\) do not fit codes \(200, 300\)"):
        StoredWeight(stored().qdata, torch.ones(3, 7))
