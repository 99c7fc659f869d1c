"""Moments that one layout of ranks has saved and another keeps in other blocks, or not in codes."""

import pytest
import torch

from octavo import E4M3, PerTensor
from octavo.distributed.other_blocks import OtherMoments
from octavo.optim import Moment
from octavo.optim.state import as_fp32
from tests.support import layout_tasks as tasks

OPTIONS = {"lr": 1e-3, "moments": "fp8", "master": "split24"}


def told(pool, layout, *arguments):
    """What each rank of a layout, data x tensor, has; or of one process, where it is None."""
    if layout is None:
        return [tasks.moments(None, *arguments)]
    return pool.run(tasks.moments, layout, *arguments)


@pytest.mark.filterwarnings("ignore:the optimizer's state was converted")
@pytest.mark.parametrize(
    ("saved", "read", "width"),
    [
        ((2, 2), None, 32),
        (None, (1, 4), 32),
        pytest.param((1, 4), (4, 1), 32, marks=pytest.mark.full),
        pytest.param((1, 4), (2, 2), 32, marks=pytest.mark.full),
        pytest.param((4, 1), (1, 4), 512, marks=pytest.mark.full),
        pytest.param((2, 2), None, 512, marks=pytest.mark.full),
    ],
)
def test_from_layout_to_layout(pool, saved, read, width, tmp_path):
    """Weights and masters bit for bit; moments too where blocks coincide, as all of matrices of 512 do.

    Else they are rounded once more, and vectors not at all where ranks share them: float32 holds codes.
    """
    wanted = told(pool, saved, str(tmp_path), True, OPTIONS, width)[0]
    for found in told(pool, read, str(tmp_path), False, OPTIONS, width):
        assert found.keys() == wanted.keys()
        rounded = set()
        for name, value in wanted.items():
            if not torch.equal(found[name], value):
                rounded.add(name.removeprefix("attention.").rpartition(".")[0])
                # E4M4 has half of E4M3's steps, and the root of a second moment doubles them
                step = value.abs() * 2.0**-4 + value.abs().amax(-1, keepdim=True) * 2.0**-16
                assert ((found[name] - value).abs() <= step * 1.01).all() and "exp_avg" in name, name
        apart = {"out", "mlp.fc2"} if width == 32 else set()  # whose columns are shared
        vectors = {"qkv.linear", "qkv.norm", "mlp.fc1", "mlp.norm", "out", "mlp.fc2"} if read is None else set()
        assert apart <= rounded <= apart | vectors


def test_what_was_saved_as_it_is_kept_is_no_other():
    codes, scales = torch.zeros(4, 300, dtype=torch.uint8), torch.ones(4, 3)
    own = {"m_codes": codes, "m_scale_inv": scales, "step": torch.zeros(())}
    sizes = {name: value.shape for name, value in own.items()}
    assert OtherMoments.of(own, ["m"], sizes) is None
    assert OtherMoments.of(own, ["v"], sizes) is None
    found = OtherMoments.of(own, ["m"], {"m_codes": torch.Size((4, 300)), "m_scale_inv_150": torch.Size((4, 4))})
    assert {name: value.shape for name, value in found.tensors.items()} == {
        "m_codes": (4, 300),
        "m_scale_inv_150": (4, 4),
    }
    # one scale, of experts one each
    found = OtherMoments.of(own, ["m"], sizes | {"m_scale_inv": torch.Size((4, 1))})
    found.tensors["m_codes"].fill_(0x38)
    found.tensors["m_scale_inv"].copy_(torch.arange(4.0).view(4, 1))
    moment = Moment(E4M3, granularity=PerTensor())
    assert torch.equal(found.values({"m": moment})["m"], torch.arange(4.0).view(4, 1).expand(4, 300))


def test_codes_are_read_by_their_own_blocks():
    """Those of a row of 300, as two ranks have it: the first blocks of 128 and 22 columns, and again."""
    moment, codes = Moment(E4M3), torch.randint(0, 127, (2, 300), dtype=torch.uint8)
    scales = torch.tensor([[1.0, 2.0, 4.0, 8.0]] * 2)
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat_interleave(torch.tensor([128, 22, 128, 22]))
    values = codes.view(torch.float8_e4m3fn).float() * factors
    assert torch.equal(moment.read_codes(codes, scales, 150), values)
    assert torch.equal(moment.read_codes(codes[:, 140:], scales, 150, 140), values[:, 140:])
    of_rows = codes.view(torch.float8_e4m3fn).float() * torch.tensor([1.0, 2.0, 4.0]).repeat_interleave(128)[:300]
    for first, end in ((0, 75), (0, 150), (75, 150), (150, 300)):  # what a rank has of rows whose blocks are whole
        assert torch.equal(moment.read_codes(codes[:, first:end], scales[:, :3], 0, first), of_rows[:, first:end])
    found = OtherMoments(["m"], {"m_codes": codes, "m_scale_inv_150": scales}).values({"m": moment})
    assert torch.equal(found["m"], values)
    assert torch.equal(as_fp32("m", moment, {"m_codes": codes, "m_scale_inv_150": scales}), values)
