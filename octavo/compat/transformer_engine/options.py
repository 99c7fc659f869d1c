"""Transformer Engine's options that octavo has nothing for: the values that leave them off, and what to write instead.

Options that change no result there (names for debugging, sizes for warming up, overlaps of tensor parallelism's
communication) are taken and have no effect here either.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from octavo.errors import UnsupportedOptionError

_PARALLEL = "shard with torch's parallelize_module, as docs/tensor-parallel.md says"
_SEED = "take torch.manual_seed, which decides initialisation and dropout"
_BLOCK = "write the block with octavo.nn.LayerNormLinear, Linear and LayerNormMLP"
_ATTENTION = "write the attention with octavo.nn.Linear and torch.nn.functional.scaled_dot_product_attention"
_OFF: dict[str, tuple[Any, str]] = {
    "sequence_parallel": (False, _PARALLEL),
    "tp_group": (None, _PARALLEL),
    "tp_size": (1, _PARALLEL),
    "parallel_mode": (None, _PARALLEL),
    "set_parallel_mode": (False, _PARALLEL),
    "ub_tp_comm_overlap": (False, _PARALLEL),
    "symmetric_ar_type": (None, _PARALLEL),
    "return_layernorm_output_gathered": (False, _PARALLEL),
    "distribute_saved_activations": (False, _PARALLEL),
    "get_rng_state_tracker": (None, _SEED),
    "rng_tracker_name": (None, _SEED),
    "fuse_wgrad_accumulation": (False, "gradients accumulate in .grad; octavo.optim.AdamW(gradient_storage='fp8')"),
    "delay_wgrad_compute": (False, "backward computes a layer's two products one after the other"),
    "save_original_input": (False, "octavo.Recipe with grad_weight=None saves the input itself"),
    "return_bias": (False, "take bias=False and add a parameter of your own"),
    "return_layernorm_output": (False, "octavo.nn.LayerNorm, then the layers apart"),
    "activation_params": (None, "octavo's activations have no parameters"),
    "checkpoint": (False, "octavo.compat.transformer_engine.checkpoint(layer, input)"),
    "sm_margin": (0, "kernels take all of a GPU"),
    "fp8_output": (False, "layers hand on tensors in high precision; the fused ones hand on FP8 inside"),
    "fp8_grad": (False, "layers hand on gradients in high precision; the fused ones hand on FP8 inside"),
    "calibrating": (False, "octavo.inspect records what casts would do"),
    "amax_reduction_group": (None, "each rank keeps its own amax: every FP8 tensor carries its scale"),
    "preserve_high_precision_init_val": (False, "octavo.optim.AdamW makes masters of stored weights"),
    "layer_type": ("encoder", _ATTENTION),
    "apply_residual_connection_post_layernorm": (False, _BLOCK),
    "output_layernorm": (False, _BLOCK),
    "parallel_attention_mlp": (False, _BLOCK),
    "drop_path_rate": (0.0, _BLOCK),
    "qk_norm_type": (None, _ATTENTION),
    "softmax_type": ("vanilla", _ATTENTION),
    "rotary_pos_interleaved": (False, _ATTENTION),
    "rotary_percent": (1.0, _ATTENTION),
    "seq_len_interpolation_factor": (None, _ATTENTION),
    "pretrained_max_position_embeddings": (None, _ATTENTION),
    "interleaved": (False, _ATTENTION),
    "window_size": (None, _ATTENTION),
    "bottom_right_diagonal": (None, _ATTENTION),
    "encoder_output": (None, _ATTENTION),
    "enc_dec_attn_mask": (None, _ATTENTION),
    "inference_params": (None, _ATTENTION),
    "core_attention_bias_type": ("no_bias", _ATTENTION),
    "core_attention_bias": (None, _ATTENTION),
    "alibi_slopes": (None, _ATTENTION),
    "checkpoint_core_attention": (False, "torch's scaled_dot_product_attention saves no scores"),
    **{f"{what}_{of}": (None, _ATTENTION) for what in ("cu_seqlens", "max_seqlen") for of in ("q", "kv")},
    **{f"cu_seqlens_{of}_padded": (None, _ATTENTION) for of in ("q", "kv")},
    "pad_between_seqs": (None, _ATTENTION),
}
_NO_EFFECT = {"name", "seq_length", "micro_batch_size", "layer_number", "qk_norm_eps", "qk_norm_before_rope"}
_NO_EFFECT |= {"fast_zero_fill", "enc_dec_attn_mask_type", "enc_dec_window_size", "enc_dec_bottom_right_diagonal"}
_NAMES = {
    "make_graphed_callables": "octavo.nn.KeptWeights and torch.cuda.CUDAGraph, as docs/kernels.md has it",
    "MultiheadAttention": _ATTENTION,
    "DotProductAttention": "torch.nn.functional.scaled_dot_product_attention",
    "GroupedLinear": "octavo.nn.GroupedLinear",
    "NVFP4BlockScaling": "MXFP8BlockScaling: octavo has no FP4",
    "CustomRecipe": "an octavo.Recipe of octavo.Cast values",
    "onnx_export": "octavo.export.to_onnx",
    "Fp8Padding": "nothing: octavo pads what needs it",
    "Fp8Unpadding": "nothing: octavo pads what needs it",
    "optimizers": "octavo.optim",
    "ops": "octavo.nn",
}


def refuse(what: str, options: dict[str, Any]) -> None:
    """Raise where an option is not off.

    Raises:
        UnsupportedOptionError: naming what to write instead.
        TypeError: for an option that Transformer Engine hasn't.

    Example:
        >>> refuse("Linear", {"tp_size": 2})
        Traceback (most recent call last):
        octavo.errors.UnsupportedOptionError: Linear: tp_size=2: shard with torch's parallelize_module, as ...
    """
    for name, value in options.items():
        if name in _OFF:
            off, instead = _OFF[name]
            if value is not off and value != off:
                raise UnsupportedOptionError(f"{what}: {name}={value!r}: {instead}")
        elif name not in _NO_EFFECT and not name.startswith("ub_"):
            raise TypeError(f"{what}() got an unexpected keyword argument {name!r}")


def chosen(table: dict[str, Any], argument: str, name: str) -> Any:
    """What a table has under a name that was given as this argument, or UnsupportedOptionError."""
    if name not in table:
        raise UnsupportedOptionError(f"{argument}={name!r}: use one of {', '.join(table)}")
    return table[name]


def device_for(device: Any) -> Any:
    """Where parameters are made: Transformer Engine's default is the GPU."""
    return device if device is not None or not torch.cuda.is_available() else "cuda"


def refuse_name(module: str, name: str) -> NoReturn:
    """What a name that octavo hasn't raises when it is imported."""
    if name in _NAMES:
        raise UnsupportedOptionError(f"{module} has no {name}: write {_NAMES[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
