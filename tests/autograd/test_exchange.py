"""What rows are sent by, and what is made of them; tests/distributed/test_experts.py has them sent."""

import pytest
import torch
import torch.distributed as dist

import octavo
from octavo import Cast, recipes
from octavo.autograd.exchange import cast_to_send
from octavo.distributed import expert_parallel
from octavo.scaling.recipe import RoleCasts
from tests.support.expert_models import batch, built
from tests.support.helpers import FP8_RECIPES, gradients


@pytest.fixture(scope="module")
def mesh():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_codes_serve_every_product_of_a_recipe(name):
    for casts in (FP8_RECIPES[name]().input_casts, FP8_RECIPES[name]().grad_output_casts):
        assert cast_to_send(casts, True, True) is casts.as_is
        assert cast_to_send(casts, True, True, exact=True) is (casts.as_is if casts.once else None)


def test_what_is_sent_in_high_precision():
    per_tensor, rows = Cast(octavo.E4M3, octavo.PerTensor()), Cast(octavo.E4M3, octavo.PerRow())
    square = Cast(octavo.E4M3, octavo.PerBlock(16, 16))
    delayed = recipes.delayed().input_casts.as_is
    for casts, reads, found in (
        (RoleCasts(rows, None, False), (True, True), None),  # grad_weight reads it in high precision
        (RoleCasts(rows, None, False), (True, False), rows),
        (RoleCasts(None, per_tensor, False), (True, True), None),
        (RoleCasts(square, square, True), (True, True), None),  # its blocks have rows of several ranks
        (RoleCasts(rows, delayed, False), (True, True), None),
        (RoleCasts(rows, per_tensor, False), (True, True), rows),
        (RoleCasts(per_tensor, per_tensor, True), (False, False), None),
    ):
        assert cast_to_send(casts, *reads) is found


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_layouts_that_a_gpu_wants(mesh, name, monkeypatch):
    """Codes written transposed, contractions padded to 16: as without expert parallelism."""
    for module in ("casts", "grouped"):
        monkeypatch.setattr(f"octavo.autograd.{module}.needs_transposed_codes", lambda device: True)
    for module in ("casts", "products"):
        monkeypatch.setattr(f"octavo.autograd.{module}.contraction_multiple", lambda device: 16)
    power_of_two = {"recipe": recipes.rowwise(power_of_two=True)} if name == "rowwise" else {}
    found = []
    for parallel in (False, True):
        net = built("octavo", name, 4)
        for recipe in power_of_two.values():
            octavo.set_recipe(net, recipe)
        if parallel:
            expert_parallel(net, mesh)
        y = net(batch(0, 0))
        y.sum().backward()
        of = gradients(net.experts)
        found.append([y, *(of[key].full_tensor() if parallel else of[key] for key in sorted(of))])
    assert len(found[0]) == 3
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
