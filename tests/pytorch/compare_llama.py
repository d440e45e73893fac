"""Opens models of the Llama family that a chapter program trained in transformers.

    compare_llama.py build/chapters/00_single_device/ch00_single_device

The program trains a few steps and saves; transformers reads the file with the config
in its metadata and computes the same logits. (The other way round, tests/golden has
models that transformers saved.) Skipped where transformers is not installed. Exit
status as compare.py's.
"""

import json
import os
import sys
import tempfile

import torch_python

torch_python.require_torch()

import torch

import compare
import safetensors_file

SKIPPED = 77
TOLERANCE = 2e-5  # f32
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# (model_type, class, further keys)
CASES = [
    ("llama", "LlamaForCausalLM", {}),
    ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("llama", "LlamaForCausalLM", {"rope_scaling": LLAMA3, "rope_theta": 500.0}),
    (
        "llama",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    ("mistral", "MistralForCausalLM", {"sliding_window": None}),
    ("qwen2", "Qwen2ForCausalLM", {"rms_norm_eps": 1e-5}),
    ("qwen3", "Qwen3ForCausalLM", {"head_dim": 10}),
]


def compare_case(case, program, folder, report):
    model_type, kind, keys = case
    name = ", ".join([model_type, *keys])
    model = json.dumps({"model_type": model_type, **SIZES, **keys})
    ours_file = os.path.join(folder, "ours.safetensors")
    logits_file = os.path.join(folder, "logits.safetensors")
    program.run(
        ["--no-check", "--model", model, "--data", "random", "--batch", "3"]
        + ["--seq", "20", "--steps", "3", "--lr", "0.01"]
        + ["--save", ours_file, "--logits", logits_file]
    )
    results, _ = safetensors_file.load(logits_file)
    compare.compare_with_transformers(
        name,
        kind,
        ours_file,
        results["input_ids"],
        results["logits"],
        TOLERANCE,
        report,
    )


def main():
    if len(sys.argv) < 2:
        print("name the program to compare", file=sys.stderr)
        return 2
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        return SKIPPED
    torch.set_num_threads(1)
    report = compare.Report()
    program = compare.Program(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="shardbook-") as folder:
        for case in CASES:
            try:
                compare_case(case, program, folder, report)
            except (compare.Failed, KeyError, OSError, ValueError) as error:
                report.line(case[0], False, str(error))
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
