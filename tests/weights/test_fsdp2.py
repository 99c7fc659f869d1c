import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.errors import UnsupportedOpError
from octavo.tensor.pair import Operands
from octavo.weights.fsdp2 import (
    GatheredWeight,
    ShardedWeight,
    attach,
    forget_failed_pass,
    maximum_over_shards,
    mp_policies,
    padded_rows,
    rows_on_each_rank,
    without_padding,
)


def shard(rows=5, cols=3):
    return torch.arange(rows * cols, dtype=torch.float32).view(rows, cols).as_subclass(ShardedWeight)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.narrow(0, 0, 2),
        lambda t: t.view(-1),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.detach(),
        lambda t: t.new_zeros(7, 3),
        lambda t: t.clone(),
        lambda t: torch.ops.aten.detach.default(t),
        lambda t: torch.ops.aten._to_copy.default(t, dtype=torch.float16),
    ],
)
def test_what_torch_makes_of_a_shard_stays_one(call):
    expected = call(shard().as_subclass(Tensor))
    result = call(shard())
    assert torch.equal(result.as_subclass(Tensor), expected)
    assert type(result) is ShardedWeight


def test_all_else_is_plain():
    for result in (shard() + 1, torch.zeros_like(shard()), shard().sum(), torch.ops.aten.mul.Tensor(shard(), 2)):
        assert type(result) is Tensor
    assert type(torch._foreach_mul([shard()], 2.0)[0]) is Tensor


def test_written_in_place_it_keeps_its_storage_and_version():
    sharded = shard()
    plain = sharded.as_subclass(Tensor)
    sharded.mul_(2)
    assert torch.equal(plain, 2 * shard().as_subclass(Tensor))
    assert sharded._version == plain._version == 1
    assert type(sharded) is ShardedWeight


def test_a_file_holds_a_plain_tensor():
    assert type(pickle.loads(pickle.dumps(shard()))) is Tensor


def test_a_module_that_is_not_octavos_gathers_as_torch_does_in_the_policys_dtype():
    mesh, policy = SimpleNamespace(size=lambda: 2), SimpleNamespace(param_dtype=None)
    (sent,), after = shard().fsdp_pre_all_gather(mesh, torch.Size([11, 3]), None, nn.Embedding(11, 3), policy)
    assert sent.shape == (6, 3) and torch.equal(sent[:5], shard().as_subclass(Tensor))
    whole = torch.cat([sent, sent])
    weight, inner = shard().fsdp_post_all_gather((whole,), after, torch.float32)
    assert weight.shape == (11, 3) and inner == () and weight.data_ptr() == whole.data_ptr()
    assert shard().fsdp_post_all_gather((whole,), after, torch.float32, out=weight) is None
    policy.param_dtype = torch.bfloat16
    (sent,), _ = shard().fsdp_pre_all_gather(mesh, torch.Size([11, 3]), None, nn.Embedding(11, 3), policy)
    assert sent.dtype == torch.bfloat16


def gathered(scale=2.0, shape=(4, 3)):
    q = torch.arange(12, dtype=torch.float32).view(shape).to(torch.float8_e4m3fn)
    scales = torch.full((1, 1), scale)
    return GatheredWeight(Operands((q, scales), (q.t(), scales)), shape, torch.bfloat16, "casts")


def test_a_gathered_weight_is_a_leaf_of_its_shape_and_dtype():
    weight = nn.Parameter(torch.as_strided(gathered(), (4, 3), (3, 1), 0))
    assert isinstance(weight, GatheredWeight) and isinstance(weight, nn.Parameter)
    assert weight.shape == (4, 3) and weight.dtype == torch.bfloat16 and weight.requires_grad
    assert weight.qdata.data_ptr() == weight.detach().qdata.data_ptr()
    assert "GatheredWeight((4, 3), torch.bfloat16" in repr(weight)
    zeros = torch.zeros_like(weight)
    assert type(zeros) is Tensor and zeros.dtype == torch.bfloat16 and zeros.shape == (4, 3)


def test_a_gathered_weight_is_transposed_within_its_matrices_alone():
    experts = GatheredWeight(gathered().read(), (2, 4, 3), torch.bfloat16, "casts")
    assert experts.mT.shape == (2, 3, 4) and experts.mT.qdata is experts.qdata
    with pytest.raises(UnsupportedOpError, match=r"aten\.transpose\.int"):
        experts.transpose(0, 1)


def test_where_fully_shard_was_never_imported_nothing_is_asked_of_it(monkeypatch):
    model = octavo.convert(nn.Linear(32, 32), select=lambda module, name: True)
    values = torch.tensor([3.0, -1.0])
    assert maximum_over_shards(values, model.weight) is values  # no other rank has a part
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp", raising=False)
    assert mp_policies(model) == {} and forget_failed_pass(model)
    assert octavo.set_recipe(model, octavo.recipes.mx()).recipe == octavo.recipes.mx()
    assert "torch.distributed.fsdp" not in sys.modules


def test_a_gathered_weight_refuses_to_be_read():
    for read in (lambda w: w + 1, lambda w: w.t(), lambda w: nn.functional.embedding(torch.tensor([1]), w)):
        with pytest.raises(octavo.UnsupportedOpError, match="exists in FP8 only"):
            read(gathered())


def test_refilled_in_place_for_the_backward_that_saved_it():
    weight, other = gathered(), gathered(3.0)
    other.qdata.view(torch.uint8).fill_(56)  # 1.0
    saved, version = weight.qdata, weight.qdata._version
    weight.write(other.read())
    assert weight.qdata is saved and torch.equal(saved.float(), torch.ones(4, 3)) and saved._version == version
    assert weight.scale_inv.item() == 3.0


def test_a_plain_parameter_is_no_shard():
    assert not attach(nn.Parameter(torch.ones(2, 2)), -1)


def test_what_ranks_send_is_the_whole():
    for rows in (1, 7, 8):
        whole = torch.randn(rows, 3, 2)
        parts = [*whole.split(rows_on_each_rank(rows, 4)), *[whole[:0]] * 4][:4]
        sent = [padded_rows(part, whole.shape, 4) for part in parts]
        assert torch.equal(without_padding(torch.cat(sent), whole.shape), whole)
    columns = torch.randn(5, 6)
    assert padded_rows(columns[:, :3], columns.shape, 2).shape == (5, 3)  # another dimension is sharded
