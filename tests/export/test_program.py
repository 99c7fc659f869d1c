"""What is left of octavo's ops in a traced program: those that depend on the inputs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import octavo
from octavo import recipes
from octavo.errors import ExportError
from octavo.export.program import delayed_argument, program_of

X = torch.randn(3, 4, 32)


def ops_of(program: torch.export.ExportedProgram) -> list[str]:
    return [n.target._opname for n in program.graph.nodes if getattr(n.target, "namespace", "") == "octavo"]


@pytest.mark.parametrize("recipe", [recipes.dynamic(), recipes.delayed(), recipes.blockwise()], ids=lambda r: r.name)
def test_weights_are_folded_and_the_rest_computes_the_same(recipe):
    module = octavo.nn.LayerNormMLP(32, 48, recipe=recipe)
    module(X).sum().backward()
    program = program_of(module, (X,), None)
    assert ops_of(program) == ["cast", "matmul", "cast", "matmul"]
    folded = [t for t in program.state_dict.values() if t.dtype == torch.float8_e4m3fn]
    assert sorted(t.numel() for t in folded) == [48 * 32, 96 * 32]
    module.eval()
    for shape in ((3, 4, 32), (5, 2, 32)):
        x = torch.randn(shape)
        with torch.no_grad():
            assert torch.equal(program.module()(x), module(x))


def test_a_delayed_cast_without_a_history_is_dynamic():
    layer = octavo.nn.Linear(32, 16, recipe=recipes.delayed())
    for delayed in (False, True):
        nodes = program_of(layer, (X,), None).graph.nodes
        assert any(map(delayed_argument, nodes)) == delayed
        layer.train()(X).sum().backward()


def test_given_shapes_are_kept():
    batch = torch.export.Dim("batch", max=8)
    program = program_of(octavo.nn.Linear(32, 16), (X,), ({0: batch},))
    (x,) = (
        n.meta["val"]
        for n in program.graph.nodes
        if n.op == "placeholder" and n.name in program.graph_signature.user_inputs
    )
    assert isinstance(x.shape[0], torch.SymInt) and x.shape[1:] == (4, 32)


@pytest.mark.parametrize("name", ["dynamic", "rowwise", "blockwise", "mx"])
@pytest.mark.parametrize("build", [octavo.nn.Linear, octavo.nn.RMSNormMLP])
def test_any_number_of_rows(name, build):
    """By torch.export itself, of weights that require gradients: nothing is cast for a backward."""
    model = build(256, 256, recipe=getattr(recipes, name)()).eval()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(model, (torch.randn(16, 256),), dynamic_shapes=({0: rows},))
    assert not any("two_scalings" in op for op in ops_of(program) if build is octavo.nn.Linear)
    for count in (2, 130, 1000):
        x = torch.randn(count, 256)
        with torch.no_grad():
            assert torch.equal(program.module()(x), model(x))


def test_what_can_not_be_traced_says_why():
    class Peeks(nn.Module):
        def forward(self, x: torch.Tensor) -> float:
            return x.sum().item() if x.sum().item() > 0 else 0.0

    with pytest.raises(ExportError, match=r"torch.export can't trace Peeks: .+"):
        program_of(Peeks(), (X,), None)
    with pytest.raises(ExportError, match="can't trace Linear"):
        program_of(octavo.nn.Linear(16, 16), (X,), None)


def test_models_on_several_ranks_are_refused(tmp_path):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Sequential(octavo.nn.Linear(32, {"q": 32, "k": 32}, recipe=recipes.blockwise()))
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": octavo.distributed.ColwiseParallel()})
        with pytest.raises(ExportError, match=r"0\.q\.weight is sharded: gather the model first"):
            program_of(model, (X,), None)
        with pytest.raises(ExportError, match="its splits are on several ranks: gather the model first"):
            octavo.export.to_safetensors(model, tmp_path)
    finally:
        dist.destroy_process_group()
