"""Configs of a few ten thousand parameters for the architectures of transformers, and what their forwards are given."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

VOCAB = 101

# Sizes by the names that configs use, as patterns of the whole name.
SIZES: list[tuple[str, int]] = [
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"hidden_size|d_model|n_embd|dim|model_dim|embedding_size|embedding_dim|dim_model|word_embed_proj_dim", 32),
    (r"embed_dim|emb_dim|width|hidden_size_global|projection_dim|out_hidden_size|hidden_dim", 32),
    (r"(.*_)?intermediate_size|.*ffn_dim|n_inner|d_ff|dff|ffn_hidden_size|dim_ff|feed_forward_size", 48),
    (r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|num_blocks|vision_layers", 4),
    (r"num_(attention_)?heads|n_heads?|(encoder_|decoder_)?attention_heads|num_encoder_attention_heads", 4),
    (r"num_decoder_attention_heads", 4),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads", 2),
    (r"head_dim|attention_head_dim|head_size|dim_head|global_head_dim|swa_head_dim|index_head_dim", 8),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group|first_k_dense_replace", 1),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|rotary_dim", 8),
    (r"(ssm_)?state_size|mamba_d_state", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|mamba_d_head|mamba_head_?dim", 8),
    (r"mamba_n_groups|mamba_ngroups", 1),
    (r"linear_(num_)?(key|value)_heads|linear_num_(key|value)_heads", 2),
    (r"linear_(key|value)_head_dim", 8),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_target_positions", 64),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id", 2),
    (r"image_size", 32),
    (r"patch_size", 8),
]
# What happens to the logits behind the head, where a config has it: values that would show.
AFTER_HEAD = {
    "final_logit_softcapping": 2.0,
    "logits_soft_cap": 2.0,
    "output_logit_soft_cap": 2.0,
    "logit_scale": 0.25,
    "logits_scaling": 4.0,
    "lm_head_multiplier": 0.5,
    "output_multiplier": 0.5,
}
# What a config needs beside these, by model type.
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
SPECIAL: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 30, "audio_token_offset": 62},
    "apertus1p5_vision_tokenizer": {"codebook_size": 32, "latent_channels": 32, "base_channels": 32},
    "big_bird": {"attention_type": "original_full"},
    "blip-2": {"image_token_index": 3, "num_query_tokens": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 3, "IMGIMGAZ": 4, "IMGIMGBZ": 5}},
    "chameleon_vqgan": {"base_channels": 32, "latent_channels": 32},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cosmos3_edge_text": _MROPE,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2, "num_experts_per_tok": 2, "n_group": 1,
                           "topk_group": 1, "moe_intermediate_size": 16},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "per_layer_config": {}},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_text": {"per_layer_config": {}, "shared_experts_intermediate_size": 16, "moe_intermediate_size": 16,
                        "head_dim": 16},
    "dots3_note_vision_encoder": {"per_layer_config": {}, "adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 3, "<|extra_200|>": 4, "<|visual token 000000|>": 5}},
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 64},
    "ernie4_5_vl_moe_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                             "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "fast_vlm": {"vision_config": {"model_type": "timm_wrapper", "architecture": "test_vit", "hidden_size": 64}},
    "florence_vision": {"embed_dim": [32] * 4, "num_heads": [4] * 4, "num_groups": [4] * 4, "depths": [1] * 4,
                        "projection_dim": 32},
    "gemma3n": {"vision_config": {"model_type": "gemma3n_vision", "architecture": "test_vit", "hidden_size": 64}},
    "gemma3n_audio": {"conf_num_hidden_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 48, "activation_sparsity_pattern": None,
                     "laurel_rank": 8, "hidden_size_per_layer_input": 8},
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0},
    "glm4v_text": _MROPE,
    "glm4v_moe_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2",
                        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 48,
                                          "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
                                          "patch_size": 8}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]}},
    "hy_v4_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "inkling2_vision": {"text_hidden_size": 32},
    "inkling2_loop_vision": {"text_hidden_size": 32},
    "instructblip": {"image_token_index": 3, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 3, "num_query_tokens": 4},
    "janus_vision_model": {"projection_dim": 32},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32, "projection_dim": 32, "image_token_embed_dim": 32,
                    "num_embeddings": 64},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "num_layers": 2,
                      "ffn_hidden_size": 48, "num_hidden_layers": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [2, 1], "text_hidden_size": 32},
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    "muse_spark": {"projector_hidden_size": 32},
    "muse_spark_audio": {"hidden_sizes": [32] * 4, "depths": [1] * 4},
    "muse_spark_text": {"moe_hidden_size": 16, "moe_intermediate_size": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {"projector_hidden_size": 32, "vision_hidden_size": 32},
    "paddleocr_vl_text": _MROPE,
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "architecture": "test_vit",
                                        "model_args": {"embed_dim": 64}}},
    "pp_formulanet_vision": {"decoder_hidden_size": 32, "post_conv_out_channels": 32, "post_conv_mid_channels": 32},
    "qwen2_vl_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 2, "hc_lowrank": 8, "moe_intermediate_size": 16,
                       "shared_expert_intermediate_size": 16},
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {"is_decoder": True, "hash_seed": 0, "hidden_dropout_prob": 0.0,
                 "local_attention_probs_dropout_prob": 0.0, "axial_pos_shape": [3, 4], "axial_pos_embds_dim": [16, 16],
                 "attn_layers": ["local", "lsh"] * 2, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4},
    "step3p5": {"sliding_window": 8},
    "step3p7_text": {"sliding_window": 8},
    "wavtokenizer_encoder": {"codebook_size": 32, "codebook_dim": 32, "num_filters": 2, "decoder_hidden_size": 32,
                             "decoder_num_layers": 1},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64,
              "attention_head_dim": 16, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
               "hybrid_layer_ids": [1, 3], "attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# Where the config's own defaults are refused by its checks, by model type.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0}},
}  # fmt: skip
SPECIAL["gemma4_assistant"] = {
    "text_config": {**DEFAULTS["gemma4_assistant"]["text_config"], "vocab_size": VOCAB, "hidden_size": 32,
                    "intermediate_size": 48, "num_hidden_layers": 4, "num_kv_shared_layers": 4, "head_dim": 8,
                    "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


def tiny_config(config_class: Any, nested: bool = False) -> Any:
    """A config of a model of some ten thousand parameters."""
    default = config_class(**DEFAULTS.get(config_class.model_type, {}))
    values: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in default.sub_configs and value is not None:
            values[name] = tiny_config(type(getattr(default, name)), nested=True)
        elif isinstance(value, int) and not isinstance(value, bool):
            sizes = [size for pattern, size in SIZES if re.fullmatch(pattern, name)]
            if sizes:
                values[name] = sizes[-1]
        if name in AFTER_HEAD and (isinstance(value, int | float) or "cap" in name):
            values[name] = AFTER_HEAD[name]
    if "kv_lora_rank" in values:  # multi-head latent attention has no grouped queries
        values["num_key_value_heads"] = values.get("num_attention_heads", 4)
    values |= SPECIAL.get(config_class.model_type, {})
    return {"model_type": config_class.model_type, **values} if nested else config_class(**values)


def inputs() -> Tensor:
    return torch.randint(6, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


def further_inputs(name: str) -> dict[str, Any]:
    """What the forward of a model class cannot do without, beside text."""
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    beginning = {"input_ids": torch.cat([torch.full((2, 4), 3), inputs()[:, 4:]], 1)}  # with four tokens of an image
    return {
        "Blip2ForConditionalGeneration": {**beginning, "pixel_values": image},
        "GitForCausalLM": {"pixel_values": image},
        "InstructBlipForConditionalGeneration": {**beginning, "pixel_values": image, "qformer_input_ids": inputs()},
        "InstructBlipVideoForConditionalGeneration": {
            **beginning,
            "pixel_values": image[:, None],
            "qformer_input_ids": inputs(),
        },
        "Molmo2ForConditionalGeneration": {"mm_token_type_ids": torch.zeros_like(inputs())},
        "PPFormulaNetForConditionalGeneration": {"pixel_values": image},
    }.get(name, {})
