"""What ranks of tests/support/pool.py run for octavo.integrations.torchtitan; needs torchtitan 0.3."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import octavo
from octavo.distributed.ranks import whole
from octavo.integrations import torchtitan
from octavo.tensor.sharded_weight import on_this_rank, own_part


def converter(recipe: str, weight_storage: str | None = None) -> Any:
    """Its converter for all layers but the head."""
    recipes: Any = octavo.recipes
    return torchtitan.OctavoConverter.Config(
        recipe=getattr(recipes, recipe)(), select=lambda module, name: True, weight_storage=weight_storage
    )


def llama_config(converters: list[Any] | None, model: str = "llama3") -> Any:
    """The configuration of its smallest Llama, or another decoder, with torch's attention, which needs no compiler."""
    models = importlib.import_module(f"torchtitan.models.{model}")
    attention = importlib.import_module("torchtitan.models.common.attention")
    config = models.model_registry("debugmodel", converters=converters).model
    for layer in config.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return config


def built(config: Any, prepare: Any = lambda model: None) -> nn.Module:
    """As its trainer builds: on the meta device, parallelized, then on the CPU."""
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    prepare(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model


def losses_of(model: nn.Module, steps: int, storage: str | None = None) -> list[float]:
    """Of a few steps on the same tokens; logits may be a DTensor; ``storage``: the weights', as convert's."""
    tokens = torch.randint(0, 2048, (2, 33), generator=torch.Generator().manual_seed(0))
    kind: Any = torch.optim.AdamW if storage is None else octavo.optim.AdamW
    optimizer, losses = kind(model.parameters(), lr=8e-4), []
    for _ in range(steps):
        logits = whole(model(tokens[:, :-1])).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded_llama(mesh: Any, compiled: bool) -> tuple[list[float], set[str]]:
    """Losses of a Llama that torchtitan's own function shards, each block compiled before; how weights are gathered."""
    shard = importlib.import_module("torchtitan.distributed.fsdp").apply_fsdp_to_decoder

    def prepare(model: Any) -> None:
        for block in model.layers.values() if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        shard(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing

    model = built(llama_config([converter("dynamic")]), prepare)
    losses = losses_of(model, 3)
    gathers = [module.gather for module in model.modules() if isinstance(module, octavo.nn.Linear)]
    return losses, {gather.used[0] for gather in gathers if gather.used is not None}


def parallel_llama(mesh: Any, recipe: str, compiled: bool) -> tuple[list[float], list[float]]:
    """Losses of a Llama on one rank, and by torchtitan's own tensor parallelism and FSDP2 on 2 x 2."""
    torch._dynamo.reset()  # else weights of other sizes would make it compile for all sizes
    dims: Any = importlib.import_module("torchtitan.distributed.parallel_dims")
    dims.device_type = "cpu"  # it would take a GPU's for granted
    degrees = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "world_size": mesh.size()}
    parallel = dims.ParallelDims(**degrees, spmd_backend="partial_dtensor")
    parallel.build_mesh()
    shard = importlib.import_module("torchtitan.distributed.fsdp").apply_fsdp_to_decoder
    layouts = importlib.import_module("torchtitan.models.llama3.sharding").set_llama3_sharding_config

    def prepare(model: Any) -> None:
        model.parallelize(parallel)
        for block in model.layers.values() if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        policy = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
        shard(model, parallel.get_mesh(["fsdp"]), **policy, pp_enabled=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    config = llama_config([converter(recipe)])
    alone = built(config)
    layouts(config, enable_sp=True)
    model = built(config, prepare)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            on_this_rank(parameter).copy_(own_part(alone.get_parameter(name), parameter))
    return losses_of(alone, 3), losses_of(model, 3)
