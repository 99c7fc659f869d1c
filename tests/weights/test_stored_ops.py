import copy

import pytest
import torch
from torch import Tensor, nn

from octavo import UnsupportedOpError
from octavo.weights.storable import FROZEN_ONLY, STORABLE
from octavo.weights.stored import StoredWeight
from octavo.weights.stored_ops import add_adapter

N, K = 200, 300

each_granularity = pytest.mark.parametrize("granularity", STORABLE + FROZEN_ONLY, ids=str)


def stored():
    return StoredWeight.cast(torch.randn(N, K, dtype=torch.bfloat16))


OPS = {
    "mm": lambda w: torch.ones(3, N, dtype=w.dtype) @ w,
    "t": lambda w: nn.functional.linear(torch.ones(3, K, dtype=w.dtype), w),
    "add_": lambda w: w.add_(1),
    "erfinv_": lambda w: w.erfinv_(),
    "slice": lambda w: w[:3],
    "view": lambda w: w.view(-1, 2),
    "equal": lambda w: torch.equal(w, w),
    "_foreach_mul": lambda w: torch._foreach_mul_([w], 2.0),
    "embedding": lambda w: nn.functional.embedding(torch.tensor([1]), w),
}


@pytest.mark.parametrize("name", OPS)
def test_any_other_op_is_refused_by_name(name):
    weight = stored()
    with pytest.raises(UnsupportedOpError, match=rf"aten\..*{name}.* of a weight that is stored in FP8"):
        OPS[name](weight)
    with pytest.raises(NotImplementedError):
        OPS[name](weight)


# --- adapters merged into a weight

MERGED = pytest.mark.filterwarnings("ignore:an adapter is merged:UserWarning")


def frozen(granularity=STORABLE[0], dtype=torch.float32, shape=(384, 256), **options) -> nn.Parameter:
    weight = torch.randn(shape).to(dtype) * torch.linspace(0.5, 2, shape[0])[:, None].to(dtype)
    return nn.Parameter(StoredWeight.cast(weight, granularity, **options), requires_grad=False)


def adapter(weight: nn.Parameter, size: float) -> Tensor:
    """Return a product of rank 8, ``size`` times as large as the weight, rms."""
    delta = torch.randn(weight.shape[0], 8) @ torch.randn(8, weight.shape[1])
    return delta * size * weight.dequantize().norm() / delta.norm()


@MERGED
@each_granularity
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_value_is_one_of_the_two_codes_around_the_sum(granularity, dtype):
    weight = frozen(granularity, dtype)
    delta = adapter(weight, 0.1).to(dtype)
    exact = weight.pair().dequantize().double() + delta.double()
    weight.data += delta
    scale_inv = StoredWeight(torch.ones_like(weight.qdata), weight.scale_inv, torch.float32, granularity).dequantize()
    step = 2.0 ** (exact.abs() / scale_inv).log2().floor().clamp(min=-6) / 8
    error = (weight.qdata.double() - exact / scale_inv).abs()
    assert (error <= step * (1 + 1e-6)).all()
    assert ((error > step / 2) & (step > 0)).any()  # to nearest there would be none


@MERGED
@each_granularity
def test_the_scales_are_those_of_the_sum(granularity):
    weight = frozen(granularity)
    delta = adapter(weight, 4.0)
    expected = StoredWeight.cast(weight.dequantize() + delta, granularity)
    weight.data += delta
    assert torch.equal(weight.scale_inv.float(), expected.scale_inv.float())


@MERGED
@each_granularity
def test_each_expert_is_as_a_weight_of_its_own(granularity):
    values = torch.randn(3, 256, 160) * torch.tensor([1.0, 1e-6, 100.0]).view(3, 1, 1)
    weight = nn.Parameter(StoredWeight.cast(values, granularity), requires_grad=False)
    alone = [nn.Parameter(StoredWeight.cast(one, granularity), requires_grad=False) for one in values]
    for each in ([weight], alone):
        torch.manual_seed(1)
        for one, delta in zip(each, [values / 8] if each[0] is weight else values / 8, strict=True):
            one.data += delta
    assert torch.equal(weight.dequantize(), torch.stack([one.dequantize() for one in alone]))


@MERGED
def test_a_small_adapter_is_kept_on_average():
    weight = frozen(shape=(1024, 1024))
    before = weight.dequantize()
    delta = adapter(weight, 0.01)
    nearest = StoredWeight.cast(before + delta).dequantize() - before
    weight.data += delta
    merged = weight.dequantize() - before

    def share(change: Tensor) -> float:
        return float((change * delta).sum() / delta.square().sum())

    assert share(nearest) < 0.5
    assert abs(share(merged) - 1) < 0.02  # 0.0021 / sqrt(1 M) / 0.01 of it, rms: two codes' distance, rounded


@MERGED
def test_the_parameter_itself_and_torchs_seed():
    weights = [frozen() for _ in range(2)]
    weights[1].copy_(weights[0])
    delta = adapter(weights[0], 0.1)
    versions = [weight._version for weight in weights]
    for weight in weights:
        torch.manual_seed(1)
        assert weight.add_(delta, alpha=2) is weight
    assert torch.equal(weights[0].dequantize(), weights[1].dequantize())
    assert all(weight.qdata._version > before for weight, before in zip(weights, versions, strict=True))


@MERGED
def test_what_an_optimizer_would_have_begun_with_is_the_merged_weight():
    weight = frozen()
    weight.facts.awaited = True
    weight.requires_grad_(True).data.copy_(torch.randn(384, 256))
    weight.requires_grad_(False).data += adapter(weight, 0.1)
    assert weight.extra_bits is not None and torch.equal(weight.before_cast(), weight.dequantize())


def test_it_says_that_it_rounds():
    weight = frozen()
    with pytest.warns(UserWarning, match=r"rounds them once more.*octavo.restore\(model\) before merging"):
        add_adapter(weight, torch.ones_like(weight.dequantize()))


def test_what_is_trained_is_refused():
    weight, with_data = frozen().requires_grad_(True), nn.Parameter(frozen().data)
    for tensor in (weight.data, weight.detach(), with_data.data, copy.deepcopy(with_data).data):
        for change in (tensor.add_, tensor.sub_):
            with pytest.raises(UnsupportedOpError, match=r"aten\.\w+_\.Tensor of a weight that is stored in FP8"):
                change(torch.ones(384, 256))


def test_taking_out_and_replacing_are_refused():
    weight = frozen()
    before = weight.dequantize()
    with pytest.raises(UnsupportedOpError, match=r"an adapter can't be taken out of a weight .* rounded"):
        weight.data -= torch.ones(384, 256)
    for other in (torch.ones(384, 256), StoredWeight.cast(torch.ones(384, 256))):
        with pytest.raises(UnsupportedOpError, match=r"weight.data = ... of a weight that is stored in FP8"):
            weight.data = other
    assert torch.equal(weight.dequantize(), before)
