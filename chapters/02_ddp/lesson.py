"""DDP in PyTorch: a replica per rank, different samples, and an average of each
gradient that travels while backward goes on.

  ./shardbook lesson ddp --pytorch

The strategy calls parameter.register_post_accumulate_grad_hook(function),
dist.all_reduce(tensor, async_op=True) and, of what that returns, wait().
"""

import torch
import torch.distributed as dist

import torch_lesson as lesson


# --- the strategy
class DistributedDataParallel:
    """Averages the gradients of a model over the ranks."""

    def __init__(self, model):
        # A hook runs when backward has added up the gradient of its parameter
        self.works = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        """Begins to average parameter.grad, and does not wait."""
        # Divide first: in 16 bits the sum could overflow
        parameter.grad.div_(dist.get_world_size())
        work = dist.all_reduce(parameter.grad, async_op=True)
        self.works.append(work)

    def wait(self):
        """Ends when all gradients are averages."""
        for work in self.works:
            work.wait()
        self.works.clear()
# --- end


def train(task):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # 1. The same model with the same weights on every rank
    model = task.gpt()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lesson.RATE)
    for step in range(lesson.STEPS):
        # 2. Its own samples: rank r of d takes r, r + d, r + 2d, ...
        inputs, targets = task.batch(step, rank, ranks)
        # 3. Forward and backward, in which the hooks send gradients
        mean = lesson.language_loss(model(inputs), targets)
        mean.backward()
        # 4. The one difference from one device
        ddp.wait()
        # 5. The same update everywhere
        optimizer.step()
        optimizer.zero_grad()
        loss = lesson.mean_over(mean)
    return loss, dict(model.named_parameters())


def bill(task, rank, ranks):
    """Ten steps send an all-reduce of every gradient, and of the loss."""
    elements = task.num_parameters() + 1
    return lesson.STEPS * 2 * (ranks - 1) / ranks * elements * 8


if __name__ == "__main__":
    lesson.compare(train, bill, ranks=(4, 2))
