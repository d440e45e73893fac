"""Replaces functions of torch.distributed, as the judge of lessons wants them.

They count bytes as comm/ledger.h does; a send waits for its receiver; and what a
transfer brings arrives in wait(), so without wait() it never does. What C++ in
PyTorch sends, as nn.parallel's DistributedDataParallel, is not seen.
"""

import contextlib
import inspect

import torch
import torch.distributed as dist

# A rank that waits as long has been forgotten
WAIT_SECONDS = 10
sent_bytes = 0.0
open_works = []
# By collective: how often a ring passes on (n - 1)/n of an argument. What
# arrives is in the first argument
RINGS = {"all_reduce": (2, "tensor"), "broadcast": (1, "tensor"),
         "reduce": (1, "tensor"), "all_gather": (1, "tensor_list"),
         "all_gather_into_tensor": (1, "output_tensor"),
         "reduce_scatter": (1, "input_list"),
         "reduce_scatter_tensor": (1, "input"),
         "all_to_all_single": (1, "input")}
# A message by which a receiver tells the sender that it is there
READY_TAG = 1 << 20


class LostPeer(RuntimeError):
    """The other rank has ended; why, that rank says."""


@contextlib.contextmanager
def gloo_of(name):
    """Says in a sentence what Gloo throws."""
    try:
        yield
    except RuntimeError as error:
        if "Timed out" in str(error):
            raise RuntimeError(f"{name} waited {WAIT_SECONDS} s") from error
        if "Connection" in str(error):
            raise LostPeer(f"{name}: the other rank has ended") from error
        raise


class Work:
    """A transfer that has begun. What it brings arrives in wait(), not before."""

    def __init__(self, name, begin, pairs=()):
        self.name, self.pairs = name, pairs
        with gloo_of(name):
            self.works = begin()
        open_works.append(self)

    def wait(self, timeout=None):
        with gloo_of(self.name):
            for work in self.works:
                work.wait()
        for target, arrived in self.pairs:
            target.copy_(arrived)
        if self in open_works:
            open_works.remove(self)
        self.works, self.pairs = [], []
        return True


def tensors_of(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


def counted(name, original):
    """The collective, which counts its bytes."""
    signature = inspect.signature(original)
    times, argument = RINGS[name]

    def call(*values, async_op=False, **named):
        global sent_bytes
        bound = signature.bind(*values, **named, async_op=True)
        given = bound.arguments
        ranks = dist.get_world_size(given.get("group"))
        size = sum(t.nbytes for t in tensors_of(given[argument]))
        sent_bytes += times * (ranks - 1) / ranks * size
        first = next(iter(given))
        targets = tensors_of(given[first])
        copies = [target.detach().clone() for target in targets]
        given[first] = copies if isinstance(given[first], list) else copies[0]
        work = Work(name, lambda: [original(*bound.args, **bound.kwargs)],
                    list(zip([target.detach() for target in targets], copies)))
        return work if async_op else work.wait() and None
    return call


def peer_of(rank, group_rank, group):
    return (dist.get_global_rank(group or dist.group.WORLD, group_rank)
            if rank is None else rank)


def counted_messages(begin_send, begin_recv):
    """isend, irecv, send and recv, of which the first counts."""
    def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
        global sent_bytes
        dst = peer_of(dst, group_dst, group)
        sent_bytes += tensor.nbytes
        return Work(f"send to rank {dst}", lambda: [
            begin_send(tensor, dst, group, tag),
            begin_recv(torch.empty(1), dst, group, tag + READY_TAG)])

    def irecv(tensor, src=None, group=None, tag=0, group_src=None):
        src = peer_of(src, group_src, group)
        arrived = torch.empty_like(tensor)
        return Work(f"recv from rank {src}", lambda: [
            begin_recv(arrived, src, group, tag),
            begin_send(torch.ones(1), src, group, tag + READY_TAG)],
            [(tensor.detach(), arrived)])

    def send(*values, **named):
        isend(*values, **named).wait()

    def recv(tensor, src=None, **named):
        irecv(tensor, src, **named).wait()
        return src
    return {"isend": isend, "irecv": irecv, "send": send, "recv": recv}


for function, replacement in {
        **{name: counted(name, getattr(dist, name)) for name in RINGS},
        **counted_messages(dist.isend, dist.irecv)}.items():
    for module in (dist, dist.distributed_c10d):
        setattr(module, function, replacement)
