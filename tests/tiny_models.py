"""Tiny random models of every architecture that the tests run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 96
WINDOW = 8  # shorter than the test prompts, so that windows are crossed

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Falcon3 (Llama)": ("llama", {"head_dim": 16, "rope_theta": 1000042.0}),
    "SmolLM2 (Llama)": ("llama", {"tie_word_embeddings": True}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 8}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral, sliding window": ("mistral", {"sliding_window": WINDOW}),
    "Gemma 2": (
        "gemma2",
        {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
         "query_pre_attn_scalar": 8, "layer_types": MIXED},
    ),
    "Gemma 3": ("gemma3_text", {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
                                "layer_types": MIXED}),
    "Phi-3": ("phi3", {"original_max_position_embeddings": 256, "sliding_window": WINDOW}),
    "GPT-2": ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "OLMo 2": ("olmo2", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 1, 0], "use_sliding_window": False}),
    "Qwen3-MoE": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "Ministral 3": ("ministral3", {"head_dim": 8, "sliding_window": None}),
    "Gemma 4": (
        "gemma4_text",
        {"head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 6,
         "num_kv_shared_layers": 3, "layer_types": [*MIXED[:2], "full_attention", *MIXED[:2], "full_attention"],
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_global_key_value_heads": 1},
    ),
    "DeepSeek-V3 (MLA)": (
        "deepseek_v3",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
         "topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "gpt-oss (sinks)": (
        "gpt_oss",
        {"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED, "num_local_experts": 4,
         "num_experts_per_tok": 2},
    ),
    "Qwen3.5 (hybrid)": (
        "qwen3_5_text",
        {"head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
    ),
    "LFM2 (hybrid)": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_multiple_of": 8},
    ),
    # Kinds that the tree cannot hold, which run with a cache of their own per branch.
    "Mamba": ("mamba", {"state_size": 8, "num_hidden_layers": 2}),
    "BLOOM (ALiBi)": ("bloom", {"n_layer": 2, "n_head": 4}),
    "Falcon-H1 (parallel hybrid)": (
        "falcon_h1",
        {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
         "mamba_n_groups": 1, "mamba_chunk_size": 8},
    ),
}  # fmt: skip


def tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """A tiny random model in float32; equal for equal arguments, and the global random state stays as it was."""
    kind, special = CONFIGS[name]
    config = AutoConfig.for_model(kind, **{**COMMON, **special, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name_of, parameter in model.named_parameters():
                if parameter.ndim > 1:  # weights of the usual size give nearly flat logits, which hide errors
                    parameter.mul_(4.0)
                elif name_of.endswith("sinks"):
                    parameter.normal_()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
