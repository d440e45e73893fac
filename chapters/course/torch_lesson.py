"""What the lessons in PyTorch share: the model, its data, and the judge, as
chapters/common/lesson.h for C++. A lesson is a program of forked ranks over Gloo:

  def train(task): ...          # trains one rank; returns its loss and weights
  def bill(task, rank, ranks):  # the bytes that it sends
  lesson.compare(train, bill, ranks=(4, 2))

The judge compares weights with those of chapter 00, which also draws the first
weights and the batches, and counts what is passed to torch.distributed
(torch_counted.py). There, a send waits for its receiver, and what a transfer
brings arrives in wait().
"""

import datetime
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn

import gpt
import safetensors_file
import torch_counted
from torch_counted import LostPeer, open_works
from torch_python import die_with_parent

# Ranks are forks: threads of this process would be missing in them
torch.set_num_threads(1)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# The first optimizer imports 900 modules: once, and not on every rank
torch.optim.SGD([torch.zeros(1)])

STEPS, RATE, TOLERANCE = 10, 0.1, 1e-12
# After the first error: others that wait for the same end in a moment
MORE_SECONDS = 2
# The one that the lessons in C++ show, and one that only the judge knows
TASKS = [
    {"batch": 12, "seq": 12, "vocabulary": 48, "width": 24, "heads": 12, "seed": 0},
    {"batch": 24, "seq": 6, "vocabulary": 24, "width": 18, "heads": 6, "seed": 2},
]


class Task:
    """A model, its batches, and its weights before and after ten steps."""

    def __init__(self, sizes, model, folder):
        self.batch_size, self.seq = sizes["batch"], sizes["seq"]
        self.vocabulary, self.width = sizes["vocabulary"], sizes["width"]
        config = {"model_type": "mlp", "n_embd": self.vocabulary}
        if model == "gpt":
            config = {"n_layer": 4, "n_embd": self.width, "n_positions": self.seq,
                      "n_head": sizes["heads"]}
        with open(f"{folder}/model.json", "w", encoding="utf-8") as file:
            json.dump({**config, "vocab_size": self.vocabulary}, file)

        def chapter_00(name, **options):
            options = {"model": f"{folder}/model.json", "data": "walk",
                       "dtype": "f64", "optimizer": "sgd", "lr": RATE,
                       "seq": self.seq, "seed": sizes["seed"], "format": "json",
                       "save": f"{folder}/{name}.safetensors", **options}
            words = [f"--{key}={value}" for key, value in options.items()]
            ended = subprocess.run(
                [os.environ["SHARDBOOK_YARDSTICK"], "--no-check", *words],
                stdout=subprocess.PIPE, text=True, check=True)
            return json.loads(ended.stdout)

        # One sample more has the last token's target
        chapter_00("first", steps=0, batch=STEPS * self.batch_size + 1,
                   logits=f"{folder}/data.safetensors")
        tokens = safetensors_file.load(f"{folder}/data.safetensors")[0]
        self.tokens = tokens["input_ids"].flatten()
        self.path = f"{folder}/first.safetensors"
        report = chapter_00("last", steps=STEPS, batch=self.batch_size)
        self.loss = report["loss"]["last"]
        self.expected = weights_of(f"{folder}/last.safetensors")

    def batch(self, step, rank=0, ranks=1):
        """Inputs and targets [b, s]: samples rank, rank + ranks, ... of a step."""
        first, size = step * self.batch_size, self.batch_size * self.seq
        first *= self.seq
        inputs = self.tokens[first:first + size].view(-1, self.seq)
        targets = self.tokens[first + 1:first + 1 + size].view(-1, self.seq)
        return inputs[rank::ranks], targets[rank::ranks]

    def gpt(self):
        """The GPT with its first weights, the same on every rank."""
        return gpt.load(self.path)

    def parts(self, cut, rank, ranks):
        """Piece `rank` of each weight that `cut` has a dimension for, by name;
        other weights are whole."""
        return {
            name: piece_of(weight, cut.get(name), rank, ranks).requires_grad_()
            for name, weight in weights_of(self.path).items()
        }

    def num_parameters(self):
        return sum(weight.numel() for weight in self.expected.values())


def weights_of(path):
    tensors, _ = safetensors_file.load(path)
    return {name.removeprefix(gpt.PREFIX): tensor
            for name, tensor in tensors.items()}


def piece_of(weight, dim, rank, ranks):
    return weight if dim is None else weight.chunk(ranks, dim)[rank].clone()


class Embedding(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.wte, self.wpe = model.wte, model.wpe

    def forward(self, ids):
        return self.wte(ids) + self.wpe.weight


class Head(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.wte, self.ln_f = model.wte, model.ln_f

    def forward(self, x):
        return nn.functional.linear(self.ln_f(x), self.wte.weight)


def layers_of(model):
    """The GPT as a list: the embedding, its blocks, the head."""
    return [Embedding(model), *model.h, Head(model)]


def language_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sum_over(loss):
    """The sum of the ranks' losses. Its message counts."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item()


def mean_over(loss):
    return sum_over(loss) / dist.get_world_size()


def write_this(function):
    """Takes the place of a function in an exercise."""
    raise NotImplementedError(
        f"{function} is empty: write it; comments above and in it say what it does")


# ---- The judge.

def run_rank(rank, ranks, task, train, folder):
    die_with_parent()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank,
        world_size=ranks, timeout=datetime.timedelta(
            seconds=torch_counted.WAIT_SECONDS))
    try:
        loss, weights = train(task)
        if open_works:
            raise RuntimeError(f"{open_works[0].name} was begun, and nobody "
                               "calls wait() of what it returned")
        result = {"loss": loss, "bytes": torch_counted.sent_bytes,
                  "weights": {name: weight.detach()
                              for name, weight in weights.items()}}
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__)
               if frame.filename == sys.argv[0]]
        place = f", line {own[-1].lineno}" if own else ""
        kind = ("" if isinstance(error, RuntimeError) else
                type(error).__name__ + ": ")
        text = (str(error).splitlines() or [""])[0]
        result = {"error": f"rank {rank}{place}: {kind}{text}",
                  "order": (isinstance(error, LostPeer), time.monotonic())}
    torch.save(result, f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}")
    if "error" not in result:
        dist.barrier()  # others may still read what this rank has sent


def run_ranks(ranks, task, train):
    """What each rank returns; throws what the rank says that failed first."""
    results, end = {}, None

    def read_results(folder):
        for rank in set(range(ranks)) - set(results):
            if os.path.exists(f"{folder}/{rank}"):
                results[rank] = torch.load(f"{folder}/{rank}")

    with tempfile.TemporaryDirectory() as folder:
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=run_rank, daemon=True,
                                  args=(rank, ranks, task, train, folder))
                     for rank in range(ranks)]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            time.sleep(0.01)
            read_results(folder)
            has_failed = (any("error" in each for each in results.values())
                          or any(process.exitcode for process in processes))
            if end is None and has_failed:
                end = time.monotonic() + MORE_SECONDS
            if end is not None and time.monotonic() > end:
                for process in processes:
                    process.kill()
        read_results(folder)
    silent = {rank: process.exitcode for rank, process in enumerate(processes)
              if rank not in results}
    for rank, status in silent.items():
        if status != -signal.SIGKILL:  # which it got above
            raise RuntimeError(f"rank {rank} ended with status {status}")
    errors = sorted((each["order"], each["error"])
                    for each in results.values() if "error" in each)
    if errors:
        busy = " and ".join(map(str, silent))
        raise RuntimeError(errors[0][1] +
                           (f", while rank {busy} went on" if busy else ""))
    return [results[rank] for rank in range(ranks)]


def difference(results, expected, cut):
    """The largest |a - b| of all weights, relative to the largest weight, and
    the weight that has it."""
    largest = (0.0, "")
    scale = max(weight.abs().max().item() for weight in expected.values())
    for name, weight in expected.items():
        ours = [each["weights"][name] for each in results
                if name in each["weights"]]
        if name in cut and ours:
            ours = [torch.cat(ours, cut[name])]
        if not ours:
            raise RuntimeError(f'no rank returns the weight "{name}"')
        for each in ours:
            if each.shape != weight.shape:
                raise RuntimeError(f'weight "{name}" is {list(each.shape)}, one '
                                   f"device has {list(weight.shape)}")
            apart = (each - weight).abs().max().item() / scale
            if not apart <= largest[0]:
                largest = (apart, name)
            if apart != apart:
                return largest
    return largest


def by_rank(values):
    if len(set(values)) == 1:
        return f"{values[0]:.0f}" + (" each" if len(values) > 1 else "")
    return ", ".join(f"{value:.0f}" for value in values)


def judge_task(task, train, bill, ranks, cut):
    """The claims on one task: name, whether it holds, and why."""
    billed = [bill(task, rank, ranks) for rank in range(ranks)]
    try:
        results = run_ranks(ranks, task, train)
        apart, name = difference(results, task.expected, cut)
    except RuntimeError as error:
        more = ("; here, as with large messages, no send ends before it is "
                "received" if "send to rank" in str(error) else "")
        return [("ends", False, str(error) + more),
                ("bytes", None, f"the bill is {by_rank(billed)}")]
    is_equal = apart <= TOLERANCE
    sent = [each["bytes"] for each in results]
    is_as_billed = all(abs(a - b) < 0.5 for a, b in zip(sent, billed))
    return [
        ("numbers", is_equal,
         f"loss {results[0]['loss']:.10f}, {task.loss:.10f} on one device; "
         f"weights differ by {apart:.0e}" + ("" if is_equal else
                                             f", most in {name}")),
        ("bytes", is_as_billed,
         f"sent {by_rank(sent)}" + (", as billed" if is_as_billed else
                                    f"; the bill is {by_rank(billed)}"))]


def compare(train, bill, ranks, model="gpt", cut={}):
    """Judges a lesson on `ranks`: how many, and another number. Ends with status
    0 if all claims hold, else 1.

    `cut` has the dimension of each weight of which a rank returns a piece.
    """
    def claims(sizes, num_ranks):
        with tempfile.TemporaryDirectory() as folder:
            return judge_task(Task(sizes, model, folder), train, bill,
                              num_ranks, cut)

    judged = claims(TASKS[0], ranks[0])
    if all(holds for _, holds, _ in judged):
        failed = [text for _, holds, text in claims(TASKS[1], ranks[1])
                  if holds is False]
        judged.append(("sizes", not failed,
                       f"on {ranks[1]} ranks, other samples: {failed[0]}"
                       if failed else
                       "the same with another model, batch, seed and ranks"))
    for name, holds, text in judged:
        word = {True: "holds", False: "FAILS", None: "later"}[holds]
        print(f"{name:8} {word:5}  {text}")
    sys.exit(0 if all(holds for _, holds, _ in judged) else 1)
