"""On a GPU: the kernel by default, in CUDA graphs, streams, torch.compile and autocast, past 2**31 elements,
from a folder made elsewhere, and in little host time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import coflash

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache_root(monkeypatch, tmp_path_factory):
    """One cache for the whole file, unlike the other tests': each kernel is compiled once."""
    root = tmp_path_factory.getbasetemp() / "gpu-cache"
    monkeypatch.setenv("COFLASH_CACHE", os.environ.get("COFLASH_GPU_TEST_CACHE", str(root)))


@pytest.fixture(autouse=True, scope="module")
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


def normal(*shape, grad=False, dtype=torch.bfloat16, device="cuda"):
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)


def qkv(batch=2, seqlen=512, heads=4, dim=64, **more):
    return tuple(normal(batch, seqlen, heads, dim, **more) for _ in range(3))


def reference(q, k, v, causal=False):
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(
            k.shape[-2] - q.shape[-2]
        )
        scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def assert_right(out, q, k, v, causal=False):
    error = (out.double() - reference(q, k, v, causal)).abs().max().item()
    assert error < 0.02, error


@pytest.mark.parametrize(
    ("dim", "causal", "dtype"),
    [
        (64, False, torch.bfloat16),
        (64, True, torch.float16),
        (128, True, torch.bfloat16),
        (256, False, torch.bfloat16),
    ],
)
def test_the_kernel_is_the_default(dim, causal, dtype, monkeypatch):
    monkeypatch.setattr("coflash.portable.forward", None)  # the portable path would fail
    q, k, v = qkv(dim=dim, dtype=dtype)
    assert_right(coflash.flash_attn_func(q, k, v, causal=causal), q, k, v, causal)


def test_what_the_kernel_cannot_do_is_refused_unless_portable():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="dropout_p.*portable"):
        coflash.flash_attn_func(q, k, v, dropout_p=0.1)
    coflash.flash_attn_func(q, k, v, dropout_p=0.1, backend="portable")


def test_gradients_match_the_portable_path():
    q, k, v = qkv(grad=True)
    dout = normal(*q.shape)
    found = torch.autograd.grad(coflash.flash_attn_func(q, k, v, causal=True), (q, k, v), dout)
    portable = coflash.flash_attn_func(q, k, v, causal=True, backend="portable")
    for a, b in zip(found, torch.autograd.grad(portable, (q, k, v), dout), strict=True):
        assert (a.float() - b.float()).abs().max() < 0.05


@pytest.mark.parametrize("causal", [False, True])
def test_a_cuda_graph(causal):
    q, k, v = qkv()
    coflash.flash_attn_func(q, k, v, causal=causal)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = coflash.flash_attn_func(q, k, v, causal=causal)
        again = coflash.flash_attn_func(out, k, v, causal=causal)
    for _ in range(5):
        q.copy_(normal(*q.shape))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(out, q, k, v, causal)
        assert_right(again, out, k, v, causal)
        # Replays and eager calls side by side do not share a scheduler's counter.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        eager = [coflash.flash_attn_func(q, k, v, causal=causal) for _ in range(10)]
        torch.cuda.synchronize()
        for one in eager:
            assert torch.equal(one, out)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_lengths_that_change(causal):
    """Calls alike but for the values of their lengths, eager and replayed: each takes those it is given."""
    q, k, v = (x.flatten(0, 1) for x in qkv())

    def attention(lengths, q=q):
        options = {"max_seqlen_q": 1024, "max_seqlen_k": 1024, "causal": causal}
        return coflash.flash_attn_varlen_func(q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, **options)

    def check(out, lengths, q=q):
        bounds = lengths.tolist()
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            assert_right(out[None, begin:end], *(x[None, begin:end] for x in (q, k, v)), causal)

    drawn = [torch.tensor([0, cut, 1024], dtype=torch.int32, device="cuda") for cut in (300, 1, 1023, 512)]
    for lengths in drawn * 2:
        check(attention(lengths), lengths)
    inputs = q.clone().requires_grad_()
    for lengths in drawn:
        out = attention(lengths, inputs)
        check(out.detach(), lengths, inputs.detach())
        (gradient,) = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert gradient.isfinite().all()
    held = drawn[0].clone()
    attention(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(held)
    for lengths in drawn:
        held.copy_(lengths)
        graph.replay()
        torch.cuda.synchronize()
        check(out, lengths)


def test_many_streams():
    streams = [torch.cuda.Stream() for _ in range(8)]
    inputs = [qkv(batch=1, seqlen=1024) for _ in streams]
    torch.cuda.synchronize()
    outs = [[] for _ in streams]
    for _ in range(20):
        for stream, (q, k, v), found in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                found.append(coflash.flash_attn_func(q, k, v, causal=True))
    torch.cuda.synchronize()
    for (q, k, v), found in zip(inputs, outs, strict=True):
        assert_right(found[0], q, k, v, causal=True)
        assert all(torch.equal(one, found[0]) for one in found)


def test_many_threads():
    inputs = [qkv(batch=1, seqlen=256 + 64 * i) for i in range(8)]
    failures = []

    def work(q, k, v):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    out = coflash.flash_attn_func(q, k, v, causal=True)
                torch.cuda.current_stream().synchronize()
                assert_right(out, q, k, v, causal=True)
        except Exception as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=x) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_every_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in range(torch.cuda.device_count()):
        for grad in (False, True):
            for _ in range(3):  # planned at first, then from the table
                q, k, v = qkv(device=f"cuda:{index}", grad=grad)  # the current device stays 0
                out = coflash.flash_attn_func(q, k, v, causal=True)
                assert out.device.index == index and torch.cuda.current_device() == 0
                assert_right(out.detach(), q.detach(), k.detach(), v.detach(), causal=True)
    q, k, v = qkv(device="cuda:0")
    with pytest.raises(ValueError, match="v is on cuda:1; accepted: the device of q, cuda:0"):
        coflash.flash_attn_func(q, k, v.to("cuda:1"), causal=True)
    with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream()):  # now 0 is not the current one
        assert_right(coflash.flash_attn_func(q, k, v, causal=True), q, k, v, causal=True)
        assert torch.cuda.current_device() == 1


def test_no_synchronisation_and_no_memory_beyond_the_outputs():
    q, k, v = qkv()
    lengths = torch.tensor([0, 300, 1024], dtype=torch.int32, device="cuda")
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    options = {"max_seqlen_q": 724, "max_seqlen_k": 724, "causal": True}

    def calls():
        coflash.flash_attn_func(q, k, v, causal=True)
        return coflash.flash_attn_varlen_func(*packed, cu_seqlens_q=lengths, cu_seqlens_k=lengths, **options)

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls()
        lse = 4 * q.shape[0] * q.shape[1] * q.shape[2]
        assert torch.cuda.max_memory_allocated() - before <= 2 * (q.nbytes + lse) + 4096
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic):
    @torch.compile(fullgraph=True, dynamic=dynamic)
    def block(q, k, v):
        return coflash.flash_attn_func(q * 2, k, v, causal=True) + 1

    for seqlen in (256, 320):
        q, k, v = qkv(seqlen=seqlen, grad=True)
        out = block(q, k, v)
        assert_right(out.detach() - 1, q.detach() * 2, k.detach(), v.detach(), causal=True)
        out.sum().backward()
        assert q.grad.isfinite().all()


def test_autocast():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = coflash.flash_attn_func(q, k, v, causal=True)
    assert out.dtype == torch.bfloat16
    assert_right(out, *(x.bfloat16() for x in (q, k, v)), causal=True)


def test_strides_and_addresses():
    wide = normal(2, 300, 3, 4, 64)
    q, k, v = wide.unbind(2)
    assert_right(coflash.flash_attn_func(q, k, v), q, k, v)
    q = normal(2, 300, 4, 72)[..., 1:65]  # an address that no copy engine takes
    assert_right(coflash.flash_attn_func(q, k, v), q, k, v)
    spare = normal(2 * 300 * 4 * 64 + 8)
    for shift in (0, 8, 1, 0, 3):  # a call that has been seen, at other addresses
        q = spare[shift : shift + 2 * 300 * 4 * 64].view(2, 300, 4, 64)
        assert_right(coflash.flash_attn_func(q, k, v), q, k, v)
    with pytest.raises(ValueError, match="k is on cpu; accepted: the device of q"):
        coflash.flash_attn_func(q, k.cpu(), v)


def test_the_same_bits_every_time():
    q, k, v = qkv(seqlen=1000, dim=128)
    first = coflash.flash_attn_func(q, k, v, causal=True)
    assert all(torch.equal(coflash.flash_attn_func(q, k, v, causal=True), first) for _ in range(100))


@pytest.mark.parametrize("which", ["queries", "keys"])
def test_past_two_to_the_31_elements(which):
    long, heads, dim = 2**20 + 200, 16, 128
    assert long * heads * dim > 2**31
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    if which == "queries":
        q, k, v = normal(1, long, heads, dim), normal(1, 200, heads, dim), normal(1, 200, heads, dim)
        out = coflash.flash_attn_func(q, k, v)
        for part in (slice(0, 256), slice(long - 300, long)):
            assert_right(out[:, part], q[:, part], k, v)
    else:
        q, k, v = normal(1, 100, heads, dim), normal(1, long, heads, dim), normal(1, long, heads, dim)
        v[:, -1000:] += 30  # what an address that wrapped around would miss
        out = coflash.flash_attn_func(q, k, v)
        for head in (0, heads - 1):
            part = slice(head, head + 1)
            assert_right(out[:, :, part], q[:, :, part], k[:, :, part], v[:, :, part])


@pytest.fixture(scope="module")
def host_times():
    """Seconds of a tiny call: of this package, and of the others that are installed, in the same rounds."""
    from coflash.bench import host, providers

    device = torch.device("cuda", torch.cuda.current_device())
    here, _ = providers.available(device, ["coflash", "sdpa", "cudnn", "fa4"])
    return host.tiny_calls(here, device)


@pytest.mark.parametrize("kind", ["no_grad", "grad"])
def test_host_time_of_a_tiny_call(kind, host_times):
    """At most a quarter of flash-attn-4's (where it isn't installed: of the 147 µs it took first), and below
    PyTorch's own attention, by the kernel it chooses and by cuDNN's."""
    ours = host_times["coflash"][kind]
    theirs = host_times["fa4"][kind] if "fa4" in host_times else 148e-6
    assert ours <= theirs / 4, host_times
    assert ours < min(host_times[name][kind] for name in ("sdpa", "cudnn")), host_times


FIRST_CALL = """
import torch, time
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
started = time.perf_counter()
import coflash
q, k, v = (torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
coflash.flash_attn_func(q, k, v, causal=True)
torch.cuda.synchronize()
print(time.perf_counter() - started)
"""


def environment_of(**env: str) -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env}


def first_call(**env: str) -> float:
    environment = environment_of(**env)
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_first_calls(tmp_path):
    pytest.importorskip("nvidia_cutlass_dsl", reason="needs nvidia-cutlass-dsl")
    cold = first_call(COFLASH_CACHE=str(tmp_path), COFLASH_CACHE_READONLY="")
    warm = first_call(COFLASH_CACHE=str(tmp_path), COFLASH_CACHE_READONLY="")
    assert warm < 0.5
    assert cold < 2.5


def test_a_folder_made_elsewhere_needs_no_dsl(tmp_path):
    pytest.importorskip("nvidia_cutlass_dsl", reason="needs nvidia-cutlass-dsl to make the folder")
    folder = tmp_path / "kernels"
    subprocess.run(
        [sys.executable, "-m", "coflash.cli", "compile", "--arch", "sm_90a", "--head-dim", "64", "--causal"]
        + ["-o", str(folder), "--with-runtime"],
        env=environment_of(),
        check=True,
    )
    code = "import tests.compiler.without_dsl" + FIRST_CALL
    environment = environment_of(COFLASH_CACHE=str(tmp_path / "empty"), COFLASH_CACHE_READONLY=str(folder))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "empty").exists()


def test_launching_takes_no_time_that_grows(monkeypatch):
    """A new length is a new call to plan, never a new kernel to compile."""
    monkeypatch.setattr("coflash.compiler.builder.Worker", None)
    q, k, v = qkv(seqlen=512)
    try:
        coflash.flash_attn_func(q, k, v, causal=True)
    except TypeError:
        pytest.skip("the kernel isn't compiled yet")
    started = time.perf_counter()
    for seqlen in range(1, 200):
        coflash.flash_attn_func(q[:, :seqlen], k[:, :seqlen], v[:, :seqlen], causal=True)
    assert (time.perf_counter() - started) / 199 < 1e-3
