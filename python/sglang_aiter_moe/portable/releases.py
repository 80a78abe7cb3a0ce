"""AITER's releases, as far as its MXFP4 MoE differs between them (docs/contract.md section e)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

# Development commits sort by the release that they led to: 6dc26b7a8 (#4534, 2026-08-05) came after
# 0.1.19.post1 and before 0.1.20; e4048607a (2026-08-22), the snapshot that docs/contract.md describes, after 0.1.20.
_COMMITS = {"6dc26b7a8": "0.1.19.post90", "e4048607a": "0.1.20.post90"}
OLDEST = Version("0.1.7")  # the first with shuffle_weight_a16w4, pads and biases


_version = functools.cache(Version)


@dataclass(frozen=True, order=True)
class Release:
    """An AITER release or commit, ordered by time.

    Attributes:
        version: where it stands among the releases.
        label: how the caller named it.
    """

    version: Version
    label: str

    @classmethod
    @functools.cache
    def parse(cls, name: str) -> Release:
        """``"0.1.20"``, ``"v0.1.19.post1"``, or a commit that docs/contract.md names (``"6dc26b7a8"``).

        Raises:
            ValueError: neither a version from 0.1.7 on nor one of those commits.
        """
        text = name.strip()
        for commit, stands_at in _COMMITS.items():
            if len(text) >= 7 and (text.startswith(commit) or commit.startswith(text)):
                return cls(Version(stands_at), text)
        try:
            version = Version(text.removeprefix("v"))
        except InvalidVersion:
            version = None
        if version is None or version < OLDEST:
            raise ValueError(
                f"unknown AITER release {name!r}; a version from {OLDEST} on, or a commit out of "
                f"{sorted(_COMMITS)}"
            )
        return cls(version, text)

    def _since(self, version: str) -> bool:
        return self.version >= _version(version)

    @property
    def has_gate_mode(self) -> bool:
        """``fused_moe(gate_mode=)``, first form (#2726). Until :attr:`gate_mode_decides` it decides nothing."""
        return self._since("0.1.13")

    @property
    def gate_mode_decides(self) -> bool:
        """gate_mode takes part in the choice of activation dtype (#2951, #3123); ``swiglu_limit``; ``moe_common``."""
        return self._since("0.1.14")

    @property
    def rounds_scales_up(self) -> bool:
        """MX scales by RoundUp; Even before (#3212)."""
        return self._since("0.1.16")

    @property
    def has_flydsl_force(self) -> bool:
        """AITER_FLYDSL_FORCE, on by default (#3377)."""
        return self._since("0.1.16")

    @property
    def has_gfx1250_force_a8w4(self) -> bool:
        """AITER_FORCE_A8W4 (#3460)."""
        return self._since("0.1.17")

    @property
    def pads_interleaved_scales(self) -> bool:
        """The a16w4 scale shuffle pads columns to 8, with 0x7F (#4130)."""
        return self._since("0.1.18")

    @property
    def has_arch_aware_shuffle(self) -> bool:
        """moe_shuffle_weight, moe_shuffle_scale and the n32k4 scales of gfx1250 (#4150); mxmoe (#3832)."""
        return self._since("0.1.18")

    @property
    def has_situv2(self) -> bool:
        """ActivationType.Situv2, AITER_SITUV2_A8W4, beta and linear_beta (#4397)."""
        return self._since("0.1.19")

    @property
    def has_situv2_a4w4(self) -> bool:
        """AITER_SITUV2_A4W4 (#4463); the shared-expert arguments (#4269)."""
        return self._since("0.1.19.post1")

    @property
    def has_opus_situv2(self) -> bool:
        """Opus stage 1 knows SiTUv2 (#4534)."""
        return self._since(_COMMITS["6dc26b7a8"])

    @property
    def has_stage2_scatter(self) -> bool:
        """``fused_moe(stage2_scatter=)`` (#4785); in no release yet."""
        return self._since(_COMMITS["e4048607a"])
