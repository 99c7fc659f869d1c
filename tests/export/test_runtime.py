"""Files in onnxruntime."""

import math

import pytest
import torch
from torch import nn

from octavo.errors import ExportError
from octavo.export import run_onnx, sqnr_in_onnxruntime, to_onnx

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    net = nn.Linear(8, 4, bias=False)
    return net, to_onnx(net, torch.randn(2, 8), tmp_path_factory.mktemp("onnx") / "m.onnx")


def test_it_computes_and_is_compared(exported):
    net, path = exported
    x = torch.randn(5, 8, dtype=torch.bfloat16)
    (y,) = run_onnx(path, x)
    torch.testing.assert_close(y, net(x.float()).detach())
    assert sqnr_in_onnxruntime(net, x, path) > 100
    other = nn.Linear(8, 4, bias=False)
    other.load_state_dict({"weight": 1.1 * net.weight})
    assert math.isclose(sqnr_in_onnxruntime(other, x, path), 20 * math.log10(11), rel_tol=1e-4)


def test_what_it_can_not_run(exported, tmp_path):
    with pytest.raises(ExportError, match="can't run"):
        run_onnx(tmp_path / "none.onnx", torch.randn(2, 8))
    with pytest.raises(ExportError, match="can't run"):
        run_onnx(exported[1], torch.randn(2, 9))
