#!/usr/bin/env bash
# Megatron-LM: how tensor parallelism treats experts unless it is told.
#
# One would guess: experts stay whole, as in DeepSpeed, where
# enable_expert_tensor_parallelism is False by default. Other degrees in the same
# config are 1 unless they are given.
# What happens: expert_tensor_parallel_size becomes tensor_model_parallel_size, so
# every expert's matrices are cut. --expert-tensor-parallel-size 1 leaves them
# whole.
# Version: megatron-core 0.19.2, torch 2.15.0. It needs Python 3.12 or later, which
# PYTHON may name.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir torch==2.15.0 numpy packaging \
  megatron-core==0.19.2

cat >"$folder/experts.py" <<'PYTHON'
import importlib.metadata
import sys
from megatron.core.model_parallel_config import ModelParallelConfig

def degree(**given):
    config = ModelParallelConfig(tensor_model_parallel_size=4,
                                 expert_model_parallel_size=2, **given)
    return config.expert_tensor_parallel_size

print("megatron-core", importlib.metadata.version("megatron-core"))
print("tensor_model_parallel_size 4: experts are cut by", degree())
print("expert_tensor_parallel_size 1 as well:", degree(expert_tensor_parallel_size=1))
sys.exit(0 if (degree(), degree(expert_tensor_parallel_size=1)) == (4, 1) else 1)
PYTHON

"$folder/venv/bin/python" -W ignore "$folder/experts.py" ||
  { echo "the behaviour changed"; exit 1; }
