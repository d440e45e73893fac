"""PyTorch's side of `./shardbook bench pytorch`: one work, timed on request.

Speaks the protocol that pytorch.py states, as build/bench/pytorch_peer does.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time

# Gloo must talk on the loopback, and one rank has the threads it was given.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tests", "pytorch"))
import gpt
import llama
import resnet
from torch_python import die_with_parent

MODELS = {**gpt.MODELS, **llama.MODELS}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
IMAGE_MODELS = {"resnet18": resnet.resnet18, "resnet50": resnet.resnet50}


class SingleRank:
    """The world of one rank."""

    rank, size = 0, 1

    def barrier(self):
        pass

    def largest(self, value):
        return value

    def command(self, count):
        return count

    def close(self):
        pass


class GlooRanks:
    """Ranks as processes over torch.distributed's Gloo; rank 0 starts them."""

    def __init__(self, options):
        self.size, self.rank = options.world_size, options.rank or 0
        self.children, self.folder = [], None
        meeting = options.meeting
        if options.rank is None:
            self.folder = tempfile.TemporaryDirectory(prefix="shardbook-")
            meeting = os.path.join(self.folder.name, "meeting")
            for rank in range(1, self.size):
                self.children.append(
                    subprocess.Popen(
                        [sys.executable, *sys.argv]
                        + ["--rank", str(rank), "--meeting", meeting],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        preexec_fn=die_with_parent,
                    )
                )
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(minutes=10),
        )

    def barrier(self):
        dist.barrier()

    def largest(self, value):
        """The largest of all ranks' values."""
        seconds = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    def command(self, count):
        """Rank 0 tells the others how often to run; 0 ends them."""
        message = torch.tensor([count], dtype=torch.int64)
        dist.broadcast(message, src=0)
        return int(message.item())

    def close(self):
        # A group that still has its threads when Python ends aborts the process
        # ("terminate called without an active exception";
        # https://github.com/pytorch/pytorch/issues/190489).
        dist.destroy_process_group()
        for child in self.children:
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if self.folder:
            self.folder.cleanup()


def seconds_of(ranks, body, count):
    """Seconds for `count` calls of body: those of the slowest rank."""
    ranks.barrier()
    start = time.perf_counter()
    for _ in range(count):
        body()
    return ranks.largest(time.perf_counter() - start)


def fastest(ranks, bodies, budget_s=15):
    """Tries {name: make_body}; returns (name, body, {name: seconds})."""
    made = {name: make_body() for name, make_body in bodies.items()}
    # Twice: DDP rebuilds its buckets after the first step.
    spent = sum(seconds_of(ranks, body, 2) for body in made.values())
    seconds = dict.fromkeys(made, float("inf"))
    # By turns, so that a slow moment of the machine decides nothing. All ranks
    # see the same seconds, and so agree on when to stop.
    for _ in range(10):
        for name, body in made.items():
            took = seconds_of(ranks, body, 1)
            seconds[name] = min(seconds[name], took)
            spent += took
        if spent > budget_s:
            break
    best = min(seconds, key=seconds.get)
    return best, made[best], seconds


def matmul(options, ranks):
    """f32 products of square matrices into the same result."""
    a, b, c = (torch.randn(options.size, options.size) for _ in range(3))
    return "torch.mm", lambda: torch.mm(a, b, out=c), {}


def step_forms(model):
    """PyTorch's forms of the step: {name: (sdpa, linear, AdamW keys)}. The Llama
    has the fused ones alone."""
    is_llama = model in llama.MODELS
    attention = {} if is_llama else {"plain attention": False}
    if hasattr(F, "scaled_dot_product_attention"):
        attention["sdpa"] = True
    layers = {} if is_llama else {"addmm": False}
    layers["linear"] = True
    optimizers = {"loop AdamW": {"foreach": False}}
    optimizers["foreach AdamW"] = {"foreach": True}
    with contextlib.suppress(Exception):
        parameter = torch.zeros(1, requires_grad=True)
        torch.optim.AdamW([parameter], fused=True)
        optimizers["fused AdamW"] = {"fused": True}
    return {
        ", ".join((a, b, c)): (attention[a], layers[b], optimizers[c])
        for a, b, c in itertools.product(attention, layers, optimizers)
    }


def make_model(options, form):
    """The book's GPT or Llama in one of PyTorch's forms."""
    sdpa, linear, _ = form
    torch.manual_seed(0)
    if options.model in llama.MODELS:
        return llama.Llama(MODELS[options.model])
    gpt.Attention.use_sdpa = sdpa
    gpt.Mlp.activation = staticmethod(lambda x: F.gelu(x, approximate="tanh"))
    conv1d = gpt.Conv1D
    if linear:
        gpt.Conv1D = torch.nn.Linear
    try:
        return gpt.Gpt(MODELS[options.model])
    finally:
        gpt.Conv1D = conv1d


def make_step(options, form, wrap=lambda model: model):
    """A training step on one fixed batch: forward, backward, AdamW."""
    vocab_size = MODELS[options.model]["vocab_size"]
    shape = (options.batch, options.seq)
    ids = torch.randint(vocab_size, shape)
    targets = torch.randint(vocab_size, (shape[0] * shape[1],))
    model = wrap(make_model(options, form).to(DTYPES[options.dtype]))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, weight_decay=0.0, **form[2]
    )

    def step():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(ids).flatten(0, 1), targets).backward()
        optimizer.step()

    return step


def training_step(options, ranks):
    """The step of one device, in the fastest of PyTorch's eager forms."""
    bodies = {
        name: lambda form=form: make_step(options, form)
        for name, form in step_forms(options.model).items()
    }
    if options.one_form:  # the others would be in memory, too
        name = list(bodies)[-1]
        bodies = {name: bodies[name]}
    return fastest(ranks, bodies)


def attention(options, _):
    """Causal attention of gpt-micro's heads, forward and backward."""
    q, k, v = (
        torch.randn(options.batch, 8, options.seq, 32, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn(options.batch, 8, options.seq, 32)

    def body():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), gradient)

    return "sdpa", body, {}


def images_step(options, ranks):
    """A ResNet's step by SGD, in the fastest of PyTorch's eager forms."""
    images = torch.randn(options.batch, 3, options.size, options.size)
    labels = torch.randint(1000, (options.batch,))

    def make_body(memory_format, keys):
        model = IMAGE_MODELS[options.model]().to(memory_format=memory_format)
        inputs = images.contiguous(memory_format=memory_format)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **keys)

        def step():
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

        return step

    formats = {
        "contiguous": torch.contiguous_format,
        "channels last": torch.channels_last,
    }
    optimizers = {"loop SGD": {"foreach": False}}
    optimizers["foreach SGD"] = {"foreach": True}
    return fastest(
        ranks,
        {
            ", ".join((f, o)): lambda f=f, o=o: make_body(
                formats[f], optimizers[o]
            )
            for f, o in itertools.product(formats, optimizers)
        },
    )


def ddp_step(options, ranks):
    """The step under DistributedDataParallel, each rank its own batch."""
    forms = step_forms(options.model)
    form = forms[options.form or list(forms)[-1]]
    kinds = {
        "defaults": {},
        "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
        "static_graph": {"gradient_as_bucket_view": True, "static_graph": True},
    }

    def make_body(keys):
        def wrap(model):
            return torch.nn.parallel.DistributedDataParallel(model, **keys)

        return make_step(options, form, wrap)

    return fastest(
        ranks,
        {
            name: lambda keys=keys: make_body(keys)
            for name, keys in kinds.items()
        },
    )


def all_reduce(options, ranks):
    """The sum of one f32 buffer over all ranks, in place."""
    buffer = torch.full((options.bytes // 4,), float(ranks.rank + 1))
    dist.all_reduce(buffer)
    expected = ranks.size * (ranks.size + 1) / 2
    if not bool((buffer == expected).all()):
        raise RuntimeError("all_reduce: the sum of rank + 1 is wrong")
    # Sums of zeros stay finite, however often they are repeated.
    buffer.zero_()
    return "gloo", lambda: dist.all_reduce(buffer), {}


WORKS = {
    "matmul": matmul,
    "step": training_step,
    "attention": attention,
    "allreduce": all_reduce,
    "ddp": ddp_step,
    "images": images_step,
}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument(
        "--model", choices=[*MODELS, *IMAGE_MODELS], default="gpt-micro"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="f32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--backend", choices=["gloo"], default="gloo")
    parser.add_argument("--world-size", type=int, default=1)
    # Of this side only: the form of the step, and what rank 0 tells the rest.
    parser.add_argument("--form")
    parser.add_argument("--one-form", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meeting")
    return parser.parse_args()


def commands():
    """The counts that stdin asks for; ends at quit or at its end."""
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            return
        if len(words) != 2 or words[0] != "run" or not words[1].isdigit():
            raise ValueError(f"stdin: {line.strip()!r}; say run N or quit")
        yield int(words[1])


def main():
    die_with_parent()
    options = parse()
    torch.set_num_threads(options.threads)
    ranks = GlooRanks(options) if options.world_size > 1 else SingleRank()
    name, body, tried = WORKS[options.work](options, ranks)
    if ranks.rank != 0:
        while count := ranks.command(0):
            seconds_of(ranks, body, count)
        ranks.close()
        return
    ready = {"version": torch.__version__, "variant": name, "tried": tried}
    print("ready " + json.dumps(ready), flush=True)
    for count in commands():
        ranks.command(count)
        print(f"{seconds_of(ranks, body, count):.9f}", flush=True)
    ranks.command(0)
    ranks.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
