"""The calls that are measured: the comparison table, other published shapes, and real models' layers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from coflash.problem import Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """One attention call. With `lengths` the sequences are packed, and batch and seqlen describe them."""

    suite: str
    name: str
    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    window: tuple[int, int] | None = None  # keys to the left and to the right of a query
    sink: bool = False
    lengths: tuple[int, ...] = ()
    dtype: str = "bf16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def problem(self, device_type: str, *, grad: bool = False) -> Problem:
        left, right = self.window or (None, None)
        return Problem(
            dtype=self.torch_dtype,
            device_type=device_type,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            nheads_q=self.heads,
            nheads_kv=self.heads_kv,
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            packed_q=bool(self.lengths),
            packed_k=bool(self.lengths),
            causal=self.causal,
            window_left=left,
            window_right=right,
            has_sink=self.sink,
            needs_grad=grad,
        )

    def pairs(self) -> int:
        """Query-key pairs that the masks let through, over all heads and sequences."""
        from coflash.planning.tiles import visible_pairs

        problem = self.problem("cpu")
        if self.lengths:
            found = sum(visible_pairs(replace(problem, seqlen_q=n, seqlen_k=n)) for n in self.lengths)
        else:
            found = self.batch * visible_pairs(problem)
        return found * self.heads

    def flop(self, direction: str) -> float:
        """A product of the forward counts twice for each pair and dimension; a backward is 2.5 forwards."""
        forward = 2.0 * (self.head_dim + self.head_dim_v) * self.pairs()
        return forward if direction == "forward" else 2.5 * forward

    def kv_bytes(self) -> int:
        """What a decoding step has to read."""
        tokens = sum(self.lengths) if self.lengths else self.batch * self.seqlen_k
        return tokens * self.heads_kv * (self.head_dim + self.head_dim_v) * self.torch_dtype.itemsize


def _square(
    suite: str, name: str, tokens: int, heads: tuple[int, int], dim: int, seqlen: int, **more: Any
) -> Shape:
    """As many sequences of one length as make up `tokens`."""
    batch = max(1, tokens // seqlen)
    more = {"head_dim_v": dim, "seqlen_q": seqlen, "seqlen_k": seqlen, **more}
    return Shape(suite, name, batch, *heads, dim, **more)


def _k(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _table() -> Iterator[Shape]:
    for dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in (1024, 4096, 16384):
                name = f"d{dim} {'causal' if causal else 'full'} {_k(seqlen)}"
                heads = 2048 // dim
                yield _square("table", name, 32768, (heads, heads), dim, seqlen, causal=causal)


def _gqa() -> Iterator[Shape]:
    for seqlen in (2048, 8192, 32768):
        yield _square("gqa", f"64/8 d128 causal {_k(seqlen)}", 32768, (64, 8), 128, seqlen, causal=True)


def _mla() -> Iterator[Shape]:
    for seqlen in (4096, 16384):
        name = f"192/128 causal {_k(seqlen)}"
        yield _square("mla", name, 32768, (16, 16), 192, seqlen, causal=True, head_dim_v=128)


def _window() -> Iterator[Shape]:
    for sink in (False, True):
        name = f"64/8 d64 window 128{' sink' if sink else ''} 8k"
        yield _square("window", name, 16384, (64, 8), 64, 8192, causal=True, window=(127, 0), sink=sink)


def log_uniform_lengths(tokens: int, low: int, high: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths drawn log-uniformly until there are `tokens` of them in all; the last is cut to fit."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, round(low * (high / low) ** rng.random())))
    return tuple(lengths)


def _varlen() -> Iterator[Shape]:
    lengths = log_uniform_lengths(65536, 64, 16384)
    for causal in (True, False):
        name = f"d128 {'causal' if causal else 'full'} 64..16k, {len(lengths)} sequences"
        longest = max(lengths)
        sizes = (len(lengths), 16, 16, 128, 128, longest, longest)
        yield Shape("varlen", name, *sizes, causal=causal, lengths=lengths)


def _decode() -> Iterator[Shape]:
    for batch, seqlen, heads, heads_kv, dim in (
        (1, 131072, 64, 8, 128),
        (16, 8192, 64, 8, 128),
        (64, 4096, 32, 8, 128),
        (128, 1024, 64, 8, 64),
    ):
        name = f"b{batch} x {_k(seqlen)}, {heads}/{heads_kv} d{dim}"
        yield Shape("decode", name, batch, heads, heads_kv, dim, dim, 1, seqlen)


# Name, heads, heads_kv, head_dim, head_dim_v, window, sink.
MODELS = (
    ("Llama-3 8B", 32, 8, 128, 128, None, False),
    ("Llama-3 70B", 64, 8, 128, 128, None, False),
    ("Qwen3 235B", 64, 4, 128, 128, None, False),
    ("DeepSeek-V3", 128, 128, 192, 128, None, False),
    ("gpt-oss full", 64, 8, 64, 64, None, True),
    ("gpt-oss window", 64, 8, 64, 64, (127, 0), True),
)


def _models() -> Iterator[Shape]:
    for name, heads, heads_kv, dim, dim_v, window, sink in MODELS:
        for seqlen in (512, 2048, 8192, 32768, 131072):
            yield _square(
                "models",
                f"{name} {_k(seqlen)}",
                16384,
                (heads, heads_kv),
                dim,
                seqlen,
                head_dim_v=dim_v,
                causal=True,
                window=window,
                sink=sink,
            )


def _small() -> Iterator[Shape]:
    """For a processor without a GPU, and for trying the benchmark itself."""
    square = partial(_square, "small", tokens=1024, dim=64, seqlen=512, dtype="fp32")
    yield square("d64 full 512", heads=(4, 4))
    yield square("d64 causal 512", heads=(4, 4), causal=True)
    yield square("4/2 d64 window 64 sink 512", heads=(4, 2), causal=True, window=(63, 0), sink=True)
    lengths = (500, 77, 200)
    yield Shape("small", "d64 causal varlen", 3, 4, 4, 64, 64, 500, 500, True, lengths=lengths, dtype="fp32")


SUITES = {
    "table": _table,
    "gqa": _gqa,
    "mla": _mla,
    "window": _window,
    "varlen": _varlen,
    "decode": _decode,
    "models": _models,
    "small": _small,
}


def suite(name: str) -> list[Shape]:
    if name not in SUITES:
        raise ValueError(f"suite {name!r}: one of {', '.join(SUITES)}")
    return list(SUITES[name]())
