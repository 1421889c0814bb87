"""What a forward kernel computes, told alike for every architecture.

Nothing here imports the DSL: planning and the cache work on machines that cannot compile.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Features:
    """Base of the kernels' configs, which add how it is computed.

    Every field changes the machine code; lengths, batch, head counts, strides, scale, window widths and the
    softcap's value do not appear.
    """

    dtype: str  # "bf16" or "fp16": of q, k, v and out
    head_dim: int
    head_dim_v: int
    packed_q: bool = False  # q and out are (total, heads, dim), found through cu_seqlens_q
    packed_k: bool = False  # k and v likewise
    seqused_q: bool = False  # only the first seqused_q[b] queries of a sequence exist
    seqused_k: bool = False
    bounded_left: bool = False  # a query sees keys from its own position - window_left
    bounded_right: bool = False  # ... up to its own position + window_right (0: causal)
    softcap: bool = False
    sink: bool = False
    lse: bool = False
    pack_heads: int = 1  # query heads of one KV head that share a tile's rows (1: one head a tile)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: the kernel takes {', '.join(DTYPES)}")
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if dim % 8 or not 8 <= dim <= 256:
                raise ValueError(f"{name} {dim}: multiples of 8 up to 256")
