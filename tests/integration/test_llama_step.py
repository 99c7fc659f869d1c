"""Rows of a Llama's step, rehearsed without a GPU: names' meanings, a run that is cut off, the account of time."""

from __future__ import annotations

import csv
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import octavo

pytest.importorskip("transformers")
pytest.importorskip("triton")
step, rows, profile, replays = (
    importlib.import_module(f"benchmarks.{name}")
    for name in ("training.llama_step", "training.llama_rows", "training.llama_profile", "kernels.replays")
)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows have bf16's readings in the same rounds and the GPU's state beside them; a missing one has its reason."""
    clock = itertools.count(1000)
    monkeypatch.setattr(step, "state_of_gpu", lambda: (float(next(clock)), 650.0, 60.0))
    output = tmp_path / "llama_step.csv"
    names = ["bf16", "delayed+fuse", "profile", "delayed+block", "bf16+liger", "delayed+head+moments"]
    assert step.main(["--toy", "--rows", *names, "--output", str(output)]) == 0, capsys.readouterr().out
    by_variant = {row["variant"]: row for row in read(output)}
    assert [*by_variant] == [name for name in names if name != "profile"]
    liger = by_variant.pop("bf16+liger")
    assert liger["note"] == "ModuleNotFoundError: No module named 'liger_kernel'" and not liger["ms"]
    for name, row in by_variant.items():
        assert float(row["ms"]) > 0 and float(row["by_bf16"]) > 0 and row["mode"] == "eager"
        clocks = [[int(one) for one in row[column].split()] for column in ("bf16_mhz", "mhz")]
        assert len(clocks[0]) == len(clocks[1]) == len(row["readings_ms"].split()) == 2
        turns = [each for pair in zip(*clocks, strict=True) for each in pair]
        assert turns == sorted(turns)  # bf16 and the row take turns
        assert row["watts"] == "650 650" and row["bf16_celsius"] == "60 60" and row["note"] == "", name
    assert by_variant["bf16"]["by_bf16"] == "1.000"
    accounts = read(tmp_path / "llama_profile.csv")
    assert {row["variant"] for row in accounts} == {"bf16", "delayed+fuse"}
    assert all(float(row["ms"]) >= 0 for row in accounts) and "idle" in {row["kind"] for row in accounts}


def test_a_cut_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is written before the next begins; a failing one is named, and one that would not fit is left out."""
    output = tmp_path / "llama_step.csv"
    row = step.row_of(rows.Variant.of("bf16"), [step.Reading(1.0)], [step.Reading(1.0)], 0.0, True)

    def measure(name: str, steps: Any, deadline: Any) -> dict[str, str]:
        if name == "rowwise":
            raise ArithmeticError("wrong")
        if name == "mx":
            raise KeyboardInterrupt
        return row | {"variant": name}

    monkeypatch.setattr(step, "measure", measure)
    assert step.run(["bf16", "rowwise", "delayed"], step.Steps(True), 1.0, output)
    assert [one["variant"] for one in read(output)] == ["bf16", "delayed"]
    with pytest.raises(KeyboardInterrupt):
        step.run(["bf16", "mx", "delayed"], step.Steps(True), 1.0, output)
    assert [one["variant"] for one in read(output)] == ["bf16"]
    output.unlink()
    assert not step.run(["bf16"], step.Steps(False), 0.1, output) and not output.exists()  # 6 s are too few


def test_no_reading_is_begun_after_the_deadline() -> None:
    calls: list[str] = []

    def noted_step(name: str) -> Any:
        return lambda: calls.append(name) or torch.zeros(())

    past, ahead = step.Deadline(-1.0), step.Deadline(1.0)
    assert [len(each) for each in step.pair(noted_step("a"), noted_step("b"), past, False)] == [1, 1]
    assert calls == ["b"] * step.STEPS + ["a"] * step.STEPS
    assert len(step.pair(noted_step("a"), noted_step("b"), ahead, False)[0]) == step.ROUNDS
    assert len(step.readings(noted_step("a"), 3, past, False)) == 1


def test_what_names_mean() -> None:
    assert all(rows.Variant.of(name).name == name for name in rows.ORDER if name != step.PROFILE)
    assert rows.Variant.of("delayed+fuse+8b4").base == "bf16+8b4" and rows.Variant.of("bf16+captured").base == "bf16"
    with pytest.raises(ValueError, match=r"row 'delayed\+fast': 'fast' is none of its words: a recipe \(bf16, dynamic"):
        rows.Variant.of("delayed+fast")
    with pytest.raises(ValueError, match="'fuse' is none"):
        rows.Variant.of("fuse")
    sizes = rows.TOY
    names = ("delayed", "delayed+head", "delayed+fuse", "delayed+block")
    models = {name: rows.converted(rows.llama(sizes), rows.Variant.of(name), sizes) for name in names}
    kinds = {name: {type(module).__name__ for module in model.modules()} for name, model in models.items()}
    assert models["delayed"].lm_head.__class__ is torch.nn.Linear and hasattr(models["delayed+head"].lm_head, "recipe")
    assert "TransformerBlock" in kinds["delayed+block"] and "LlamaDecoderLayer" not in kinds["delayed+block"]
    assert models["delayed+fuse"].model.norm.__class__ is not models["delayed"].model.norm.__class__
    assert isinstance(rows.optimizer_of(rows.Variant.of("bf16+moments"), models["delayed"]), octavo.optim.AdamW)


def test_liger_is_around_its_own_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger patches transformers' module around its own steps only; here by a library that patches alike."""
    from types import ModuleType

    from transformers.models.llama import modeling_llama

    def apply(model: Any) -> None:
        modeling_llama.apply_rotary_pos_emb = rotate
        model.patched = True

    plain, rotate = modeling_llama.apply_rotary_pos_emb, object()
    library = ModuleType("liger_kernel.transformers")
    library.apply_liger_kernel_to_llama = apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", library)
    model = torch.nn.Module()
    around = rows.surroundings(rows.Variant.of("bf16+liger"), model)
    assert modeling_llama.apply_rotary_pos_emb is plain and model.patched
    with around():
        assert modeling_llama.apply_rotary_pos_emb is rotate
    assert modeling_llama.apply_rotary_pos_emb is plain


def test_where_a_steps_time_goes() -> None:
    kernels = [
        profile.Kernel("nvjet_tst_128x256", 0.0, 400.0),
        profile.Kernel("cast_transpose_kernel", 300.0, 500.0),  # beside the other
        profile.Kernel("void at::native::elementwise_kernel<...>", 600.0, 900.0),
        profile.Kernel("flash_fwd_kernel", 900.0, 1000.0),
    ]
    by_kind = {row["kind"]: row for row in profile.account(kernels)}
    assert {kind: row["ms"] for kind, row in by_kind.items()} == {
        "products": "0.40", "other elementwise": "0.30", "casts": "0.20", "attention": "0.10", "idle": "0.10"
    }  # fmt: skip
    assert by_kind["idle"]["share"] == "0.100" and by_kind["products"]["launches"] == "1"
    assert profile.account([]) == []


@pytest.mark.gpu
def test_replays_have_the_bits_of_plain_calls(kernels: Any) -> None:
    """Replays have the bits of plain calls, and a replay that does something else is found."""
    module = kernels.module("replay")
    wrong, calls = replays.faults(kernels.cast, module, step.Deadline(0.02), seed=3)
    assert wrong == [] and calls >= replays.CALLS

    def other(*args: Any, **named: Any) -> Any:
        results = kernels.cast(*args, **named)
        if not isinstance(module.REPLAYS, replays._Forgetful):
            results[0].view(torch.uint8).bitwise_xor_(1)
        return results

    assert replays.faults(other, module, step.Deadline(0.02), seed=3)[0]
