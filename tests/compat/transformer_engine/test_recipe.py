"""Transformer Engine's recipes mean octavo's; what they ask for besides is refused."""

import dataclasses

import pytest

import octavo
from octavo import E4M3, E5M2, PerBlock, recipes
from octavo.compat.transformer_engine.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (DelayedScaling(), recipes.delayed(1024)),
        (DelayedScaling(2, Format.HYBRID, 8, "most_recent"), recipes.delayed(8, "most_recent", 2)),
        (Float8CurrentScaling(), recipes.dynamic()),
        (Float8CurrentScaling(use_power_2_scales=True), recipes.dynamic(power_of_two=True)),
        (MXFP8BlockScaling(), recipes.mx()),
        (Float8BlockScaling(), recipes.blockwise()),
        (Float8BlockScaling(use_f32_scales=True), recipes.blockwise(power_of_two=False)),
    ],
    ids=str,
)
def test_they_mean_octavos(made, expected):
    assert made.octavo() == expected
    assert made.octavo().name == type(made).__name__


def test_fields_in_their_order():
    """Of Transformer Engine 2.20."""
    rest = ["fp8_dpa", "fp8_mha", "backward_override"]
    gemms = ["fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"]
    dims = ["x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"]
    algorithms = ["amax_compute_algo", "scaling_factor_compute_algo", "reduce_amax"]
    fields = {
        DelayedScaling: ["margin", "fp8_format", "amax_history_len", *algorithms, *rest],
        Float8CurrentScaling: ["use_power_2_scales", "fp8_format", *gemms, *rest],
        MXFP8BlockScaling: ["margin", "fp8_format", *rest, "enable_2d_quantization"],
        Float8BlockScaling: ["use_f32_scales", "fp8_format", *dims, *gemms, *rest],
    }
    assert {kind: [field.name for field in dataclasses.fields(kind)] for kind in fields} == fields


def test_formats():
    for kind in (DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling):
        for format, of_gradients in ((Format.E4M3, E4M3), (Format.HYBRID, E5M2)):
            found = kind(fp8_format=format).octavo()
            assert found.grad_input[0].format is found.grad_weight[0].format is of_gradients
            assert found.output[0].format is found.output[1].format is E4M3


def test_accumulators():
    assert Float8CurrentScaling(fp8_gemm_dgrad=MMParams(False)).octavo().fast_accum == ("output", "grad_input")
    assert Float8CurrentScaling(fp8_gemm_fprop=MMParams(True)).octavo().fast_accum == ()


def test_blocks():
    found = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1).octavo()
    assert [cast.granularity for cast in found.output] == [PerBlock(128, 128), PerBlock(1, 128)]
    found = MXFP8BlockScaling(enable_2d_quantization=True).octavo()
    assert [cast.granularity for cast in found.grad_input] == [PerBlock(1, 32), PerBlock(32, 32)]
    assert found.weight_casts.once


def test_a_backward_in_high_precision():
    found = Float8CurrentScaling(backward_override="high_precision").octavo()
    assert found.output == recipes.dynamic().output
    assert found.grad_input is found.grad_weight is None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: DelayedScaling(fp8_format=Format.E5M2), r"use Format\.HYBRID"),
        (lambda: DelayedScaling(amax_compute_algo=max), "use 'max' or 'most_recent'"),
        (lambda: DelayedScaling(scaling_factor_compute_algo=max), "use 'max' or 'most_recent'"),
        (lambda: DelayedScaling(backward_override="high_precision"), "take Float8CurrentScaling"),
        (lambda: Float8CurrentScaling(backward_override="dequantized"), "use None, or 'high_precision'"),
        (lambda: Float8CurrentScaling(fp8_dpa=True), "attention is torch's"),
        (lambda: MXFP8BlockScaling(margin=1), "leave it out"),
        (lambda: Float8BlockScaling(w_block_scaling_dim=3), "1 or 2 dimensions"),
        (lambda: Float8BlockScaling(fp8_gemm_wgrad=MMParams(False)), "use_split_accumulator=True"),
    ],
)
def test_what_cant_be_honoured(make, match):
    with pytest.raises(octavo.UnsupportedOptionError, match=match):
        make()


def test_octavos_own_checks_hold():
    with pytest.raises(ValueError, match="history_length=0"):
        DelayedScaling(amax_history_len=0)
    with pytest.raises(ValueError, match="margin=-1"):
        DelayedScaling(margin=-1)
