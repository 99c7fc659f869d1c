import pytest
import torch

import octavo
from octavo.autograd.gather_input import GatheredGradient, GatheredInput, Wire
from octavo.tensor.pair import Operands

PAIR = torch.ones(4, 8).to(torch.float8_e4m3fn), torch.ones(1, 1)


@pytest.fixture
def gathered():
    carrier = torch.zeros((), dtype=torch.bfloat16).expand(2, 2, 8).requires_grad_()
    return GatheredInput(carrier, Operands(PAIR, PAIR), None, ("casts",), Wire("group", 2, 1))


def test_it_says_what_modules_ask_of_an_input(gathered):
    assert gathered.shape == (2, 2, 8) and gathered.ndim == gathered.dim() == 3 and gathered.size(-1) == 8
    assert (gathered.dtype, gathered.device.type, gathered.is_meta) == (torch.bfloat16, "cpu", False)
    assert gathered.requires_grad


@pytest.mark.parametrize(
    "read",
    [
        lambda x: torch.relu(x),
        lambda x: torch.ones(2, 2, 8) + x,
        lambda x: x.view(4, 8),
        lambda x: torch.nn.functional.linear(x, torch.ones(3, 8)),
    ],
)
def test_nothing_else_reads_it(gathered, read):
    with pytest.raises(octavo.UnsupportedOpError, match=r"gathered in FP8: .* torch's own PrepareModuleInput"):
        read(gathered)
    assert not hasattr(gathered, "no_attribute_of_tensors")


def test_a_gradient_comes_to_the_products_as_rows():
    operands = Operands(PAIR, PAIR, None, torch.ones(8))
    own = GatheredGradient(operands, (2, 2, 8), torch.bfloat16)
    rows = own.view(4, 8)
    assert rows.shape == (4, 8) and rows.dtype == torch.bfloat16 and rows.read() == operands
    assert rows.isnan().shape == (4, 8) and not rows.isnan().any() and rows.to(rows.dtype) is rows
    assert own.detach().shape == own.shape
    with torch.inference_mode():
        assert rows.to(torch.bfloat16) is rows
    with pytest.raises(octavo.UnsupportedOpError):
        own.view(2, 16)
    with pytest.raises(octavo.UnsupportedOpError):
        own + 1
