#!/usr/bin/env python3
"""Cycles that a Hopper SM takes for one ``wgmma`` of 64 rows and 32 bytes of K, by columns, warp groups and what stands
around it. Needs nvcc on the PATH.

    python benchmark/wgmma_rate.py --json wgmma.json [--build-only]

Each warp group runs chains of four on one accumulator and waits for each chain:
"rs": the 64-row operand from registers; "rs fenced": a fence and a commit for each; "rs decoded": ten integer
instructions before each as well; "rs promoted": and each chain in an accumulator of its own, which is multiplied by
column scales and added to another; "ss": both operands from shared memory.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

KINDS = ("rs", "rs fenced", "rs decoded", "rs promoted", "ss")
COLUMNS = (16, 32, 64, 128)
HEAD = r"""
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>
#define FENCE asm volatile("wgmma.fence.sync.aligned;")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;")
#define WAIT asm volatile("wgmma.wait_group.sync.aligned 0;")
#define DECODE                                                                                                       \
  a0 = __byte_perm(a0, a1, w & 0x7777), a1 = __byte_perm(a1, a2, w >> 16 & 0x7777);                                  \
  a2 = __byte_perm(a2, a3, w & 0x3737), a3 = __byte_perm(a3, a0, w >> 8 & 0x7373);                                   \
  w = w * 5 + 1, a0 &= 0x7b7b7b7b, a1 &= 0x7b7b7b7b, a2 &= 0x7b7b7b7b, a3 &= 0x7b7b7b7b
"""
KERNEL = r"""
__global__ void __launch_bounds__(128) NAME(float* out, long long* cycles, int chains, const uint32_t* in) {
  extern __shared__ __align__(1024) unsigned char memory[];
  for (int i = threadIdx.x; i < 8192; i += 128) ((uint32_t*)memory)[i] = in[i] & 0x3b3b3b3b;
  __syncthreads();
  asm volatile("fence.proxy.async.shared::cta;");
  __syncthreads();
  const float* scale = (const float*)memory;
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(memory);
  // Rows of 128 bytes, swizzled; eight of them are 64 units of 16 bytes.
  const uint64_t form = 1ull << 16 | 64ull << 32 | 1ull << 62;
  const uint64_t b0 = (base >> 4 & 0x3fff) | form, a_0 = (base + 16384 >> 4 & 0x3fff) | form;
  uint64_t a, b;
  uint32_t w = in[threadIdx.x], a0 = w & 0x3b3b3b3b, a1 = a0 ^ 1, a2 = a0 ^ 2, a3 = a0 ^ 3;
  float part[HALF], sum[HALF];
  for (int i = 0; i < HALF; i++) part[i] = sum[i] = 0;
  const long long begin = clock64();
#pragma unroll 1
  for (int chain = 0; chain < chains; chain++) {
BODY
  }
  const long long end = clock64();
  float v = 0;
  for (int i = 0; i < HALF; i++) v += part[i] + sum[i];
  out[blockIdx.x * 128 + threadIdx.x] = v;
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - begin;
}
"""
MAIN = r"""
template <class K> int run(K kernel, const char* name, float* out, long long* cycles, const uint32_t* in, int sms) {
  const int chains = 500;
  for (int groups : {1, 2, 4}) {
    const int bytes = min(227 * 1024 / groups - 2048, 100000);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    for (int twice = 0; twice < 2; twice++) kernel<<<sms * groups, 128, bytes>>>(out, cycles, chains, in);
    if (cudaError_t e = cudaDeviceSynchronize()) return printf("%s: %s\n", name, cudaGetErrorString(e)), 1;
    static long long host[1024];
    cudaMemcpy(host, cycles, sms * groups * 8, cudaMemcpyDeviceToHost);
    double mean = 0;
    for (int i = 0; i < sms * groups; i++) mean += host[i] / double(sms * groups);
    printf("%s %d %.1f\n", name, groups, mean / (chains * 4.0 * groups));
  }
  return 0;
}
int main() {
  uint32_t *in, x = 1;
  float* out;
  long long* cycles;
  int sms;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  cudaMalloc(&in, 1 << 18), cudaMalloc(&out, 1 << 22), cudaMalloc(&cycles, 1 << 16);
  static uint32_t host[1 << 16];
  for (auto& v : host) x = x * 1664525u + 1013904223u, v = x ^ x >> 13;
  cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice);
"""


def product(columns: int, kind: str, fp8: bool, use: bool) -> str:
    half = columns // 2
    sums = ", ".join(f"%{i}" for i in range(half))
    if kind == "ss":
        operand, values, at = f"%{half}", '"l"(a)', half + 1
    else:
        registers = ", ".join(f"%{half + i}" for i in range(4))
        operand, values, at = f"{{{registers}}}", '"r"(a0), "r"(a1), "r"(a2), "r"(a3)', half + 4
    types = "e5m2.e4m3" if fp8 else "bf16.bf16"
    flags = "1, 1" if fp8 else "1, 1, 0, 0" if kind == "ss" else "1, 1, 0"
    outputs = ", ".join(f'"+f"(part[{i}])' for i in range(half))
    return (
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{at + 1}, 0; wgmma.mma_async.sync.aligned.m64n{columns}'
        f'k{32 if fp8 else 16}.f32.{types} {{{sums}}}, {operand}, %{at}, p, {flags}; }}"'
        f' : {outputs} : {values}, "l"(b), "n"({int(use)}));'
    )


def kernel(columns: int, kind: str, fp8: bool) -> tuple[str, str]:
    name = f"{'fp8' if fp8 else 'bf16'}_{columns}_{kind.replace(' ', '_')}"
    each = kind not in ("rs", "ss")
    lines = []
    for u in range(4):
        lines += ["DECODE;"] if kind in ("rs decoded", "rs promoted") else []
        lines += ["FENCE;"] if each or u == 0 else []
        lines.append(f"a = a_0 + {2 * u}, b = b0 + {2 * u};")
        lines.append(product(columns, kind, fp8, kind != "rs promoted" or u > 0))
        lines += ["COMMIT;"] if each or u == 3 else []
    lines.append("WAIT;")
    if kind == "rs promoted":
        lines.append(
            f"for (int i = 0; i < {columns // 2}; i++)"
            " sum[i] += part[i] * scale[i / 4 * 8 + (threadIdx.x & 3) * 2 + (i & 1)];"
        )
    body = "\n".join("    " + line for line in lines)
    text = KERNEL.replace("NAME", name).replace("HALF", str(columns // 2)).replace("BODY", body)
    return name, text


def source() -> str:
    kernels = [kernel(n, kind, fp8) for fp8 in (True, False) for n in COLUMNS for kind in KINDS]
    calls = [f'  if (run({name}, "{name}", out, cycles, in, sms)) return 1;' for name, _ in kernels]
    return "".join([HEAD, *(text for _, text in kernels), MAIN, "\n".join(calls), "\n}\n"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if shutil.which("nvcc") is None:
        parser.error("nvcc is not on the PATH; it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rate.cu")
        file.write_text(source())
        program = str(Path(folder, "rate"))
        command = [
            "nvcc",
            "-O3",
            "-std=c++17",
            "-gencode",
            "arch=compute_90a,code=sm_90a",
            "-Xptxas",
            "-v",
        ]
        built = subprocess.run(
            [*command, "-o", program, str(file)], capture_output=True, text=True, check=False
        )
        notes = re.findall(r"error.*|.*serialized.*", built.stdout + built.stderr)
        if built.returncode or notes:
            print("\n".join(notes))
            return 1
        if arguments.build_only:
            return 0
        run = subprocess.run([program], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = {}
    for line in run.stdout.splitlines():
        name, groups, cycles = line.split()
        found.setdefault(name, {})[groups] = float(cycles)
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
