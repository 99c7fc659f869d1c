import torch

import octavo
from octavo import recipes
from octavo.tensor import pair as pair_module
from octavo.weights.shard_cast import ShardCast, ShardCodes
from octavo.weights.ways import MakeWeight
from tests.support.helpers import padded_as_on_gpu


def gathered(codes):
    """Return the two layouts of codes from all ranks, and those in storage of their own."""
    codes, module = codes.view(torch.uint8), octavo.nn.Linear(1, 1, recipe=recipes.dynamic())
    shard_cast, known = ShardCast(module.recipe.weight_casts, codes.shape, 2, 0), ShardCodes((), (torch.ones(1, 1),))
    hook = MakeWeight(codes.shape, "", lambda received: shard_cast.read(received, known, module.recipe.may_pad))
    weight, inner = hook((codes,), torch.float32, None)
    return weight.qdata, weight.transposed_qdata, inner


def test_layouts_of_a_gpu(monkeypatch):
    """Return codes transposed and padded to 16, in storage of their own where they differ from the gathered ones."""
    monkeypatch.setattr(pair_module, "needs_transposed_codes", lambda device: True)
    monkeypatch.setattr(pair_module, "contraction_multiple", padded_as_on_gpu)
    q = torch.randn(20, 24).to(torch.float8_e4m3fn)
    laid, transposed, inner = gathered(q)
    assert laid.shape == (20, 32) and transposed.shape == (24, 32) and len(inner) == 2
    assert torch.equal(laid[:, :24].float(), q.float()) and laid[:, 24:].float().abs().sum() == 0
    assert torch.equal(transposed[:, :20].float(), q.t().float()) and transposed[:, 20:].float().abs().sum() == 0
    whole = torch.randn(32, 48).to(torch.float8_e4m3fn)
    laid, transposed, inner = gathered(whole)
    assert laid.data_ptr() == whole.data_ptr() and inner[0] is transposed and len(inner) == 1
