from dataclasses import replace

import pytest
import torch

from octavo import recipes
from octavo.schedule import Phase
from octavo.train import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunCheckpointError,
    StateConfig,
    TrainConfig,
    TrainError,
    compare,
    load_corpus,
    run,
)
from octavo.train.checkpoint import RunFolder
from octavo.train.trainer import (
    AUTO_RATIO,
    Trainer,
    build_model,
    build_optimizer,
    choose_device,
    learning_rate,
    phases_of,
    require_memory,
)
from tests.train.test_shard import changed

DYNAMIC = recipes.dynamic()
STATE = StateConfig("fp8", "none", "fp8")
HIGH = Phase(recipes.high_precision(), "fp32", "fp32", None)


@pytest.fixture
def tiny(config):
    return changed(config, optimizer={"steps": 10}, run={"eval_every": 0})


def test_names_and_shares():
    low = Phase(DYNAMIC, "fp8", None, "fp8")
    assert phases_of("fp8-then-bf16@0.7", DYNAMIC, 240, STATE) == [low, replace(HIGH, from_step=168)]
    phases = phases_of("bf16-then-blockwise@.3-then-fp8@0.5", DYNAMIC, 100, STATE)
    assert phases == [HIGH, replace(low, recipe=recipes.blockwise(), from_step=30), replace(low, from_step=50)]
    first, last = phases_of("auto", DYNAMIC, 9, StateConfig())
    assert first == Phase(DYNAMIC, "fp32", "auto", None) and last == replace(
        HIGH, when_update_below_resolution=AUTO_RATIO
    )


@pytest.mark.parametrize("text", ["fp8", "fp8-then-bf16", "fp8-then-bf16@1.5", "fp9-then-bf16@0.5", "fp8@0.3", "AUTO"])
def test_what_is_no_schedule(text):
    with pytest.raises(ValueError, match="choose auto, or phases"):
        StateConfig(schedule=text)


@pytest.mark.parametrize("text", ["fp8-then-bf16@0.01", "fp8-then-bf16@0.5-then-fp8@0.4", "fp8-then-bf16@0.99"])
def test_phases_that_begin_in_no_step(text):
    with pytest.raises(TrainError, match="would begin at step"):
        phases_of(text, DYNAMIC, 10, STATE)


def test_the_baseline_has_no_phases_and_stands_beside_runs_that_do(tiny):
    config = replace(tiny, state=StateConfig(schedule="fp8-then-bf16@0.5"))
    with pytest.raises(TrainError, match="switches FP8 layers, and bf16 has none"):
        run(config, "bf16")
    baseline, scheduled = compare(config, ["bf16", "dynamic"])
    assert baseline.switches == [] and baseline.losses == run(tiny, "bf16").losses
    assert len(scheduled.switches) == 2


def make_trainer(config, recipe="bf16"):
    model = build_model(config.model, recipe, config.run.seed, config.state)
    return Trainer(config, model, load_corpus(config.data.data))


def test_a_checkpoint_without_the_schedules_state_does_not_fit(tiny, tmp_path):
    config = replace(tiny, state=StateConfig(schedule="fp8-then-bf16@0.5"))
    model = build_model(config.model, "dynamic", 0, config.state)
    trainer = Trainer(config, model, load_corpus(config.data.data), recipe=DYNAMIC)
    with pytest.raises(RunCheckpointError, match="the checkpoint does not fit this run: 'schedule'"):
        trainer.load(RunFolder(tmp_path), {})


def test_learning_rate_rises_then_falls_to_its_last_value():
    config = OptimizerConfig(steps=100, lr=1e-2, final_lr=0.1, warmup=0.1)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(1e-3) and rates[9] == rates[10] == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.0), (1, 1.0), (2, 0.5), (5, 1.0), (3, 0.0)])
def test_learning_rate_of_short_runs(steps, warmup):
    config = OptimizerConfig(steps=steps, lr=1e-2, warmup=warmup)
    assert all(0 < learning_rate(step, config) <= 1e-2 for step in range(steps))


def test_only_matrices_decay(config):
    model = build_model(config.model, "bf16", seed=0)
    decaying, others = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3 and all(p.dim() == 2 for p in decaying["params"])
    assert others["weight_decay"] == 0 and len(others["params"]) == 3  # the norms' gains
    assert len(decaying["params"]) + 3 == len(list(model.parameters()))


def test_initial_weights_depend_on_the_seed_only(config):
    first = build_model(config.model, "bf16", seed=5)
    state = torch.get_rng_state()
    second = build_model(config.model, "delayed", seed=5)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator is his own
    other = build_model(config.model, "bf16", seed=6)
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)


def test_micro_batches_add_up_to_the_batch(config):
    config = changed(config, run={"dtype": "float32"})
    whole, parted = make_trainer(config), make_trainer(changed(config, data={"micro_batches": 4}))
    for step in range(2):
        loss, norm, _ = whole.step(step)
        parts_loss, parts_norm, _ = parted.step(step)
        torch.testing.assert_close(parts_loss, loss, rtol=1e-4, atol=0)
        torch.testing.assert_close(parts_norm, norm, rtol=1e-3, atol=0)


def test_updates_in_backward_clip_as_those_after_it(config):
    """Updates in backward clip by the norm of a step after it where all gradients come first, else by one near it."""
    config = changed(config, data={"micro_batches": 2}, run={"dtype": "float32"})
    runs = {}
    for threshold in ("", "64MB", "1KB"):
        trainer = make_trainer(replace(config, state=StateConfig(update_in_backward=threshold)))
        assert (trainer.in_backward is not None) == bool(threshold)
        runs[threshold] = [[float(value) for value in trainer.step(step)[:2]] for step in range(4)]
    assert min(norm for _, norm in runs[""]) > config.optimizer.clip
    for exact, at_once, early in zip(*runs.values(), strict=True):
        assert at_once == pytest.approx(exact, rel=1e-3)
        assert early == pytest.approx(exact, rel=0.05)


def test_validation_changes_nothing(config):
    trainer = make_trainer(config, "delayed")
    trainer.step(0)
    before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    assert trainer.validate() == trainer.validate()
    assert trainer.model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in trainer.model.named_buffers())


def test_no_clipping_when_it_is_zero(config):
    trainer = make_trainer(replace(config, optimizer=replace(config.optimizer, clip=0.0)))
    _, norm, _ = trainer.step(0)
    torch.testing.assert_close(torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm(), norm)


def test_devices():
    assert choose_device("cpu").type == "cpu"
    for name in ("gpu", "cuda:99", "cpu:x"):
        with pytest.raises(TrainError, match="cannot be used here"):
            choose_device(name)


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(model=ModelConfig(width=10**6, heads=1)),
        TrainConfig(model=ModelConfig(layers=10**8)),
        TrainConfig(data=DataConfig(batch=10**8)),
        TrainConfig(model=ModelConfig(context=2**31 - 1), data=DataConfig(batch=2**20)),
    ],
)
def test_sizes_that_cannot_fit_are_refused_before_anything_is_allocated(config):
    with pytest.raises(TrainError, match="GiB"):
        require_memory(config, torch.device("cpu"))
    require_memory(TrainConfig(), torch.device("cpu"))


def test_muon_has_the_blocks_matrices_and_adamw_all_others(config):
    model = build_model(replace(config.model, experts=2), "dynamic", 0)
    names = {param: name for name, param in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(), StateConfig(algorithm="muon"))
    groups = [(group["algorithm"], group["weight_decay"]) for group in optimizer.param_groups]
    assert groups == [("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0)]
    moved, others, vectors = ([names[param] for param in group["params"]] for group in optimizer.param_groups)
    assert all("attention" in name or "mlp" in name for name in moved) and any("experts" in name for name in moved)
    assert {"embedding.weight", "head.weight", "blocks.0.mlp.router.weight"} <= {*others}
    assert all(name.endswith("norm.weight") for name in vectors)
