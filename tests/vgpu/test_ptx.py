"""The parser: grammar, scopes, literals, line information, control flow, and errors that name the line."""

from __future__ import annotations

import pytest

from coflash.vgpu import PtxError
from coflash.vgpu.ptx import Imm, Mem, Pair, Reg, Sink, Sym, Vec, literal, parse, split_operands

TOP = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, head: str = "", tail: str = ""):
    text = (
        TOP
        + head
        + ".visible .entry k(.param .u32 a, .param .align 16 .b8 b[24])\n{\n"
        + body
        + "\n}\n"
        + tail
    )
    module = parse(text)
    return module, module.kernel("k")


def test_module_header_and_parameters():
    module, k = kernel("ret;")
    assert module.version == (9, 0) and module.target == "sm_90a"
    assert [(p.name, p.offset, p.size) for p in k.parameters] == [("a", 0, 4), ("b", 16, 24)]
    assert k.parameter_bytes == 40


def test_directives_of_an_entry():
    module = parse(TOP + ".entry k()\n.reqntid 128, 2, 1\n.minnctapersm 1\n.maxnreg 64\n{ ret; }")
    assert module.kernel("k").directives == {"reqntid": (128, 2, 1), "minnctapersm": (1,), "maxnreg": (64,)}


def test_every_kind_of_operand():
    _, k = kernel(
        ".reg .b32 %r<9>; .reg .b64 %d<4>; .reg .pred %p<3>;\n"
        "shfl.sync.idx.b32 %r1|%p1, %r2, 0, 0x1f, -1;\n"
        "ld.shared.v2.b32 {%r3, _}, [%r4+-16];\n"
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2, 7}], [%r3];\n"
        "setp.eq.and.s32 %p1, %r1, 0, !%p2;\n"
        "mov.f32 %r1, 0f3F800000;\n"
        "mov.u64 %d2, b+8;\n"
    )
    shfl, ld, copy, setp, mov, symbol = k.instructions
    first = shfl.operands[0]
    assert isinstance(first, Pair) and isinstance(first.second, Reg) and first.second.width == 1
    assert [o.value for o in shfl.operands[2:]] == [0, 31, -1]
    assert isinstance(ld.operands[0], Vec) and isinstance(ld.operands[0].items[1], Sink)
    assert isinstance(ld.operands[1], Mem) and ld.operands[1].offset == -16
    coordinates = copy.operands[1].extra[0]
    assert isinstance(coordinates, Vec) and coordinates.items[1] == Imm(7)
    assert setp.operands[3].negated
    assert mov.operands[1] == Imm(0x3F800000, 32)
    assert symbol.operands[1] == Sym("b", 8)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-3", -3), ("0x1F", 31), ("0b101", 5), ("017", 15), ("7U", 7), ("0f40490FDB", 0x40490FDB),
     ("0d3FF0000000000000", 0x3FF0000000000000), ("1.5", 0x3FF8000000000000)],
)  # fmt: skip
def test_literals(text, value):
    assert literal(text).value == value


def test_a_register_is_not_a_literal():
    assert literal("%r1") is None and literal("fade") is None


def test_operands_split_at_top_level_commas_only():
    assert [x.strip() for x in split_operands("{a, b}, [c, {d, e}], f")] == ["{a, b}", "[c, {d, e}]", "f"]


def test_scopes_have_their_own_registers_and_labels():
    one = "{ .reg .pred P1; .reg .b32 x; mov.u32 x, 1; again: setp.eq.s32 P1, x, 1; @!P1 bra again; }\n"
    _, k = kernel(one + one)
    assert len(k.labels) == 2 and sorted(k.labels.values()) == [1, 4]
    registers = {i.operands[0] for i in k.instructions if i.op.startswith("mov")}
    assert len(registers) == 2, "a register of an inner scope is a new one each time"
    targets = [i.operands[0].name for i in k.instructions if i.op == "bra"]
    assert [k.labels[t] for t in targets] == [1, 4]


def test_a_branch_out_of_a_scope():
    _, k = kernel(".reg .pred %p<2>;\n{ @%p1 bra end; }\nmembar.gl;\nend: ret;")
    assert k.labels[k.instructions[0].operands[0].name] == 2


def test_line_information():
    module, k = kernel('.loc 1 42 7\n.reg .b32 %r<2>;\nmov.u32 %r1, 1;\n'
                       '.loc 1 43 0, function_name $x, inlined_at 1 3 3\nret;',
                       tail='.file 1 "/src/attention.py"\n')  # fmt: skip
    assert str(module.source(k.instructions[0].loc)) == "/src/attention.py:42"
    assert str(module.source(k.instructions[1].loc)) == "/src/attention.py:43"
    assert k.instructions[0].line == 8


def test_comments_keep_line_numbers():
    _, k = kernel("// one\n/* two\n three */ ret;")
    assert k.instructions[0].line == 8


def test_variables():
    module, k = kernel(
        ".shared .align 16 .b8 tile[64]; ret;",
        head=".extern .shared .align 1024 .b8 dyn[];\n.global .align 4 .u32 table[3] = {1, 2, -1};\n",
    )
    assert (k.variables[0].name, k.variables[0].size, k.variables[0].align) == ("tile", 64, 16)
    dynamic, table = module.variables
    assert dynamic.extern and dynamic.size == 0
    assert table.size == 12 and table.data == bytes.fromhex("0100000002000000ffffffff")


def test_sections_and_functions_are_skipped():
    _, k = kernel("ret;", tail=".section .debug_str { .b8 1,2,3 }\n.func f() { ret; }\n")
    assert len(k.instructions) == 1


def test_reconvergence_is_the_immediate_post_dominator():
    _, k = kernel(
        ".reg .pred %p<3>;\n"
        "@%p1 bra other;\n"  # 0
        "membar.gl;\n"  # 1
        "bra join;\n"  # 2
        "other: @%p2 bra join;\n"  # 3
        "membar.gl;\n"  # 4
        "join: ret;"  # 5
    )
    meet = k.reconvergence()
    assert meet[0] == 5 and meet[3] == 5


def test_sides_that_never_meet():
    _, k = kernel(".reg .pred %p<3>;\n@%p1 bra other;\nret;\nother: ret;")
    assert k.reconvergence()[0] == len(k.instructions)


@pytest.mark.parametrize(
    ("body", "what", "line"),
    [
        (".reg .b32 %r<2>;\nadd.u32 %r1, %r2, 1;", "register %r2 is not declared", 7),
        ("bra nowhere;", "label nowhere is not defined", 6),
        ("a: ret;\na: ret;", "label a is defined twice", 7),
        (".frobnicate 3;", "unknown directive .frobnicate", 6),
        (".reg .q32 %r<2>;", "cannot read the declaration", 6),
        ("@%p1 ret;", "guard %p1", 6),
        ("ret", "never", 6),
        (".reg .b32 %r<2>;\nmov.u32 %r1, ;", "operand is missing", 7),
        (".reg .b32 %r<2>;\nld.global.b32 %r1, [%r1;", "cannot read", 7),
    ],
)
def test_errors_name_the_line(body, what, line):
    with pytest.raises(PtxError, match=what.replace(".", r"\.")) as caught:
        kernel(body)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not a PTX module"),
        ("hello world", "cannot read"),
        (".version 9.0\n.target sm_90a\n.address_size 32\n", "64-bit"),
        (TOP + ".entry k() { ret;", "never closed"),
        (TOP + ".entry k(.param .frob x) { ret; }", "cannot read the parameter"),
    ],
)
def test_texts_that_are_not_modules(text, what):
    with pytest.raises(PtxError, match=what):
        parse(text)


def test_a_kernel_that_is_not_there():
    module, _ = kernel("ret;")
    with pytest.raises(PtxError, match="no kernel named 'other'.*it has: k"):
        module.kernel("other")


def test_vector_registers():
    _, k = kernel(
        "{ .reg .v4 .s32 abcd; mov.s32 abcd.x, 1; mov.s32 abcd.w, abcd.x; st.shared.v4.s32 [0], abcd; }"
    )
    stored = k.instructions[2].operands[1]
    assert isinstance(stored, Vec) and [r.name for r in stored.items] == [
        "abcd.x",
        "abcd.y",
        "abcd.z",
        "abcd.w",
    ]
    assert k.instructions[0].operands[0] == stored.items[0]
