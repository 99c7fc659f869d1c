import pytest
import torch
from torch import nn

import octavo
from octavo import recipes
from octavo.errors import ExportError
from octavo.export.layouts import LAYOUTS, entries, scale_shape
from tests.support.helpers import to_fp8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_recipe_that_is_named_fits(layout):
    net = to_fp8(nn.Sequential(nn.Linear(200, 300)), getattr(recipes, LAYOUTS[layout].recipe)())
    found, layers, skipped = entries(net, layout)
    assert [(entry.key, entry.layer) for entry in found] == [("0.weight", net[0]), ("0.bias", None)]
    assert (layers, skipped) == ({"0": net[0]}, [])
    ((name, codes, scales),) = found[0].read(True, {})
    assert name == "0.weight"
    assert (codes.shape, codes.dtype) == ((300, 200), torch.float8_e4m3fn)
    assert scales.shape == scale_shape(net[0])


@pytest.mark.parametrize(
    ("shape", "recipe"), [((3, 2), recipes.blockwise()), ((1,), recipes.dynamic()), ((300, 1), recipes.rowwise())]
)
def test_the_shapes_of_scales(shape, recipe):
    assert scale_shape(octavo.nn.Linear(200, 300, recipe=recipe)) == shape


def test_codes_that_no_product_reads_are_not_taken_for_values():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    octavo.convert(net, recipes.dynamic(), lambda module, name: True, "fp8")
    octavo.set_recipe(net, octavo.RecipeMap(recipes.dynamic(), {"1": None}))
    with pytest.raises(ExportError, match=r"1\.weight is stored in FP8, but its layer's recipe has no FP8 output"):
        entries(net, "per-tensor")


def test_a_wrapper_that_renames_tensors_is_refused():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = to_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), recipes.blockwise())
    net[1] = checkpoint_wrapper(net[1])
    with pytest.raises(ExportError, match=r"1._checkpoint_wrapped_module.weight is not in the model's state_dict"):
        entries(net, "fine-grained")
