#!/usr/bin/env bash
# The balancing loss of a Mixtral in the Trainer, over micro-batches and ranks.
#
# One would guess: one batch of 8 sequences, 4 micro-batches of 2, and 2 ranks with
# 4 each train alike, as a Llama does.
# What happens: the loss of the tokens is divided by the tokens of the whole batch.
# The balancing loss is added to it undivided, so it counts once per micro-batch and
# rank: router_aux_loss_coef is 4 times, or 2 times, what the configuration says.
# Version: transformers 5.24.0, torch 2.15.0, accelerate 1.15.0, Gloo.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 \
  transformers==5.24.0 accelerate==1.15.0 numpy

cat >"$folder/balancing.py" <<'PYTHON'
import os
import sys
import torch
import transformers
from transformers import (MixtralConfig, MixtralForCausalLM, Trainer,
                          TrainingArguments)

transformers.logging.set_verbosity_error()
ranks = int(os.environ["WORLD_SIZE"])

def first_loss(micro_batches, coefficient):
    """The loss that the Trainer logs for one step over 8 sequences."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True, router_aux_loss_coef=coefficient))
    tokens = torch.randint(0, 32, (8, 12))
    trainer = Trainer(model=model, train_dataset=[
        {"input_ids": row, "labels": row} for row in tokens],
        args=TrainingArguments(
            sys.argv[1], max_steps=1, logging_steps=1, max_grad_norm=0,
            per_device_train_batch_size=8 // micro_batches // ranks,
            gradient_accumulation_steps=micro_batches, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True))
    trainer.train()
    return trainer.state.log_history[0]["loss"]

def balancing(micro_batches):
    """What the balancing loss adds to the loss."""
    return first_loss(micro_batches, 0.1) - first_loss(micro_batches, 0.0)

found = [balancing(1)] + ([balancing(4)] if ranks == 1 else [])
if os.environ["RANK"] == "0":
    print("transformers", transformers.__version__, "ranks", ranks,
          "the balancing loss of 1 and 4 micro-batches adds",
          *(f"{value:.2f}" for value in found))
# Top 2 of 4 experts in balance: the loss is 2, times the coefficient.
expected = {1: [0.2, 0.8], 2: [0.4]}[ranks]
sys.exit(any(abs(value - right) > 0.05 * right
             for value, right in zip(found, expected, strict=True)))
PYTHON

for ranks in 1 2; do
  OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone \
    --nproc-per-node "$ranks" "$folder/balancing.py" "$folder/out" |
    grep transformers || { echo "the behaviour changed"; exit 1; }
done
