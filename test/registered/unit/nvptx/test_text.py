"""The PTX parser: what it reads, and what it refuses by line; every opcode of the Hopper forms is in a table."""

import sys

import numpy as np
import pytest

from sglang_aiter_moe.nvptx import code, semantics
from sglang_aiter_moe.nvptx.errors import PtxError
from sglang_aiter_moe.nvptx.shared import BASE
from sglang_aiter_moe.nvptx.text import parse
from sglang_aiter_moe.testing.ptx_snippets import module, run_lines
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

TEXT = """//
// Generated
//
.version 8.7
.target sm_90a, texmode_independent
.address_size 64

	// .globl	first              // -- Begin function first
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 small[20];
                                        // @first
.visible .entry first(
	.param .align 64 .b8 first_param_0[128],
	.param .u32 first_param_1,
	.param .u64 .ptr .global .align 1 first_param_2,
	.param .u8 first_param_3,
	.param .f32 first_param_4
)
.reqntid 128, 2
.maxnreg 255
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<2>;
	.reg .f32 	lonely;
	.loc	1 226 0                         // kernel.py:226:0
$L__func_begin0:
// %bb.0:
	ld.param.b32 	%r1, [first_param_1];
	/* a comment
of two lines */ mov.b32 	%r2, dynamic;
	.loc	2 10 4, function_name $L__info_string0, inlined_at 1 7 8 // ring.py:10:4 @[ kernel.py:230:1 ]
	{ .reg .b32 a, b; mov.b32 a, -7; { .reg .pred a; setp.eq.b32 a, %r1, 0; @!a bra DONE; DONE: mov.b32 b, 0x1F; }
	add.s32 %r3, a, b; }
	{
	waitLoop: @%p1 bra.uni waitLoop;
	}
	{
	waitLoop: @%p1 bra.uni waitLoop;
	}
	st.shared.v2.b32 	[dynamic+8], {%r2, %r3};
	ld.shared.b32 %r4, [ small + -4 ];
	elect.sync 	%r5|%p2, -1;
	mov.f32 lonely, 0f3F800000;
	$L_brx_0: .branchtargets
		$L__A,
		$L__B;
	brx.idx %r1, $L_brx_0;
$L__A:                                  // a comment
$L__B:
	.pragma "nounroll";
	ret;
                                        // -- End function
}
	.file	1 "/a path/with; braces { } .py"
	.section	.debug_abbrev
	{
.b8 1
.b8 0
	}
	.section	.debug_macinfo	{	}
"""


def test_a_module():
    program = parse(TEXT)
    assert (program.target, program.version, list(program.kernels)) == ("sm_90a", "8.7", ["first"])
    kernel = program.kernels["first"]
    sizes = [(p.name[-1], p.offset, p.size) for p in kernel.params]
    assert sizes == [("0", 0, 128), ("1", 128, 4), ("2", 136, 8), ("3", 144, 1), ("4", 148, 4)]
    assert kernel.param_bytes == 152
    assert (kernel.threads, kernel.static_shared) == ((128, 2, 1), 20)
    names = [i.name for i in kernel.instructions]
    assert names == [
        "ld.param.b32", "mov.b32", "mov.b32", "setp.eq.b32", "bra", "mov.b32", "add.s32", "bra.uni", "bra.uni",
        "st.shared.v2.b32", "ld.shared.b32", "elect.sync", "mov.f32", "brx.idx", "ret",
    ]  # fmt: skip


def test_scopes_have_names_of_their_own():
    instructions = parse(TEXT).kernels["first"].instructions
    inner, outer = instructions[3].operands[0], instructions[2].operands[0]
    assert (inner.name, outer.name, inner.type, outer.type) == ("a", "a", "pred", "b32")
    assert inner.slot != outer.slot
    assert instructions[4].guard == (inner.slot, True)
    assert instructions[6].operands[1].slot == outer.slot
    assert (
        instructions[4].operands[0].value == 5
    )  # a label in a block, in front of the next instruction
    assert [instructions[i].operands[0].value for i in (7, 8)] == [7, 8]


def test_a_table_of_labels_behind_a_label_in_a_line_of_its_own():
    """As LLVM writes it behind the function's head (Triton 3.9); an empty label is no table's."""
    own = "$L_brx_0:\n\t.branchtargets\n\t\t$L__B,\n\t\t$L__C;\nNOTHING:\n\tmov.f32 lonely, 0f3F800000;"
    text = TEXT.replace("\t$L_brx_0: .branchtargets\n\t\t$L__A,\n\t\t$L__B;\n", "")
    text = text.replace("\tmov.f32 lonely, 0f3F800000;", own)
    text = text.replace("$L__B:\n", "$L__B:\n\tbra.uni NOTHING;\n$L__C:\n")
    kernel = parse(text).kernels["first"]
    assert [i.name for i in kernel.instructions][12:] == ["mov.f32", "brx.idx", "bra.uni", "ret"]
    assert [i.value for i in kernel.instructions[13].operands[1].items] == [14, 15]
    assert kernel.instructions[14].operands[0].value == 12
    with pytest.raises(PtxError, match=r"\.branchtargets"):
        parse(TEXT.replace("$L_brx_0: .branchtargets", ".branchtargets"))


def test_operands():
    instructions = parse(TEXT).kernels["first"].instructions
    store = instructions[9]
    address, vector = store.operands
    assert (address.kind, address.base.kind, address.base.value, address.offset) == (
        "address",
        "symbol",
        BASE + 1024,
        8,
    )
    assert [i.name for i in vector.items] == ["%r2", "%r3"]
    assert (instructions[10].operands[1].base.value, instructions[10].operands[1].offset) == (
        BASE,
        -4,
    )
    pair = instructions[11].operands[0]
    assert (pair.kind, [i.name for i in pair.items]) == ("pair", ["%r5", "%p2"])
    assert (instructions[2].operands[1].value, instructions[5].operands[1].value) == (-7, 31)
    assert instructions[12].operands[1].value == 1.0
    assert [i.value for i in instructions[13].operands[1].items] == [14, 14]


def test_lines_and_sources():
    instructions = parse(TEXT).kernels["first"].instructions
    lines = TEXT.splitlines()
    for instruction in instructions:
        assert instruction.name in lines[instruction.line - 1]
    assert (instructions[0].source, instructions[6].source) == ("kernel.py:226:0", "ring.py:10:4")
    assert instructions[0].line == 1 + lines.index("\tld.param.b32 \t%r1, [first_param_1];")


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("mov.b32 %r1, %foo;", 14, "the operand '%foo'"),
        ("\nmov.b32 %r1, nowhere;", 15, "the operand 'nowhere'"),
        ("bra NOWHERE;", 14, "the operand 'NOWHERE'"),
        ("@%q bra L; L:", 14, "the guard %q"),
        (".local .b8 x[4];", 14, "the directive .local"),
        (".reg .v4 %z<3>;", 14, "v4"),
        ("mov.b32 %r1, 0f3F80;", 14, "the constant '0f3F80'"),
        ("ld.global.b32 %r1, [%rd1+%rd2];", 14, r"the operand '%rd1\+%rd2'"),
    ],
)
def test_what_is_refused_by_line(body, line, message):
    with pytest.raises(PtxError, match=message) as error:
        parse(module(body + "\nret;"))
    assert f"line {line}:" in str(error.value)


def test_text_without_an_end():
    with pytest.raises(PtxError, match="without an end"):
        parse(".version 8.7\n.visible .entry k()\n{\nret;\n")


@pytest.mark.parametrize("declared", ["[11] = {95, 95, 0};", "[11];"])
def test_a_global_array_may_be_declared_but_not_used(declared):
    """Triton leaves ``_$_str``, which nothing uses, where a kernel calls libdevice."""
    text = ".global .align 1 .b8 _$_str" + declared
    before, head, rest = module("mov.b32 %r1, 0;\nret;").partition(".visible .entry")
    kernel = parse(before + text + "\n" + head + rest).kernels["k"]
    assert [i.name for i in kernel.instructions] == ["mov.b32", "ret"]
    used = rest.replace("mov.b32 %r1, 0;", "mov.u64 %rd1, _$_str;")
    with pytest.raises(PtxError, match=r"the operand '_\$_str'"):
        parse(before + text + "\n" + head + used)


def test_an_opcode_nobody_knows_names_its_line():
    with pytest.raises(PtxError, match=r"line 14: the opcode frobnicate\.b32 is not modelled"):
        code.check(parse(module("frobnicate.b32 %r1, %r2;\nret;")))


def test_code_that_is_not_reached_may_be_unknown():
    got = run_lines("bra.uni OVER; frobnicate.b32 %r1; OVER: mov.b32 %y, 3;", {}, {"y": np.int32})
    assert set(got["y"].tolist()) == {3}


def test_the_longest_prefix_decides():
    assert (
        semantics.opcode_of("cp.async.bulk.tensor.2d.shared::cluster.global")
        == "cp.async.bulk.tensor"
    )
    assert semantics.opcode_of("cp.async.wait_group") == "cp.async.wait_group"
    assert semantics.opcode_of("cp.async.ca.shared.global") == "cp.async"
    assert semantics.opcode_of("cpx.async") is None


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
