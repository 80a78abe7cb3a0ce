"""Activation modes and gate modes: their names, AITER's precedence, and what a SiTUv2 flag may say.

Source: docs/contract.md section 0 (the rule for SiTUv2) and section b.1 (AITER's order of decisions).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from sglang_aiter_moe import environ
from sglang_aiter_moe.errors import ContractError


class ActivationMode(StrEnum):
    """What stage 1 and stage 2 multiply the MXFP4 weights with.

    ``A16W4``: bf16 activations. ``A8W4``: MXFP8 (e4m3, one E8M0 scale per 1x32).
    ``A4W4``: MXFP4 (e2m1, one E8M0 scale per 1x32).
    """

    A16W4 = "A16W4"
    A8W4 = "A8W4"
    A4W4 = "A4W4"


class GateMode(StrEnum):
    """AITER's ``gate_mode`` strings (``aiter.ops.flydsl.moe_common.GateMode``).

    In the MXFP4 path only the first two occur: ``separated`` says that w13 holds all gate rows before
    all up rows, ``interleave`` that gate and up rows alternate.
    """

    SEPARATED = "separated"
    INTERLEAVE = "interleave"
    MOCK_GATE_ONLY = "mock_gate_only"
    GATE_ONLY = "gate_only"


SITUV2_A8W4 = "AITER_SITUV2_A8W4"
SITUV2_A4W4 = "AITER_SITUV2_A4W4"
FORCE_A8W4 = "AITER_FORCE_A8W4"

_CLEAN = (None, "0", "1")


def check_clean_flag(name: str, value: str | None) -> bool:
    """Returns what a mode flag says, if it is spelt so that SGLang and AITER read the same.

    Args:
        name: the environment variable.
        value: its raw value, None when it is not set.

    Raises:
        ContractError: for every spelling but unset, ``0`` and ``1``; the message says what SGLang
            and what AITER would read and gives the line to type.
    """
    if value in _CLEAN:
        return value == "1"
    variable = environ.VARIABLES[name]
    on = value.strip().lower() in ("1", "true", "yes", "on", "01")
    raise ContractError(
        f"{name}={value!r} is not a clean spelling: SGLang reads it as "
        f"{_on_off(variable.sglang_reads(value))}, AITER as {_on_off(variable.aiter_reads(value))}",
        allowed=f"{name} unset, '0' or '1'",
        fix=f"type `export {name}={int(on)}`, or `unset {name}` to leave it off",
    )


def situv2_mode(env: Mapping[str, str], *, has_a4w4_flag: bool = True) -> ActivationMode:
    """The mode that AITER picks for a SiTUv2 layer on gfx942 and gfx950, at every call.

    A8W4 wins when both flags are ``1``. An AITER older than v0.1.19.post1 does not know the A4W4
    flag and runs A16W4 (docs/contract.md sections 0 and b.1).

    Args:
        env: the environment.
        has_a4w4_flag: whether this AITER reads ``AITER_SITUV2_A4W4``.

    Raises:
        ContractError: for a flag that is not unset, ``0`` or ``1``.
    """
    a8w4 = check_clean_flag(SITUV2_A8W4, env.get(SITUV2_A8W4))
    a4w4 = check_clean_flag(SITUV2_A4W4, env.get(SITUV2_A4W4))
    if a8w4:
        return ActivationMode.A8W4
    if a4w4 and has_a4w4_flag:
        return ActivationMode.A4W4
    return ActivationMode.A16W4


def gfx1250_mode(env: Mapping[str, str]) -> ActivationMode:
    """The mode on gfx1250, for every activation: AITER_FORCE_A8W4 alone decides (section b.1).

    Raises:
        ContractError: for a value that is not unset, ``0`` or ``1``. AITER tests whether the value
            is a substring of ``"1"``, so that the empty string switches A8W4 on.
    """
    on = check_clean_flag(FORCE_A8W4, env.get(FORCE_A8W4))
    return ActivationMode.A8W4 if on else ActivationMode.A4W4


def _on_off(value: object) -> str:
    return "on" if value else "off"
