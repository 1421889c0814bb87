"""`Problem`: one attention call, described once, in words every other room of the package uses.

A Problem holds no tensors and no device properties.  It is frozen and hashable, so it is a key: planning
caches plans under it and the compiler derives its own, coarser key (everything static) from it.  What
changes from call to call without changing any decision, the softmax scale for instance, is not in it.

Shapes follow the public interface: `batch` sequences, `nheads_q` query heads that share `nheads_kv` key and
value heads in consecutive groups of `group_size`.  Lengths are in tokens.  For packed operands (sequences
laid end to end, found through cumulative lengths) `seqlen_q` and `seqlen_k` are the longest sequence's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call without its tensors.

    Order of operations on a score: scale, softcap, alibi, `score_mod`, then the masks (causal, window,
    `mask_mod`, lengths); the sink joins the denominator last.
    """

    dtype: torch.dtype  # of q, k, v and the output
    device_type: str  # "cpu", "cuda", ...
    head_dim: int  # of q and k
    head_dim_v: int  # of v and the output
    nheads_q: int
    nheads_kv: int
    batch: int
    seqlen_q: int
    seqlen_k: int

    packed_q: bool = False  # q is (total_q, nheads_q, head_dim), found through cu_seqlens_q
    packed_k: bool = False  # k and v likewise
    has_seqused_q: bool = False  # only the first seqused_q[b] queries of sequence b exist
    has_seqused_k: bool = False
    page_size: int = 0  # tokens in a page of k and v; 0: not paged
    has_cache_batch_idx: bool = False  # sequence b reads row cache_batch_idx[b] of k and v
    has_leftpad: bool = False  # sequence b starts cache_leftpad[b] tokens into its row of k and v

    causal: bool = False  # query i sees key j when j <= i + len_k - len_q
    window_left: int | None = None  # query i sees j >= i + len_k - len_q - window_left; None: unbounded
    window_right: int | None = None  # query i sees j <= i + len_k - len_q + window_right; None: unbounded
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: off
    has_sink: bool = False
    score_mod: Callable | None = None  # (score, b, h, q_idx, kv_idx) -> score
    mask_mod: Callable | None = None  # (b, h, q_idx, kv_idx) -> bool
    block_mask_size: tuple[int, int] | None = None  # (queries, keys) in a block of FlexAttention's BlockMask
    has_alibi: bool = False
    dropout_p: float = 0.0

    deterministic: bool = False  # the backward gives the same bits every run
    needs_lse: bool = False  # the caller takes the log-sum-exp
    needs_grad: bool = False  # a backward may follow

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.nheads_q // self.nheads_kv if self.nheads_kv else 1

    @property
    def paged(self) -> bool:
        return self.page_size > 0

    @property
    def has_block_mask(self) -> bool:
        """Whether a FlexAttention BlockMask says which blocks are empty, partial and full."""
        return self.block_mask_size is not None

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The band of visible keys as (left, right), causality included."""
        right = self.window_right
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return self.window_left, right

    @property
    def options(self) -> tuple[str, ...]:
        """The public names of the options this call uses, for messages that say what a path cannot do."""
        uses = {
            "cu_seqlens_q": self.packed_q,
            "cu_seqlens_k": self.packed_k,
            "seqused_q": self.has_seqused_q,
            "seqused_k": self.has_seqused_k,
            "page_table": self.paged,
            "cache_batch_idx": self.has_cache_batch_idx,
            "cache_leftpad": self.has_leftpad,
            "causal": self.causal,
            "window_size": self.window_left is not None or self.window_right is not None,
            "softcap": self.softcap != 0.0,
            "learnable_sink": self.has_sink,
            "score_mod": self.score_mod is not None,
            "mask_mod": self.mask_mod is not None,
            "block_mask": self.has_block_mask,
            "alibi_slopes": self.has_alibi,
            "dropout_p": self.dropout_p > 0.0,
            "deterministic": self.deterministic,
            "return_lse": self.needs_lse,
        }
        return tuple(name for name, used in uses.items() if used)
