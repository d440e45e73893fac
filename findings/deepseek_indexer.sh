#!/usr/bin/env bash
# The indexer of DeepSeek V3.2 and GLM-5 in training with transformers.
#
# One would guess: a backward of the model's loss reaches every parameter that
# requires a gradient, or those of the indexer do not require one.
# What happens: the indexer computes under torch.no_grad(), and its choice of tokens
# passes no gradient. Its five parameters per layer require gradients and get none,
# so they stay as they were; DistributedDataParallel calls them unused. (DeepSeek
# trained them by a loss of their own.)
# Version: transformers 5.24.0, torch 2.15.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy \
  transformers==5.24.0
cat >"$folder/gradients.py" <<'END'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=88,
             num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, moe_intermediate_size=24,
             n_routed_experts=8, num_experts_per_tok=2, n_group=1,
             topk_group=1, kv_lora_rank=20, q_lora_rank=28,
             qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
INDEXER = dict(index_n_heads=3, index_head_dim=14, index_topk=5)
for kind, more in (("deepseek_v3", {}), ("deepseek_v32", INDEXER),
                   ("glm_moe_dsa", INDEXER)):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, first_k_dense_replace=1, **SIZES, **more)
    model = AutoModelForCausalLM.from_config(config).train()
    tokens = torch.randint(0, 96, (1, 16))
    model(tokens, labels=tokens).loss.backward()
    without = [name for name, parameter in model.named_parameters()
               if parameter.requires_grad and parameter.grad is None]
    of_indexer = sum(".indexer." in name for name in without)
    print(len(without), of_indexer)
END
readarray -t lines < <("$folder/venv/bin/python" "$folder/gradients.py" 2>/dev/null)
echo "parameters of two layers without a gradient, and those of indexers: DeepSeek V3 ${lines[0]}, DeepSeek V3.2 ${lines[1]}, GLM-5 ${lines[2]}"
[[ ${lines[0]} == "0 0" && ${lines[1]} == "10 10" && ${lines[2]} == "10 10" ]]
