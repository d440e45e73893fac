"""Tensor parallelism in PyTorch: one matrix is cut by columns, the next by rows,
and the ranks meet once forward and once backward.

  ./shardbook lesson tensor_parallel --pytorch

The strategy calls dist.all_reduce(tensor), and apply(x) of autograd functions.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import embedding, relu

import torch_lesson as lesson


# --- the strategy
def summed(x):
    """A new tensor: the sum of the x of all ranks."""
    total = x.contiguous().clone()
    dist.all_reduce(total)
    return total


class CopyTo(torch.autograd.Function):
    """f does nothing forward. Backward, it adds the ranks' terms of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class ReduceFrom(torch.autograd.Function):
    """g adds the ranks' terms forward. Backward, it does nothing."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def column_linear(x, weight, bias):
    """Maps x [b, s, in], equal on all ranks, to this rank's columns [b, s, out/t];
    weight is [in, out/t], bias [out/t]. An element-wise function may follow."""
    return CopyTo.apply(x) @ weight + bias


def row_linear(x, weight, bias):
    """Maps this rank's columns x [b, s, in/t] to [b, s, out], equal on all ranks;
    weight is [in/t, out], bias [out]. The bias is added once, behind the sum."""
    return ReduceFrom.apply(x @ weight) + bias
# --- end


# The dimension by which a parameter is cut; the others are whole
CUT = {"fc1.weight": 1, "fc1.bias": 0, "fc2.weight": 0}


def train(task):
    # 1. Take this rank's part of each parameter out of the whole model
    p = task.parts(CUT, dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.SGD(p.values(), lr=lesson.RATE)
    for step in range(lesson.STEPS):
        # 2. Every rank reads the whole batch
        inputs, targets = task.batch(step)
        x = embedding(inputs, p["wte.weight"])
        # 3. Columns, then rows: nothing is sent between them
        x = relu(column_linear(x, p["fc1.weight"], p["fc1.bias"]))
        x = relu(row_linear(x, p["fc2.weight"], p["fc2.bias"]))
        x = x @ p["fc3.weight"] + p["fc3.bias"]
        mean = lesson.language_loss(x, targets)
        mean.backward()
        # 4. Whole parameters have equal gradients everywhere: no average
        optimizer.step()
        optimizer.zero_grad()
    return mean.item(), p


def bill(task, rank, ranks):
    """Ten steps send an all-reduce of [b, s, h] forward by g, and one backward by
    f. The mlp is as wide as its vocabulary."""
    elements = task.batch_size * task.seq * task.vocabulary
    return lesson.STEPS * 2 * 2 * (ranks - 1) / ranks * elements * 8


if __name__ == "__main__":
    lesson.compare(train, bill, ranks=(4, 2), model="mlp", cut=CUT)
