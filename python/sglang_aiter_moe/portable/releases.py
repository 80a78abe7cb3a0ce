"""AITER's releases, as far as its MXFP4 MoE differs between them (docs/contract.md section e)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import date

from packaging.version import InvalidVersion, Version

OLDEST = Version("0.1.7")  # the first with shuffle_weight_a16w4, pads and biases
_COMMITS = {
    "c4be416761": "2025-11-07",
    "e991be1c43": "2026-04-17",
    "cd994551ce": "2026-05-08",
    "446260d19a": "2026-05-09",
    "ff9bf15cc5": "2026-05-12",
    "c654495df9": "2026-06-02",
    "7a8ff7dd4a": "2026-06-05",
    "0cc90134c9": "2026-06-09",
    "76ea4ac325": "2026-06-15",
    "c2b69b9b87": "2026-07-09",
    "b2dd7703df": "2026-07-09",
    "8f86aad8b0": "2026-07-10",
    "3135022616": "2026-07-28",
    "00cbe979f2": "2026-08-01",
    "4045b2de7b": "2026-08-03",
    "6dc26b7a81": "2026-08-05",
    "868ac1f7aa": "2026-08-08",
    "1262e0a696": "2026-08-18",
    "ba59a37aa6": "2026-08-21",
    "e4048607a535": "2026-08-22",
}
_version = functools.cache(Version)


@dataclass(frozen=True)
class Release:
    """An AITER release or a commit of its main branch.

    Attributes:
        label: how the caller named it.
        version: of a release, else None.
        committed: date of a commit, else None.
    """

    label: str
    version: Version | None = None
    committed: date | None = None

    @classmethod
    @functools.cache
    def parse(cls, name: str) -> Release:
        """``"0.1.20"``, ``"v0.1.19.post1"``, or a commit that docs/contract.md dates (``"6dc26b7a8"``).

        Raises:
            ValueError: neither a version from 0.1.7 on nor one of those commits.
        """
        text = name.strip()
        for commit, day in _COMMITS.items():
            if len(text) >= 7 and (text.startswith(commit) or commit.startswith(text)):
                return cls(text, committed=date.fromisoformat(day))
        try:
            version = Version(text.removeprefix("v"))
        except InvalidVersion:
            version = None
        if version is None or version < OLDEST:
            raise ValueError(
                f"unknown AITER release {name!r}; a version from {OLDEST} on, or a commit that "
                "docs/contract.md section e dates"
            )
        return cls(text, version)

    def _since(self, tag: str | None, day: str) -> bool:
        """Whether this is at or after the first tag (a release) or the first commit (a commit)."""
        if self.committed is not None:
            return self.committed >= date.fromisoformat(day)
        return tag is not None and self.version >= _version(tag)

    @functools.cached_property
    def has_gate_mode(self) -> bool:
        """``fused_moe(gate_mode=)``, first form (#2726). Until :attr:`gate_mode_decides` it decides nothing."""
        return self._since("0.1.13", "2026-04-17")

    @functools.cached_property
    def gate_mode_decides(self) -> bool:
        """gate_mode takes part in the choice of activation dtype (#2951, #3123); ``swiglu_limit``; ``moe_common``."""
        return self._since("0.1.14", "2026-05-12")

    @functools.cached_property
    def rounds_scales_up(self) -> bool:
        """MX scales by RoundUp; Even before (#3212)."""
        return self._since("0.1.16", "2026-06-02")

    @functools.cached_property
    def has_flydsl_force(self) -> bool:
        """AITER_FLYDSL_FORCE, on by default (#3377)."""
        return self._since("0.1.16", "2026-06-05")

    @functools.cached_property
    def has_gfx1250_force_a8w4(self) -> bool:
        """AITER_FORCE_A8W4 (#3460)."""
        return self._since("0.1.17", "2026-06-15")

    @functools.cached_property
    def pads_interleaved_scales(self) -> bool:
        """The a16w4 scale shuffle pads columns to 8, with 0x7F (#4130)."""
        return self._since("0.1.18", "2026-07-09")

    @functools.cached_property
    def has_mxmoe(self) -> bool:
        """The mxmoe A4W4 port (#3832)."""
        return self._since("0.1.18", "2026-07-09")

    @functools.cached_property
    def has_arch_aware_shuffle(self) -> bool:
        """moe_shuffle_weight, moe_shuffle_scale and the n32k4 scales of gfx1250 (#4150)."""
        return self._since("0.1.18", "2026-07-10")

    @functools.cached_property
    def has_situv2(self) -> bool:
        """ActivationType.Situv2, AITER_SITUV2_A8W4, beta and linear_beta (#4397)."""
        return self._since("0.1.19", "2026-07-28")

    @functools.cached_property
    def has_shared_expert(self) -> bool:
        """``fused_moe(shared_w1=)`` and its kin (#4269)."""
        return self._since("0.1.19.post1", "2026-08-01")

    @functools.cached_property
    def has_situv2_a4w4(self) -> bool:
        """AITER_SITUV2_A4W4 (#4463)."""
        return self._since("0.1.19.post1", "2026-08-03")

    @functools.cached_property
    def has_opus_situv2(self) -> bool:
        """Opus stage 1 knows SiTUv2 (#4534)."""
        return self._since("0.1.20", "2026-08-05")

    @functools.cached_property
    def has_stage2_scatter(self) -> bool:
        """``fused_moe(stage2_scatter=)`` (#4785); in no release yet."""
        return self._since(None, "2026-08-21")
