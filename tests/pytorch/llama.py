"""The book's Llama in plain PyTorch, for the benchmark.

RMSNorm, rotary positions in halves, grouped queries and SwiGLU, with PyTorch's own
fused functions; q, k and v are one matrix, gate and up another, as in the book.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


def config(hidden, intermediate, heads, kv_heads, blocks=4):
    """A configuration with Hugging Face's keys."""
    return {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }


MODELS = {
    "llama-nano": config(hidden=64, intermediate=176, heads=4, kv_heads=2),
    "llama-micro": config(hidden=256, intermediate=704, heads=8, kv_heads=2),
}


def rope_table(seq, width, theta, dtype):
    """cos and sin [S, d], each angle in both halves."""
    frequency = theta ** (-torch.arange(0, width, 2) / width)
    angle = torch.outer(torch.arange(seq, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turned(x, table):
    """x [B, heads, S, d], turned by the angles of its tokens."""
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden, inner = cfg["hidden_size"], cfg["intermediate_size"]
        self.heads, self.kv = (
            cfg["num_attention_heads"],
            cfg["num_key_value_heads"],
        )
        self.width = hidden // self.heads
        all_heads = self.heads + 2 * self.kv
        self.norm_1 = nn.RMSNorm(hidden, eps=cfg["rms_norm_eps"])
        self.qkv = nn.Linear(hidden, all_heads * self.width, bias=False)
        self.proj = nn.Linear(self.heads * self.width, hidden, bias=False)
        self.norm_2 = nn.RMSNorm(hidden, eps=cfg["rms_norm_eps"])
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, table):
        batch, seq, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, seq, -1, self.width)
        q, k, v = qkv.transpose(1, 2).split((self.heads, self.kv, self.kv), 1)
        y = F.scaled_dot_product_attention(
            turned(q, table),
            turned(k, table),
            v,
            is_causal=True,
            enable_gqa=True,
        )
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, -1))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Token ids [B, S] to logits [B, S, V]; an output layer of its own."""

    def __init__(self, cfg):
        super().__init__()
        hidden = cfg["hidden_size"]
        self.cfg = cfg
        self.table = nn.Embedding(cfg["vocab_size"], hidden)
        self.blocks = nn.ModuleList(
            Block(cfg) for _ in range(cfg["num_hidden_layers"])
        )
        self.norm = nn.RMSNorm(hidden, eps=cfg["rms_norm_eps"])
        self.head = nn.Linear(hidden, cfg["vocab_size"], bias=False)
        self.rope = {}

    def forward(self, ids):
        x = self.table(ids)
        key = (ids.size(1), x.dtype)
        if key not in self.rope:
            width = self.cfg["hidden_size"] // self.cfg["num_attention_heads"]
            self.rope[key] = rope_table(
                ids.size(1), width, self.cfg["rope_theta"], x.dtype
            )
        for block in self.blocks:
            x = block(x, self.rope[key])
        return self.head(self.norm(x))
