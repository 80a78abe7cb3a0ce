"""Builds the Hopper forms for sm90 without a GPU and counts the instructions of their inner loops.

The layouts that make them fast (no exchange between lanes, nothing staged in shared memory but tokens) are the
compiler's choice for the bf16 forms and asserted, not promised, for the others; this is where a new Triton shows
that it
chooses differently. Must run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from sglang_aiter_moe.portable.triton.hopper import read_once, table
from sglang_aiter_moe.portable.triton.hopper.fp8_launch import Ring
from sglang_aiter_moe.portable.triton.hopper.fp8_stage1 import stage1_fp8
from sglang_aiter_moe.portable.triton.hopper.fp8_stage2 import stage2_fp8
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_launch import MxPrefillConfig
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_stage1 import stage1_mx_prefill
from sglang_aiter_moe.portable.triton.hopper.mx_prefill_stage2 import stage2_mx_prefill
from sglang_aiter_moe.portable.triton.hopper.prefill_stage1 import stage1_prefill
from sglang_aiter_moe.portable.triton.hopper.prefill_stage2 import stage2_prefill
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_stage1 import stage1_shared
from sglang_aiter_moe.portable.triton.hopper.shared_prefill_stage2 import stage2_shared
from sglang_aiter_moe.portable.triton.hopper.stage1 import stage1_hopper
from sglang_aiter_moe.portable.triton.hopper.stage2 import stage2_list
from sglang_aiter_moe.portable.triton.hopper.whole import whole_layer
from sglang_aiter_moe.portable.triton.hopper.wide_launch import ahead
from sglang_aiter_moe.portable.triton.hopper.wide_stage1 import stage1_wide
from sglang_aiter_moe.portable.triton.hopper.wide_stage2 import stage2_wide
from sglang_aiter_moe.testing.triton_compile import FLOATS, POINTERS

BIN = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
BF16 = POINTERS | {
    "x_ptr": "bf16", "a_ptr": "bf16", "words_ptr": "i32", "w2_ptr": "i32", "scale_ptr": "u8", "ids_ptr": "i32",
    "w_ptr": "u8",
}  # fmt: skip
FP8 = POINTERS | {
    "x_ptr": "fp8e4nv", "a_ptr": "fp8e4nv", "x_scale_ptr": "fp32", "a_scale_ptr": "fp32", "w_ptr": "u8",
    "scale_ptr": "i32", "starts_ptr": "i32", "counter_ptr": "i32",
}  # fmt: skip
PAIR = FP8 | {"a_ptr": "bf16"}
WHOLE = POINTERS | {
    "x_ptr": "bf16", "a_ptr": "bf16", "ids_ptr": "i32", "state_ptr": "i32", "out_ptr": "bf16", "bias13_ptr": "fp32",
    "bias2_ptr": "fp32",
}  # fmt: skip
PREFILL = BF16 | {"w_ptr": "i32", "block_rows_ptr": "i32"}
MX = FP8 | {"w_ptr": "i32", "block_rows_ptr": "i32"}
K3 = {"H": 3584, "I": 384}
STAGE1 = K3 | {"LAYOUT": "separated", "ACTIVATION": "situv2", "HAS_LIMIT": False, "HAS_BIAS": False}


def mx_config(group: str, name: str = "mx_prefill"):
    """The table's first configuration of the fp8 prefill form (of short layers one that the tuner times: the table has
    none), or the last of the shared one."""
    found = [config for _, form, config in table.load()[group] if form == name]
    if name == "mx_prefill" and "short" in group:
        found = [MxPrefillConfig(32, 64, 4, 64, 4, 7, 96, 128)]
    return found[0 if name == "mx_prefill" else -1]


def forms() -> dict[str, tuple]:
    """name -> (kernel, constants, element types, warps, columns of the matrix instruction)."""
    bf16 = {"ASM": True, "T": 8, "R": 32, "G": 1, "PDL": True}
    stage1 = (
        STAGE1
        | bf16
        | {"H_USED": 3584, "I_USED": 384, "A_STRIDE": 384, "PREFETCH": False, "X_STRIDE": 3584}
    )
    stage2 = K3 | bf16 | {"I_USED": 384, "A_STRIDE": 384, "HAS_BIAS": False, "G": 4, "U": 1}
    oss = {"H": 2880, "I": 2880}
    fp8 = {
        "PARTS": 2,
        "PDL": True,
        "N": 8,
        "W": 4,
        "SB": 16,
        "SLOTS": 3,
        "BY_ROW": True,
        "QUEUE": 897,
    }
    fp8 |= {"TAIL": 0, "UNIT": 1}
    fp8_two = fp8 | {"DISCARDED": True}
    queue = {"TAIL": 3, "UNIT": 1}
    blocks = {"PARTS": 1, "BY_ROW": False}
    pair = {"RULE": "none", "VIA_BF16": False, "QUADS2": 3}
    epilogue = {"RULE": "epilogue", "VIA_BF16": False, "QUADS2": 3}
    whole = {"HAS_BIAS13": False, "HAS_BIAS2": False, "SB": 16, "SLOTS": 5}
    whole |= {"HALVES": False, "NARROW": False, "ONE": False}
    one = {k: v for k, v in STAGE1.items() if k != "HAS_BIAS"} | whole | {"TOPK": 16}
    one_oss = one | oss | {"TOPK": 4, "HAS_BIAS13": True, "HAS_BIAS2": True, "ACTIVATION": "swiglu"}
    prefill = {"WIDE": False, "R": 128, "W": 8}
    groups = ("A8W4 short", "A8W4 long")
    short, long = (mx_config(group) for group in groups)
    shared, shared_long = (mx_config(group, "shared_prefill") for group in groups)
    shared96 = next(c for _, form, c in table.load()[groups[0]] if form == "shared_prefill")
    rows = {
        "WIDE": False,
        "X_STRIDE": 3584,
        "A_STRIDE": 384,
        "FORMAT": "e4m3",
        "RULE": "epilogue",
        "VIA_BF16": False,
    }
    wide, wide_long = (
        next(config for _, form, config in reversed(table.load()[group]) if form == "wide")
        for group in groups
    )
    return {
        "bf16 stage 1 list": (stage1_hopper, stage1 | {"LIST": True, "PERMUTED": True, "WEIGHTED": False, "U": 4},
        BF16, 1, 8),
        "bf16 stage 1 tokens": (stage1_hopper, stage1 | {"LIST": False, "PERMUTED": False, "WEIGHTED": True, "U":
        2}, BF16, 1, 8),
        "bf16 stage 2 list, K 2880": (
            stage2_list, stage2 | oss | {"I_USED": 2880, "A_STRIDE": 2944, "G": 1, "U": 2}, BF16, 1, 8,
        ),
        "fp8 stage 1": (stage1_fp8, STAGE1 | fp8 | pair, PAIR, 4, 8),
        "fp8 stage 1 gui": (stage1_fp8, STAGE1 | fp8 | pair | {"LAYOUT": "gu_interleaved"}, PAIR, 4, 8),
        "fp8 stage 1 A8W4": (stage1_fp8, STAGE1 | fp8 | epilogue | blocks, FP8, 4, 8),
        "fp8 stage 1, 16 columns": (stage1_fp8, STAGE1 | fp8 | pair | {"N": 16}, PAIR, 4, 16),
        "fp8 stage 1, queue": (stage1_fp8, STAGE1 | fp8 | pair | queue | {"N": 16}, PAIR, 4, 16),
        "fp8 stage 2, queue": (stage2_fp8, fp8_two | K3 | {"HAS_BIAS": False} | queue, PAIR, 4, 8),
        "fp8 stage 2, K 2880": (stage2_fp8, fp8_two | oss | {"HAS_BIAS": True}, PAIR, 4, 8),
        "fp8 stage 2 A8W4": (stage2_fp8, fp8_two | oss | {"HAS_BIAS": True} | blocks, FP8, 4, 8),
        "fp8 stage 1 by row": (stage1_fp8, STAGE1 | fp8 | epilogue | {"PARTS": 1, "N": 16}, PAIR, 4, 16),
        "fp8 stage 2 by row, K 2880": (
            stage2_fp8, fp8_two | oss | {"HAS_BIAS": True, "PARTS": 1, "N": 16}, PAIR, 4, 16,
        ),
        "whole": (whole_layer, one, WHOLE, 8, 8),
        "whole halves": (whole_layer, one | {"HALVES": True}, WHOLE, 8, 8),
        "whole narrow, K 2880": (
            whole_layer, one_oss | {"SLOTS": 3, "HALVES": True, "NARROW": True}, WHOLE, 8, 8,
        ),
        "whole, one token": (whole_layer, one | {"ONE": True}, WHOLE, 8, 8),
        "whole gui": (whole_layer, one | {"LAYOUT": "gu_interleaved"}, WHOLE, 8, 8),
        "whole, K 2880": (whole_layer, one_oss, WHOLE, 8, 8),
        "prefill stage 1": (
            stage1_prefill, STAGE1 | prefill | {"X_STRIDE": 3584, "A_STRIDE": 384, "T": 96, "FORMAT": "bf16",
            "RULE": "none", "VIA_BF16": False}, PREFILL, 8, 96,
        ),
        "prefill stage 2": (
            stage2_prefill, K3 | prefill | {"A_STRIDE": 384, "HAS_BIAS": False, "TILES": 7, "T": 64}, PREFILL, 8, 64,
        ),
        "prefill stage 2, K 2880": (
            stage2_prefill, oss | prefill | {"A_STRIDE": 2944, "HAS_BIAS": True, "TILES": 0, "T": 32}, PREFILL, 8, 32,
        ),
        "fp8 prefill stage 1": (
            stage1_mx_prefill, STAGE1 | prefill | {"X_STRIDE": 3584, "A_STRIDE": 384, "T": short.n, "R": short.r1,
            "W": short.w1, "FORMAT": "e4m3", "RULE": "epilogue", "VIA_BF16": False}, MX | {"a_scale_ptr": "u8"},
            short.w1, short.n,
        ),
        "fp8 prefill stage 2": (
            stage2_mx_prefill, K3 | prefill | {"A_STRIDE": 384, "HAS_BIAS": False, "TILES": short.tiles, "T": short.n,
            "R": short.r2, "W": short.w2}, MX, short.w2, short.n,
        ),
        "fp8 prefill stage 2, K 2880": (
            stage2_mx_prefill, oss | prefill | {"A_STRIDE": 2944, "HAS_BIAS": True, "TILES": long.tiles, "T": long.n,
            "R": long.r2, "W": long.w2}, MX, long.w2, long.n,
        ),
        "shared prefill stage 1": (
            stage1_shared, STAGE1 | rows | {"T": shared.n} | shared.one.constants(), MX | {"a_scale_ptr": "u8"}, 4, 128,
        ),
        "shared prefill stage 2": (
            stage2_shared, K3 | {"WIDE": False, "A_STRIDE": 384, "HAS_BIAS": False, "TILES": shared.tiles,
            "KEPT": shared.kept, "T": shared.n} | shared.two.constants(), MX, 4, 128,
        ),
        "shared prefill stage 1, 96 tokens": (
            stage1_shared, STAGE1 | rows | {"T": shared96.n} | shared96.one.constants(), MX | {"a_scale_ptr": "u8"}, 4,
            64,
        ),
        "shared prefill stage 2, 96 tokens": (
            stage2_shared, K3 | {"WIDE": False, "A_STRIDE": 384, "HAS_BIAS": False, "TILES": shared96.tiles,
            "KEPT": shared96.kept, "T": shared96.n} | shared96.two.constants(), MX, 4, 64,
        ),
        "shared prefill stage 2, K 2880": (
            stage2_shared, oss | {"WIDE": False, "A_STRIDE": 2944, "HAS_BIAS": True, "TILES": shared_long.tiles,
            "KEPT": shared_long.kept, "T": shared_long.n} | shared_long.two.constants(), MX, 4, 128,
        ),
        "shared prefill stage 1, K 2880": (
            stage1_shared, STAGE1 | rows | oss | {"X_STRIDE": 2944, "A_STRIDE": 2944, "HAS_BIAS": True,
            "HAS_LIMIT": True, "ACTIVATION": "swiglu", "T": shared_long.n} | shared_long.one.constants(),
            MX | {"a_scale_ptr": "u8"}, 4, 128,
        ),
        "wide stage 1": wide_stage(1, STAGE1, wide),
        "wide stage 2": wide_stage(2, K3 | {"HAS_BIAS": False}, wide),
        "wide stage 1, K 2880": wide_stage(
            1, STAGE1 | oss | {"HAS_BIAS": True, "HAS_LIMIT": True, "ACTIVATION": "swiglu"}, wide_long
        ),
        "wide stage 2, K 2880": wide_stage(2, oss | {"HAS_BIAS": True}, wide_long),
        "wide stage 2, K 2112": wide_stage(2, {"H": 256, "I": 2112, "HAS_BIAS": False}, wide_long),
    }  # fmt: skip


def wide_stage(stage: int, constants: dict, config) -> tuple:
    """A row of ``forms``."""
    ring = config.one if stage == 1 else config.two
    if stage == 1:
        constants = constants | {
            "A_STRIDE": -(-constants["I"] // 128) * 128,
            "FORMAT": "e4m3",
            "RULE": "epilogue",
            "VIA_BF16": False,
        }
    else:
        constants = constants | {"SHIFT": 0}
    constants |= {
        "N1": config.n1, "N2": config.n2, "W": ring.w, "SLOTS": ring.slots, "AHEAD": ahead(ring),
        "maxnreg": ring.maxnreg,
    }  # fmt: skip
    kernel, words = (stage1_wide, {}) if stage == 1 else (stage2_wide, {"a_ptr": "i32"})
    return (
        kernel,
        constants,
        MX | {"a_scale_ptr": "u8"} | words,
        ring.w,
        64 if config.n2 else config.n1,
    )


def descriptor_type(name: str, c: dict) -> str:
    """As the launcher names it; the boxes are those of ``fp8_launch``, with a number of ``whole_launch``."""
    both = 2 if c.get("LAYOUT") == "separated" and not name.endswith("2") else 1
    if "CREGS" in c:  # shared_prefill_launch
        box, swizzle = [both, 4 // both, 8, 32], 128
        if name == "desc_s":
            box, swizzle = [both, 2 // both, 4, 16], 64
        layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=32, rank=4)
        return f"tensordesc<i32{box},{layout!r}>"
    whole = name[-1].isdigit()
    w, sb, swizzle = 2 if whole else c["W"], c.get("SB", 16), 128
    if name == "desc_w2" and c["NARROW"]:
        w = 1
    if name.startswith("desc_w"):
        box, bits = [both, w // both, 2 * sb, 128], 8
    elif whole:
        box, bits, swizzle = [both, 1, sb // 2, 16], 32, 64
    else:
        box, bits = [both, w // 2 // both, sb // 4, 32], 32
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=4)
    return f"tensordesc<{'u8' if bits == 8 else 'i32'}{box},{layout!r}>"


def build(kernel, constants: dict, types: dict, warps: int, maxnreg: int | None = None):
    names = kernel.arg_names
    signature, attrs = {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith("desc_"):
            signature[name] = descriptor_type(name, constants)
        elif name in types:
            signature[name] = "*" + types[name]
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    gluon, once = isinstance(kernel, GluonJITFunction), isinstance(kernel, read_once.read_once)
    source = (read_once.Source if once else GluonASTSource if gluon else ASTSource)(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs=attrs,
    )
    options = {"num_warps": warps} | ({} if gluon else {"num_stages": 1})
    if maxnreg:
        options["maxnreg"] = maxnreg
    make = read_once.compile if once else triton.compile
    return make(source, target=GPUTarget("cuda", 90, 32), options=options)


def disassemble(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """The instructions in order, and for each label where it stands."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [f"{BIN}/nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            instructions.append(found.group(1))
    return instructions, labels


def loops(instructions: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and end of each loop (a backward branch and what it spans) with matrix instructions."""
    found = []
    for at, instruction in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", instruction)
        first = labels.get(target.group(1), at) if target else at
        if first < at and any("MMA" in i for i in instructions[first : at + 1]):
            found.append((first, at + 1))
    return found


def inner_loop(
    instructions: list[str], labels: dict[str, int], innermost: bool, shortest: bool = False
) -> list[str]:
    """The loop with the most matrix instructions, of all or of those that hold no other: the first. Or the shortest."""
    found = loops(instructions, labels)
    if innermost:
        found = [
            a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)
        ]
    bodies = [instructions[first:end] for first, end in found]
    if shortest:
        return min(bodies, key=len)
    return max(bodies, key=lambda body: sum("MMA" in i for i in body), default=[])


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def stores_beside_products(ptx: str) -> int:
    """Stores and copies to shared memory that no barrier keeps behind the last products' end.

    A warp group that has waited for its own products knows nothing of another's, which may still read the tokens;
    Triton gives an epilogue's exchange the same bytes. Told by the order of the text, so for straight code.
    """
    found, ended = 0, False
    for line in ptx.splitlines():
        if re.search(r"\bwgmma\.wait_group\.sync\.aligned\s+0;", line):
            ended = True
        elif re.search(r"\b(bar|barrier)\.(cta\.)?sync|\bret\b|\bwgmma\.mma", line):
            ended = False
        elif ended:
            found += bool(re.search(r"\b(st\.shared|stmatrix|cp\.async\.c[ag])\b", line))
    return found


def unwritten_halves(instructions: list[str]) -> int:
    """Conversions to 8 bits that take the other half of their word from a register that nothing wrote before.

    ptxas of CUDA 12.8 makes them of words that are 0 at compile time (``wide_stage2``); told by the order of the text.
    """
    written, found = set(), 0
    for instruction in instructions:
        name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
        registers = re.findall(r"\bR\d+\b|\bRZ\b", operands)
        if "MERGE_C" in name and registers[-1] != "RZ":
            found += registers[-1] not in written
        # Wide loads write the registers that follow, which none of those conversions merges into.
        written.update(registers[:1])
    return found


def describe(name: str) -> dict:
    kernel, constants, types, warps, _ = forms()[name]
    maxnreg = constants.pop("maxnreg", None)
    if kernel in (stage1_fp8, stage2_fp8):
        maxnreg = Ring(warps, 16, 3, 2).maxnreg
    if kernel in (stage1_mx_prefill, stage2_mx_prefill):
        config = mx_config("A8W4 long" if constants["H"] == 2880 else "A8W4 short")
        maxnreg = (config.regs1 if kernel is stage1_mx_prefill else config.regs2) or None
    compiled = build(kernel, constants, types, warps, maxnreg)
    instructions, labels = disassemble(compiled.asm["cubin"])
    innermost = name.startswith(("whole", "shared", "wide"))
    loop = inner_loop(instructions, labels, innermost, shortest=name == "whole narrow, K 2880")
    # A fence is written as loads that never happen: @!PT LDS RZ, [RZ].
    mix = Counter(opcode(i) for i in loop if not i.startswith("@!PT"))
    # Weights of one lane a matrix instruction: 16 x 16 over 32 lanes (HMMA), 16 rows x K over 32 lanes (wgmma).
    per = {"HMMA": 8, "HGMMA": 8, "QGMMA": 16}
    weights = sum(per.get(op, 0) * n for op, n in mix.items())
    return {
        "name": name,
        "instructions_per_weight": round(sum(mix.values()) / weights, 2),
        "mix": dict(mix.most_common()),
        "waits": sum(i.startswith("WARPGROUP.DEPBAR") for i in loop),
        "operands": sorted(
            {i.split()[0].partition("F32.")[2] for i in loop if i.startswith("QGMMA")}
        ),
        "spills": sum(opcode(i) in ("LDL", "STL") for i in instructions),
        "shared": compiled.metadata.shared,
        "stores_beside_products": stores_beside_products(compiled.asm["ptx"]),
        "unwritten_halves": unwritten_halves(instructions),
        "unhinted_copies": sum(
            "cp.async.bulk.tensor" in line and "L2::cache_hint" not in line
            for line in compiled.asm["ptx"].splitlines()
        ),
    }


def main() -> None:
    for name in forms():
        print(json.dumps(describe(name)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
