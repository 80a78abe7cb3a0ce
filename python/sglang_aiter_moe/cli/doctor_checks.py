"""What `doctor` looks at. Nothing here needs a GPU, SGLang or AITER: what is missing is a finding."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sglang_aiter_moe import environ, plugin
from sglang_aiter_moe.cli.doctor_files import examine_files
from sglang_aiter_moe.cli.env import describe
from sglang_aiter_moe.cli.finding import BAD, OK, WARN, Finding
from sglang_aiter_moe.cli.plan_report import Setting
from sglang_aiter_moe.contract import modes
from sglang_aiter_moe.contract.capabilities import FEATURES, NEWEST_RELEASE, Capabilities
from sglang_aiter_moe.contract.plan import MoePlan
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.model_config import moe_layers, read_config
from sglang_aiter_moe.patches.model import Status

# The wheel name of AITER; PyPI's `aiter` is another project.
AITER_DISTRIBUTION = "amd-aiter"
USE_AITER = "SGLANG_USE_AITER"
MODE_FLAGS = (modes.SITUV2_A8W4, modes.SITUV2_A4W4, modes.FORCE_A8W4)


def examine(config: str, *, tp: int, ep: int, arch: str | None) -> list[Finding]:
    """All findings, in the order in which they are shown."""
    gpu = gpu_arch()
    aiter = aiter_package()
    arch = arch or gpu or "gfx950"
    plan, refusal = _plan(config, tp, ep, arch, aiter)
    prebuild = f"sglang-aiter-moe prebuild {config} --tp {tp} --ep {ep} --arch {arch}"
    return [
        *_versions(gpu, aiter),
        *_variables(gpu),
        *_mode(f"{config}, tp {tp}, ep {ep}, on {arch}", plan, refusal),
        *_patches(),
        *examine_files(aiter, plan, prebuild),
    ]


# --- versions ------------------------------------------------------------------------------------


def _versions(gpu: str | None, aiter: Path | None) -> Iterator[Finding]:
    section = "versions"
    hip = torch.version.hip
    yield Finding(
        section,
        OK if hip else WARN,
        f"torch {torch.__version__}, " + (f"ROCm {hip}" if hip else "not a ROCm build"),
        "" if hip else "AITER's kernels need a ROCm build of torch; the portable backend does not",
    )
    yield Finding(
        section,
        OK if gpu else WARN,
        f"GPU {gpu}" if gpu else "no ROCm GPU",
        "" if gpu else "plans are shown for gfx950 unless --arch says otherwise",
    )
    sglang = plugin.installed_release()
    if sglang is None:
        yield Finding(section, WARN, "SGLang is not installed", "nothing is patched")
    else:
        problem = plugin.release_problem()
        first, last = plugin.TESTED
        yield Finding(
            section,
            BAD if problem else OK,
            f"SGLang {sglang} (tested: {first} to {last}; gpt-oss from {plugin.FIRST_WITH_GPT_OSS})",
            problem or "",
        )
    capabilities = aiter_capabilities(aiter)
    if aiter is None:
        yield Finding(section, WARN, "AITER is not installed", capabilities.how)
    else:
        level = OK if capabilities.identified else WARN
        yield Finding(section, level, f"AITER: {capabilities.name}", capabilities.how)
    yield Finding(section, OK, _aiter_window())
    for name in ("flydsl", "triton"):
        version = _version(name)
        if version is None:
            yield Finding(section, WARN, f"{name} is not installed")
            continue
        needed = capabilities.flydsl_needed if name == "flydsl" and aiter else None
        wrong = needed is not None and version != needed
        yield Finding(
            section,
            WARN if wrong else OK,
            f"{name} {version}",
            f"this AITER is built for {needed}: pip install flydsl=={needed}" if wrong else "",
        )


def _aiter_window() -> str:
    since = {name: FEATURES[name].since for name in ("gate_mode_decides", "situv2", "situv2_a4w4")}
    return (
        f"AITER releases that fit: from {since['gate_mode_decides']}; SiTUv2 from "
        f"{since['situv2']}, its A4W4 from {since['situv2_a4w4']}; rules are known up to "
        f"{NEWEST_RELEASE}"
    )


def aiter_package() -> Path | None:
    """The directory of an installed AITER; found without importing it, which may build kernels."""
    try:
        if importlib.util.find_spec("aiter") is None:
            return None
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    return package if (package / "ops" / "shuffle.py").is_file() else None


def aiter_capabilities(aiter: Path | None) -> Capabilities:
    """What that AITER can do by its release; the newest rule where it has none."""
    if aiter is None:
        return Capabilities.newest("no AITER here: the newest rule is taken")
    version = _version(AITER_DISTRIBUTION) or _version("aiter")
    try:
        return Capabilities.for_release(version or "")
    except ContractError:
        return Capabilities.newest(
            f"its version {version!r} says nothing: the newest rule is taken"
        )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_arch() -> str | None:
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]


# --- variables -----------------------------------------------------------------------------------


def _variables(gpu: str | None) -> Iterator[Finding]:
    section = "variables that are set"
    if gpu and not environ.sglang_bool()(os.environ.get(USE_AITER)):
        text = f"{USE_AITER} is not on: SGLang leaves AITER's path alone on this GPU"
        yield Finding(section, WARN, text, f"type `export {USE_AITER}=1` before the server")
    shown = 0
    for variable in environ.VARIABLES.values():
        row = describe(variable, os.environ)
        if row["value"] is None:
            continue
        shown += 1
        reads = ", ".join(f"{name} reads {value}" for name, value in row["reads"].items())
        text = f"{variable.name}={row['value']!r}: {reads or 'nothing reads it'}"
        if variable.readers:
            text += f" ({variable.when.rstrip('.')})"
        problem, fix = _problem(variable, row)
        yield Finding(section, problem or OK, text, fix)
    if not shown:
        yield Finding(section, OK, "none: the defaults hold (see `sglang-aiter-moe env`)")


def _problem(variable: environ.Variable, row: dict[str, Any]) -> tuple[str | None, str]:
    if not variable.readers:
        return WARN, f"unset {variable.name}"
    if variable.name in MODE_FLAGS:
        try:
            modes.check_clean_flag(variable.name, row["value"])
        except ContractError as error:
            return BAD, error.fix
    broken = [str(value) for value in row["reads"].values() if str(value).startswith("ValueError")]
    if broken:
        return BAD, f"unset {variable.name} (accepted: {variable.accepted})"
    # What has an own list of values here has no other: `ENABLE=false` would leave the patch set on.
    if variable.ours and "," in variable.accepted and row["value"] not in accepted(variable):
        return BAD, f"unset {variable.name}, or use one of {variable.accepted}"
    if row["readers_differ"]:
        return BAD, f"use {variable.accepted}; read {variable.when}"
    return None, ""


def accepted(variable: environ.Variable) -> list[str]:
    """The values of a variable whose ``accepted`` lists them."""
    return [value.strip() for value in variable.accepted.split(",")]


# --- the resolved mode ---------------------------------------------------------------------------


def _plan(
    config: str, tp: int, ep: int, arch: str, aiter: Path | None
) -> tuple[MoePlan | None, ContractError | None]:
    release = aiter_capabilities(aiter)
    name = release.name.removeprefix("release ") if release.identified else NEWEST_RELEASE
    try:
        layers = moe_layers(read_config(config), tp=tp, ep=ep)
        return Setting(arch, name, os.environ).plan(layers.spec), None
    except ContractError as error:
        return None, error


def _mode(section: str, plan: MoePlan | None, refusal: ContractError | None) -> Iterator[Finding]:
    if plan is None:
        yield Finding(section, BAD, refusal.what, refusal.fix)
        return
    yield Finding(section, OK, _resolved(plan))
    for decision in plan.decisions:
        if decision.subject in ("mode", "w13_layout"):
            text = f"{decision.subject} {decision.value}: {decision.reason}"
            yield Finding(section, OK, text)
        elif decision.subject == "note":
            yield Finding(section, WARN, f"{decision.value}: {decision.reason}")
    for part in plan.ranges:
        tuned = {True: "a tuned row", False: "no tuned row", None: "tuned rows not known"}
        text = f"{part.first} to {part.last} tokens: {part.family}, {tuned[part.tuned]}"
        yield Finding(section, OK, text)


def _resolved(plan: MoePlan) -> str:
    mode = " then ".join(str(mode) for mode in plan.modes)
    return f"mode {mode}, w13 laid out {plan.w13_layout}, gate_mode {plan.gate_mode}"


# --- patches -------------------------------------------------------------------------------------


def _patches() -> Iterator[Finding]:
    section = "patches"
    if not plugin.enabled():
        text = f"the patch set is switched off by {plugin.ENABLE}"
        yield Finding(section, WARN, text, f"unset {plugin.ENABLE}")
        return
    problem = plugin.backend_problem()
    if problem:
        yield Finding(section, BAD, problem, f"use one of {', '.join(plugin.BACKENDS)}")
        return
    backend, reason = plugin.resolve_backend()
    yield Finding(section, OK, f"backend {backend}: {reason}")
    if plugin.installed_release() is None:
        yield Finding(section, WARN, "no patch is applied: SGLang is not installed")
        return
    for state in plugin.inspect_states():
        refused = state.status is Status.REFUSED
        what = f"{state.status.value} ({state.reason})" if state.reason else state.status.value
        group = state.status.value if state.status is Status.IN_FORCE else what
        yield Finding(
            section,
            BAD if refused else OK,
            f"{state.patch.name}: {what}",
            group="" if refused else group,
            name=state.patch.name,
        )
