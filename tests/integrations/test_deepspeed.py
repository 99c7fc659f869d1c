"""DeepSpeed on two ranks: ZeRO 0 to 3 train as one process does and resume bit for bit, also in Trainer and accelerate.

DeepSpeed is no development requirement: ``pip install deepspeed`` runs these tests. Its op for shared memory is left
out: that compiles C++ as ranks start, and waits for ever where a killed process left a lock.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.integrations.accelerate import TrainingState
from octavo.scaling.delayed import state_of
from octavo.scaling.recipe import WEIGHT
from tests.support.helpers import every_layer, losses_on_rank
from tests.support.torchrun import on_ranks

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

WIDTH, BATCH, STEPS, SAVED = 64, 8, 5, 2
STAGES = (0, 1, 2, 3)
RECIPES = {"dynamic": recipes.dynamic(), "delayed": recipes.delayed(history_length=3)}
PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"


def deepspeed_on_cpu() -> Any:
    """Import DeepSpeed, with its CPU accelerator and without its op for shared memory."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def config_of(stage: int, **options: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}  # ZeRO-3 frees the smallest weight, too
    # DeepSpeed clips by 1 where nothing is said
    batch = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    return {**batch, "zero_optimization": zero, "zero_allow_untested_optimizer": True, **options}


def model_of(recipe: octavo.Recipe) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False))
    return octavo.convert(model, recipe, every_layer)


def loss_of(model: Any, step: int) -> Tensor:
    """Return the loss on this rank's batch, which grows by the step: a delayed scale is another than a batch's own."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())) * (1 + step)
    return (model(x) - x).square().mean()


def losses_of_twin(recipe: octavo.Recipe) -> list[float]:
    """Return this rank's losses of a model that no library wraps: gradients are averaged here."""
    model = model_of(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return losses_on_rank(model, optimizer, lambda step: loss_of(model, step), STEPS, average=True)


def engine_of(
    deepspeed: Any, stage: int, recipe: octavo.Recipe, kind: Any = torch.optim.AdamW, **options: Any
) -> tuple[Any, TrainingState]:
    model = model_of(recipe)
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(stage))
    return engine, TrainingState(model)


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def stages(folder: Path, name: str) -> dict[str, Any]:
    """Train by each stage: through, resumed after two steps, and after much larger weights were loaded into it."""
    deepspeed = deepspeed_on_cpu()
    deepspeed.init_distributed("gloo")
    results: dict[str, Any] = {"twin": losses_of_twin(RECIPES[name])}
    for stage in STAGES:
        engine, saving = engine_of(deepspeed, stage, RECIPES[name])
        first = train(engine, range(SAVED))
        engine.save_checkpoint(str(folder / f"{stage}"), client_state={"octavo": saving.state_dict()})
        through = first + train(engine, range(SAVED, STEPS))
        engine, loading = engine_of(deepspeed, stage, RECIPES[name])
        _, client_state = engine.load_checkpoint(str(folder / f"{stage}"))
        loading.load_state_dict(client_state["octavo"])
        resumed = first + train(engine, range(SAVED, STEPS))
        _, client_state = engine.load_checkpoint(str(folder / f"{stage}"))  # into an engine that has other weights now
        loading.load_state_dict(client_state["octavo"])
        again = first + train(engine, range(SAVED, STEPS))
        engine.load_checkpoint(str(folder / f"{stage}"))
        emptied = [state.scale[WEIGHT].item() for module in engine.module if (state := state_of(module)) is not None]
        engine, _ = engine_of(deepspeed, stage, RECIPES[name], octavo.optim.AdamW, moments="fp32")
        others = {"octavo": train(engine, range(STEPS)), "emptied": emptied}
        results[str(stage)] = {"through": through, "resumed": resumed, "again": again, **others}
    return results


@pytest.mark.parametrize("name", RECIPES)
def test_each_stage_has_the_losses_of_a_model_that_nothing_wraps_and_resumes(name: str, tmp_path: Path) -> None:
    for results in on_ranks(stages, tmp_path, name):
        for stage in map(str, STAGES):
            result = results[stage]
            assert result["through"] == pytest.approx(results["twin"], rel=1e-6), stage
            assert result["octavo"] == pytest.approx(results["twin"], rel=1e-6), stage
            assert result["resumed"] == result["again"] == result["through"], stage
            assert all(scale == 0 for scale in result["emptied"]), stage  # the weights are others, by no step


def stored_weights(folder: Path) -> list[str]:
    deepspeed = deepspeed_on_cpu()
    deepspeed.init_distributed("gloo")
    messages = []
    for stage in STAGES:
        model = octavo.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH)), recipes.dynamic(), every_layer, "fp8")
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(stage))
        except octavo.UnsupportedOpError as error:
            messages.append(str(error))
    return messages


def test_weights_in_fp8_are_refused_with_what_to_take(tmp_path: Path) -> None:
    for messages in on_ranks(stored_weights, tmp_path):
        assert len(messages) == len(STAGES)
        assert all("FSDP2" in message for message in messages)


def page(folder: Path) -> list[str]:
    deepspeed_on_cpu()
    os.chdir(folder)
    program = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for block in program:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})
    return sorted(str(path) for path in Path().glob("*"))


def test_the_programs_of_the_page_run_as_printed(tmp_path: Path) -> None:
    on_ranks(page, tmp_path)


def with_trainer(folder: Path, stage: int, name: str) -> list[list[float]]:
    """Return the logged losses of transformers' Trainer: through, and resumed after two steps."""
    deepspeed_on_cpu()
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from octavo.integrations.transformers import OctavoCallback

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4)
    tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))

    def losses(resume: str | None) -> list[float]:
        arguments = TrainingArguments(
            str(folder / "run"), max_steps=4, save_steps=2, logging_steps=1, report_to=[], use_cpu=True, seed=3,
            per_device_train_batch_size=2, disable_tqdm=True,
            deepspeed={**config_of(stage), "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"},
        )  # fmt: skip
        torch.manual_seed(0)
        trainer = Trainer(
            LlamaForCausalLM(config),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[OctavoCallback(RECIPES[name], every_layer)],
        )
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return [losses(None), losses(str(folder / "run" / "checkpoint-2"))]


@pytest.mark.parametrize(("stage", "name"), [(2, "dynamic"), (3, "delayed")])
def test_transformers_trainer_resumes_bit_for_bit(stage: int, name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for through, resumed in on_ranks(with_trainer, tmp_path, stage, name):
        assert len(through) == 4
        assert resumed == through


def with_accelerate(folder: Path, stage: int, name: str) -> list[list[float]]:
    """Return losses with accelerate: through, and the last ones again after load_state."""
    deepspeed_on_cpu()
    import accelerate

    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config_of(stage))
    accelerator = accelerate.Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = model_of(RECIPES[name])
    state = TrainingState(model)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    accelerator.register_for_checkpointing(state)

    def train_on(steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(prepared, step)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    train_on(range(SAVED))
    accelerator.save_state(str(folder / "state"))
    through = train_on(range(SAVED, STEPS))
    accelerator.load_state(str(folder / "state"))
    return [through, train_on(range(SAVED, STEPS))]


@pytest.mark.parametrize(("stage", "name"), [(1, "dynamic"), (3, "delayed")])
def test_accelerate_resumes_bit_for_bit(stage: int, name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for through, resumed in on_ranks(with_accelerate, tmp_path, stage, name):
        assert resumed == through
