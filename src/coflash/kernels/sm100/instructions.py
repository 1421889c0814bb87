"""Single instructions of the Blackwell kernels, as functions on registers.

Shared memory is addressed by 32-bit integers, tensor memory by 32-bit integers (lane << 16 | column), global memory
by 64-bit integers: the kernels' tables of offsets stay readable, and every address is one addition.  What the DSL
offers with the right form is used as it is; the rest is inline PTX.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.experimental import primitives as prims

from coflash.kernels.parts.inline import ptx

SHARED, TENSOR = 3, 6  # LLVM address spaces
PEER_MASK = (
    0xFEFFFFFF - 2**32
)  # clears the bit of a shared address that tells a pair's CTAs apart: the leader's


def shared(address: Int32, element: Any = Int64) -> cutlass.Pointer:
    return cutlass.inttoptr(address, SHARED, element)


def tensor(address: Int32, element: Any = Int32) -> cutlass.Pointer:
    return cutlass.inttoptr(address, TENSOR, element)


# ---- barriers ----


@dsl_user_op
def init(barrier: Int32, arrivals: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Make a barrier whose phases take `arrivals` arrivals."""
    if isinstance(arrivals, int):
        ptx(None, f"mbarrier.init.shared::cta.b64 [$0], {arrivals};", "r", barrier, loc=loc, ip=ip)
    else:
        ptx(None, "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", barrier, arrivals, loc=loc, ip=ip)


@dsl_user_op
def wait(
    barrier: Int32, parity: Int32, *, order: str = "acquire.cta", loc: Any = None, ip: Any = None
) -> None:
    """Block until the barrier's phase of this parity is complete. `order`: what this thread then sees; relaxed is
    enough for tensor memory between tcgen05 fences, and spares the multiprocessor's first-level cache."""
    ptx(
        None,
        "{\n\t.reg .pred done;\nagain:\n\t"
        f"mbarrier.try_wait.parity.{order}.shared::cta.b64 done, [$0], $1, 10000000;\n\t"
        "@!done bra again;\n\t}",
        "r,r",
        barrier,
        Int32(parity),
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def arrive(barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    ptx(None, "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", "r", barrier, loc=loc, ip=ip)


@dsl_user_op
def arrive_at(barrier: Int32, rank: int, *, order: str = "release", loc: Any = None, ip: Any = None) -> None:
    """Arrive at the barrier that CTA `rank` of the cluster has at this address. A release waits until all that
    this thread wrote is visible to the cluster; relaxed is enough for tensor memory behind a tcgen05 fence."""
    ptx(
        None,
        "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, $0, $1;\n\t"
        f"mbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [remote];\n\t}}",
        "r,r",
        barrier,
        Int32(rank),
        loc=loc,
        ip=ip,
    )


# ---- shared memory ----


@dsl_user_op
def store_shared(address: Int32, words: list[Any], *, loc: Any = None, ip: Any = None) -> None:
    """1, 2 or 4 registers to as many aligned words."""
    kind = "f" if isinstance(words[0], Float32) else "r"
    if len(words) == 1:
        ptx(None, "st.shared.b32 [$0], $1;", f"r,{kind}", address, *words, loc=loc, ip=ip)
        return
    operands = ", ".join(f"${i + 1}" for i in range(len(words)))
    text = f"st.shared.v{len(words)}.b32 [$0], {{{operands}}};"
    ptx(None, text, ",".join(["r"] + [kind] * len(words)), address, *words, loc=loc, ip=ip)


@dsl_user_op
def load_shared(
    address: Int32, count: int, element: Any = Int32, *, loc: Any = None, ip: Any = None
) -> list[Any]:
    """1, 2 or 4 aligned words."""
    kind, of = ("f", T.f32()) if element is Float32 else ("r", T.i32())
    if count == 1:
        return [element(ptx(of, "ld.shared.b32 $0, [$1];", f"={kind},r", address, loc=loc, ip=ip))]
    results = ", ".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.b32 {{{results}}}, [${count}];"
    constraints = ",".join([f"={kind}"] * count + ["r"])
    fields = ptx(llvm.StructType.get_literal([of] * count), text, constraints, address, loc=loc, ip=ip)
    return [element(llvm.extractvalue(of, fields, [i], loc=loc, ip=ip)) for i in range(count)]


# ---- the copy engine ----


@dsl_user_op
def load_tile(
    destination: Int32,
    tensor_map: Int64,
    coordinates: list[Int32],
    barrier: Int32,
    *,
    pair: bool,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """A box of global memory to shared memory; its bytes count at `barrier`, in a pair at the leader's."""
    rank = len(coordinates)
    at = ", ".join(f"${i + 3}" for i in range(rank))
    if pair:
        barrier = barrier & Int32(PEER_MASK)
    ptx(
        None,
        f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {{{at}}}], [$2];"
        if not pair
        else f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
        f" [$0], [$1, {{{at}}}], [$2];",
        ",".join(["r", "l", "r"] + ["r"] * rank),
        destination,
        tensor_map,
        barrier,
        *[Int32(c) for c in coordinates],
        loc=loc,
        ip=ip,
    )


# ---- tensor memory ----


def tmem_stored() -> None:
    prims.tcgen05_wait("store")


@dsl_user_op
def commit(barrier: Int32, ctas: int | None, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive at `barrier` when all tensor-core work issued by this thread is done; `ctas`: in these of the cluster."""
    text = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster{}.b64 [$0]{};"
    if ctas is None:
        ptx(None, text.format(1, "", ""), "r", barrier, loc=loc, ip=ip)
    else:
        half = cutlass.Int16(ctas)
        ptx(None, text.format(2, ".multicast::cluster", ", $1"), "r,h", barrier, half, loc=loc, ip=ip)


# ---- arithmetic ----


@dsl_user_op
def join(low: Int32, high: int, *, loc: Any = None, ip: Any = None) -> Int64:
    """A 64-bit register of two halves."""
    high -= (high >> 31) << 32
    return Int64(ptx(T.i64(), "mov.b64 $0, {$1, $2};", "=l,r,r", low, Int32(high), pure=True, loc=loc, ip=ip))


@dsl_user_op
def address_of(array: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Shared-memory address of an array."""
    return Int32(llvm.ptrtoint(T.i32(), array.data_ptr().ir_value(), loc=loc, ip=ip))


@dsl_user_op
def twice(a: Float32, *, loc: Any = None, ip: Any = None) -> Int64:
    """A number in both halves of a 64-bit register."""
    return Int64(ptx(T.i64(), "mov.b64 $0, {$1, $1};", "=l,f", a, pure=True, loc=loc, ip=ip))


@dsl_user_op
def total(pairs: list[Any], *, loc: Any = None, ip: Any = None) -> Float32:
    """Sum of two packed float32 pairs."""
    both = ptx(T.i64(), "add.rn.f32x2 $0, $1, $2;", "=l,l,l", *pairs, pure=True, loc=loc, ip=ip)
    low, high = halves(both, loc=loc, ip=ip)
    return low + high


@dsl_user_op
def halves(a: Int64, *, loc: Any = None, ip: Any = None) -> tuple[Float32, Float32]:
    fields = ptx(
        llvm.StructType.get_literal([T.f32()] * 2),
        "mov.b64 {$0, $1}, $2;",
        "=f,=f,l",
        a,
        pure=True,
        loc=loc,
        ip=ip,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), fields, [i], loc=loc, ip=ip)) for i in range(2))


@dsl_user_op
def rcp(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    return Float32(ptx(T.f32(), "rcp.approx.ftz.f32 $0, $1;", "=f,f", a, pure=True, loc=loc, ip=ip))


@dsl_user_op
def log2(a: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    return Float32(ptx(T.f32(), "lg2.approx.ftz.f32 $0, $1;", "=f,f", a, pure=True, loc=loc, ip=ip))


# ---- cluster launch control ----


@dsl_user_op
def ask_for_launch(answer: Int32, barrier: Int32, *, pair: bool, loc: Any = None, ip: Any = None) -> None:
    """Take over a cluster that has not started; the answer (16 bytes) counts at `barrier`, in a pair in both CTAs."""
    how = "async.shared::cta.mbarrier::complete_tx::bytes" + (".multicast::cluster::all" if pair else "")
    ptx(
        None,
        f"clusterlaunchcontrol.try_cancel.{how}.b128 [$0], [$1];",
        "r,r",
        answer,
        barrier,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def launch_answer(answer: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Int32, Int32]:
    """Whether a cluster was taken over (1 or 0), and the x coordinate of its first CTA."""
    text = (
        "{\n\t.reg .b128 answer;\n\t.reg .pred taken;\n\tld.shared.b128 answer, [$2];\n\t"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 taken, answer;\n\t"
        "selp.b32 $0, 1, 0, taken;\n\tmov.b32 $1, 0;\n\t"
        "@taken clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 $1, answer;\n\t}"
    )
    fields = ptx(llvm.StructType.get_literal([T.i32()] * 2), text, "=&r,=&r,r", answer, loc=loc, ip=ip)
    return tuple(Int32(llvm.extractvalue(T.i32(), fields, [i], loc=loc, ip=ip)) for i in range(2))


# ---- global memory ----


@dsl_user_op
def store_global(address: Int64, words: list[Int32], *, loc: Any = None, ip: Any = None) -> None:
    """4 or 8 registers to 16 or 32 consecutive bytes, as aligned as they are long."""
    operands = ", ".join(f"${i + 1}" for i in range(len(words)))
    ptx(
        None,
        f"st.global.v{len(words)}.b32 [$0], {{{operands}}};",
        ",".join(["l"] + ["r"] * len(words)),
        address,
        *words,
        loc=loc,
        ip=ip,
    )
