"""Builds the portable kernels for a GPU that is not here, and reads registers, memory and instructions off the result.

Triton's wheel carries LLVM's AMDGPU back end and NVIDIA's assembler, so a code object for gfx950 is built on any
machine
(docs/performance.md). Nothing is executed. Must run in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_aiter_moe.portable.triton import launch, table
from sglang_aiter_moe.portable.triton.stage1 import stage1_kernel
from sglang_aiter_moe.portable.triton.stage2 import stage2_kernel

WAVE = {"gfx942": 64, "gfx950": 64, "gfx1250": 32}
MODES = ("A16W4", "A8W4", "A4W4")
"""All of them on each arch, whether or not AITER has the mode there (docs/contract.md section b): tables do."""
LAYOUTS = {
    ("gfx950", "A8W4"): ("gu_interleaved", "gu_interleaved", "separated"),
    ("gfx1250", "A8W4"): ("gu_interleaved_gfx1250", "n32k4_gu", "n32k4"),
    ("gfx1250", "A4W4"): ("gu_interleaved_gfx1250", "n32k4_gu", "n32k4"),
}
K3 = {"hidden": 3584, "inter": 384, "activation": "situv2", "bias": False}
GPT_OSS = {"hidden": 2880, "inter": 2880, "activation": "swiglu", "bias": True}
POINTERS = {
    "bias_ptr": "fp32", "weights_ptr": "fp32", "pairs_ptr": "i32", "block_expert_ptr": "i32",
    "num_blocks_ptr": "i32", "part_ptr": "bf16",
}  # fmt: skip
FLOATS = ("limit", "alpha", "beta", "linear_beta")


@dataclass(frozen=True)
class Report:
    arch: str
    mode: str
    stage: int
    shape: str
    tile: dict
    block_m: int
    vgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    matrix: dict[str, int]


def build(kernel, constants: dict, types: dict, target: GPUTarget, **options):
    """``kernel`` compiled: ``constants`` are constexpr, ``types`` element types of pointers, the rest int32 or
    float32."""
    names = kernel.arg_names
    signature, attrs = {}, {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = "*" + types[name]
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs=attrs,
    )
    return triton.compile(source, target=target, options=options)


def build_stage(
    arch: str,
    mode: str,
    stage: int,
    config: table.Config,
    shape: dict,
    target: GPUTarget | None = None,
):
    """One stage of the portable form as ``launch.run_portable`` would launch it."""
    fmt = launch.X_FORMAT[mode]
    element = "bf16" if fmt == "bf16" else "u8"
    w13, w13_scale, w2_scale = LAYOUTS.get((arch, mode), ("separated",) * 3)
    tile = config.stage1 if stage == 1 else config.stage2
    common = {
        "H": shape["hidden"], "I": shape["inter"], "I_USED": shape["inter"], "X_FORMAT": fmt,
        "DOT": launch.dot_kind(arch), "HAS_BIAS": shape["bias"],
        "BLOCK_M": config.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k,
    }  # fmt: skip
    if stage == 1:
        constants = common | {
            "H_USED": shape["hidden"], "W_LAYOUT": w13, "W_SCALE_LAYOUT": w13_scale,
            "ACTIVATION": shape["activation"], "HAS_LIMIT": shape["activation"] == "swiglu",
            "WEIGHT_ON_INPUT": False, "REQUANT_RULE": "none" if mode == "A16W4" else "epilogue",
            "Y_VIA_BF16": False,
        }  # fmt: skip
        types = {"x_ptr": element, "x_scale_ptr": "u8", "y_ptr": element, "y_scale_ptr": "u8"}
        kernel = stage1_kernel
    else:
        constants = common | {
            "W_LAYOUT": "separated", "W_SCALE_LAYOUT": w2_scale, "WEIGHT_ON_OUTPUT": True
        }  # fmt: skip
        types = {"y_ptr": element, "y_scale_ptr": "u8"}
        kernel = stage2_kernel
    types |= POINTERS | {"w_ptr": "u8", "w_scale_ptr": "u8"}
    target = target or GPUTarget("hip", arch, WAVE[arch])
    return build(kernel, constants, types, target, num_warps=tile.warps, num_stages=tile.stages)


def report(
    arch: str, mode: str, stage: int, config: table.Config, shape: dict, name: str
) -> Report:
    compiled = build_stage(arch, mode, stage, config, shape)
    text = compiled.asm["amdgcn"]

    def meta(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    matrix = Counter(re.findall(r"^\s+(v_(?:mfma|wmma)_\w+)", text, re.M))
    tile = config.stage1 if stage == 1 else config.stage2
    return Report(
        arch, mode, stage, name, asdict(tile), config.m, meta("vgpr_count"), meta("vgpr_spill_count"),
        meta("sgpr_spill_count"), meta("private_segment_fixed_size"), compiled.metadata.shared, dict(matrix),
    )  # fmt: skip


def reports(archs: list[str], shapes: tuple[str, ...] = ("k3", "gpt-oss")) -> Iterator[Report]:
    """Every table row, stage and shape of ``archs``."""
    known = {"k3": K3, "gpt-oss": GPT_OSS}
    for arch in archs:
        for mode in MODES:
            for _, config in table.load(arch)[mode]:
                for stage in (1, 2):
                    for name in shapes:
                        shape = known[name]
                        if arch == "gfx1250" and name == "gpt-oss":
                            shape = shape | {
                                "hidden": 3072,
                                "inter": 3072,
                            }  # n32k4 has columns in fours
                        yield report(arch, mode, stage, config, shape, name)


def main(arguments: list[str]) -> None:
    """Prints a JSON object for each; ``--k3``: that shape alone."""
    archs = [a for a in arguments if not a.startswith("-")] or list(WAVE)
    shapes = ("k3",) if "--k3" in arguments else ("k3", "gpt-oss")
    for row in reports(archs, shapes):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
