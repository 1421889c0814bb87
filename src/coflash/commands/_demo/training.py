"""A small causal transformer trained twice from one seed: with coflash, and with dense attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coflash
from coflash.commands._demo.progress import Progress

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# Small: most CPUs emulate bfloat16.
SEQLEN, BATCH, WIDTH, HEADS, LAYERS = 128, 4, 64, 2, 2
LEARNING_RATE = 4e-3
TOLERANCE = 0.05  # nats, between the curves averaged over 20 steps


def with_coflash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    try:
        out = coflash.flash_attn_func(q, k, v, causal=True)
    except NotImplementedError:
        out = coflash.flash_attn_func(q, k, v, causal=True, backend="portable")
    return cast(Tensor, out)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula as it is written, the whole matrix of scores in memory."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + cast(Tensor, self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.blocks = nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return cast(Tensor, self.head(self.norm(self.blocks(x))))


def train(label: str, attention: Attention, data: Tensor, device: torch.device, steps: int) -> list[float]:
    """The loss of every step, in nats per byte. Seed and batches are the same in every call."""
    torch.manual_seed(0)
    model = Transformer(attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1)
    batches = torch.Generator().manual_seed(1)
    losses = []
    with Progress(f"training with {label}", steps) as progress:
        for _ in range(steps):
            starts = torch.randint(len(data) - SEQLEN - 1, (BATCH,), generator=batches)
            rows = torch.stack([data[s : s + SEQLEN + 1] for s in starts.tolist()]).to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            progress.step(f"loss {losses[-1]:.3f}, {progress.seconds:.0f} s")
    return losses


def show(text: str, device: torch.device, steps: int, folder: Path) -> bool:
    """Train twice and draw both curves; whether they stay together."""
    print(f"\n2. A causal transformer on that text, {steps} steps in bfloat16, from one seed")
    data = torch.tensor(list(text.encode()), dtype=torch.long)
    curves = {
        "coflash": train("coflash", with_coflash, data, device, steps),
        "dense attention": train("dense attention", dense, data, device, steps),
    }
    smooth = {label: _mean_of_20(losses) for label, losses in curves.items()}
    gap = max(abs(a - b) for a, b in zip(*smooth.values(), strict=True))
    path = folder / "loss.png"
    draw(curves, path)
    last = ", ".join(f"{label} {losses[-1]:.3f}" for label, losses in smooth.items())
    print(f"  loss over the last 20 steps: {last}; largest gap between the curves {gap:.1e}; drawn to {path}")
    return gap < TOLERANCE


def _mean_of_20(losses: list[float]) -> list[float]:
    window = min(20, len(losses))
    return [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (label, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="The same model, trained with two attentions")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
