import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo import E4M3, E5M2, PerBlock, PerRow, PerTensor, ScaledTensor, quantize
from octavo.formats import Format
from octavo.granularity import Granularity
from tests.support.definitions import same_bits

BLOCK = PerBlock(3, 5)
GRANULARITIES = [PerTensor(), PerRow(), PerRow(dim=-2), PerBlock(1, 5), BLOCK]
each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
each_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)


def saved_and_loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


TWINS: dict[str, Callable[[Any], Any]] = {
    "torch.save": saved_and_loaded,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "pickle 2": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "deepcopy": copy.deepcopy,
}
each_twin = pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)


def pair(granularity: Granularity = BLOCK, fmt: Format = E4M3, shape: tuple[int, ...] = (7, 11)) -> ScaledTensor:
    return quantize(torch.randn(shape), fmt, granularity)


def assert_twins(a: ScaledTensor, b: ScaledTensor) -> None:
    assert type(a) is type(b) is ScaledTensor
    assert same_bits(a.qdata, b.qdata) and same_bits(a.scale_inv, b.scale_inv)
    for name in ("shape", "dtype", "device", "format", "granularity", "requires_grad"):
        assert getattr(a, name) == getattr(b, name), name
    assert a.stride() == b.stride() == a.qdata.stride() == b.qdata.stride()
    b.validate()


# the invariant


@each_granularity
@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_made_from_its_parts(dtype: torch.dtype, fmt: Format, granularity: Granularity) -> None:
    q = pair(granularity, fmt)
    made = ScaledTensor(q.qdata, q.scale_inv, granularity, dtype)
    assert made.qdata is q.qdata and made.scale_inv is q.scale_inv
    assert (made.dtype, made.format, made.shape, made.granularity) == (dtype, fmt, (7, 11), granularity)
    assert not made.requires_grad and made.is_leaf
    made.validate()


def test_what_does_not_fit_is_refused_with_both_values() -> None:
    codes = torch.zeros(4, 6, dtype=torch.float8_e4m3fn)
    scale_inv = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"scale_inv has shape \(1, 1\); PerRow\(\) of qdata \(4, 6\) needs \(4, 1\)"):
        ScaledTensor(codes, scale_inv, PerRow())
    with pytest.raises(ValueError, match=r"\(\); PerTensor\(\) .*needs \(1, 1\)"):
        ScaledTensor(codes, torch.ones(()), PerTensor())
    with pytest.raises(TypeError, match=r"scale_inv is torch.float64; .*torch.float32"):
        ScaledTensor(codes, scale_inv.double(), PerTensor())
    with pytest.raises(TypeError, match=r"torch.uint8 .*torch.float8_e4m3fn or torch.float8_e5m2"):
        ScaledTensor(codes.view(torch.uint8), scale_inv, PerTensor())
    with pytest.raises(TypeError, match=r"float32, not torch.float64"):
        ScaledTensor(codes, scale_inv, PerTensor(), torch.float64)
    with pytest.raises(TypeError, match=r"granularity=\(1, 128\) .*PerTensor\(\), PerRow\(\) or PerBlock"):
        ScaledTensor(codes, scale_inv, (1, 128))
    with pytest.raises(ValueError, match="qdata is on cpu, scale_inv on meta"):
        ScaledTensor(codes, scale_inv.to("meta"), PerTensor())


def test_validate_finds_a_pair_that_was_broken_later() -> None:
    q = pair(PerRow())
    q.scale_inv = q.scale_inv[:3]
    with pytest.raises(ValueError, match=r"\(3, 1\).*\(7, 1\)"):
        q.validate()


@pytest.mark.parametrize("strided", [lambda t: t.t(), lambda t: t[2:, ::2]], ids=["transposed", "part"])
def test_shape_and_strides_are_those_of_the_codes(strided: Callable[[Tensor], Tensor]) -> None:
    codes = strided(pair(PerTensor()).qdata)
    q = ScaledTensor(codes, torch.ones(1, 1), PerTensor())
    assert (q.shape, q.stride(), q.storage_offset()) == (codes.shape, codes.stride(), codes.storage_offset())
    assert same_bits(q.dequantize(), codes.to(torch.bfloat16))


# save, load, copy


@each_twin
@each_granularity
@each_format
def test_twins(fmt: Format, granularity: Granularity, twin: Callable[[Any], Any]) -> None:
    q = pair(granularity, fmt)
    for original in (
        q,
        q.to(torch.bfloat16),
        q.t(),
        pair(granularity, fmt, (0, 5)),
        pair(granularity, fmt, (2, 6, 10)),
    ):
        assert_twins(original, twin(original))
    q.qdata.view(torch.uint8)[0] = 0x7F
    assert_twins(q, twin(q))


@each_twin
def test_twins_share_nothing(twin: Callable[[Any], Any]) -> None:
    q = pair()
    other = twin(q)
    before = q.clone()
    other.qdata.view(torch.uint8).zero_()
    other.scale_inv.zero_()
    assert_twins(q, before)


@each_twin
def test_a_parameter_stays_one(twin: Callable[[Any], Any]) -> None:
    for requires_grad in (True, False):
        other = twin(nn.Parameter(pair(), requires_grad=requires_grad))
        assert isinstance(other, nn.Parameter) and other.requires_grad == requires_grad
    assert not isinstance(twin(pair()), nn.Parameter)
    assert twin(pair().requires_grad_()).requires_grad


@each_twin
def test_one_pair_twice_stays_one(twin: Callable[[Any], Any]) -> None:
    q = pair()
    a, b = twin([q, q])
    assert a is b


def test_views_saved_together_still_share() -> None:
    q = pair((PerTensor()), shape=(6, 10))
    whole, part = saved_and_loaded([q, q[3:]])
    whole.qdata.view(torch.uint8).zero_()
    assert not part.qdata.view(torch.uint8).any()


def test_a_file_with_parts_that_do_not_fit_is_refused() -> None:
    q = pair(PerRow())
    q.scale_inv = q.scale_inv[:3]
    with pytest.raises((ValueError, pickle.UnpicklingError), match="scale_inv has shape"):
        saved_and_loaded(q)


# modules, devices, dtypes


def test_as_a_parameter() -> None:
    q = pair()
    parameter = nn.Parameter(q)
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, ScaledTensor) and parameter.requires_grad
    assert parameter.qdata.data_ptr() == q.qdata.data_ptr() and not q.requires_grad
    module = nn.Module()
    module.weight = parameter
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    (parameter.dequantize() * 3).sum().backward()
    assert type(parameter.grad) is Tensor and bool((parameter.grad == 3).all())
    module.zero_grad()
    assert parameter.grad is None
    assert_twins(module.state_dict()["weight"], q)


def test_a_module_with_pairs_moves_loads_and_copies() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(pair())
    before = module.weight.detach().clone()
    module.to(torch.bfloat16)
    assert isinstance(module.weight, nn.Parameter) and module.weight.dtype == torch.bfloat16
    assert same_bits(module.weight.qdata, before.qdata)
    twin = copy.deepcopy(module)
    twin.weight.qdata.view(torch.uint8).zero_()
    assert same_bits(module.weight.qdata, before.qdata)
    twin.load_state_dict(module.state_dict())
    assert_twins(twin.weight.detach(), module.weight.detach())
    meta = copy.deepcopy(module).to("meta")
    assert meta.weight.is_meta and meta.weight.granularity == before.granularity


def test_deepcopy_of_a_gradient_holder() -> None:
    parameter = nn.Parameter(pair())
    parameter.dequantize().sum().backward()
    twin = copy.deepcopy(parameter)
    assert torch.equal(twin.grad, parameter.grad) and twin.grad is not parameter.grad


@each_granularity
def test_to(granularity: Granularity) -> None:
    q = pair(granularity)
    assert q.to(torch.float32) is q and q.to("cpu") is q and q.cpu() is q
    half = q.to(torch.float16)
    assert half.dtype == torch.float16 and same_bits(half.qdata, q.qdata) and same_bits(half.scale_inv, q.scale_inv)
    assert half.dequantize().dtype == torch.float16
    meta = q.to("meta")
    assert meta.is_meta and meta.qdata.is_meta and meta.scale_inv.is_meta
    assert (meta.shape, meta.dtype, meta.granularity) == (q.shape, q.dtype, granularity)
    both = q.to("meta", torch.bfloat16)
    assert both.is_meta and both.dtype == torch.bfloat16 and both.dequantize().dtype == torch.bfloat16
    for dtype in (torch.float64, torch.int8, torch.float8_e5m2):
        with pytest.raises(TypeError, match=f"float32, not {dtype}"):
            q.to(dtype)


def test_requires_grad() -> None:
    q = pair()
    assert q.requires_grad_() is q and q.requires_grad and q.detach().requires_grad is False
    assert not q.qdata.requires_grad and not q.scale_inv.requires_grad
    q.to(torch.bfloat16).t().dequantize().sum().backward()
    assert q.grad.shape == q.shape and q.grad.dtype == torch.float32


# repr


@each_granularity
@each_format
def test_repr_says_format_granularity_and_amax(fmt: Format, granularity: Granularity) -> None:
    q = quantize(torch.tensor([[1.0, 2.0, -4.0], [-8.0, 0.5, 0.25]]), fmt, granularity)
    text = repr(q)
    for part in (str(fmt), str(granularity), "shape=(2, 3)", "dtype=torch.float32"):
        assert part in text
    amax = {
        PerTensor(): "amax 8",
        PerRow(): "amax 4 to 8",
        PerRow(dim=-2): "amax 2 to 8",
        PerBlock(1, 5): "amax 4 to 8",
        PerBlock(3, 5): "amax 8",
    }
    assert text.endswith(f", {amax[granularity]})")
    assert str(q) == f"{q}" == text


def test_repr_of_what_has_no_amax() -> None:
    assert "empty" in repr(pair(shape=(0, 3)))
    assert "amax unknown" in repr(pair().to("meta")) and "device=meta" in repr(pair().to("meta"))
    assert "requires_grad=True" in repr(nn.Parameter(pair()))
    q = quantize(torch.tensor([[float("nan"), 2.0]]), E4M3, PerTensor())
    assert "amax 2" in repr(q)


# torch.compile


@each_granularity
def test_flatten_and_unflatten(granularity: Granularity) -> None:
    for q in (pair(granularity), pair(granularity).t(), pair(granularity).half()):
        names, context = q.__tensor_flatten__()
        assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(q)
        inner = {name: getattr(q, name) for name in names}
        assert all(type(t) is Tensor for t in inner.values())
        assert hash(context) == hash(copy.deepcopy(context)) and context == copy.deepcopy(context)
        assert_twins(q, ScaledTensor.__tensor_unflatten__(inner, context, q.shape, q.stride()))


@pytest.fixture
def compiled() -> Callable[..., Any]:
    torch.compiler.reset()
    return lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)


@each_granularity
def test_as_input_and_output_of_a_compiled_graph(compiled: Callable[..., Any], granularity: Granularity) -> None:
    def step(q: ScaledTensor, x: Tensor) -> tuple[ScaledTensor, ScaledTensor, Tensor]:
        return q.t(), q.to(torch.bfloat16), x @ q.dequantize()

    f = compiled(step)
    x = torch.randn(2, 7)
    for q in (pair(granularity), pair(granularity)):
        for eager, traced in zip(step(q, x), f(q, x), strict=True):
            if isinstance(eager, ScaledTensor):
                assert_twins(eager, traced)
            else:
                assert torch.equal(eager, traced)


def test_a_pair_as_parameter_of_a_compiled_graph(compiled: Callable[..., Any]) -> None:
    parameter = nn.Parameter(pair())
    f = compiled(lambda x: (x @ parameter.dequantize()).sum())
    x = torch.randn(2, 7, requires_grad=True)
    f(x).backward()
    assert torch.equal(parameter.grad, x.detach().sum(0)[:, None].expand(7, 11))
    assert torch.allclose(x.grad, parameter.dequantize().sum(1).expand(2, 7))


def test_another_granularity_is_another_graph(compiled: Callable[..., Any]) -> None:
    f = compiled(lambda q: q.dequantize())
    for granularity in GRANULARITIES:
        q = pair(granularity)
        assert torch.equal(f(q), q.dequantize())


def test_an_op_outside_the_table_raises_in_a_compiled_function_too() -> None:
    torch.compiler.reset()
    f = torch.compile(lambda q: q + 1, backend="aot_eager")
    with pytest.raises(Exception, match=r"aten.add.Tensor is not defined for a ScaledTensor"):
        f(pair())


def test_quantize_compiles(compiled: Callable[..., Any]) -> None:
    x = torch.randn(7, 11)
    assert_twins(quantize(x, E4M3, BLOCK), compiled(lambda x: quantize(x, E4M3, BLOCK))(x))


# torch hides this warning of its own, but not where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_quantize_compiles_with_its_gradient() -> None:
    torch.compiler.reset()
    x = torch.randn(7, 11, requires_grad=True)
    # in two graphs: torch traces the backward with a ScaledTensor for its gradient, which then is a plain tensor
    value = torch.compile(lambda x: quantize(x, E4M3, BLOCK).dequantize(), backend="aot_eager")(x)
    assert torch.equal(value, quantize(x, E4M3, BLOCK).dequantize())
    value.sum().backward()
    assert bool((x.grad == 1).all())
