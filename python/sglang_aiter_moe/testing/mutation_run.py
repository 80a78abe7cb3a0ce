"""Runs mutants of ``contract/`` and ``srt/`` against the tests of their module.

``python -m sglang_aiter_moe.testing.mutation_run RESULTS [--share S] [--minutes M] [--only GLOB]``, from the
checkout's root. Results are kept in RESULTS (docs/mutation.json) and gone on with; a mutant is always the same one for
the same source. Each runs in a fork of a process that has torch and pytest loaded already, so that a mutant costs its
tests alone. Python processes that the tests start import the mutant too.

A draw (``--draw``) is a sample whose first verdicts count: what its modules became later changes nothing in it. What
``--again`` finds is kept beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.abc
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sglang_aiter_moe.testing.mutation import Mutant, mutants, sample

PACKAGE = Path(__file__).resolve().parents[1]
UNIT = "test/registered/unit/"
_PLAN = ("contract/test_plan.py", "contract/test_refusals.py", "contract/test_moe_plan.py")
_TOTAL = "contract/test_plan_total.py"
_MX = "layers/quantization/test_mxfp4_"
_UPDATES = (
    "model_executor/test_weight_updater.py",
    "model_executor/test_weight_updater_methods.py",
    "model_executor/test_weight_updater_target_and_draft.py",
)
_OF_RUNNER = "layers/moe/moe_runner/test_"
_CONTEXT = "layers/test_zero_copy_context.py"
_RUNNER = (
    "patches/test_glue.py",
    f"{_OF_RUNNER}output.py",
    f"{_OF_RUNNER}call_arguments.py",
    "layers/moe/test_aiter_runner_upstream.py",
    "layers/moe/test_aiter_runner.py",
    f"{_MX}situ_output.py",
)
_BIAS = (
    "layers/moe/test_correction_bias.py",
    "patches/test_glue.py",
    "patches/test_routing_glue.py",
    "patches/test_select_experts.py",
    "layers/moe/test_topk_correction_bias_cache.py",
)
_LAYOUT = (f"{_MX}situ_weight_layout.py", f"{_MX}reload.py")
#: Module -> its tests, the quickest first.
TESTS: dict[str, tuple[str, ...]] = {
    "contract/_bytes.py": ("contract/test_weight_layouts.py", "contract/test_scale_layouts.py"),
    "contract/capabilities.py": ("contract/test_capabilities.py", *_PLAN),
    "contract/families.py": (
        "contract/test_families.py",
        *_PLAN,
        "contract/test_routes.py",
        _TOTAL,
    ),
    "contract/identity.py": ("contract/test_identity.py", f"{_MX}packed.py"),
    "contract/layouts.py": ("contract/test_weight_layouts.py",),
    "contract/modes.py": ("contract/test_modes.py", "contract/test_routes.py"),
    "contract/moe_plan.py": ("contract/test_moe_plan.py", "contract/test_plan.py"),
    "contract/padding.py": ("contract/test_padding.py", "contract/test_plan.py"),
    "contract/plan.py": (*_PLAN, "contract/test_routes.py", _TOTAL),
    "contract/refusals.py": ("contract/test_refusals.py", "contract/test_plan.py", _TOTAL),
    "contract/routes.py": ("contract/test_routes.py", *_PLAN, _TOTAL),
    "contract/scale_layouts.py": ("contract/test_scale_layouts.py",),
    "contract/spec.py": ("contract/test_spec.py", *_PLAN),
    "contract/tuned.py": ("contract/test_tuned.py", *_PLAN),
    "srt/layers/moe/moe_runner/aiter.py": _RUNNER,
    "srt/layers/moe/moe_runner/aiter_api.py": (
        f"{_OF_RUNNER}aiter_api.py",
        "srt/test_switch.py",
        *_RUNNER,
    ),
    "srt/layers/moe/moe_runner/base.py": _RUNNER,
    "srt/layers/moe/moe_runner/call_arguments.py": _RUNNER,
    "srt/layers/moe/moe_runner/dispatch.py": (f"{_OF_RUNNER}dispatch.py", *_RUNNER),
    "srt/layers/moe/moe_runner/expert_ids.py": (f"{_OF_RUNNER}expert_ids.py", *_RUNNER),
    "srt/layers/moe/moe_runner/flashinfer_trtllm.py": (
        f"{_OF_RUNNER}flashinfer_trtllm.py",
        "patches/test_glue.py",
        "patches/test_routing_glue.py",
    ),
    "srt/layers/moe/correction_bias.py": _BIAS,
    "srt/layers/moe/topk.py": _BIAS,
    "srt/layers/quantization/mxfp4.py": (
        f"{_MX}quant_info.py",
        *_LAYOUT,
        f"{_MX}situ_output.py",
        f"{_MX}watch.py",
    ),
    "srt/layers/quantization/mxfp4_checkpoint.py": (f"{_MX}checkpoint.py", *_LAYOUT),
    "srt/layers/quantization/mxfp4_layer_weights.py": (
        f"{_MX}layer_weights.py",
        f"{_MX}reload.py",
        f"{_MX}watch.py",
        *_UPDATES,
    ),
    "srt/layers/quantization/mxfp4_method.py": ("srt/test_mxfp4_method.py",),
    "srt/layers/quantization/mxfp4_others.py": (
        f"{_MX}others.py",
        *_UPDATES,
    ),
    "srt/layers/quantization/mxfp4_packed.py": (f"{_MX}packed.py",),
    "srt/layers/quantization/mxfp4_progress.py": (f"{_MX}progress.py",),
    "srt/layers/quantization/mxfp4_raw_form.py": (
        f"{_MX}quant_info.py",
        f"{_MX}reload.py",
        f"{_MX}packed.py",
    ),
    "srt/layers/quantization/mxfp4_reload.py": (
        f"{_MX}layer_weights.py",
        f"{_MX}reload.py",
        *_UPDATES,
    ),
    "srt/layers/quantization/mxfp4_update_check.py": (
        f"{_MX}update_check.py",
        f"{_MX}reload.py",
        *_UPDATES,
    ),
    "srt/layers/quantization/mxfp4_watch.py": (
        f"{_MX}watch.py",
        f"{_MX}reload.py",
        *_UPDATES,
    ),
    "srt/layers/zero_copy_context.py": (_CONTEXT, *_RUNNER),
    "srt/model_executor/model_runner_components/ranks.py": (
        *_UPDATES,
        "model_executor/test_ranks.py",
    ),
    "srt/model_executor/model_runner_components/weight_updater.py": (
        *_UPDATES,
        "model_executor/test_ranks.py",
    ),
    "srt/switch.py": ("srt/test_switch.py", "test_plugin.py"),
}
#: Modules without tests here, and why.
ELSEWHERE = {
    "contract/_device_kernels.py": "GPU kernels, which are off until executed on one",
    "contract/_device_scale_kernels.py": "the same",
    "contract/device_moves.py": "their host side",
}


#: What a Python process that a test starts runs first (the module ``site`` imports it).
_IN_CHILDREN = """
import sys
from pathlib import Path
from sglang_aiter_moe.testing.mutation_run import Finder
sys.meta_path.insert(0, Finder({module!r}, Path({file!r}), {source!r}))
"""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed source."""

    def __init__(self, module: str, file: Path, source: str) -> None:
        self.module, self.file, self.source = module, file, source

    def in_children_too(self, folder: str) -> None:
        """Python processes that this one starts import the changed source as well.

        Args:
            folder: an empty one, which has to outlive them.
        """
        code = _IN_CHILDREN.format(module=self.module, file=str(self.file), source=self.source)
        Path(folder, "sitecustomize.py").write_text(code)
        paths = (folder, str(PACKAGE.parent), os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module) -> None:
        exec(compile(self.source, str(self.file), "exec"), vars(module))


def passes(name: str, source: str | None, tests: Sequence[str], limit: float) -> tuple[str, float]:
    """("survived" | "killed" | "timeout", processor seconds) of a module's tests with another source of the module.

    Args:
        name: of the module, a key of TESTS.
        source: in place of the file's; None for the file itself.
        tests: below UNIT.
        limit: processor seconds after which it counts as killed by an endless loop; twenty times as many by the clock
            (a busy machine), for one that waits for ever.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            _become_test_run(name, source, tests, limit, folder)
        while True:
            done, status, used = os.wait4(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                found = {0: "survived", -signal.SIGXCPU: "timeout"}.get(code, "killed")
                return found, used.ru_utime + used.ru_stime
            if time.monotonic() - start > 20 * limit:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "timeout", limit
            time.sleep(0.02)


def _become_test_run(
    name: str, source: str | None, tests: Sequence[str], limit: float, folder: str
) -> None:
    """In the fork: never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if source is not None:
            module = "sglang_aiter_moe." + name.removesuffix(".py").replace("/", ".")
            finder = Finder(module, PACKAGE / name, source)
            finder.in_children_too(folder)
            sys.meta_path.insert(0, finder)
        import pytest

        files = [UNIT + test for test in tests]
        options = ["-x", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
        code = int(pytest.main([*options, *files]))
    finally:
        os._exit(code)


def preload() -> None:
    """What every test imports and no mutant changes."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)


def distinct(name: str) -> list[Mutant]:
    """A module's mutants; of equal ones on one line, the first."""
    found: dict[str, Mutant] = {}
    for mutant in mutants((PACKAGE / name).read_text()):
        found.setdefault(mutant.name, mutant)
    return list(found.values())


def chosen(
    name: str,
    share: float,
    draw: str = "",
    least: int = 3,
    known: Collection[str] = (),
    *,
    apart: bool = False,
) -> list[Mutant]:
    """The sample of a module: this share of its mutants, and ``least`` of them at least.

    Args:
        name: of the module.
        share: of all its mutants.
        draw: any text; another sample for another one.
        least: how many at least, where there are so many.
        known: names of mutants that are not drawn.
        apart: see ``sample``.
    """
    found = distinct(name)
    count = max(least, round(share * len(found)))
    rest = [mutant for mutant in found if mutant.name not in known]
    return sample(rest, count, draw + name, apart=apart)


def without_line(change: str) -> str:
    """A mutant's name without the number of its line, which edits elsewhere move."""
    return change.partition(": ")[2]


def beside(others: Sequence[dict[str, Any]], name: str, source: str) -> set[str]:
    """The names of a module's mutants that other results have.

    Of results of another source: every mutant with the text of one of theirs, on whichever line.

    Args:
        others: each as a run keeps it.
        name: of the module.
        source: of the module, as :func:`sources` says it.
    """
    entries = [results[name] for results in others if name in results]
    exact = {change for e in entries if e["source"] == source for change in e["ran"]}
    moved = {without_line(c) for e in entries if e["source"] != source for c in e["ran"]}
    return exact | {m.name for m in distinct(name) if without_line(m.name) in moved}


def later_look(
    entry: dict[str, Any], name: str, source: str
) -> tuple[list[Mutant], dict[str, str]]:
    """What ``--again`` has to run of a module, and where its verdicts go.

    Its survivors; where the source is another one by now, every mutant with the text of one that was drawn.
    """
    if entry["source"] == source:
        kept = entry.get("again", {})
        left = {change for change, v in (entry["ran"] | kept).items() if v == "survived"}
        if left:
            entry["again"] = kept
        return [mutant for mutant in distinct(name) if mutant.name in left], kept
    if entry.get("now", {}).get("source") != source:
        entry["now"] = {"source": source, "ran": {}}
    kept = entry["now"]["ran"]
    drawn = set(map(without_line, entry["ran"]))
    found = [mutant for mutant in distinct(name) if without_line(mutant.name) in drawn]
    return [mutant for mutant in found if kept.get(mutant.name, "survived") == "survived"], kept


def sources(names: Sequence[str]) -> dict[str, str]:
    """What tells a module's source from another one, by module."""
    return {n: hashlib.sha256((PACKAGE / n).read_bytes()).hexdigest()[:16] for n in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--share", type=float, default=0.1, help="of each module's mutants")
    parser.add_argument(
        "--minutes", type=float, default=7, help="stop after so long; run again to go on"
    )
    parser.add_argument("--only", default="*", help="glob of modules")
    parser.add_argument("--draw", default="", help="any text: another sample")
    parser.add_argument("--least", type=int, default=3, help="so many of each module at least")
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], help="other results: none of their mutants"
    )
    parser.add_argument(
        "--apart", action="store_true", help="draw equal changes on several lines one by one"
    )
    parser.add_argument("--survivors", action="store_true", help="run those again")
    parser.add_argument(
        "--again",
        action="store_true",
        help="the same, with the verdicts kept beside the first ones; of a changed source all of the draw",
    )
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp()
    preload()
    names = [name for name in TESTS if fnmatch(name, options.only)]
    hashes = sources(names)
    others = [json.loads(file.read_text()) for file in options.beside]
    drawn = {
        name: chosen(
            name,
            options.share,
            options.draw,
            options.least,
            beside(others, name, hashes[name]),
            apart=options.apart,
        )
        for name in names
    }
    unchanged: dict[tuple[str, ...], tuple[str, float]] = {}
    for name in names:
        entry = results.get(name, {})
        if entry.get("source") != hashes[name]:
            if entry and options.draw:
                print(f"{name}: another source since it was drawn; its first verdicts stay")
                drawn[name] = []
            else:
                entry = {"source": hashes[name], "mutants": 0, "ran": {}}
        if entry["source"] == hashes[name]:
            entry["mutants"] = len(distinct(name))
        results[name] = entry
        if options.survivors:
            entry["ran"] = {m: v for m, v in entry["ran"].items() if v != "survived"}
        kept = entry["ran"]
        todo = [mutant for mutant in drawn[name] if mutant.name not in kept]
        if time.monotonic() > end:
            continue
        if options.again:
            todo, kept = later_look(entry, name, hashes[name])
        if not todo:
            continue
        if TESTS[name] not in unchanged:
            unchanged[TESTS[name]] = passes(name, None, TESTS[name], 600)
        verdict, seconds = unchanged[TESTS[name]]
        if verdict != "survived":
            print(f"{name}: its tests fail without any change", flush=True)
            continue
        for mutant in todo:
            if time.monotonic() > end:
                break
            verdict, _ = passes(name, mutant.source, TESTS[name], 20 + 5 * seconds)
            kept[mutant.name] = verdict
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{verdict:9} {name} {mutant.name}", flush=True)
    options.results.write_text(json.dumps(results, indent=1) + "\n")
    ran = [verdict for entry in results.values() for verdict in entry["ran"].values()]
    killed = sum(verdict != "survived" for verdict in ran)
    left = sum(m.name not in results[n]["ran"] for n in names for m in drawn[n])
    print(f"{killed} of {len(ran)} killed; {left} of the chosen ones not run yet")


if __name__ == "__main__":
    main()
