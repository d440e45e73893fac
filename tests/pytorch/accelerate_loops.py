"""Accelerate's own loops: what the Accelerator of chapter 15 has to equal.

  accelerate_loops.py [NAME...]    prints the results, one JSON object a line
  accelerate_loops.py --store      stores all, for accelerator_originals_test

Stored by torch 2.15, Accelerate 1.15 and DeepSpeed 0.19.8 on a CPU, over Gloo.
"""

import functools
import json
import os
import pathlib
import sys
import tempfile

import torch_python

torch_python.require_torch()

import torch  # noqa: E402
from torch import nn  # noqa: E402

import gpt  # noqa: E402

STORED = (pathlib.Path(__file__).resolve().parents[1] /
          "chapters/15_engine/accelerate_loops.json")
SEQ, VOCAB, EVALUATED = 8, 32, 11

# What a loop may have; the test reads the same names.
USUAL = {"ranks": 2, "plugin": "ddp", "batch_size": 2, "samples": 24,
         "epochs": 1, "accumulation": 1, "max_norm": 0.2, "optimizer": "SGD",
         "lr": 0.5, "split_batches": False, "drop_last": False,
         "even_batches": True, "stop_after": 0}
LOOPS = {
    "OneProcess": {"ranks": 1, "samples": 11, "accumulation": 4, "epochs": 2},
    "Ddp": {"epochs": 2, "optimizer": "AdamW", "lr": 0.01},
    "ShortWindow": {"samples": 20, "accumulation": 3, "epochs": 2},
    "RepeatedSamples": {"samples": 21, "accumulation": 2},
    "ThreeRanks": {"ranks": 3, "samples": 22, "accumulation": 2},
    "DropLast": {"samples": 22, "drop_last": True},
    "SplitBatches": {"batch_size": 4, "samples": 22, "split_batches": True,
                     "accumulation": 2, "epochs": 2},
    "NoClipping": {"max_norm": 0, "accumulation": 2},
    "SavedAndLoaded": {"epochs": 2, "accumulation": 2, "optimizer": "AdamW",
                       "lr": 0.01, "stop_after": 2},
    "Fsdp": {"plugin": "fsdp FULL_SHARD", "accumulation": 2},
    "FsdpShardGradOp": {"plugin": "fsdp SHARD_GRAD_OP", "samples": 20,
                        "accumulation": 3},
    "Fsdp2": {"plugin": "fsdp2 FULL_SHARD", "accumulation": 2},
    "DeepSpeed0": {"plugin": "deepspeed 0", "accumulation": 2},
    "DeepSpeed1": {"plugin": "deepspeed 1", "samples": 20, "accumulation": 3},
    "DeepSpeed2": {"plugin": "deepspeed 2", "accumulation": 2},
    "DeepSpeed3": {"plugin": "deepspeed 3", "accumulation": 2},
}


def numbers(i, count):
    """The values of parameter i, by names in order: no generator is needed."""
    k = torch.arange(count, dtype=torch.float64)
    return ((k * 37 + i * 11) % 101 - 50) / 500


def tiny_gpt():
    model = gpt.Gpt(gpt.config(n_embd=16, n_layer=2, n_head=2,
                               n_positions=SEQ, vocab_size=VOCAB))
    for i, (name, value) in enumerate(sorted(model.named_parameters())):
        is_scale = name.endswith("weight") and "ln_" in name
        with torch.no_grad():
            value.copy_(numbers(i, value.numel()).view_as(value) + is_scale)
    return model


class Samples(torch.utils.data.Dataset):
    """Sample i: its number, and the tokens 5i, 5i + 1 + i mod 3, ..."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        tokens = (5 * i + (1 + i % 3) * torch.arange(SEQ + 1)) % VOCAB
        return i, tokens[:-1], tokens[1:]


def plugin_of(loop):
    import accelerate
    library, _, choice = loop["plugin"].partition(" ")
    if library == "deepspeed":
        # DeepSpeed's config clips; 0 is off
        return {"deepspeed_plugin": accelerate.DeepSpeedPlugin(
            zero_stage=int(choice), gradient_clipping=loop["max_norm"])}
    if library == "ddp":
        return {}
    sharding = {"fsdp_version": 1, "sharding_strategy": choice}
    if library == "fsdp2":
        sharding = {"fsdp_version": 2, "reshard_after_forward": True}
    return {"fsdp_plugin": accelerate.FullyShardedDataParallelPlugin(
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["Block"], use_orig_params=True,
        **sharding)}


def train(loop, folder, leg):
    """The loop of the documents. Leg 1 stops after some windows and saves, leg
    2 loads and goes on; leg 0 does neither."""
    import accelerate
    acc = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=loop["accumulation"],
        dataloader_config=accelerate.DataLoaderConfiguration(
            split_batches=loop["split_batches"],
            even_batches=loop["even_batches"]), **plugin_of(loop))
    # ZeRO's masters are f32; the other libraries prove more in f64
    model = tiny_gpt()
    if "deepspeed" not in loop["plugin"]:
        model = model.double()
    optimizer = getattr(torch.optim, loop["optimizer"])(
        model.parameters(), lr=loop["lr"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer,
                                                 lambda k: 1 / (1 + 0.1 * k))
    load = functools.partial(torch.utils.data.DataLoader,
                             batch_size=loop["batch_size"])
    model, optimizer, loader, schedule = acc.prepare(
        model, optimizer, load(Samples(loop["samples"]),
                               drop_last=loop["drop_last"]), schedule)
    test_loader = acc.prepare(load(Samples(EVALUATED)))

    def loss_of(inputs, targets):
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1),
                                           targets.flatten())

    result = {"batches": [], "losses": [], "norms": [], "rates": []}
    window, first = 0.0, 0
    if leg == 2:
        acc.load_state(folder)
        first = loop["stop_after"] * loop["accumulation"]
    for epoch in range(loop["epochs"]):
        rest = loader
        if epoch == 0 and first:
            rest = acc.skip_first_batches(loader, first)
        for numbers_, inputs, targets in rest:
            if epoch == 0:
                result["batches"].append(numbers_.tolist())
            with acc.accumulate(model):
                loss = loss_of(inputs, targets)
                window += acc.reduce(loss.detach(), "mean").item()
                rate = optimizer.param_groups[0]["lr"]
                acc.backward(loss)
                norm = 0
                if acc.sync_gradients and (loop["max_norm"] or
                                           "deepspeed" in loop["plugin"]):
                    norm = acc.clip_grad_norm_(model.parameters(),
                                               loop["max_norm"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not acc.sync_gradients:
                continue
            result["losses"].append(window / loop["accumulation"])
            result["norms"].append(float(norm or 0))
            result["rates"].append(rate)
            window = 0.0
            if leg == 1 and len(result["losses"]) == loop["stop_after"]:
                acc.save_state(folder)
                return result
    # As in transformers' run_clm_no_trainer.py
    seen, losses = [], []
    model.eval()
    for numbers_, inputs, targets in test_loader:
        with torch.no_grad():
            loss = loss_of(inputs, targets)
        seen += acc.gather_for_metrics(numbers_).tolist()
        losses.append(acc.gather_for_metrics(loss.repeat(len(inputs))))
    result["seen"] = seen
    result["evaluation"] = torch.cat(losses).mean().item()
    return result


def rank_body(rank, loop, folder, leg):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank),
                      WORLD_SIZE=str(loop["ranks"]), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT="29511", DS_ACCELERATOR="cpu",
                      ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    result = train(loop, f"{folder}/state", leg)
    path = f"{folder}/{rank}.json"
    before = {}
    if leg == 2:
        before = json.loads(pathlib.Path(path).read_text())
    for name, value in result.items():
        if isinstance(before.get(name), list):
            result[name] = before[name] + value
    pathlib.Path(path).write_text(json.dumps(result))


def results_of(loop):
    with tempfile.TemporaryDirectory() as folder:
        for leg in [1, 2] if loop["stop_after"] else [0]:
            torch.multiprocessing.spawn(rank_body, (loop, folder, leg),
                                        nprocs=loop["ranks"])
        ranks = [json.loads(pathlib.Path(f"{folder}/{rank}.json").read_text())
                 for rank in range(loop["ranks"])]
    # The ranks have their own batches, and all the rest in common
    return {**ranks[0], "batches": [each["batches"] for each in ranks]}


def main(*names):
    stores = names == ("--store",)
    lines = []
    for name in LOOPS if stores or not names else names:
        loop = {**USUAL, **LOOPS[name]}
        lines.append(json.dumps({"name": name, **loop, **results_of(loop)}))
        print(lines[-1], flush=True)
    if stores:
        STORED.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
