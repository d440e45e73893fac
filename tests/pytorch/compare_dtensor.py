"""Compares chapter 11's recipe of a block with that of PyTorch's tutorial.

    compare_dtensor.py build/chapters/11_dtensor/ch11_dtensor

The tutorial ("Large Scale Transformer model training with Tensor Parallel") cuts a
Llama with norms on slices of the sequence and a loss on cut logits. Two processes do
this to a golden model with torch.distributed.tensor, the program does it with
--sequence-parallel, and these must agree: the loss, every gradient, the placement of
every parameter, the tensors between the modules, and the bytes on the wire. Skipped
where torch has no loss_parallel. Exit status as compare.py's.
"""

import json
import os
import re
import sys
import tempfile

import torch_python

torch_python.require_torch()

import torch
import torch.nn as nn
import torch.nn.functional as F

import compare
import llama
import safetensors_file
from toys_of_many_ranks import on_ranks

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(77)

RANKS, BATCH, SEQ = 2, 4, 24
GOLDEN = os.path.join(compare.ROOT, "tests", "golden", "llama_gqa")
TOLERANCE = 1e-12
# The file's names of a block's parts, and the model's below
PARTS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}
# Ours, by the name of a matrix in the program's picture: those of the tutorial that
# lie in it
PICTURED = {
    "embed_tokens": ["tok_embeddings"],
    "lm_head": ["output"],
    "input_layernorm": ["attention_norm", "ffn_norm", "norm"],
    "qkv_proj": ["wq", "wk", "wv"],
    "o_proj": ["wo"],
    "gate_up_proj": ["w1", "w3"],
    "down_proj": ["w2"],
}
# What goes into a module, and what comes out, as the chapter's details say
BETWEEN = {
    "tok_embeddings": ("R", "S(1)"),
    "layers.0.attention_norm": ("S(1)", "S(1)"),
    "layers.0.attention": ("R", "S(1)"),
    "layers.0.attention.wq": ("R", "S(2)"),
    "layers.0.attention.wo": ("S(2)", "S(1)"),
    "layers.0.ffn_norm": ("S(1)", "S(1)"),
    "layers.0.feed_forward": ("R", "S(1)"),
    "layers.0.feed_forward.w1": ("R", "S(2)"),
    "layers.0.feed_forward.w2": ("S(2)", "S(1)"),
    "norm": ("S(1)", "S(1)"),
    "output": ("R", "S(2)"),
}


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden, self.heads = cfg["hidden_size"], cfg["num_attention_heads"]
        self.kv, self.width = cfg["num_key_value_heads"], hidden // self.heads
        self.wq = nn.Linear(hidden, hidden, bias=False)
        self.wk = nn.Linear(hidden, self.kv * self.width, bias=False)
        self.wv = nn.Linear(hidden, self.kv * self.width, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, table):
        q, k, v = (
            w(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(
            llama.turned(q, table),
            llama.turned(k, table),
            v,
            is_causal=True,
            enable_gqa=True,
        )
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden, inner = cfg["hidden_size"], cfg["intermediate_size"]
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        norm = lambda: nn.RMSNorm(cfg["hidden_size"], eps=cfg["rms_norm_eps"])
        self.attention, self.feed_forward = Attention(cfg), FeedForward(cfg)
        self.attention_norm, self.ffn_norm = norm(), norm()

    def forward(self, x, table):
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    """The modules and names of the tutorial's Llama."""

    def __init__(self, cfg):
        super().__init__()
        hidden, vocabulary = cfg["hidden_size"], cfg["vocab_size"]
        self.tok_embeddings = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            Block(cfg) for _ in range(cfg["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(hidden, eps=cfg["rms_norm_eps"])
        self.output = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens, table):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, table)
        return self.output(self.norm(x))


def name_here(name):
    """model.layers.0.mlp.up_proj.weight -> layers.0.feed_forward.w3.weight"""
    module, kind = name.rsplit(".", 1)
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    block, part = re.fullmatch(r"model\.(layers\.\d+)\.(.*)", module).groups()
    return f"{block}.{PARTS[part]}.{kind}"


def parallelize(model, mesh):
    """The tutorial's plan."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1),
                use_local_output=False,
            ),
        },
    )
    to_all = {
        "desired_input_layouts": (Replicate(), None),
        "input_layouts": (Shard(1), None),
    }
    for block in model.layers:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**to_all),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),),
                    desired_input_layouts=(Replicate(),),
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


class Wire(TorchDispatchMode):
    """Bytes that a rank sends: of n, a gather or a scatter n (t - 1)/t."""

    sent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:  # its own operations come back with plain tensors
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        if re.search("all_reduce|all_gather|reduce_scatter", str(function)):
            times = 2 if "all_reduce" in str(function) else 1
            whole = max(args[0].nbytes, result.nbytes)
            self.sent += times * whole * (RANKS - 1) // RANKS
        return result


def letters(x, cfg):
    """Where a plain tensor [n, S, ..] is cut, by its shape."""
    if x.dim() == 3 and x.size(1) == SEQ // RANKS:
        return "S(1)"
    wholes = ("hidden_size", "intermediate_size", "vocab_size")
    is_part = x.dim() == 3 and x.size(2) in [cfg[k] // RANKS for k in wholes]
    return "S(2)" if is_part else "R"


def original(rank, path):
    """On each of two ranks; rank 0 writes what it has seen."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with open(os.path.join(GOLDEN, "config.json")) as file:
        cfg = json.load(file)
    model = Model(cfg)
    weights, _ = safetensors_file.load(
        os.path.join(GOLDEN, "model.safetensors")
    )
    model.load_state_dict({name_here(name): w for name, w in weights.items()})
    parallelize(model, torch.distributed.init_device_mesh("cpu", (RANKS,)))
    between = {}

    def sees(name):
        def hook(_, inputs, output):
            local = [
                x.to_local() if isinstance(x, DTensor) else x
                for x in (inputs[0], output)
            ]
            between[name] = [letters(x, cfg) for x in local]

        return hook

    for name in BETWEEN:
        model.get_submodule(name).register_forward_hook(sees(name))

    with open(os.path.join(GOLDEN, "tokens.u16"), "rb") as file:
        ids = torch.frombuffer(
            bytearray(file.read(2 * (BATCH * SEQ + 1))), dtype=torch.uint16
        ).long()
    table = llama.rope_table(
        SEQ,
        cfg["head_dim"],
        cfg["rope_parameters"]["rope_theta"],
        torch.float64,
    )
    # Gradients of norms stay terms of a sum until the optimizer reads them
    wire = Wire()
    with wire, loss_parallel():
        logits = model(ids[:-1].view(BATCH, SEQ), table)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[1:])
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    seen = {
        "loss": loss.full_tensor().item(),
        "sent": wire.sent,
        "between": between,
        "placements": {
            name: ["R", "S(0)", "S(1)"][
                1 + each.placements[0].dim
                if each.placements[0].is_shard()
                else 0
            ]
            for name, each in model.named_parameters()
        },
    }
    after = {
        name: each.full_tensor().detach()
        for name, each in model.named_parameters()
    }
    if rank == 0:
        safetensors_file.save(path, after, {"seen": json.dumps(seen)})


def pictured(output):
    """Where the program cuts a parameter, by the last name of its module."""
    cuts = {}
    for name, cells in re.findall(
        r"(\w+)\.weight \[.*\]\n((?:[+|].*\n)+)", output
    ):
        rows = [row for row in cells.split("\n") if row.startswith("|")]
        columns = rows[0].count("|") - 1
        cuts[name] = "S(0)" if len(rows) > 1 else "S(1)" if columns > 1 else "R"
    return cuts


def compare_recipe(program, folder, report):
    theirs_file = os.path.join(folder, "theirs.safetensors")
    ours_file = os.path.join(folder, "ours.safetensors")
    log_file = os.path.join(folder, "log.jsonl")
    on_ranks(RANKS, original, theirs_file)
    theirs, metadata = safetensors_file.load(theirs_file)
    seen = json.loads(metadata["seen"])

    options = ["--load", os.path.join(GOLDEN, "model.safetensors")]
    options += ["--data", os.path.join(GOLDEN, "tokens.u16")]
    options += ["--batch", str(BATCH), "--seq", str(SEQ), "--steps", "1"]
    options += ["--optimizer", "sgd", "--lr", "1", "--dtype", "f64"]
    options += ["--world-size", str(RANKS), "--sequence-parallel"]
    options += ["--model", os.path.join(GOLDEN, "config.json"), "--no-check"]
    cuts = pictured(program.run(options))
    result = json.loads(
        program.run(
            [*options, "--format", "json", "--log", log_file]
            + ["--save", ours_file]
        )
    )
    with open(log_file) as file:
        loss = json.loads(file.readline())["loss"]
    report.error("loss", abs(loss - seen["loss"]), TOLERANCE)
    for name, ours in safetensors_file.load(ours_file)[0].items():
        error = (ours - theirs[name_here(name)]).abs().max().item()
        report.error(f"{name} after a step", error, TOLERANCE)
    # Beside the original, the program sums the norm of the gradient: 8 bytes
    sent = result["bytes"][0]["counted"] - 2 * 8 * (RANKS - 1) / RANKS
    report.line("bytes", sent == seen["sent"], f"{sent}, {seen['sent']}")
    turned = {"R": "R", "S(0)": "S(1)", "S(1)": "S(0)"}  # [in, out] here
    for ours, names in PICTURED.items():
        for name, placement in seen["placements"].items():
            if name.split(".")[-2] not in names:
                continue
            is_linear = "_proj" in ours
            expected = turned[placement] if is_linear else placement
            report.line(name, cuts[ours] == expected, cuts[ours])
    for name, places in BETWEEN.items():
        same = list(places) == seen["between"][name]
        report.line(f"around {name}", same, " -> ".join(seen["between"][name]))


def main():
    if len(sys.argv) < 2:
        print("name the program to compare", file=sys.stderr)
        return 2
    report = compare.Report()
    program = compare.Program(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="shardbook-") as folder:
        try:
            compare_recipe(program, folder, report)
        except (compare.Failed, KeyError, OSError, ValueError) as error:
            report.line("recipe", False, str(error))
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
