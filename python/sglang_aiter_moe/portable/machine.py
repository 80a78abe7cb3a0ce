"""The machine that portable pretends to be: an architecture and an AITER release."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_aiter_moe.portable.releases import Release

ARCHES = ("gfx942", "gfx950", "gfx1250")
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256, "gfx1250": 256}
A16W4_KERNELS = ("separated", "gu_interleaved")
EXTENSIONS = ("output", "no_combine")


@dataclass(frozen=True)
class Machine:
    """What to pretend.

    Attributes:
        arch: "gfx942" (MI300), "gfx950" (MI350) or "gfx1250".
        release: AITER release or commit.
        a16w4_kernel: how the A16W4 SiTUv2 kernel is built: "separated" as every release has it, or
            "gu_interleaved" for a build that reads interleaved bytes (docs/contract.md section 0).
        flydsl: whether flydsl is importable.
        extensions: ``fused_moe`` arguments that no release has yet: "output", "no_combine".

    Raises:
        ValueError: a value outside those lists.
    """

    arch: str = "gfx950"
    release: Release = field(default_factory=lambda: Release.parse("0.1.20"))
    a16w4_kernel: str = "separated"
    flydsl: bool = True
    extensions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("arch", self.arch, ARCHES),
            ("a16w4_kernel", self.a16w4_kernel, A16W4_KERNELS),
            *(("extensions", e, EXTENSIONS) for e in self.extensions),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; one of {', '.join(allowed)}")

    @classmethod
    def make(
        cls,
        arch: str = "gfx950",
        aiter: str = "0.1.20",
        a16w4_kernel: str = "separated",
        flydsl: bool = True,
        extensions: tuple[str, ...] = (),
    ) -> Machine:
        """A machine from plain strings, as :func:`portable.install` takes them."""
        return cls(arch, Release.parse(aiter), a16w4_kernel, flydsl, tuple(extensions))
