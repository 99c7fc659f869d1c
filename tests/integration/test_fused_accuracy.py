"""What a fused module loses against float64: no more than 1.05 times what its parts lose."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.kernels.activations import ACTIVATIONS
from tests.support.combinations import each_pair
from tests.support.fused_cases import in_float64, in_parts, linear, mlp, named, results
from tests.support.helpers import FP8_RECIPES, CountOps, sqnr

T, K, N, INSIDE = 256, 96, 80, 160
AT_MOST = 1.05
NORMS = ["layer_norm", "rms_norm"]
BOTH = [False, True]
DTYPES = [torch.float32, torch.bfloat16]


def errors(module: nn.Module, steps: list[tuple[Tensor, Tensor]], truths: list[dict[str, Tensor]]) -> dict[str, float]:
    """Each result's distance from the truth over all steps."""
    found: dict[str, float] = defaultdict(float)
    for step, truth in zip(steps, truths, strict=True):
        for name, result in results(module, *step).items():
            assert result.dtype == step[0].dtype, name
            found[name] += float((result.double() - truth[name]).square().sum())
    return {name: square**0.5 for name, square in found.items()}


def assert_no_worse(module: nn.Module, n: int, dtype: torch.dtype, steps: int = 3, luck: float = 3.0) -> None:
    """With delayed scales each step's come from those before it; the others' steps are so many samples.

    Two independent errors of m elements differ by 1 / sqrt(m) of themselves by chance. For matrices that is little, for
    a norm's parameters and biases ``luck`` times it is allowed.
    """
    data = [(torch.randn(T, K).to(dtype), torch.randn(T, n).to(dtype)) for _ in range(steps)]
    truth = in_float64(module)
    truths = [results(truth, x.double(), grad.double()) for x, grad in data]
    theirs = errors(in_parts(module), data, truths)
    with CountOps() as ops:
        ours = errors(module, data, truths)
    assert ops.calls["norm_cast"] + ops.calls["norm_cast_two_scalings"] == steps
    assert ours.keys() == theirs.keys()
    for name, error in ours.items():
        expected = truths[0][name]
        chance = luck / (steps * expected.numel()) ** 0.5 if expected.ndim == 1 else 0.0
        assert error <= (AT_MOST + chance) * theirs[name], (name, error / theirs[name])
        assert error < 0.2 * sum(float(truth[name].square().sum()) for truth in truths) ** 0.5, name


@each_pair(norm=NORMS, recipe=[*FP8_RECIPES], activation=[*ACTIVATIONS], bias=BOTH, zero=BOTH, dtype=DTYPES, saved=BOTH)
def test_an_mlp_loses_no_more_than_its_parts(case: dict[str, Any]) -> None:
    zero = case.pop("zero")
    assert_no_worse(mlp(width=K, inside=INSIDE, zero_centered_gamma=zero, **case), K, case["dtype"])


@each_pair(norm=NORMS, recipe=[*FP8_RECIPES], bias=BOTH, zero=BOTH, dtype=DTYPES, splits=BOTH)
def test_a_linear_loses_no_more_than_its_parts(case: dict[str, Any]) -> None:
    zero, n = case.pop("zero"), {"query": N // 2, "key": N // 2} if case.pop("splits") else N
    assert_no_worse(linear(k=K, n=n, zero_centered_gamma=zero, **case), N, case["dtype"])


@pytest.mark.parametrize(
    "recipe", [pytest.param(n, marks=[] if n == "delayed" else pytest.mark.full) for n in FP8_RECIPES]
)
def test_nor_do_a_norms_parameters_and_biases_over_many_steps(recipe: str) -> None:
    module = mlp("layer_norm", recipe, K, INSIDE, dtype=torch.bfloat16, zero_centered_gamma=True)
    assert_no_worse(module, K, torch.bfloat16, steps=20, luck=0.0)


# Every result's SQNR in dB: 20 dB is a tenth of it; no FP8 product of normal data reaches 31.
LOWEST, HIGHEST = 20.0, 31.0
COSTS_OF_SAVED = 1.5  # 0.4 to 0.8 in a matrix, more by chance in a vector


@pytest.mark.parametrize(
    ("width", "inside"),
    [(512, 1792), pytest.param(4096, 14336, marks=pytest.mark.full, id="Llama 3 8B")],
)
def test_a_llama_shaped_ffn_in_every_recipe(width: int, inside: int) -> None:
    module = mlp(width=width, inside=inside, bias=False, dtype=torch.bfloat16)
    for weight in (module.fc1.weight, module.fc2.weight):
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    x, grad = torch.randn(48, width).bfloat16(), torch.randn(48, width).bfloat16()
    truth = results(in_float64(module), x.double(), grad.double())
    for name in FP8_RECIPES:
        octavo.set_recipe(module, named(name))
        found = results(module, x, grad)
        db = {result: sqnr(tensor, truth[result]) for result, tensor in found.items()}
        assert all(LOWEST < of_result < HIGHEST for of_result in db.values()), (name, db)
        octavo.set_recipe(module, named(name, saved=True))
        for result, tensor in results(module, x, grad).items():
            if result in ("y", "fc2.weight"):
                assert torch.equal(tensor, found[result])
            else:
                assert sqnr(tensor, truth[result]) > db[result] - COSTS_OF_SAVED, (name, result)
