"""Private names of torch: this release has each, and octavo/private.py alone uses them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from octavo import private
from octavo.errors import OctavoError
from tests.support.pool import Pool
from tests.support.private_attributes import ANYWHERE

OCTAVO = Path(private.__file__).parent


@pytest.mark.parametrize("name", private.NAMES)
def test_torch_has_it(name: str) -> None:
    entry = private.NAMES[name]
    if entry.cuda and torch.version.cuda is None:
        assert getattr(private, name) is None
    else:
        assert getattr(private, name) is private._look_up(entry)


@pytest.mark.parametrize("name", ANYWHERE)
def test_instances_have_it(name: str) -> None:
    instances = {
        "torch.nn.Module": nn.Module(),
        "torch.UntypedStorage": torch.ones(1).untyped_storage(),
        "torch._ops.OpOverload": torch.ops.aten.mm.default,
        "torch.optim.Optimizer": torch.optim.SGD([torch.ones(1)]),
    }
    path = ANYWHERE[name].path
    assert path.endswith(f".{name}")
    owner = path.removesuffix(f".{name}")
    assert hasattr(instances.get(owner) or private._look_up(private.Name(owner, "")), name)


def test_a_name_that_is_missing_says_what_fails() -> None:
    for path in ("torch._C._no_such_name", "torch.no_such_module._name"):
        with pytest.raises(OctavoError, match=rf"has no {re.escape(path)} .*can't do this: hold a pair"):
            private._look_up(private.Name(path, "hold a pair"))
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(private, "no_such_name")  # noqa: B009
    with pytest.raises(OctavoError, match=r"has no torch\.distributed\.fsdp .*no attribute '_get_fsdp_state'"):
        private._params_of(object())


def test_exporting_is_not_asked_of_torch() -> None:
    """torch 2.11's is_exporting() is true whenever torch.compile traces: layers that believed it had no gradients."""
    asks = [file.name for file in OCTAVO.rglob("*.py") if re.search(r"compiler\.is_exporting\(\)", file.read_text())]
    assert asks == []
    answers: list[bool] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        answers.append(private.is_exporting())
        return x + 1

    torch.compile(traced, backend="eager")(torch.ones(2))
    torch.export.export(_Calls(traced), (torch.ones(2),), strict=False)
    assert answers[-1] is True and not any(answers[:-1])


class _Calls(nn.Module):
    """A module of a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_hooks_and_forward_mode() -> None:
    parameter, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    seen: list[str] = []
    parameter.register_hook(lambda gradient: seen.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    private.set_hooks(other, private.hooks_of(parameter))
    other.sum().backward()
    assert seen == ["gradient", "accumulated"]
    assert not private.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert private.in_forward_mode()


def _fsdp2(mesh: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    (param,) = private.fsdp_params(model)
    assert param.module is param.owner is model[0]
    assert param.sharded is model[0].weight
    assert (param.mp_policy, param.mesh_dim) == (policy, 0)
    assert not param.was_gathered
    assert private.local_tensor(param.sharded).tolist() == param.shard.tolist()
    model(torch.ones(1, 4))
    assert param.was_gathered
    param.forget_gathered()
    assert not param.was_gathered
    assert {"_sharded_param_data", "reset_sharded_param"} <= {*dir(param._param)}  # take_shard: schedules' tests
    model(torch.ones(1, 4))


def test_fsdp2(pool: Pool) -> None:
    pool.run(_fsdp2, (2,))


def test_a_module_that_is_not_there_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = [*sys.meta_path]
    private._after_import("octavo_absent_module", lambda module: pytest.fail("nobody imported it"))
    with pytest.raises(ModuleNotFoundError, match="octavo_absent_module"):
        importlib.import_module("octavo_absent_module")
    assert sys.meta_path == finders


def test_a_torch_without_a_list_of_dear_operations_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    partitioners, counter = SimpleNamespace(), SimpleNamespace(register_flop_formula=lambda op: registered.append)
    registered: list[object] = []
    monkeypatch.setitem(sys.modules, "torch._functorch.partitioners", partitioners)
    monkeypatch.setitem(sys.modules, "torch.utils.flop_counter", counter)
    private.tell_torch_of_products({"an op": "its formula"})
    assert registered == ["its formula"] and vars(partitioners) == {}
    ops = SimpleNamespace(compute_intensive_ops={"mm"})
    partitioners.get_default_op_list = lambda: ops
    private.tell_torch_of_products({"an op": "its formula"})
    assert partitioners.get_default_op_list() is ops and ops.compute_intensive_ops == {"mm", "an op"}


def test_a_torch_of_one_group_of_parameters_a_module_has_these() -> None:
    """As torch 2.11; a module without parameters has none."""
    param = SimpleNamespace(sharded_param="sharded", _sharded_local_tensor="shard", mp_policy="policy")
    param._module_info, param.mesh_info = SimpleNamespace(module="owner"), SimpleNamespace(mesh=torch.zeros(2, 2))
    state = SimpleNamespace(_fsdp_param_group=SimpleNamespace(fsdp_params=[param]))
    module = SimpleNamespace(_get_fsdp_state=lambda: state)
    (of_module,) = private._params_of(module)
    assert (of_module.owner, of_module.sharded, of_module.shard, of_module.mesh_dim) == ("owner", "sharded", "shard", 1)
    state._fsdp_param_group = None
    assert private._params_of(module) == []


def test_a_module_is_followed_until_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "octavo_followed_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders, seen = [*sys.meta_path], list[int]()
    for _ in range(2):
        private._after_import("octavo_followed_module", lambda module: seen.append(module.value))
    assert seen == []
    followed = importlib.import_module("octavo_followed_module")
    assert seen == [1, 1] and sys.meta_path == finders
    private._after_import("octavo_followed_module", lambda module: seen.append(2))
    assert seen == [1, 1, 2]
    del sys.modules[followed.__name__]
