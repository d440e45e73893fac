"""GPipe in PyTorch: a stage of layers per rank. All micro-batches go forward
through the stages, then all go back.

  ./shardbook lesson gpipe --pytorch

The strategy calls dist.send(tensor, rank), dist.recv(tensor, rank),
dist.all_reduce(tensor, group=ends), tensor.chunk(n), x.requires_grad_(),
y.backward(gradient) and torch.no_grad().
"""

import torch
import torch.distributed as dist

import torch_lesson as lesson

MICRO_BATCHES = 6


# --- the strategy
def receive(shape, rank):
    """The float64 tensor of this shape that a rank sends."""
    x = torch.empty(shape, dtype=torch.float64)
    dist.recv(x, rank)
    return x


def run_stages(stage, inputs, targets, width):
    """The mean loss over the batch on the last rank, zero on the others. Leaves
    gradients in the stage's parameters. Between stages: [b, s, width]."""
    s, last = dist.get_rank(), dist.get_world_size() - 1
    inputs, targets = inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)
    between = (*inputs[0].shape, width)
    kept = []
    # Fill the pipeline. A stage keeps its inputs alone
    for b in range(MICRO_BATCHES):
        kept.append(inputs[b] if s == 0 else receive(between, s - 1))
        if s != last:  # the last forward comes with the backward
            with torch.no_grad():
                dist.send(stage(kept[b]), s + 1)
    # Drain it: compute the graph again, then its gradients
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(MICRO_BATCHES):
        x = kept[b] if s == 0 else kept[b].requires_grad_()
        y = stage(x)
        if s == last:
            y = lesson.language_loss(y, targets[b]) / MICRO_BATCHES
            loss += y.detach()
        y.backward(None if s == last else receive(between, s + 1))
        if s != 0:
            dist.send(x.grad, s - 1)
        kept[b] = None
    return loss


def sum_tied(embedding, ends):
    """Both ends of the pipeline have the embedding; each has one of two terms of
    its gradient. `ends` is their group."""
    dist.all_reduce(embedding.grad, group=ends)
# --- end


def train(task):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # 1. This rank's layers, with the weights that they have in the whole model
    model = task.gpt()
    layers = lesson.layers_of(model)
    cuts = [len(layers) * s // ranks for s in range(ranks + 1)]
    stage = torch.nn.Sequential(*layers[cuts[rank]:cuts[rank + 1]])
    ends = dist.new_group([0, ranks - 1])
    optimizer = torch.optim.SGD(stage.parameters(), lr=lesson.RATE)
    for step in range(lesson.STEPS):
        # 2. The first stage reads the inputs, the last one the targets
        local = run_stages(stage, *task.batch(step), task.width)
        if rank in (0, ranks - 1):
            sum_tied(model.wte.weight, ends)
        # 3. Each rank updates its own layers, when all micro-batches are through
        optimizer.step()
        optimizer.zero_grad()
        loss = lesson.sum_over(local)
    own = set(stage.parameters())
    return loss, {name: parameter for name, parameter in
                  model.named_parameters() if parameter in own}


def bill(task, rank, ranks):
    """Ten steps send an activation or a gradient over each cut per micro-batch,
    the tied gradient between two ranks, and an all-reduce of the loss."""
    sent = ((rank > 0) + (rank + 1 < ranks)) * task.batch_size * task.seq
    tied = (rank in (0, ranks - 1)) * task.vocabulary
    elements = (sent + tied) * task.width + 2 * (ranks - 1) / ranks
    return lesson.STEPS * elements * 8


if __name__ == "__main__":
    lesson.compare(train, bill, ranks=(3, 2))
