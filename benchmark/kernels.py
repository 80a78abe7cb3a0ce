#!/usr/bin/env python3
"""The MXFP4 MoE layer on this GPU: microseconds, ratio to the roofline and to other kernels, error against float32.

    python benchmark/kernels.py --json benchmark/results/kernels.json
    python benchmark/kernels.py --peers bench.py --peer-names tkbest,marlin,marlinbest,hum

A roofline is the larger of bytes (the packed weights of the experts that were hit, x and y) over the copy rate and
operations
over the bf16 matrix rate, both measured in the same run. ``--peers`` names a Python file with ``MAKERS`` (name ->
make(W) -> layer(x, ids,
weights) -> y; a layer may have ``variants(tokens)``) and ``Weights(shape)``; they get the same weights and inputs, and
each token count is timed for all of them before the next.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import sys
import time
import traceback
from pathlib import Path

import torch
import triton
from moe_layers import SHAPES, Layer, ceilings, number_of_sets, time_graph

from sglang_aiter_moe.numerics.metrics import relative_error
from sglang_aiter_moe.numerics.mxfp4 import (
    dequantize_mxfp4,
    quantize_mxfp4,
    quantize_mxfp4_epilogue,
)
from sglang_aiter_moe.numerics.mxfp8 import (
    dequantize_mxfp8,
    quantize_mxfp8,
    quantize_mxfp8_epilogue,
)
from sglang_aiter_moe.portable import triton as backend
from sglang_aiter_moe.portable.triton.hopper import table as hopper_table

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)


def rounding(mode: str):
    """A mode's activation rounding, for ``Layer.reference``."""
    if mode == "A8W4":
        return lambda v, stage: dequantize_mxfp8(
            *(quantize_mxfp8(v) if stage == 1 else quantize_mxfp8_epilogue(v))
        )
    if mode == "A4W4":
        return lambda v, stage: dequantize_mxfp4(
            *(quantize_mxfp4(v) if stage == 1 else quantize_mxfp4_epilogue(v))
        )
    return None


class Bench:
    def __init__(self, arguments) -> None:
        self.a = arguments
        self.start = time.time()
        self.ceilings = ceilings()
        self.result = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": arguments.commit,
            "command": " ".join(["python", *sys.argv]),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "ceilings": self.ceilings,
            "rows": [],
            "checks": [],
            "errors": [],
        }
        self.peers = None
        if arguments.peers:
            spec = importlib.util.spec_from_file_location("peer_kernels", arguments.peers)
            self.peers = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = self.peers
            spec.loader.exec_module(self.peers)
        print({k: f"{v:.4g}" for k, v in self.ceilings.items()}, flush=True)

    def save(self) -> None:
        self.result["seconds"] = round(time.time() - self.start, 1)
        if self.a.json:
            self.a.json.write_text(json.dumps(self.result, indent=1) + "\n")

    def late(self) -> bool:
        return time.time() - self.start > self.a.deadline

    def ours(self, layer: Layer, mode: str):
        request = layer.request(mode)

        def call(x, ids, weights, out):
            backend.run(request, x, *layer.packed, weights, ids, out)

        return call

    def form(self, layer: Layer, mode: str, ids: torch.Tensor) -> str:
        if torch.cuda.get_device_capability() != (9, 0):
            return "portable"
        request = layer.request(mode)
        chosen = hopper_table.choose(request, *ids.shape, *layer.packed)
        return f"{chosen[0].__name__} {chosen[1]}" if chosen else "portable"

    def peer_layers(self, layer: Layer) -> dict:
        found = {}
        for name in self.a.peer_names.split(",") if self.peers else ():
            try:
                weights = self.peers.Weights(layer.name)
                weights.w13, weights.s13, weights.w2, weights.s2 = (
                    layer.w13,
                    layer.s13,
                    layer.w2,
                    layer.s2,
                )
                found[name] = self.peers.MAKERS[name](weights)
                torch.cuda.synchronize()
            except Exception:
                self.fail(layer.name, name, 0)
            gc.collect()
            torch.cuda.empty_cache()
        return found

    def fail(self, *where) -> None:
        traceback.print_exc()  # its paths are this machine's: the result keeps what was raised
        text = "".join(traceback.format_exception_only(sys.exception())).strip()
        self.result["errors"].append({"where": list(where), "error": text[-1500:]})
        print("ERROR", *where, text.splitlines()[-1][:300], flush=True)

    def check(self, layer: Layer, modes: list[str], peers: dict) -> None:
        """Relative error of everybody on fresh inputs; a poisoned output first."""
        for tokens in (3, 24, 600):
            inputs = layer.inputs(tokens, 101)
            for mode in modes:
                reference = layer.reference(*inputs, rounding(mode))
                out = torch.full_like(inputs[0], float("nan"))
                try:
                    self.ours(layer, mode)(*inputs, out)
                    error = relative_error(out.float(), reference)
                except Exception:
                    self.fail(layer.name, mode, tokens)
                    error = float("nan")
                self.result["checks"].append(
                    {"shape": layer.name, "who": mode, "tokens": tokens, "rel_err": error}
                )
                print(f"{layer.name} {mode} tokens {tokens} rel err {error:.2e}", flush=True)
                if mode == "A16W4":
                    for name, peer in peers.items():
                        try:
                            error = relative_error(peer(*inputs).float(), reference)
                        except Exception:
                            self.fail(layer.name, name, tokens)
                            error = float("nan")
                        row = {"shape": layer.name, "who": name, "tokens": tokens, "rel_err": error}
                        self.result["checks"].append(row)

    def row(self, layer: Layer, tokens: int, who: str, timing: dict, unique: float, **more) -> dict:
        size, flops = layer.bytes_and_flops(tokens, unique)
        memory, matrix = size / self.ceilings["copy"] * 1e6, flops / self.ceilings["bf16"] * 1e6
        row = {"shape": layer.name, "tokens": tokens, "who": who, **timing, "unique": unique}
        row |= {"memory_us": memory, "matrix_us": matrix, "roof_us": max(memory, matrix), **more}
        row["to_roofline"] = row["us"] / row["roof_us"]
        self.result["rows"].append(row)
        return row

    def tokens(self, layer: Layer, tokens: int, modes: list[str], peers: dict) -> None:
        sets = [layer.inputs(tokens, 1 + s) for s in range(number_of_sets(tokens))]
        unique = sum(torch.unique(s[1]).numel() for s in sets) / len(sets)
        out = torch.empty_like(sets[0][0])
        shown = []
        for mode in modes:
            call = self.ours(layer, mode)
            try:
                timing = time_graph(
                    [lambda s=s, call=call: call(*s, out) for s in sets], self.a.budget
                )
            except Exception:
                self.fail(layer.name, mode, tokens)
                continue
            form = self.form(layer, mode, sets[0][1])
            row = self.row(layer, tokens, mode, timing, unique, form=form)
            shown.append(f"{mode} {row['us']:.1f} (x{row['to_roofline']:.2f})")
        best = float("inf")
        for name, peer in peers.items():
            variants = peer.variants(tokens) if hasattr(peer, "variants") else [("", peer)]
            for label, layer_call in variants:
                try:
                    timing = time_graph(
                        [lambda s=s, f=layer_call: f(*s) for s in sets], self.a.budget / 2
                    )
                except Exception:
                    self.fail(layer.name, name, label, tokens)
                    continue
                self.row(layer, tokens, name, timing, unique, variant=label)
            mine = [
                r["us"]
                for r in self.result["rows"]
                if (r["shape"], r["who"], r["tokens"]) == (layer.name, name, tokens)
            ]
            if mine:
                best = min(best, *mine)
                shown.append(f"{name} {min(mine):.1f}")
        ours = [
            r["us"] for r in self.result["rows"]
            if (r["shape"], r["tokens"]) == (layer.name, tokens) and r["who"] in modes
        ]  # fmt: skip
        if best < float("inf") and ours:
            shown.append(f"ratio {ours[0] / best:.3f}")
        print(f"{layer.name} tokens {tokens} unique {unique:.1f}:", ", ".join(shown), flush=True)

    def run(self) -> int:
        for shape in self.a.shapes.split(","):
            layer = Layer(shape, self.a.layout)
            peers = self.peer_layers(layer)
            modes = self.a.modes.split(",")
            self.check(layer, modes, peers)
            self.save()
            for tokens in (int(t) for t in self.a.tokens.split(",")):
                if self.late():
                    self.result["errors"].append({"where": [shape, tokens], "error": "deadline"})
                    print("deadline", shape, tokens, flush=True)
                    break
                self.tokens(layer, tokens, modes, peers)
                self.save()
            del layer, peers
            gc.collect()
            torch.cuda.empty_cache()
        wrong = [c for c in self.result["checks"] if c["who"] in modes and not c["rel_err"] < 2e-2]
        return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="k3,oss", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--modes", default="A16W4")
    parser.add_argument("--layout", default="separated", choices=("separated", "gu_interleaved"))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument(
        "--budget", type=float, default=0.25, help="seconds of replays for each number"
    )
    parser.add_argument(
        "--deadline", type=float, default=1e9, help="seconds after which no further count is begun"
    )
    parser.add_argument("--peers", help="Python file with MAKERS and Weights")
    parser.add_argument("--peer-names", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    return Bench(parser.parse_args()).run()


if __name__ == "__main__":
    raise SystemExit(main())
