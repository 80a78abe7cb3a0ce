"""Assembly text to instructions and kernels."""

import sys

import pytest

from sglang_aiter_moe.amdgpu.assembly import Argument, Operand, parse, parse_instruction
from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.amdgpu.metadata import parse_metadata
from sglang_aiter_moe.testing.amdgpu_wave import kernel_text
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("v7", Operand("v", 7)),
        ("v[4:7]", Operand("v", 4, 4)),
        ("v[4]", Operand("v", 4)),
        ("a[0:15]", Operand("a", 0, 16)),
        ("s[2:3]", Operand("s", 2, 2)),
        ("vcc", Operand("s", 106, 2)),
        ("vcc_hi", Operand("s", 107)),
        ("exec", Operand("s", 126, 2)),
        ("m0", Operand("s", 124)),
        ("-17", Operand("int", value=-17)),
        ("0x3fb8aa3b", Operand("int", value=0x3FB8AA3B)),
        ("-0.5", Operand("float", value=-0.5)),
        ("1.0", Operand("float", value=1.0)),
        ("0.15915494", Operand("float", value=0.15915494)),
        ("off", Operand("off")),
        (".LBB0_3", Operand("label", value=".LBB0_3")),
        ("-v3", Operand("v", 3, negate=True)),
        ("-s22", Operand("s", 22, negate=True)),
        ("|v3|", Operand("v", 3, absolute=True)),
        ("-|v3|", Operand("v", 3, negate=True, absolute=True)),
        ("sext(v3)", Operand("v", 3, sext=True)),
        ("neg(1)", Operand("int", value=1, negate=True)),
        ("src_scc", Operand("name", value="src_scc")),
    ],
)
def test_operands(text, operand):
    assert parse_instruction(f"v_mov_b32_e32 v0, {text}").operands[1] == operand


def test_an_instruction():
    i = parse_instruction(
        "v_pk_mul_f32 v[0:1], s[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1]", 9, "gfx950"
    )
    assert (i.mnemonic, i.opcode, i.encoding, i.line, i.target) == (
        "v_pk_mul_f32",
        "v_pk_mul_f32",
        "",
        9,
        "gfx950",
    )
    assert i.modifiers == {"op_sel": (1, 0), "op_sel_hi": (0, 1)}
    i = parse_instruction(
        "v_add_u32_sdwa v0, v1, sext(v2) dst_sel:WORD_1 dst_unused:UNUSED_PAD src1_sel:BYTE_0"
    )
    assert (i.opcode, i.encoding, i.modifiers["dst_sel"]) == ("v_add_u32", "sdwa", "WORD_1")
    i = parse_instruction("buffer_load_dwordx4 v1, s[0:3], s7 offen offset:48 lds")
    assert len(i.operands) == 3 and i.modifiers == {"offen": True, "offset": 48, "lds": True}
    i = parse_instruction(
        "v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xa bound_ctrl:1"
    )
    assert i.modifiers == {
        "quad_perm": (1, 0, 3, 2),
        "row_mask": 15,
        "bank_mask": 10,
        "bound_ctrl": 1,
    }
    assert [o.value for o in parse_instruction("s_waitcnt vmcnt(0) lgkmcnt(1)").operands] == [
        "vmcnt(0)",
        "lgkmcnt(1)",
    ]
    assert parse_instruction("s_endpgm").operands == ()


@pytest.mark.parametrize(
    "line",
    [
        "v_mov_b32 v0, v1 wobble", "v_mov_b32 v0, %v1", "v_mov_b32 v0 v1, v2", "x v0 op_sel:[a]",
        "v_mov_b32 v256, v1", "v_mov_b64 v[255:256], 0", "v_mov_b32 v0, a256", "s_mov_b32 s102, 0",
        "s_mov_b64 s[101:102], 0", "v_mov_b64 v[3:2], 0", "ds_read_b32 v1, v0 offset:4 offset:8",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_quoted(line):
    with pytest.raises(AssemblyError, match="line 12"):
        parse_instruction(line, 12)


def test_a_kernel():
    text = kernel_text(
        "	v_mov_b32_e32 v1, 0 ; comment\n.LBB0_1:                ; %loop\n	s_branch .LBB0_1",
        lds=512,
        kernargs=24,
    )
    more = (
        "	.amdhsa_user_sgpr_dispatch_ptr 1\n		.amdhsa_user_sgpr_kernarg_preload_length 4\n"
    )
    text = text.replace("	.amdhsa_system_sgpr", more + "		.amdhsa_system_sgpr", 1)
    program = parse(text)
    assert [i.opcode for i in program.instructions] == ["v_mov_b32", "s_branch", "s_endpgm"]
    assert program.labels == {"k": 0, ".LBB0_1": 1}
    assert (
        program.instructions[0].line
        == text.splitlines().index("	v_mov_b32_e32 v1, 0 ; comment") + 1
    )
    k = program.kernels["k"]
    assert (k.entry, k.target, k.lds_bytes, k.kernarg_size, k.workgroup_size, k.wavefront_size) == (
        0,
        "gfx950",
        512,
        24,
        64,
        64,
    )
    assert k.arguments == (Argument(0, 8, "global_buffer"),)
    assert k.user_sgprs == (("dispatch_ptr", 2), ("kernarg_segment_ptr", 2))
    assert k.kernarg_preload == (0, 4)
    assert (k.workgroup_ids, k.workitem_ids) == ((True, False, False), 0)


def test_sections_other_than_code_are_not_code():
    text = (
        kernel_text("	s_nop 0")
        + '	.section .debug_str,"MS",@progbits,1\nanother:\n	.asciz "v_wobble; x"\n'
    )
    program = parse(text)
    assert set(program.labels) == {"k"} and len(program.instructions) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("unknown-gfx950", "unknown-gfx1250"), "gfx1250"),
        (("	.amdgcn_target", "	.nothing"), "names nothing"),
        (("	s_endpgm", "	s_branch .LBB7_7"), ".LBB7_7 is nowhere"),
        (
            ("	.amdhsa_float_denorm_mode_32 3", "	.amdhsa_float_denorm_mode_32 0"),
            "float_denorm_mode_32 of k is 0",
        ),
        (("	.amdhsa_float_denorm_mode_32 3", ""), "float_denorm_mode_32 of k is 0"),
        (
            (
                "	.amdhsa_float_denorm",
                "	.amdhsa_float_round_mode_32 3\n	.amdhsa_float_denorm",
            ),
            "float_round_mode_32",
        ),
        (("segment_fixed_size 0", "segment_fixed_size max(a, b)"), "group_segment_fixed_size"),
        ((".wavefront_size: 64", ".wavefront_size: 32"), "waves of 32"),
        (("\nk:\n", "\nkk:\n"), "the kernel k has no label"),
        (("    .name:           k\n", ""), "lacks or misplaces '.name'"),
        (("        .size:           8\n", ""), "lacks or misplaces '.size'"),
        ((".size: ", ".seize: "), "lacks or misplaces '.size'"),
        (("amdhsa.kernels:", "amdhsa.kernels: 5\nx:"), "metadata of the kernels"),
    ],
)
def test_what_is_not_modelled_is_refused(change, named):
    with pytest.raises(AssemblyError, match=named):
        parse(kernel_text("").replace(*change))


def test_features_after_the_target_do_not_count():
    assert parse(kernel_text("", target="gfx942:sramecc+:xnack-")).kernels["k"].target == "gfx942"


def test_metadata():
    text = """---
amdhsa.kernels:
  - .agpr_count:     4
    .args:
      - .address_space:  global
        .offset:         0
      - .name:           'x y'
        .offset:         0x8
    .reqd_workgroup_size:
      - 256
      - 1
    .symbol:         k.kd
    .uses_dynamic_stack: false
  - .args:           []
    .symbol:         other
amdhsa.version:
  - 1
  - 2
...
"""
    assert parse_metadata(text.splitlines()) == {
        "amdhsa.kernels": [
            {
                ".agpr_count": 4, ".args": [{".address_space": "global", ".offset": 0}, {".name": "x y", ".offset": 8}],
                ".reqd_workgroup_size": [256, 1], ".symbol": "k.kd", ".uses_dynamic_stack": False,
            },
            {".args": [], ".symbol": "other"},
        ],
        "amdhsa.version": [1, 2],
    }  # fmt: skip
    assert parse_metadata([]) == {}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
