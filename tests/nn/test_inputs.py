import copy

import pytest
import torch

import octavo
from octavo.nn.inputs import product_dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_of_a_product(dtype):
    weight = torch.ones(4, 8, dtype=dtype)
    assert product_dtype(torch.ones(2, 8, dtype=dtype), weight) == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(torch.ones(2, 8), weight) == torch.bfloat16
        assert product_dtype(torch.ones(2, 8, dtype=torch.float64), weight) == torch.float64
    with pytest.raises(TypeError, match=r"convert one of them or use torch\.autocast"):
        product_dtype(torch.ones(2, 8, dtype=torch.float64), weight)
    for shape in ((), (2, 7)):
        with pytest.raises(ValueError, match=r"needs in_features=8 last"):
            product_dtype(torch.ones(shape, dtype=dtype), weight)
    with pytest.raises(ValueError, match=r"on the meta device .* call model\.to_empty"):
        product_dtype(torch.ones(2, 8, dtype=dtype), weight.to("meta"))


class _ByConvertedLayers(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, octavo.nn.Linear) or super().is_leaf_module(module, name)


MODULES = {
    "linear": lambda: octavo.nn.Linear(16, 16),
    "grouped": lambda: octavo.nn.GroupedLinear(2, 16, 16),
    "fused": lambda: octavo.nn.RMSNormMLP(16, 16),
    "transformer": lambda: octavo.nn.TransformerBlock(16, 16, 2),
    "experts": lambda: octavo.nn.Experts(2, 16, 16),
}


@pytest.mark.parametrize("kind", MODULES)
def test_symbolic_tracing_says_what_to_do(kind):
    with pytest.raises(octavo.UnsupportedOpError, match=r"octavo\.convert with the traced.*leaves"):
        torch.fx.symbolic_trace(MODULES[kind]())


def test_the_remedies_for_symbolic_tracing_work():
    plain, x = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()), torch.randn(4, 16)

    def convert(model):
        return octavo.convert(copy.deepcopy(model), octavo.recipes.dynamic(), lambda module, name: True)

    ours = convert(plain)
    by_leaves = torch.fx.GraphModule(ours, _ByConvertedLayers().trace(ours))
    for traced in (convert(torch.fx.symbolic_trace(plain)), by_leaves):
        assert torch.equal(traced(x), ours(x))


def test_nested_tensors_say_what_to_do():
    layer, parts = octavo.nn.Linear(16, 16), [torch.randn(3, 16), torch.randn(5, 16)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with pytest.raises(octavo.UnsupportedOpError, match=r"x\.values\(\).*nested_tensor_from_jagged"):
        layer(x)
    y = torch.nested.nested_tensor_from_jagged(layer(x.values()), x.offsets())
    assert torch.equal(y.values(), layer(torch.cat(parts)))
    octavo.set_recipe(layer, octavo.recipes.high_precision())
    assert torch.equal(layer(x).values(), layer(torch.cat(parts)))


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"input is list, not a torch\.Tensor"):
        octavo.nn.Linear(2, 2)([1.0, 2.0])
