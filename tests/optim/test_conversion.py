from itertools import product

import pytest
import torch
from torch import Tensor, nn

from octavo import PerBlock, PerTensor
from octavo.optim import SGD, AdamW
from octavo.optim.conversion import Conversion
from octavo.optim.masters import FP8_MASTERS, PLAIN_MASTERS, MasterForm
from octavo.optim.state import Settings
from octavo.weights.stored import StoredWeight, store
from tests.support.fp8_weights import BITS
from tests.support.trained import MASTERS, master_values, moments_of

SHAPE = (130, 300)
PLAIN = [("plain", master) for master in MASTERS]
CODES = [(kind, master) for kind in ("tensor", "blocks") for master in FP8_MASTERS]
STORAGES = {"plain": None, "tensor": PerTensor(), "blocks": PerBlock(128, 128)}


def bits_of(kind: tuple[str, str | None]) -> int:
    return BITS[(PLAIN_MASTERS if kind[0] == "plain" else FP8_MASTERS)[kind[1]].kind]


def weight_of(kind: tuple[str, str | None], values: Tensor) -> nn.Parameter:
    storage = STORAGES[kind[0]]
    return nn.Parameter(values.clone() if storage is None else StoredWeight.cast(values, storage))


def trained(kind: tuple[str, str | None], moments: object = "fp8", steps: int = 3) -> AdamW:
    # within 2^6 of each other: far from any kind's subnormal numbers
    values = (torch.rand(SHAPE) + 1 / 64).mul_(torch.randn(SHAPE).sign()).bfloat16()
    optimizer = AdamW([weight_of(kind, values)], 1e-4, moments=moments, master=kind[1])
    for _ in range(steps):
        step(optimizer, torch.randn(SHAPE))
    return optimizer


def only(optimizer) -> nn.Parameter:
    (weight,) = optimizer.param_groups[0]["params"]
    return weight


def step(optimizer, gradient: Tensor) -> None:
    only(optimizer).grad = gradient.to(only(optimizer).dtype)
    optimizer.step()


def values_of(weight: nn.Parameter) -> Tensor:
    weight = weight.detach()
    return (weight.dequantize() if isinstance(weight, StoredWeight) else weight).float().clone()


def changed(optimizer, kind: tuple[str, str | None], moments: object = None) -> None:
    weight = only(optimizer)
    storage = {} if same_storage(weight, kind) else {weight: STORAGES[kind[0]]}
    kinds_of_moments = optimizer.moments if moments is None else optimizer.moments_of(moments)
    Conversion(Settings(kinds_of_moments, optimizer.names, kind[1]), storage).apply(nn.Module(), optimizer)


def same_storage(weight: nn.Parameter, kind: tuple[str, str | None]) -> bool:
    return (weight.granularity if isinstance(weight, StoredWeight) else None) == STORAGES[kind[0]]


@pytest.mark.covering(1)
@pytest.mark.parametrize("old", PLAIN + CODES, ids=str)
@pytest.mark.parametrize("new", PLAIN + CODES, ids=str)
def test_every_change_keeps_the_masters_values_as_far_as_the_new_one_has_bits(old, new):
    optimizer = trained(old)
    now, before, before_weight = only(optimizer), master_values(optimizer, only(optimizer)), values_of(only(optimizer))
    stays = same_storage(now, new)
    changed(optimizer, new)
    after = master_values(optimizer, only(optimizer))
    assert only(optimizer) is now
    assert isinstance(now, StoredWeight) == (new[0] != "plain") and optimizer.master == new[1]
    if bits_of(new) >= bits_of(old):
        assert torch.equal(before, after)
    else:
        assert ((after - before).abs() / before.abs()).max() <= 2.0 ** -bits_of(new)
    assert (values_of(now) - after).abs().max() <= after.abs().max() * 2.0 ** (-8 if new[0] == "plain" else -4)
    if stays and bits_of(new) >= bits_of(old) and not old[1] == "fp16_scaled":  # whose ties go to even
        assert torch.equal(values_of(now), before_weight)
    step(optimizer, torch.randn(SHAPE))
    moved = (master_values(optimizer, only(optimizer)) - after).abs()
    assert 0 < moved.max() < 1e-2 or new[1] is None


@pytest.mark.parametrize("storage", ["plain", "tensor", "blocks"])
def test_a_change_and_back_loses_nothing_and_trains_on_bit_for_bit(storage):
    low = (storage, "split24" if storage == "plain" else "split16")
    torch.manual_seed(0)
    there = trained(low)
    torch.manual_seed(0)
    stayed = trained(low)
    changed(there, ("plain", "split32"), "fp32")
    changed(there, low, "fp8")
    gradient = torch.randn(SHAPE)
    for optimizer in (there, stayed):
        step(optimizer, gradient)
    assert torch.equal(values_of(only(there)), values_of(only(stayed)))
    assert torch.equal(master_values(there, only(there)), master_values(stayed, only(stayed)))


@pytest.mark.parametrize(("old", "new"), list(product(("fp8", "bf16", "fp32"), repeat=2)))
def test_moments_keep_their_values(old, new):
    optimizer = trained(("plain", "split32"), old)
    weight, state = only(optimizer), dict(optimizer.state[only(optimizer)])
    before = moments_of(optimizer, weight)
    changed(optimizer, ("plain", "split32"), new)
    after = moments_of(optimizer, weight)
    assert optimizer.state[weight]["step"] is state["step"]
    if old == new:
        assert all(optimizer.state[weight][name] is value for name, value in state.items())
    for was, now in zip(before, after, strict=True):
        limit = {"fp32": 0.0, "bf16": 2.0**-8, "fp8": 2.0**-3}[new] if old != new else 0.0
        assert ((was - now).abs() <= limit * was.abs() + (was.abs().max() * 2.0**-9 if limit > 0.1 else 0)).all()
    assert optimizer.clip_update == (new != "fp32")


def test_float32_weights_are_their_own_master_before_and_after():
    weight = nn.Parameter(torch.randn(40, 30))
    optimizer = AdamW([weight], 0.01, moments="fp32", master="fp32")
    step(optimizer, torch.randn(40, 30))
    before = weight.detach().clone()
    Conversion(optimizer.settings._replace(master="split24"), {}).apply(nn.Module(), optimizer)
    assert torch.equal(weight, before)
    Conversion(optimizer.settings._replace(master="fp32"), {weight: PerTensor()}).apply(nn.Module(), optimizer)
    assert torch.equal(master_values(optimizer, only(optimizer)), before) and weight.dtype == torch.float32
    Conversion(optimizer.settings, {weight: None}).apply(nn.Module(), optimizer)
    assert torch.equal(weight, before) and type(weight) is nn.Parameter


def test_weights_that_have_not_stepped_change_their_storage_alone():
    weight = nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer, before = AdamW([weight], 0.01, master="auto"), weight.detach().clone()
    Conversion(optimizer.settings, {weight: PerTensor()}).apply(nn.Module(), optimizer)
    assert torch.equal(values_of(weight), values_of(nn.Parameter(StoredWeight.cast(before))))
    assert optimizer.state[weight] == {} and MasterForm.of(weight, "auto").kind == "fp8_split16"
    store(weight, None)
    torch.testing.assert_close(weight, before, rtol=2.0**-8, atol=float(before.abs().max()) * 2.0**-26)
    step(optimizer, torch.randn(64, 64))


@pytest.mark.parametrize(
    ("settings", "storage", "message"),
    [
        ({"master": "split32"}, PerTensor(), "weights stored in FP8 take"),
        ({"master": "nothing"}, None, "master='nothing'"),
    ],
)
def test_what_can_not_be_changes_nothing(settings, storage, message):
    optimizer = trained(("plain", "split24"))
    weight, state = only(optimizer), dict(optimizer.state[only(optimizer)])
    conversion = Conversion(optimizer.settings._replace(**settings), {weight: storage} if storage else {})
    with pytest.raises(ValueError, match=message):
        conversion.apply(nn.Module(), optimizer)
    assert only(optimizer) is weight and optimizer.master == "split24"
    assert all(optimizer.state[weight][name] is value for name, value in state.items())


def test_weights_of_torchs_optimizers_keep_their_storage():
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.SGD([weight], 0.01)
    Conversion(None, {}).check(optimizer)
    with pytest.raises(ValueError, match=r"weights change their storage with an optimizer of octavo\.optim only"):
        Conversion(None, {weight: PerTensor()}).check(optimizer)


def test_sgd_changes_too_but_stores_no_weight_in_fp8():
    weight = nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = SGD([weight], 0.01, 0.9, master="split24")
    step(optimizer, torch.randn(64, 64))
    before = weight.detach().clone()
    Conversion(Settings(optimizer.moments_of("fp32"), optimizer.names, "split32"), {}).apply(nn.Module(), optimizer)
    assert torch.equal(weight, before) and "momentum_buffer" in optimizer.state[weight]
    with pytest.raises(ValueError, match="AdamW or Adam"):
        Conversion(optimizer.settings._replace(master="split16"), {weight: PerTensor()}).apply(nn.Module(), optimizer)


def test_a_nan_stays_in_its_element():
    optimizer = trained(("tensor", "split16"))
    with torch.no_grad():
        only(optimizer).qdata.view(torch.uint8)[3, 5] = 0x7F
    changed(optimizer, ("plain", "split32"))
    assert only(optimizer).isnan().nonzero().tolist() == [[3, 5]]
    changed(optimizer, ("blocks", "split24"))
    assert master_values(optimizer, only(optimizer)).isnan().nonzero().tolist() == [[3, 5]]
