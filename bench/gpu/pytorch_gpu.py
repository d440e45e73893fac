"""PyTorch's side of `./shardbook bench gpu`: the same works, timed on request.

gpu_bench starts it and writes lines to its stdin; each has one line as answer:

  hello         "ready VERSION", or "no REASON"
  WORK COUNT    seconds per call, measured by CUDA events; or what went wrong
  drop WORK     "dropped": its memory is free again

A work is tried in several forms; the fastest one is measured. Training steps
are eager. GPT's attention is scaled_dot_product_attention and its optimizer the
fused AdamW. Precision is mixed as in Shardbook's 00_single_device (bf16 weights
and gradients, f32 master copies that the optimizer updates) or by autocast (f32
weights, bf16 products), whichever is faster.
"""

import argparse
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# In the tree the models are those of the tests; in a pack they lie here.
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "tests", "pytorch")]


def why_not():
    """Why this Python cannot measure; empty where it can."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} cannot import torch ({error})"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return ""


def parse():
    parser = argparse.ArgumentParser()
    for name in ("gemm", "copy", "batch", "seq", "images", "image-size"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--gpt", required=True)
    parser.add_argument("--resnet", required=True)
    return parser.parse_args()


def seconds_of(body, count):
    """Seconds per call, between two events in the GPU's own queue."""
    import torch
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        body()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def fastest(forms):
    """The fastest of {name: function that makes the body}."""
    bodies = {}
    for name, make in forms.items():
        body = make()
        seconds_of(body, 3)
        bodies[min(seconds_of(body, 3) for _ in range(3)), name] = body
    (_, name), body = min(bodies.items(), key=lambda item: item[0])
    sys.stderr.write(f"PyTorch: {name}\n")
    return body


def gemm(options, dtype, tf32=False):
    import torch
    a, b = (torch.randn(options.gemm, options.gemm).to(dtype) for _ in "ab")
    c = torch.empty_like(a)

    def body():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.mm(a, b, out=c)

    return body


def copy(options, source, target):
    import torch

    def make(device):
        return torch.zeros(options.copy // 4, device=device,
                           pin_memory=device == "cpu")

    a, b = make(source), make(target)
    return lambda: b.copy_(a, non_blocking=True)


def step_with_masters(model, make_optimizer, loss_of):
    """Weights and gradients in bf16; the optimizer updates f32 copies."""
    import torch
    model.bfloat16()
    weights = list(model.parameters())
    masters = [w.detach().float().requires_grad_() for w in weights]
    optimizer = make_optimizer(masters)

    def body():
        for weight in weights:
            weight.grad = None
        loss_of(model).backward()
        with torch.no_grad():
            for master, weight in zip(masters, weights):
                if master.grad is None:
                    master.grad = torch.empty_like(master)
            torch._foreach_copy_([m.grad for m in masters],
                                 [w.grad for w in weights])
            optimizer.step()
            torch._foreach_copy_(weights, masters)

    return body


def step_with_autocast(model, make_optimizer, loss_of):
    """Weights in f32; products in bf16."""
    import torch
    optimizer = make_optimizer(model.parameters())

    def body():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()

    return body


STEPS = {"bf16 weights with f32 masters": step_with_masters,
         "autocast": step_with_autocast}


def gpt_step(options):
    import gpt
    import torch
    import torch.nn.functional as F
    if options.gpt != "gpt2":
        raise ValueError(f"no model {options.gpt} here")
    config = gpt.config(n_embd=768, n_layer=12, n_head=12, n_positions=1024,
                        vocab_size=50257)
    shape = (options.batch, options.seq)
    inputs, targets = (torch.randint(50257, shape) for _ in "xy")

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0,
                                 fused=True)

    def loss_of(model):
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    gpt.Attention.use_sdpa = True
    gpt.Mlp.activation = staticmethod(
        lambda x: F.gelu(x, approximate="tanh"))
    return fastest({
        name: lambda make=make: make(gpt.Gpt(config), adamw, loss_of)
        for name, make in STEPS.items()})


def resnet_step(options):
    import resnet
    import torch
    import torch.nn.functional as F
    make_model = {"resnet18": resnet.resnet18,
                  "resnet50": resnet.resnet50}[options.resnet]
    size = options.image_size
    images = torch.randn(options.images, 3, size, size)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (options.images,))
    images_as = {dtype: images.to(dtype)
                 for dtype in (torch.float32, torch.bfloat16)}
    torch.backends.cudnn.benchmark = True

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=True)

    def loss_of(model):
        x = images_as[next(model.parameters()).dtype]
        return F.cross_entropy(model(x).float(), labels)

    def form(make):
        model = make_model().to(memory_format=torch.channels_last)
        return make(model, sgd, loss_of)

    return fastest({name: lambda make=make: form(make)
                    for name, make in STEPS.items()})


def make_work(name, options):
    import torch
    return {
        "gemm-bf16": lambda: gemm(options, torch.bfloat16),
        "gemm-f16": lambda: gemm(options, torch.float16),
        "gemm-tf32": lambda: gemm(options, torch.float32, tf32=True),
        "gemm-f32": lambda: gemm(options, torch.float32),
        "copy": lambda: copy(options, "cuda", "cuda"),
        "copy-in": lambda: copy(options, "cpu", "cuda"),
        "copy-out": lambda: copy(options, "cuda", "cpu"),
        "gpt": lambda: gpt_step(options),
        "resnet": lambda: resnet_step(options),
    }[name]()


def answer(line, works, options):
    import torch
    name, _, count = line.partition(" ")
    if name == "drop":
        works.pop(count, None)
        torch.cuda.empty_cache()
        return "dropped"
    if name not in works:
        works[name] = make_work(name, options)
    return f"{seconds_of(works[name], int(count)):.9f}"


def main():
    options = parse()
    # Answers go to gpu_bench alone; what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(text):
        answers.write(" ".join(str(text).split()) + "\n")
        answers.flush()

    reason = why_not()
    works = {}
    for line in sys.stdin:
        line = line.strip()
        if line == "hello":
            if reason:
                say("no " + reason)
                return
            import torch
            torch.set_default_device("cuda")
            say(f"ready {torch.__version__}, {torch.cuda.get_device_name()}")
            continue
        try:
            say(answer(line, works, options))
        except Exception as error:  # out of memory, an operation it lacks
            works.pop(line.partition(" ")[0], None)
            say(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
