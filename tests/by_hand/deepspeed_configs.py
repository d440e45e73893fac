#!/usr/bin/env python3
"""Gives one config after another to DeepSpeed and to the engine, and prints where they differ.

A config has one key of DeepSpeed's config classes, with a value of one kind or
another, beside the keys that it needs. DeepSpeed's classes read it; for keys
without a class, and with --engine for all, DeepSpeed also builds its engine and
takes a step on the CPU. The book's program prints it. A difference is:

  accepted   DeepSpeed refuses it, the book does not
  unknown    DeepSpeed accepts it, and the book has no such key
  value      both accept it, and a key that acts has another value

What the book refuses with a reason is listed with --refusals.

  DS_ACCELERATOR=cpu python tests/by_hand/deepspeed_configs.py build

Needs a Python with torch and deepspeed 0.19.8, which compiles one of its
operators at the first start.
"""
import argparse
import copy
import inspect
import json
import logging
import os
import subprocess
import sys

os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=os.environ.get("MASTER_PORT", "29555"), RANK="0",
                  WORLD_SIZE="1", LOCAL_RANK="0", CUDA_VISIBLE_DEVICES="")
import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.comm.config import CommsLoggerConfig  # noqa: E402
from deepspeed.compile.config import CompileConfig  # noqa: E402
from deepspeed.monitor import config as monitor  # noqa: E402
from deepspeed.runtime import config as top, precision_config  # noqa: E402
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig  # noqa: E402
from pydantic import BaseModel  # noqa: E402

CLASSES = {"/zero_optimization": DeepSpeedZeroConfig,
           "/bf16": precision_config.DeepSpeedBF16Config,
           "/fp16": precision_config.DeepSpeedFP16Config,
           "/tensor_parallel": TPTrainingConfig,
           "/tensorboard": monitor.TensorBoardConfig,
           "/wandb": monitor.WandbConfig,
           "/csv_monitor": monitor.CSVConfig,
           "/comet": monitor.CometConfig,
           "/compile": CompileConfig,
           "/timers/throughput": DeepSpeedThroughputTimerConfig,
           "/comms_logger": CommsLoggerConfig,
           "/hybrid_engine": top.HybridEngineConfig}
# Readers without a class
PLAIN = {"": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
             gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op dump_state
             managed_gradient_accumulation communication_data_type seq_parallel_communication_data_type
             disable_allgather disable_python_gc memory_breakdown wall_clock_breakdown dataloader_drop_last
             zero_allow_untested_optimizer zero_force_ds_cpu_optimizer use_data_before_expert_parallelism
             log_level""",
         "/optimizer/params": """lr weight_decay betas eps adam_w_mode torch_adam amsgrad maximize fused foreach
             capturable differentiable bias_correction set_grad_none fp32_optimizer_states momentum""",
         "/scheduler/params": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
         "/data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
         "/checkpoint": "tag_validation load_universal use_node_local_storage",
         "/activation_checkpointing": "partition_activations number_checkpoints cpu_checkpointing profile"}
VALUES = [True, False, 0, 1, 2, 3, 7, -1, 0.0, 2.0, 0.5, 1e3, "1", "2", "2.0", "true", "No", " 1", "1e3", "auto", "x", "",
          None, [], {}, [0.9, 0.99], "fp32", "bf16", "FP16", "float16", "torch.bfloat16", "warn", "cpu", "log",
          {"device": "cpu"}]
# Values that cannot be tried on the CPU, or that mean another library
SKIPPED = {("/tensor_parallel", "autotp_size"), ("/zero_optimization", "zero_quantized_weights"),
           ("/zero_optimization", "zero_quantized_nontrainable_weights"), ("/compile", "deepcompile"),
           ("/optimizer/params", "capturable"), ("/compile", "passes")}
SKIPPED |= {(section, "enabled") for section in CLASSES if section not in ("/bf16", "/fp16")}


def keys_of_class(section, model, found):
    for name, field in model.model_fields.items():
        for each in {name, field.alias or name}:
            found.append((section, each))
            for kind in (field.annotation, *getattr(field.annotation, "__args__", [])):
                if inspect.isclass(kind) and issubclass(kind, BaseModel):
                    keys_of_class(f"{section}/{each}", kind, found)


def all_keys():
    found = [(section, key) for section, keys in PLAIN.items() for key in keys.split()]
    for section, model in CLASSES.items():
        keys_of_class(section, model, found)
    return [key for key in found if key not in SKIPPED]


def config_with(section, key, value, stage):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0,
              "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
              "scheduler": {"type": "WarmupLR", "params": {}}, "zero_optimization": {"stage": stage}}
    at = config
    for part in section.split("/")[1:]:
        at = at.setdefault(part, {})
    at[key] = value
    return config


def deepspeeds(config, builds_engine):
    """DeepSpeed's reading of a config, or the reason for its refusal."""
    model = torch.nn.Linear(4, 2)
    try:
        read = top.DeepSpeedConfig(copy.deepcopy(config))
        if not builds_engine:
            return read, ""
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                      config=copy.deepcopy(config))[0]
        dtype = next(model.parameters()).dtype
        for _ in range(2 * int(engine.gradient_accumulation_steps())):
            engine.backward(engine(torch.ones(2, 4, dtype=dtype)).float().mean())
            engine.step()
        return read, ""
    except Exception as error:  # noqa: BLE001: any refusal counts
        return None, f"{type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}"


def books(config, build):
    """The book's config as JSON, or its message."""
    program = os.path.join(build, "chapters/15_engine/ch15_engine")
    run = subprocess.run([program, "--print-config", "--config", json.dumps(config), "--cluster", "textbook"],
                         capture_output=True, text=True, check=False)
    return (json.loads(run.stdout), "") if run.returncode == 0 else (None, run.stderr)


def value_in(read, section, key):
    """The value of a key in DeepSpeed's own objects; None where they have no such object."""
    read = {"/zero_optimization": read.zero_config, "/fp16": read.float16_config,
            "/bf16": read.bfloat16_config, "": read}.get(section)
    value = getattr(read, key.removeprefix("stage3_"), getattr(read, key, None))
    return value if isinstance(value, (bool, int, float, str)) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("build")
    parser.add_argument("--only", default="", help="keys whose path has this text")
    parser.add_argument("--stages", default="2")
    parser.add_argument("--engine", action="store_true", help="build DeepSpeed's engine for every config")
    parser.add_argument("--refusals", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    type(get_accelerator()).is_fp16_supported = lambda self: True
    tried = differ = 0
    for section, key in all_keys():
        path = f"{section}/{key}"
        for value in VALUES if args.only in path else []:
            for stage in map(int, args.stages.split(",")):
                config = config_with(section, key, value, stage)
                if value == "auto" and section in PLAIN:
                    continue  # the book's program fills it, as Hugging Face's Trainer does
                read, theirs = deepspeeds(config, args.engine or section in PLAIN)
                ours, message = books(config, args.build)
                tried += 1
                kind = ""
                if theirs and not message:
                    kind = f"accepted: {theirs}"
                elif not theirs and "unknown key" in message:
                    kind = f"unknown: {message.strip()}"
                elif not theirs and message and args.refusals:
                    kind = f"refused: {message.strip()}"
                elif not theirs and not message:
                    at, mine = ours, None
                    for part in path.split("/")[1:]:
                        at = mine = at.get(part) if isinstance(at, dict) else None
                    real = value_in(read, section, key)
                    if mine is not None and real is not None and mine != real:
                        kind = f"value: {mine!r} here, {real!r} in DeepSpeed"
                if kind:
                    differ += not kind.startswith("refused")
                    print(f"{path} = {json.dumps(value)}, stage {stage}: {kind}", flush=True)
    print(f"{tried} configs, {differ} differences from DeepSpeed {deepspeed.__version__}")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main())
