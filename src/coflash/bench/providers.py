"""Who is measured. A provider says whether it is here, whether it takes a shape, and gives the call to
time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from coflash.bench.shapes import Shape
from coflash.bench.tensors import Tensors

Context = Callable[[], "AbstractContextManager[Any]"]


class Unsupported(Exception):
    """A provider doesn't take this shape; the message says what it lacks."""


def _same(result: Any) -> Any:
    return result


@dataclass(frozen=True)
class Call:
    """A prepared forward call."""

    forward: Callable[[], Any]  # what is timed
    context: Context = contextlib.nullcontext  # entered around a series of calls, not around each
    restore: Callable[[Any], Tensor] = _same  # from what it returns, the output, laid out as the tensors' q

    def output(self) -> Tensor:
        return self.restore(self.forward())


@dataclass(frozen=True)
class Provider:
    name: str
    about: str
    devices: tuple[str, ...]
    find: Callable[[], str]  # its version; raises ImportError where it isn't installed
    prepare: Callable[[Tensors], Call]
    backward: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def missing(self, device: torch.device) -> str | None:
        """Why it can't run here; None where it can."""
        if device.type not in self.devices:
            return f"needs a {' or '.join(self.devices)} device"
        try:
            self.find()
        except Exception as error:  # a broken installation is as good as none
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None


def _version(distribution: str, module: str) -> str:
    importlib.import_module(module)
    return f"{distribution} {metadata.version(distribution)}"


# ---- coflash
# ----------------------------------------------------------------------------------------------------


def backend(device: torch.device) -> str:
    """What is asked of coflash: a GPU's own kernel, also where calls do not take it by themselves yet."""
    if device.type != "cuda":
        return "auto"
    from coflash import planning

    return "kernel" if planning.device_info(device).arch in planning.CHIPS else "auto"


def _coflash(t: Tensors) -> Call:
    import coflash

    s = t.shape
    options: dict[str, Any] = {
        "causal": s.causal,
        "learnable_sink": t.sink,
        "backend": backend(t.q.device),
    }
    if s.window:
        options["window_size"] = s.window
    return Call(_flash(coflash, t, options))


def _flash(package: Any, t: Tensors, options: dict[str, Any]) -> Callable[[], Any]:
    """The call of a package that has FlashAttention's two functions."""
    if t.cu_seqlens is None:
        return functools.partial(package.flash_attn_func, t.q, t.k, t.v, **options)
    options = {
        "cu_seqlens_q": t.cu_seqlens,
        "cu_seqlens_k": t.cu_seqlens,
        "max_seqlen_q": t.shape.seqlen_q,
        "max_seqlen_k": t.shape.seqlen_k,
        **options,
    }
    return functools.partial(package.flash_attn_varlen_func, t.q, t.k, t.v, **options)


def _coflash_version() -> str:
    import coflash

    return f"coflash {coflash.__version__}"


# ---- PyTorch
# ----------------------------------------------------------------------------------------------------


def _refuse(s: Shape, **lacks: bool) -> None:
    for what, needed in lacks.items():
        if needed:
            raise Unsupported(f"no {what}")


def _sdpa(backend: SDPBackend | None, t: Tensors) -> Call:
    s = t.shape
    _refuse(s, sink=s.sink, window=s.window is not None, varlen=bool(s.lengths))
    if s.causal and s.seqlen_q != s.seqlen_k:
        raise Unsupported("its causal mask is aligned to the top left")
    function = torch.nn.functional.scaled_dot_product_attention
    context: Context = functools.partial(sdpa_kernel, backend) if backend else contextlib.nullcontext
    return _heads_first(function, t, context, is_causal=s.causal)


def _heads_first(
    function: Callable[..., Tensor], t: Tensors, context: Context = contextlib.nullcontext, **options: Any
) -> Call:
    """The call of a function of PyTorch's, whose tensors have their heads before their tokens."""
    q, k, v = (_transpose(x) for x in (t.q, t.k, t.v))
    grouped = t.shape.heads != t.shape.heads_kv
    return Call(functools.partial(function, q, k, v, enable_gqa=grouped, **options), context, _transpose)


def _transpose(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _fa2(t: Tensors) -> Call:
    s = t.shape
    if not s.lengths:
        return _sdpa(SDPBackend.FLASH_ATTENTION, t)
    _refuse(s, sink=s.sink, window=s.window is not None, **{"grouped heads": s.heads != s.heads_kv})
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # Causality was a flag before it became a window.
    if "is_causal" in inspect.signature(varlen).parameters:
        mask: dict[str, Any] = {"is_causal": s.causal}
    else:
        mask = {"window_size": (-1, 0)} if s.causal else {}
    lengths = (t.cu_seqlens, t.cu_seqlens, s.seqlen_q, s.seqlen_k)
    return Call(functools.partial(varlen, t.q, t.k, t.v, *lengths, **mask))


def _flex(t: Tensors) -> Call:
    from torch.nn.attention import flex_attention as flex

    s = t.shape
    _refuse(s, sink=s.sink, varlen=bool(s.lengths))
    mask = None
    if s.causal or s.window:
        mask = flex.create_block_mask(_mask_mod(s), None, None, s.seqlen_q, s.seqlen_k, device=t.q.device)
    return _heads_first(_compiled_flex(), t, block_mask=mask)


def _mask_mod(s: Shape) -> Callable[..., Tensor]:
    offset = s.seqlen_k - s.seqlen_q
    left, right = s.window or (s.seqlen_k + s.seqlen_q, s.seqlen_k + s.seqlen_q)
    if s.causal:
        right = min(right, 0)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q + offset + right) & (kv >= q + offset - left)

    return mask


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention, dynamic=False)


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _cudnn_version() -> str:
    version = torch.backends.cudnn.version()
    if version is None:
        raise ImportError("this PyTorch has no cuDNN")
    return f"cuDNN {version} in torch {torch.__version__}"


# ---- other packages
# ---------------------------------------------------------------------------------------------


def _fa4(t: Tensors) -> Call:
    options: dict[str, Any] = {"causal": t.shape.causal, "learnable_sink": t.sink}
    if t.shape.window:
        options |= {"window_size": t.shape.window, "causal": False}
    return Call(_flash(importlib.import_module("flash_attn.cute"), t, options), restore=_first)


def _fa3(t: Tensors) -> Call:
    s = t.shape
    _refuse(s, sink=s.sink)
    options: dict[str, Any] = {"causal": s.causal}
    if s.window:
        options |= {"window_size": s.window, "causal": False}
    if s.seqlen_q == 1:
        options["num_splits"] = 0  # its heuristic splits long caches
    return Call(_flash(importlib.import_module(_fa3_module()), t, options), restore=_first)


@functools.cache
def _fa3_module() -> str:
    """The package built from source, or the forward alone as a wheel."""
    for name in ("flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
            return name
    raise ImportError("none of flash_attn_interface, flash_attn_3, fa3_fwd_interface is installed")


def _fa3_version() -> str:
    name = _fa3_module()
    return _version("fa3-fwd", name) if name == "fa3_fwd_interface" else name


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


PROVIDERS = {
    p.name: p
    for p in (
        Provider("coflash", "this package", ("cuda", "cpu"), _coflash_version, _coflash),
        Provider(
            "cudnn",
            "cuDNN, through PyTorch's SDPA",
            ("cuda",),
            _cudnn_version,
            functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
        ),
        Provider("fa2", "FlashAttention-2, in PyTorch", ("cuda",), _torch_version, _fa2),
        Provider("flex", "PyTorch's FlexAttention, compiled", ("cuda",), _torch_version, _flex),
        Provider(
            "fa4",
            "flash-attn-4",
            ("cuda",),
            functools.partial(_version, "flash-attn-4", "flash_attn.cute"),
            _fa4,
        ),
        Provider("fa3", "FlashAttention-3, forward", ("cuda",), _fa3_version, _fa3, backward=False),
        Provider(
            "sdpa",
            "PyTorch's SDPA, by the kernel it chooses",
            ("cuda", "cpu"),
            _torch_version,
            functools.partial(_sdpa, None),
        ),
    )
}


def available(device: torch.device, names: list[str] | None = None) -> tuple[list[Provider], dict[str, str]]:
    """The providers that can run on a device, and why the others can't."""
    unknown = set(names or ()) - PROVIDERS.keys()
    if unknown:
        raise ValueError(f"provider {', '.join(sorted(unknown))}: one of {', '.join(PROVIDERS)}")
    here, absent = [], {}
    for name in names or PROVIDERS:
        reason = PROVIDERS[name].missing(device)
        if reason is None:
            here.append(PROVIDERS[name])
        else:
            absent[name] = reason
    return here, absent
