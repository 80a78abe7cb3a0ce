"""Text that no assembler takes and workgroups that no GPU starts: refused, with the line, before anything runs."""

import sys

import pytest

from sglang_aiter_moe.amdgpu import semantics
from sglang_aiter_moe.amdgpu.assembly import parse, parse_instruction
from sglang_aiter_moe.amdgpu.errors import AssemblyError
from sglang_aiter_moe.amdgpu.machine import run
from sglang_aiter_moe.amdgpu.memory import Memory
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.amdgpu_wave import kernel_text
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    "options, what",
    [
        ({"block": (65, 1, 1)}, "65 work-items.*at most 64"),
        ({"block": (8, 8, 2)}, "128 work-items"),
        ({"grid": (1, 1 << 32, 1)}, "2\\*\\*32 work-items along each"),
        ({"grid": (1 << 26, 1, 1)}, r"67108864, 1, 1\] workgroups of \[64, 1, 1\]"),
        ({"lds_bytes": 160 * 1024 + 1}, "163841 bytes of LDS.*at most 163840 on gfx950"),
    ],
)
def test_workgroups_that_do_not_start(options, what):
    program = parse(kernel_text(""))
    with pytest.raises(ContractError, match=what):
        run(program, "k", Memory(), bytes(8), **({"grid": (1, 1, 1)} | options))
    run(program, "k", Memory(), bytes(8), (1, 1, 1), block=(8, 8, 1), lds_bytes=160 * 1024)


@pytest.mark.parametrize(
    "line",
    [
        "s_movk_i32 s5, foo", "ds_read_b32", "v_add_f16_e32 v1, 1e10, v0", "s_cbranch_scc0", "s_branch 4",
        "s_barrier foo:3", "s_endpgm 1", "s_waitcnt foo(3)", "s_nop v1", "v_pk_add_f16 v1, v0, v0 op_sel:foo",
        "v_pk_add_f16 v1, v0, v0 op_sel:[1]", "v_pk_add_f16 v1, v0, v0 op_sel:[2,0]",
        "v_mov_b32_dpp v1, v0 quad_perm:[0,1,2,9] row_mask:0xf bank_mask:0xf",
        "v_mov_b32_dpp v1, v0 quad_perm:[0,1] row_mask:0xf bank_mask:0xf",
        "v_mov_b32_dpp v1, v0 row_shl:16 row_mask:0xf bank_mask:0xf",
        "v_mov_b32_dpp v1, v0 row_newbcast:16 row_mask:0xf bank_mask:0xf",
        "v_mov_b32_dpp v1, v0 row_shl:1 row_mask:0x1f bank_mask:0xf",
        "v_mul_f32_e64 v1, v0, v0 mul:3", "v_mul_f32_e64 v1, v0, v0 div:4", "v_mul_f32_e64 v1, v0, v0 mul:foo",
        "ds_read_b32 v1, v0 offset:foo", "ds_write_b32 v0, v0 offset:-4", "ds_write_b32 v0, v0 offset:0x10000",
        "ds_read2_b32 v[2:3], v0 offset0:256", "global_load_dword v1, v0, s[4:5] offset:4096",
        "buffer_load_dword v1, v0, s[4:7], 0 offen offset:4096", "s_load_dword s5, s[0:1], 0x0 offset:0x100000",
        "v_bitop3_b32 v1, v0, v0, v0 bitop3:0x100", "v_bitop3_b32 v1, v0, v0, v0 bitop3:foo",
        "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[4:11], 0 cbsz:x",
    ],
)  # fmt: skip
def test_text_that_no_assembler_takes_is_refused_with_its_line(line):
    with pytest.raises(AssemblyError, match=r"line 5: .*is not modelled"):
        run(parse(kernel_text("	" + line)), "k", Memory(), bytes(8), (1, 1, 1))


ODD = [
    "v_lshl_add_u64 v[3:4], v[2:3], 0, v[2:3]", "v_lshl_add_u64 v[4:5], v[3:4], 0, v[2:3]", "ds_read_b64 v[1:2], v0",
    "ds_write_b96 v0, v[1:3]", "ds_read_b128 v[1:4], v0", "global_load_dwordx2 v[3:4], v0, s[4:5]",
    "global_load_dword v3, v0, s[5:6]", "flat_load_dword v3, v[1:2]", "s_mov_b64 s[5:6], 0",
    "s_load_dwordx4 s[6:9], s[0:1], 0x0", "s_load_dwordx8 s[6:13], s[0:1], 0x0", "s_load_dwordx2 s[3:4], s[0:1], 0x0",
    "buffer_load_dword v1, v0, s[6:9], 0 offen", "v_cmp_gt_u32_e64 s[5:6], v0, v1",
    "v_cndmask_b32_e64 v0, v1, v2, s[5:6]",
    "v_mfma_f32_16x16x16_bf16 a[1:4], v[4:5], v[4:5], 0", "v_mfma_f32_16x16x16_bf16 a[0:3], v[5:6], v[4:5], 0",
]  # fmt: skip
EVEN = [
    "v_lshl_add_u64 v[2:3], v[2:3], 0, v[2:3]", "ds_read_b64 v[2:3], v0", "ds_write_b96 v0, v[2:4]",
    "ds_read_b128 v[2:5], v0", "s_mov_b64 s[6:7], 0", "s_load_dwordx4 s[8:11], s[0:1], 0x0",
    "s_load_dwordx8 s[4:11], s[0:1], 0x0", "buffer_load_dword v1, v0, s[4:7], 0 offen", "v_cmp_gt_u32_e64 vcc, v0, v1",
    "v_mfma_f32_16x16x16_bf16 a[2:5], v[6:7], v[4:5], 0",
]  # fmt: skip


@pytest.mark.parametrize("line", ODD)
def test_registers_that_begin_where_none_may(line):
    with pytest.raises(
        AssemblyError, match=r"line 5: .* begins at register \d+, where .* multiple"
    ):
        parse(kernel_text("	" + line))


def test_llvm_says_the_same_of_where_registers_begin():
    pytest.importorskip("triton")
    from sglang_aiter_moe.testing.amd_mutation import assembles

    for arch in ("gfx942", "gfx950"):
        assert not any(assembles(line, arch) for line in ODD)
        assert all(assembles(line, arch) for line in EVEN)
    for line in EVEN:
        semantics.build(parse_instruction(line, 1, "gfx950"))


NEWER = [
    "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[8:11], 0, v12, v13 op_sel_hi:[0,0,0] cbsz:4 blgp:4",
    "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[4:11], v[4:11], 0", "v_mfma_f32_16x16x32_f16 v[0:3], v[4:7], v[4:7], 0",
    "v_mfma_f32_32x32x16_bf16 v[0:15], v[4:7], v[4:7], 0", "ds_read_b64_tr_b16 v[2:3], v1",
    "v_permlane32_swap_b32_e32 v1, v2", "v_bitop3_b32 v1, v2, v3, v4 bitop3:1", "v_cvt_pk_bf16_f32 v1, v2, v3",
    "v_cvt_scalef32_pk_f32_fp4 v[4:5], v1, v2", "v_maximum3_f32 v1, v2, v3, v4", "v_cvt_f32_bf16_e32 v1, v2",
    "buffer_load_dwordx4 v1, s[4:7], 0 offen lds", "global_load_lds_dwordx3 v1, s[4:5]",
    "buffer_atomic_pk_add_bf16 v1, v2, s[4:7], 0 offen",
]  # fmt: skip


@pytest.mark.parametrize("line", NEWER)
def test_what_only_gfx950_has(line):
    """That LLVM's assembler says the same is checked where Triton is there."""
    semantics.build(parse_instruction(line, 1, "gfx950"))
    with pytest.raises(AssemblyError, match="on gfx942, which does not have it"):
        semantics.build(parse_instruction(line, 1, "gfx942"))


def test_llvm_says_the_same_of_both_targets():
    pytest.importorskip("triton")
    from sglang_aiter_moe.testing.amd_mutation import assembles

    older = [
        "v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[4:5], 0", "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[4:5], 0",
        "buffer_load_dword v1, s[4:7], 0 offen lds", "buffer_load_dwordx4 v[0:3], v1, s[4:7], 0 offen",
        "global_load_lds_dword v1, s[4:5]", "ds_pk_add_bf16 v1, v2", "global_atomic_pk_add_bf16 v1, v2, s[4:5]",
    ]  # fmt: skip
    for line in NEWER:
        assert (assembles(line, "gfx942"), assembles(line, "gfx950")) == (False, True)
    for line in older:
        assert assembles(line, "gfx942") and assembles(line, "gfx950")
        semantics.build(parse_instruction(line, 1, "gfx942"))


@pytest.mark.parametrize(
    "line",
    [
        "v_mov_b32_dpp v1, v0 row_shl:15 row_mask:0xf bank_mask:0xf", "v_mul_f32_e64 v1, v0, v0 mul:4",
        "ds_write_b32 v0, v0 offset:0xffff", "s_waitcnt vmcnt(0) expcnt(0) & lgkmcnt(0)", "s_nop 7",
        "global_load_dword v1, v0, s[4:5] offset:-4096", "buffer_load_dword v1, v0, s[4:7], 0 offen offset:4095",
        "ds_read2_b32 v[2:3], v0 offset0:255 offset1:1",
    ],
)  # fmt: skip
def test_the_outermost_values_are_decoded(line):
    semantics.build(parse_instruction(line, 1, "gfx950"))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
