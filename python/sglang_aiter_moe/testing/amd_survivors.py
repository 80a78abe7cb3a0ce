"""Mutants of AMD kernels that nothing noticed, and why they have no effect on what the kernel writes.

Read off the kernels that Triton 3.9.0 compiles; for ``docs/amd-execution.md``. A survivor that is not here counts as
one that the launches of ``amd_launches.py`` do not notice.
"""

_QUOTIENT = (
    "one of the corrections of a quotient; the others bring it to the same number, or to within {} of it, "
    "which {} hide"
)
_SIGN = "extends the sign of a number that is never negative"
_TINY = "1 + it, and 1 - it, are 1 either way"

REASONS = {
    ("A4W4", "stage1_kernel"): {
        "s_mov_b32 s10, s6 -> s_mov_b32 s10, s87": "the size of a buffer: the bits of 25.0 are one that holds "
        "every offset of the launch",
        "v_add_f32_e32 v43, v140, v43 -> v_sub_f32_e32 v43, v140, v43": "the exponent of an exponential below "
        f"2**-126, moved by 64 down in place of up: {_TINY}",
        "v_mul_f32_e32 v49, v43, v37 -> v_add_f32_e32 v49, v43, v37": "the first guess of (1 - e) / (1 + e), used "
        "from 0.1 on, where two corrections bring it to the same number",
        "v_cndmask_b32_e32 v61, 0, v134, vcc -> v_cndmask_b32_e32 v61, 8, v134, vcc": "adds 1e-44 in place of 0 "
        "to an exponent",
        "v_cmp_gt_f32_e32 vcc, s97, v51 -> v_cmp_gt_f32_e32 vcc, s97, v85": "whether an exponent is moved by 64 "
        "and back: the exponential is the same to 3e-6, which 4-bit numbers hide",
    },
    ("A16W4", "stage1_kernel"): {
        "v_cndmask_b32_e64 v60, v40, v60, s[0:1] -> s_nop 0": "a gate's scale past the end reads as NaN; its up "
        "column's lies further on, and makes the result NaN by itself",
        "v_fmac_f32_e32 v31, v38, v29 -> s_nop 0": _QUOTIENT.format("1e-7", "bf16 numbers"),
    },
    ("A8W4", "stage1_kernel"): {
        "v_cmp_gt_f32_e64 s[6:7], s9, v58 -> v_cmp_gt_f32_e64 s[6:7], s36, v58": "whether an exponent is moved by "
        "64 and back: the exponential is the same to 3e-6, which 8-bit numbers hide",
        "v_fmac_f32_e32 v37, v34, v37 -> v_fmac_f32_e32 v37, v34, v12": _QUOTIENT.format(
            "1e-6", "8-bit numbers"
        ),
    },
    ("A4W4", "stage2_kernel"): {"v_bfe_i32 v4, v4, 0, 16 -> s_nop 0": _SIGN},
    ("A8W4", "stage2_kernel"): {
        "v_bfe_i32 v5, v5, 0, 16 -> v_bfe_i32 v5, v5, 0, 18": _SIGN,
        "v_ashrrev_i32_e32 v19, 31, v18 -> v_ashrrev_i32_e32 v19, 23, v18": "the high half of an offset below 2**23, 0 "
        "either way",
    },
    ("A16W4", "stage2_kernel"): {
        "v_mov_b32_e32 v14, v0 -> v_mov_b32_e32 v14, v64": "a sum starts at the number whose bits are a small integer, "
        "below 1e-40, in place of 0",
    },
}
"""(mode, kernel) -> "before -> after" -> why it has no effect."""


def why(mode: str, kernel: str, before: str, after: str) -> str | None:
    """None: it may have one that the launches do not show."""
    return REASONS.get((mode, kernel), {}).get(f"{before} -> {after}")
