"""The originals of the toys: what PyTorch gives, beside what the toys print.

  toys.py BUILD [CHAPTER...]    runs both, compares
  toys.py --store [CHAPTER...]  stores what the originals print, for tests/toys

Each original is the code of its document, with seeds.
"""

import functools
import os
import pathlib
import subprocess
import sys
import tempfile

import torch_python

torch_python.require_torch()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "toys"))
import toys_test  # noqa: E402


def show(name, *values):
    """A name, and the first five elements of each value."""
    numbers = [f"{x:.6f}" for value in values
               for x in value.detach().flatten()[:5].tolist()]
    print(name, *numbers, flush=True)


def seeded(seed, *shapes):
    """torch.randn of each shape, from the beginning of a seed."""
    torch.manual_seed(seed)
    return [torch.randn(shape) for shape in shapes]


def on_two_ranks(body, *arguments):
    """Runs body in two processes over Gloo."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, body, arguments), nprocs=2)


def _rank(rank, folder, body, arguments):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet",
                            rank=rank, world_size=2)
    body(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


# ---- 01: DataParallel needs GPUs; on a CPU, its chunks one after the other.

def data_parallel():
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.randn(100, 5).split(30):
        outputs = []
        for chunk in rows.chunk(3):
            print("In Model: input size", list(chunk.shape))
            outputs.append(model(chunk))
        output = torch.cat(outputs)
        print(f"Outside: input size {list(rows.shape)}, "
              f"output size {list(output.shape)}")
        loss = output.square().mean()
        show("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show("bias", model.bias)


# ---- 02

def ddp():
    on_two_ranks(demo_basic)


def demo_basic(rank):
    torch.manual_seed(0)
    model = nn.Linear(10, 10)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    inputs, labels = seeded(1 + rank, (20, 10), (20, 10))
    loss = nn.MSELoss()(ddp_model(inputs), labels)
    losses = [torch.empty(()) for _ in range(2)]
    dist.all_gather(losses, loss.detach())
    loss.backward()
    optimizer.step()
    if rank == 0:
        show("loss of rank 0", losses[0])
        show("loss of rank 1", losses[1])
        show("averaged gradient of the bias", model.bias.grad)
        show("bias after the update", model.bias)


# ---- 03

class Net(nn.Module):
    def __init__(self, wrap=lambda layer: layer):
        super().__init__()
        self.layer1 = wrap(nn.Linear(8, 4))
        self.layer2 = nn.Linear(4, 16)
        self.layer3 = wrap(nn.Linear(16, 4))

    def forward(self, x):
        return self.layer3(self.layer2(self.layer1(x)))


def zero_fsdp():
    for way in ("default policy", "by size", "by hand"):
        on_two_ranks(train_fsdp, way)


def train_fsdp(rank, way):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import (enable_wrap,
                                             size_based_auto_wrap_policy, wrap)
    torch.manual_seed(0)
    # Without CPUOffload, which changes no number, and needs a GPU
    options = {"device_id": torch.device("cpu"), "backward_prefetch": None}
    if way == "by hand":
        with enable_wrap(wrapper_cls=FSDP, **options):
            model = FSDP(Net(wrap), **options)
    else:
        policy = size_based_auto_wrap_policy
        if way == "by size":
            policy = functools.partial(policy, min_num_params=50)
        model = FSDP(Net(), auto_wrap_policy=policy, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    if rank == 0:
        print(way)
    for name, unit in model.named_modules():
        if isinstance(unit, FSDP) and rank == 0:
            flat = unit._flat_param  # pylint: disable=protected-access
            whole = flat._unpadded_unsharded_size.numel()
            print(f"  {name.rpartition('.')[2] or 'root'} has {whole} elements, "
                  f"{flat.numel()} on each rank", flush=True)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        x, labels = torch.randn(4, 8), torch.randn(4, 4)
        loss = nn.MSELoss()(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            show("loss of rank 0", loss)


# ---- 04: both layers on the CPU.

def model_parallel():
    torch.manual_seed(0)
    net1, net2 = nn.Linear(10, 10), nn.Linear(10, 5)
    optimizer = torch.optim.SGD([*net1.parameters(), *net2.parameters()],
                                lr=0.001)
    torch.manual_seed(1)
    for _ in range(3):
        outputs = net2(net1(torch.randn(20, 10)).relu())
        loss = nn.MSELoss()(outputs, torch.randn(20, 5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show("two devices: loss", loss)


# ---- 05: Pipe is gone from newer torch; its chunks, one after the other.

def gpipe():
    torch.manual_seed(0)
    fc1, fc2 = nn.Linear(16, 8), nn.Linear(8, 4)
    outputs = [fc2(fc1(chunk)) for chunk in torch.rand(16, 16).chunk(8)]
    output = torch.cat(outputs)
    print(f"output of each micro-batch {list(outputs[0].shape)}, "
          f"of all {list(output.shape)}")
    show("output", output)
    show("loss", output.square().mean())


# ---- 06: the stages of torch.distributed.pipelining, in two processes.

def _1f1b():
    on_two_ranks(run_stage)


def run_stage(rank):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    torch.manual_seed(0)
    layers, losses = [nn.Linear(16, 8), nn.Linear(8, 4)], []
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8,
                            loss_fn=nn.functional.mse_loss)
    inputs = [torch.rand(16, 16)] if rank == 0 else []
    schedule.step(*inputs, target=torch.zeros(16, 4), losses=losses)
    if rank == 1:
        print("losses", *(f"{x.item():.6f}" for x in losses), flush=True)
        show("loss", sum(losses) / 8)
    dist.barrier()
    if rank == 0:
        show("gradient of fc1's bias", layers[0].bias.grad)


def original_of(chapter):
    """What an original prints, in a process of its own."""
    module = "toys" if chapter < "07" else "toys_of_many_ranks"
    name = chapter.partition("_")[2]
    name = name if name.isidentifier() else f"_{name}"
    code = f"import {module}; {module}.{name}()"
    return subprocess.run([sys.executable, "-c", code], text=True, check=True,
                          stdout=subprocess.PIPE,
                          cwd=os.path.dirname(__file__)).stdout


def main(build, *chapters):
    failed = 0
    for chapter in chapters or sorted(
            path.parent.name
            for path in toys_test.ROOT.glob("chapters/[0-9]*/toy.cpp")):
        original = original_of(chapter)
        if build == "--store":
            path = toys_test.ORIGINALS / f"{chapter}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"# torch {torch.__version__.partition('+')[0]}, "
                            f"CPU\n{original}", "utf-8")
            continue
        _, printed = toys_test.run_toy(build, chapter)
        missing = toys_test.first_missing(original, printed)
        print(f"{chapter}: " + ("as in PyTorch" if missing is None else
                                f"PyTorch prints, too: {missing}"))
        failed += missing is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
