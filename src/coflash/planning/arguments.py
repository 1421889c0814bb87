"""A Problem from a command line; `coflash explain` and `coflash compile` share the words."""

from __future__ import annotations

import argparse

import torch

from coflash.problem import Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments that describe one attention call."""
    group = parser.add_argument_group("the call")
    group.add_argument("--dtype", choices=DTYPES, default="bf16")
    group.add_argument("--batch", type=int, default=2)
    group.add_argument("--heads", type=int, default=16, help="query heads (default: 16)")
    group.add_argument("--heads-kv", type=int, help="key and value heads (default: as many)")
    group.add_argument("--head-dim", type=int, default=128)
    group.add_argument("--head-dim-v", type=int, help="default: head-dim")
    group.add_argument("--seqlen", type=int, default=4096, help="queries of a sequence")
    group.add_argument("--seqlen-k", type=int, help="keys of a sequence (default: seqlen)")
    group.add_argument("--causal", action="store_true")
    group.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="-1: unbounded")
    group.add_argument("--softcap", type=float, default=0.0)
    group.add_argument("--sink", action="store_true", help="a learnable sink")
    group.add_argument("--varlen", action="store_true", help="packed sequences, found by cu_seqlens")
    group.add_argument("--lse", action="store_true", help="the log-sum-exp is returned")
    group.add_argument("--grad", action="store_true", help="gradients follow")


def problem(args: argparse.Namespace, device_type: str = "cuda") -> Problem:
    left, right = (None if side < 0 else side for side in args.window or (-1, -1))
    heads_kv = args.heads_kv or args.heads
    if args.heads % heads_kv:
        raise SystemExit(f"--heads {args.heads} is no multiple of --heads-kv {heads_kv}")
    return Problem(
        dtype=DTYPES[args.dtype],
        device_type=device_type,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim_v or args.head_dim,
        nheads_q=args.heads,
        nheads_kv=heads_kv,
        batch=args.batch,
        seqlen_q=args.seqlen,
        seqlen_k=args.seqlen_k or args.seqlen,
        packed_q=args.varlen,
        packed_k=args.varlen,
        causal=args.causal,
        window_left=left,
        window_right=right,
        softcap=args.softcap,
        has_sink=args.sink,
        needs_lse=args.lse,
        needs_grad=args.grad,
    )
