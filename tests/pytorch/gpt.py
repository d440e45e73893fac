"""The book's GPT in plain PyTorch, its data, and its training loop.

The model is GPT-2 as published, under Hugging Face's names and layouts, so that
a file saved by any chapter program loads here, and the other way round. This
is written for reading, not for speed: bench/pytorch.py imports the model and
chooses among faster variants.
"""

import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import safetensors_file

PREFIX = "transformer."
DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


def config(n_embd, n_layer, n_head, n_positions, vocab_size=256):
    """A configuration with Hugging Face's keys; dropout is 0."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "vocab_size": vocab_size,
        "n_positions": n_positions,
        "n_embd": n_embd,
        "n_layer": n_layer,
        "n_head": n_head,
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


MODELS = {
    "gpt-nano": config(n_embd=64, n_layer=4, n_head=4, n_positions=256),
    "gpt-micro": config(n_embd=256, n_layer=4, n_head=8, n_positions=256),
}


def gelu_tanh(x):
    """GELU in its tanh form, as GPT-2 was trained with ("gelu_new")."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


class Conv1D(nn.Module):
    """x W + b with W [in, out], the layout of GPT-2's files."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        rows = x.reshape(-1, x.size(-1))
        y = torch.addmm(self.bias, rows, self.weight)
        return y.reshape(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    # Set by the benchmark, which compares the forms; tests use the plain one.
    use_sdpa = False

    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg["n_head"]
        self.c_attn = Conv1D(cfg["n_embd"], 3 * cfg["n_embd"])
        self.c_proj = Conv1D(cfg["n_embd"], cfg["n_embd"])

    def forward(self, x):
        batch, seq, width = x.shape
        heads = (batch, seq, self.n_head, width // self.n_head)
        q, k, v = (
            part.reshape(heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        if self.use_sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(heads[-1])
            future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
            y = weights @ v
        return self.c_proj(y.transpose(1, 2).reshape(batch, seq, width))


class Mlp(nn.Module):
    """Up to four times the width, the config's GELU, and down again."""

    activation = staticmethod(gelu_tanh)

    def __init__(self, cfg):
        super().__init__()
        inner = cfg.get("n_inner") or 4 * cfg["n_embd"]
        self.c_fc = Conv1D(cfg["n_embd"], inner)
        self.c_proj = Conv1D(inner, cfg["n_embd"])
        if cfg.get("activation_function") == "gelu":
            self.activation = F.gelu

    def forward(self, x):
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    """Pre-norm: each branch normalises its input, the sum stays raw."""

    def __init__(self, cfg):
        super().__init__()
        epsilon = cfg["layer_norm_epsilon"]
        self.ln_1 = nn.LayerNorm(cfg["n_embd"], eps=epsilon)
        self.attn = Attention(cfg)
        self.ln_2 = nn.LayerNorm(cfg["n_embd"], eps=epsilon)
        self.mlp = Mlp(cfg)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """Token ids [B, S] to logits [B, S, V]; output tied to the embedding."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg["vocab_size"], cfg["n_embd"])
        self.wpe = nn.Embedding(cfg["n_positions"], cfg["n_embd"])
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)
        self.h = nn.ModuleList(Block(cfg) for _ in range(cfg["n_layer"]))
        self.ln_f = nn.LayerNorm(cfg["n_embd"], eps=cfg["layer_norm_epsilon"])

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    def loss(self, ids, targets):
        """The mean cross entropy over all tokens."""
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


def load(path):
    """Returns the model of a file; names with or without "transformer."."""
    tensors, metadata = safetensors_file.load(path)
    if "config" not in metadata:
        raise ValueError(f"{path}: no `config` in __metadata__")
    model = Gpt(json.loads(metadata["config"]))
    state = {
        name[len(PREFIX) :] if name.startswith(PREFIX) else name: tensor
        for name, tensor in tensors.items()
    }
    tied = state.pop("lm_head.weight", None)
    if tied is not None and not torch.equal(tied, state["wte.weight"]):
        raise ValueError(f"{path}: lm_head.weight differs from wte.weight")
    # Double precision holds every stored dtype exactly; callers narrow it.
    model = model.double()
    model.load_state_dict(state)
    return model


def save(path, model):
    """Writes the model as the chapter programs do."""
    state = {PREFIX + name: value for name, value in model.state_dict().items()}
    metadata = {"format": "pt", "config": json.dumps(model.cfg)}
    safetensors_file.save(path, state, metadata)


class Tokens:
    """Sample i is tokens [i*S, i*S+S), with targets one further."""

    def __init__(self, path, seq):
        with open(path, "rb") as file:
            content = bytearray(file.read())
        if path.endswith(".u16"):
            low, high = content[0::2], content[1::2]
            self.ids = torch.tensor([a + 256 * b for a, b in zip(low, high)])
        else:
            self.ids = torch.tensor(list(content))
        self.seq = seq
        self.num_samples = (len(self.ids) - 1) // seq
        if self.num_samples < 1:
            raise ValueError(f"{path}: {len(self.ids)} tokens; give {seq + 1}")

    def batch(self, step, size):
        """The inputs and targets, [B, S] each; samples wrap at the end."""
        picks = [(step * size + j) % self.num_samples for j in range(size)]
        rows = [self.ids[i * self.seq : (i + 1) * self.seq + 1] for i in picks]
        block = torch.stack(rows)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def make_optimizer(name, parameters, lr, weight_decay=0.0, momentum=0.0):
    """PyTorch's optimizer over all parameters, decay included."""
    if name == "sgd":
        return torch.optim.SGD(
            parameters, lr=lr, momentum=momentum, weight_decay=weight_decay
        )
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[name](parameters, lr=lr, weight_decay=weight_decay)


def grad_norm(parameters):
    """The Euclidean norm of all gradients together."""
    squares = [p.grad.double().square().sum() for p in parameters]
    return math.sqrt(float(sum(squares)))


def train(model, tokens, steps, batch, optimizer):
    """Trains in place; returns one {step, loss, grad_norm} for each step."""
    log = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*tokens.batch(step, batch))
        loss.backward()
        log.append(
            {
                "step": step,
                "loss": loss.item(),
                "grad_norm": grad_norm(list(model.parameters())),
                "lr": optimizer.param_groups[0]["lr"],
            }
        )
        optimizer.step()
    return log
