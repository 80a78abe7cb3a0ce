"""SGLang's test registration marks, also where SGLang is not installed.

SGLang's CI reads the calls ``register_*_ci(...)`` from a test file's syntax tree; at run time they
do nothing. The names here are SGLang's own when it is installed and no-ops otherwise, so that a
test file runs in this repository and, unchanged, in SGLang's tree.
"""

from __future__ import annotations

try:
    from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci, register_cuda_ci
except ImportError:

    def register_cpu_ci(est_time: float, suite: str, **kwargs) -> None:
        """Marks a test file for SGLang's CPU suites (no effect at run time)."""

    def register_cuda_ci(est_time: float, stage: str, runner_config: str, **kwargs) -> None:
        """Marks a test file for SGLang's CUDA runners (no effect at run time)."""

    def register_amd_ci(est_time: float, stage: str, runner_config: str, **kwargs) -> None:
        """Marks a test file for SGLang's AMD runners (no effect at run time)."""


__all__ = ["register_amd_ci", "register_cpu_ci", "register_cuda_ci"]
