"""Adam's step in C++ against the reference: every way to keep a weight, any values, the same bits."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.kernels.cpu import codes
from octavo.kernels.cpu.library import library
from octavo.kernels.cpu.optimizer_step import FORMATS, step_in_place
from octavo.kernels.reference.optimizer_state import MASTER_KINDS, MasterWeight
from octavo.kernels.reference.optimizer_step import optimizer_step
from octavo.kernels.step_numbers import adam_max_update
from tests.support.fp8_weights import BITS
from tests.support.optimizer_both import (
    ADAM,
    IN_FP8,
    MASTERS,
    OTHER,
    SCHEMES,
    dealt_weights,
    differences,
    update_of,
    update_of_case,
)

SHAPES = [(1, 1), (1, 300), (3, 128), (130, 256), (200, 300), (64, 384), (5, 1000)]
KINDS = [*MASTERS, *IN_FP8]


def differences_of(seed: int, count: int, recorded: Any = step_in_place) -> list[Any]:
    """Cases whose steps differ from the reference's."""
    torch.manual_seed(seed)
    differing = []
    for number, case in enumerate(dealt_weights(seed, count, KINDS, SHAPES)):
        update = update_of_case(case, slice(2), number)._replace(group=0)
        ours, theirs = copy.deepcopy(update), copy.deepcopy(update)
        group = (ADAM, OTHER)[number % 2]._replace(bounds_update=True, decoupled=number % 3 > 0)
        scale = [None, torch.tensor(8.0), torch.tensor(3.0)][number % 3]
        optimizer_step([theirs], [group], None, scale)
        optimizer_step([ours], [group], None, scale, None, recorded)
        differing += [case] if differences([ours], [theirs]) else []
    return differing


@pytest.mark.parametrize("threads", [1, 3])
def test_any_update_has_the_bits_of_the_reference(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library("optimizer_step") is not None
    taken: list[bool] = []

    def recorded(*args: Any) -> bool:
        taken.append(step_in_place(*args))
        return taken[-1]

    monkeypatch.setattr(codes, "_SHARE", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert differences_of(threads, 120 // threads, recorded) == []
    assert taken == [True] * (120 // threads)


def test_plain_weights_of_16_bits_are_updated_as_the_reference_does() -> None:
    """They are their own masters, which the source reads as float32 alone."""
    for number, dtype in enumerate((torch.float16, torch.bfloat16)):
        update = update_of((5, 200), SCHEMES["fp8"], number=number)._replace(group=0)
        update = update._replace(master=MasterWeight(update.master.weight.to(dtype), "weight"))
        before = update.master.weight.clone()
        ours, theirs = copy.deepcopy(update), copy.deepcopy(update)
        optimizer_step([theirs], [ADAM._replace(bounds_update=True)])
        optimizer_step([ours], [ADAM._replace(bounds_update=True)], step_in_place=step_in_place)
        assert differences([ours], [theirs]) == [] and not torch.equal(theirs.master.weight, before)


def test_a_bound_past_float32_limits_nothing() -> None:
    """Where beta1 squared is more than beta2 it grows without end."""
    update = update_of((5, 200), SCHEMES["fp8"], step=500)._replace(group=0)
    group = ADAM._replace(beta1=0.9, beta2=0.5, bounds_update=True)
    assert torch.finfo(torch.float32).max < adam_max_update(501, group.beta1, group.beta2) < math.inf
    ours, theirs = copy.deepcopy(update), copy.deepcopy(update)
    optimizer_step([theirs], [group])
    optimizer_step([ours], [group], step_in_place=step_in_place)
    assert differences([ours], [theirs]) == [] and theirs.master.weight.isfinite().all()


def test_formats_of_the_source_are_those_of_python() -> None:
    source = Path(codes.__file__).with_name("optimizer_step.cpp").read_text(encoding="utf-8")
    (numbered,) = re.findall(r"enum FormatNumber : int32_t \{ (.*?) \}", source)
    assert numbered.split(", ") == [f"IS_{fmt}" for fmt in FORMATS]
    (fields,) = re.findall(r"struct Format \{(.*?)\n\}", source, re.DOTALL)
    names = [name.removeprefix("is_") for name in re.findall(r"(\w+)[,;]", fields)]
    for fmt in FORMATS:
        (numbers,) = re.findall(rf"constexpr Format {fmt} = \{{(.*?)\}}", source)
        values = [literal.removesuffix("f") for literal in numbers.split(", ")]
        assert [number_of(value) for value in values] == [float(getattr(fmt, name)) for name in names], fmt


def number_of(literal: str) -> float:
    """The value of a C++ literal without its suffix."""
    return float.fromhex(literal) if "x" in literal else float({"true": 1, "false": 0}.get(literal, literal))


def test_kinds_of_masters_have_the_numbers_of_saved_states_and_of_the_source() -> None:
    saved = "weight split32 split24 stochastic fp8_split16 fp8_split24 fp8_fp16 fp8_fp32 fp8_stochastic".split()
    assert [*MASTER_KINDS][: len(saved)] == saved, "saved states hold indices of MASTER_KINDS: a new kind is the last"
    source = Path(codes.__file__).with_name("optimizer_step.cpp").read_text(encoding="utf-8")
    (enumerated,) = re.findall(r"enum MasterKind : int32_t \{(.*?)\}", source, re.DOTALL)
    assert enumerated.lower().replace(",", " ").split() == [*MASTER_KINDS] == [*BITS]
