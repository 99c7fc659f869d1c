"""Every argument of Transformer Engine's modules is taken where it is off, and honoured or refused where it is on."""

import re

import pytest
import torch

import octavo
from octavo.compat import transformer_engine as te
from octavo.compat.transformer_engine.options import _OFF, device_for, refuse

# As read in the source of Transformer Engine 2.20, without "device", whose default here is the GPU where there is one.
UB = "ub_overlap_ag=False ub_overlap_rs=False ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False "
SHARED = "sequence_parallel=False fuse_wgrad_accumulation=False tp_group=None tp_size=1 get_rng_state_tracker=None "
SHARED += "init_method=None bias=True return_bias=False params_dtype=None delay_wgrad_compute=False name=None "
SHARED += "symmetric_ar_type=None " + UB
GATHERED = "return_layernorm_output=False return_layernorm_output_gathered=False normalization='LayerNorm' eps=1e-05 "
LINEAR = SHARED + "parallel_mode=None parameters_split=None ub_name=None "
ARGUMENTS = {
    "Linear": LINEAR + "rng_tracker_name=None save_original_input=False",
    "LayerNormLinear": LINEAR + GATHERED + "zero_centered_gamma=False",
    "LayerNormMLP": SHARED
    + GATHERED
    + "activation='gelu' activation_params=None output_layer_init_method=None seq_length=None micro_batch_size=None "
    "set_parallel_mode=False zero_centered_gamma=False checkpoint=False",
    "TransformerLayer": "num_gqa_groups=None layernorm_epsilon=1e-05 hidden_dropout=0.1 attention_dropout=0.1 "
    "init_method=None output_layer_init_method=None layer_number=None kv_channels=None self_attn_mask_type='causal' "
    "window_size=None bottom_right_diagonal=None enc_dec_attn_mask_type='no_mask' enc_dec_bottom_right_diagonal=None "
    "enc_dec_window_size=None tp_group=None tp_size=1 params_dtype=None get_rng_state_tracker=None "
    "fuse_wgrad_accumulation=False seq_length=None micro_batch_size=None sequence_parallel=False "
    "apply_residual_connection_post_layernorm=False output_layernorm=False parallel_attention_mlp=False "
    "layer_type='encoder' drop_path_rate=0.0 set_parallel_mode=False fuse_qkv_params=False "
    "rotary_pos_interleaved=False zero_centered_gamma=False qkv_weight_interleaved=True ub_tp_comm_overlap=False "
    "ub_overlap_ag=True ub_overlap_rs=True ub_overlap_rs_dgrad=False ub_bulk_dgrad=True ub_bulk_wgrad=True bias=True "
    "activation='gelu' activation_params=None normalization='LayerNorm' attn_input_format='sbhd' name=None "
    "qk_norm_type=None qk_norm_eps=1e-06 qk_norm_before_rope=False softmax_type='vanilla'",
}
FORWARD = {
    "Linear": "is_first_microbatch=None fp8_output=False fp8_grad=False",
    "LayerNormLinear": "is_first_microbatch=None fp8_output=False fp8_grad=False",
    "LayerNormMLP": "is_first_microbatch=None",
    "TransformerLayer": "attention_mask=None self_attn_mask_type=None window_size=None bottom_right_diagonal=None "
    "encoder_output=None enc_dec_attn_mask=None enc_dec_attn_mask_type=None enc_dec_window_size=None "
    "enc_dec_bottom_right_diagonal=None is_first_microbatch=None checkpoint_core_attention=False inference_params=None "
    "rotary_pos_emb=None core_attention_bias_type='no_bias' core_attention_bias=None alibi_slopes=None "
    "cu_seqlens_q=None cu_seqlens_kv=None cu_seqlens_q_padded=None cu_seqlens_kv_padded=None max_seqlen_q=None "
    "max_seqlen_kv=None fast_zero_fill=True pad_between_seqs=None",
}
SIZES = {"Linear": (8, 8), "LayerNormLinear": (8, 8), "LayerNormMLP": (8, 8), "TransformerLayer": (8, 8, 2)}


def values(text):
    return {name: eval(value) for name, value in (pair.split("=") for pair in text.split())}


@pytest.mark.parametrize("name", SIZES)
def test_defaults_are_taken_and_change_nothing(name):
    torch.manual_seed(0)
    plain = getattr(te, name)(*SIZES[name]).eval()
    torch.manual_seed(0)
    spelled = getattr(te, name)(*SIZES[name], **values(ARGUMENTS[name])).eval()
    x = torch.randn(4, 2, 8)
    assert torch.equal(plain(x), spelled(x, **values(FORWARD[name])))


@pytest.mark.parametrize("name", SIZES)
def test_an_option_that_is_on_is_honoured_or_refused(name):
    for option, off in (values(ARGUMENTS[name])).items():
        if option in _OFF and not (option == "return_layernorm_output" and name == "LayerNormLinear"):
            on = 2 if off == 1 and off is not True else "on"
            with pytest.raises(octavo.UnsupportedOptionError, match=rf"{name}: {option}='?{on}'?: .{{10}}"):
                getattr(te, name)(*SIZES[name], **{option: on})
    layer = getattr(te, name)(*SIZES[name])
    for option in values(FORWARD[name]):
        if option in _OFF:
            with pytest.raises(octavo.UnsupportedOptionError, match=rf"{name}.*: {option}='on': .{{10}}"):
                layer(torch.randn(4, 2, 8), **{option: "on"})


def test_an_option_that_nobody_has_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'biass'"):
        te.Linear(8, 8, biass=False)
    with pytest.raises(octavo.UnsupportedOptionError, match=r"use one of relu, reglu, .*, geglu"):
        te.LayerNormMLP(8, 8, activation="clamped_swiglu")
    with pytest.raises(octavo.UnsupportedOptionError, match="use one of LayerNorm, RMSNorm"):
        te.LayerNormLinear(8, 8, normalization="BatchNorm")


@pytest.mark.parametrize("name", ["make_graphed_callables", "GroupedLinear", "CustomRecipe", "DotProductAttention"])
def test_names_that_are_not_here_say_what_to_write(name):
    with pytest.raises(octavo.UnsupportedOptionError, match=f"has no {name}: write "):
        exec(f"from octavo.compat.transformer_engine import {name}")


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'Lineaar'"):
        _ = te.Lineaar


def test_remedies_are_sentences_of_octavo():
    for option, (off, instead) in _OFF.items():
        refuse("a layer", {option: off})
        assert re.match(r"[a-z]", instead) and len(instead) > 10, option


def test_layers_are_made_on_the_gpu_where_there_is_one(monkeypatch):
    assert device_for(None) is None and device_for("meta") == "meta"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_for(None) == "cuda" and device_for("cpu") == "cpu"
