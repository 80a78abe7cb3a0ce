"""What an AITER build can do: by feature test where one is loaded, by release or commit for planning.

Source: docs/contract.md section e (which commit and which tag brought what).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

from sglang_aiter_moe.errors import ContractError


@dataclass(frozen=True)
class Feature:
    """Something AITER gained, and when.

    Attributes:
        name: our name for it.
        meaning: what it is.
        since: first release tag, None if no tag has it.
        commit: first commit, None if it is on no main branch that was looked at.
        date: that commit's date.
        kwargs: keyword arguments of ``fused_moe`` that came with it.
    """

    name: str
    meaning: str
    since: str | None
    commit: str | None
    date: str | None
    kwargs: tuple[str, ...] = ()


_FEATURES = (
    Feature(
        "pads_and_bias",
        "hidden_pad, intermediate_pad, bias1, bias2; shuffle_weight_a16w4 (#1341)",
        "0.1.7",
        "c4be416761",
        "2025-11-07",
        ("hidden_pad", "intermediate_pad", "bias1", "bias2"),
    ),
    Feature(
        "gate_mode",
        "gate_mode keyword, first form (#2726)",
        "0.1.13",
        "e991be1c43",
        "2026-04-17",
        ("gate_mode",),
    ),
    Feature(
        "swiglu_bf16_bound",
        "GPTOSS_SWIGLU_MXFP4_BF16_BOUND (#2972)",
        "0.1.14",
        "cd994551ce",
        "2026-05-08",
    ),
    Feature(
        "swiglu_limit",
        "swiglu_limit, moe_common.GateMode, AITER_BF16_FP8_MOE_BOUND (#2951)",
        "0.1.14",
        "446260d19a",
        "2026-05-09",
        ("swiglu_limit",),
    ),
    Feature(
        "gate_mode_decides",
        "gate_mode decides the activation type of SwiGLU, SiLU and GELU (#3123)",
        "0.1.14",
        "ff9bf15cc5",
        "2026-05-12",
    ),
    Feature("round_up_scales", "RoundUp scales (#3212)", "0.1.16", "c654495df9", "2026-06-02"),
    Feature("flydsl_force", "AITER_FLYDSL_FORCE (#3377)", "0.1.16", "7a8ff7dd4a", "2026-06-05"),
    Feature("force_a8w4", "AITER_FORCE_A8W4 (#3460)", "0.1.17", "76ea4ac325", "2026-06-15"),
    Feature("scale_padding", "0x7F scale pads (#4130)", "0.1.18", "c2b69b9b87", "2026-07-09"),
    Feature("mxmoe", "mxmoe A4W4 kernels (#3832)", "0.1.18", "b2dd7703df", "2026-07-09"),
    Feature(
        "gfx1250_shuffle",
        "moe_shuffle_weight and moe_shuffle_scale by architecture (#4150)",
        "0.1.18",
        "8f86aad8b0",
        "2026-07-10",
    ),
    Feature(
        "situv2",
        "SiTUv2, AITER_SITUV2_A8W4, beta, linear_beta (#4397)",
        "0.1.19",
        "3135022616",
        "2026-07-28",
        ("beta", "linear_beta"),
    ),
    Feature(
        "shared_expert",
        "shared expert fused into the call (#4269)",
        "0.1.19.post1",
        "00cbe979f2",
        "2026-08-01",
        ("shared_w1",),
    ),
    Feature("situv2_a4w4", "AITER_SITUV2_A4W4 (#4463)", "0.1.19.post1", "4045b2de7b", "2026-08-03"),
    Feature("opus_situv2", "Opus A8W4 for SiTUv2 (#4534)", "0.1.20", "6dc26b7a81", "2026-08-05"),
    Feature("a16w4_port", "A16W4 SiTUv2 kernel port (#4502)", "0.1.20", "868ac1f7aa", "2026-08-08"),
    Feature(
        "runtime_betas",
        "beta and linear_beta as kernel arguments (#4707)",
        "0.1.20",
        "1262e0a696",
        "2026-08-18",
    ),
    Feature(
        "stage2_scatter",
        "stage2_scatter (#4785)",
        None,
        "ba59a37aa6",
        "2026-08-21",
        ("stage2_scatter",),
    ),
    Feature("no_combine", "no_combine keyword", None, None, None, ("no_combine",)),
    Feature("output", "output keyword", None, None, None, ("output",)),
    Feature("quant_dtype_a", "quant_dtype_a keyword", None, None, None, ("quant_dtype_a",)),
)

FEATURES: Mapping[str, Feature] = {f.name: f for f in _FEATURES}

#: The newest release and main revision that section e was read from.
NEWEST_RELEASE = "0.1.20.post1"
SNAPSHOT = ("e4048607a535", "2026-08-22")
#: Without it nothing below is true: gate_mode does not yet decide the activation type.
OLDEST_RELEASE = "0.1.14"

#: FlyDSL release that each AITER release is built for.
FLYDSL_PINS = (
    ("0.1.20", "0.3.1"),
    ("0.1.19.post1", "0.3.0"),
    ("0.1.18", "0.2.4"),
)


@dataclass(frozen=True)
class Capabilities:
    """What one AITER build can do.

    Attributes:
        features: names from :data:`FEATURES`.
        name: what it was identified as, for people.
        identified: whether that is known; if not, the features are the newest.
        how: how it was found out.
        flydsl: FlyDSL's version, None if unknown.
        flydsl_available: whether AITER can use FlyDSL kernels.
        flydsl_needed: the FlyDSL release this AITER is built for, None if unknown.
        swiglu_bf16_bound: GPTOSS_SWIGLU_MXFP4_BF16_BOUND as an AITER that is already imported froze it.
    """

    features: frozenset[str]
    name: str
    identified: bool = True
    how: str = "stated"
    flydsl: str | None = None
    flydsl_available: bool = True
    flydsl_needed: str | None = None
    swiglu_bf16_bound: int | None = field(default=None)

    def has(self, feature: str) -> bool:
        """Whether the build has a feature of :data:`FEATURES`."""
        if feature not in FEATURES:
            raise KeyError(feature)
        return feature in self.features

    @property
    def kwargs(self) -> frozenset[str]:
        """The optional keyword arguments of ``fused_moe`` that this build knows."""
        return frozenset(k for name in self.features for k in FEATURES[name].kwargs)

    @classmethod
    def newest(cls, why: str) -> Capabilities:
        """The newest rule, for an AITER that could not be identified."""
        return cls(
            _up_to_date(SNAPSHOT[1]),
            f"main {SNAPSHOT[0]}",
            False,
            why,
            flydsl_needed=_pin(NEWEST_RELEASE),
        )

    @classmethod
    def for_release(cls, text: str) -> Capabilities:
        """The capabilities of a release (``"0.1.20"``, ``"v0.1.19.post1"``) or of a commit of section e.

        A release newer than the newest that was looked at counts as that one, and says so.

        Raises:
            ContractError: for what is neither a version nor such a commit.
        """
        commit = _commit(text)
        if commit:
            sha, date = commit
            return cls(
                _up_to_date(date), f"commit {sha}", how="commit stated", flydsl_needed=_pin_at(date)
            )
        try:
            version = Version(str(text).removeprefix("v"))
            if len(version.release) < 2:
                raise InvalidVersion(text)
        except InvalidVersion:
            raise ContractError(
                f"AITER {text!r} is neither a release nor a commit that docs/contract.md names",
                allowed="a release such as 0.1.20, or a commit such as 6dc26b7a8",
                fix="name the release that AITER's checkout follows",
            ) from None
        public = Version(version.public)
        newer = public > Version(NEWEST_RELEASE)
        features = frozenset(
            f.name for f in _FEATURES if f.since is not None and Version(f.since) <= public
        )
        how = "release stated"
        if newer:
            how += f", newer than {NEWEST_RELEASE}, whose rules are taken"
        return cls(features, f"release {public}", not newer, how, flydsl_needed=_pin(str(public)))

    def with_flydsl(self, version: str | None, *, available: bool = True) -> Capabilities:
        """The same build beside another FlyDSL."""
        values = {**self.__dict__, "flydsl": version, "flydsl_available": available}
        return Capabilities(**values)

    @classmethod
    def from_modules(cls, modules: Mapping[str, ModuleType]) -> Capabilities:
        """Tests the AITER that is imported in this process, feature by feature.

        Signature of ``aiter.fused_moe.fused_moe`` for keywords, names for enums and modules, the
        module's source text for variables; the version only for what leaves no such trace.

        Args:
            modules: ``sys.modules``, or a stand-in.

        Returns:
            :meth:`newest` if there is no AITER or it shows nothing.
        """
        aiter = modules.get("aiter")
        fused = modules.get("aiter.fused_moe")
        function = getattr(fused, "fused_moe", None)
        if aiter is None or function is None:
            return cls.newest("no AITER is imported in this process; the newest rule is taken")
        stated = _stated_version(aiter)
        base = None
        if stated:
            try:
                base = cls.for_release(stated)
            except ContractError:
                base = None
        found = _features_by_test(modules, aiter, fused, function)
        unsure = {name for name in FEATURES if name not in found}
        fallback = base if base is not None else cls.newest("")
        features = {name for name, present in found.items() if present}
        features |= {name for name in unsure if name in fallback.features}
        bound = getattr(fused, "_SWIGLU_MXFP4_BF16_BOUND", None)
        flydsl = getattr(modules.get("flydsl"), "__version__", None)
        return cls(
            frozenset(features),
            base.name if base else "an AITER that states no version",
            base is not None and base.identified,
            f"feature test on the imported aiter ({len(found)} of {len(FEATURES)} features tested, "
            + ("the rest by its version)" if base else "the rest by the newest rule)"),
            flydsl=flydsl,
            flydsl_available=_flydsl_available(modules),
            flydsl_needed=fallback.flydsl_needed,
            swiglu_bf16_bound=bound if isinstance(bound, int) else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.__dict__, "features": sorted(self.features)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Capabilities:
        """The inverse of :meth:`to_dict`."""
        return cls(**{**data, "features": frozenset(data["features"])})


def _features_by_test(
    modules: Mapping[str, ModuleType], aiter: ModuleType, fused: ModuleType, function: Any
) -> dict[str, bool]:
    found: dict[str, bool] = {}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if parameters and not takes_any:
        for name, feature in FEATURES.items():
            if feature.kwargs:
                found[name] = all(k in parameters for k in feature.kwargs)
        # Three days apart, and in the same release.
        found["gate_mode_decides"] = found["gate_mode"] and found["swiglu_limit"]
    activations = getattr(aiter, "ActivationType", None)
    if activations is not None:
        found["situv2"] = hasattr(activations, "Situv2") and found.get("situv2", True)
    shuffle = modules.get("aiter.ops.shuffle")
    if shuffle is not None:
        found["gfx1250_shuffle"] = hasattr(shuffle, "moe_shuffle_weight")
    text = _source_text(fused)
    if text:
        found["situv2_a4w4"] = "AITER_SITUV2_A4W4" in text
        found["force_a8w4"] = "AITER_FORCE_A8W4" in text
        found["flydsl_force"] = "AITER_FLYDSL_FORCE" in text
        found["swiglu_bf16_bound"] = "GPTOSS_SWIGLU_MXFP4_BF16_BOUND" in text
    return found


def _flydsl_available(modules: Mapping[str, ModuleType]) -> bool:
    ask = getattr(modules.get("aiter.ops.flydsl.utils"), "is_flydsl_available", None)
    if callable(ask):
        return bool(ask())
    # aiter.fused_moe imports this module if it can, and does without FlyDSL if not.
    return "aiter.ops.flydsl.moe_common" in modules


def _source_text(module: ModuleType) -> str:
    try:
        text = inspect.getsource(module)
    except (OSError, TypeError):
        return ""
    # A stand-in keeps its dispatch elsewhere: only a file that reads AITER's variables tells of them.
    return text if "AITER_BF16_FP8_MOE_BOUND" in text else ""


def _stated_version(aiter: ModuleType) -> str | None:
    text = getattr(aiter, "__version__", None)
    if not isinstance(text, str):
        return None
    match = re.search(r"\+g([0-9a-f]{7,40})", text)
    if match and _commit(match.group(1)):
        return match.group(1)
    return text


def _commit(text: str) -> tuple[str, str] | None:
    if not re.fullmatch(r"[0-9a-f]{7,40}", str(text)):
        return None
    known: Iterable[tuple[str, str]] = [
        (f.commit, f.date) for f in _FEATURES if f.commit and f.date
    ]
    for sha, date in [*known, SNAPSHOT]:
        short = min(len(sha), len(text))
        if sha[:short] == text[:short]:
            return text, date
    return None


def _up_to_date(date: str) -> frozenset[str]:
    return frozenset(f.name for f in _FEATURES if f.date is not None and f.date <= date)


def _pin(release: str) -> str | None:
    for since, flydsl in FLYDSL_PINS:
        if Version(release) >= Version(since):
            return flydsl
    return None


def _pin_at(date: str) -> str | None:
    if date >= "2026-08-18":
        return "0.3.1"
    if date >= "2026-08-01":
        return "0.3.0"
    return "0.2.4" if date >= "2026-07-09" else None
