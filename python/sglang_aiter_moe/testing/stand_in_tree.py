"""A miniature SGLang tree of our own making: the places that the in-tree edits look at, and nothing else.

Its AITER branches are not SGLang's. :func:`accept` makes their digests the known ones, so that a test can
change the code and see the edit refused.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = {
    "srt/layers/quantization/mxfp4.py": '''
        """MXFP4."""

        from __future__ import annotations

        import os

        from sglang.srt.layers.moe import utils
        from sglang.srt.utils import round_up

        _use_aiter = False  # a comment   with  spaces


        def _aiter_situ_uses_gu_interleaved_weights() -> bool:
            """Which layout."""
            return bool(os.environ.get("A"))


        class Mxfp4MoEMethod:
            def create_weights(
                self,
                layer,
                num_experts: int,
                hidden_size,
                intermediate_size_per_partition,
                params_dtype,
                with_bias = False,
                **extra_weight_attrs,
            ):
                # first comment
                if utils is None:
                    pass
                elif _use_aiter:
                    self.hidden_pad = 1
                self.hidden_size = hidden_size

            def process_weights_after_loading(self, layer):
                if _use_aiter:
                    layer.packed = True

            def create_moe_runner(self, layer, moe_runner_config):
                moe_runner_backend = utils
                if moe_runner_backend.is_aiter():
                    self.runner = "aiter"

            def apply(self, layer, dispatch_output):

                if _use_aiter:
                    return self._apply_aiter(layer, dispatch_output)

            def _apply_aiter(self, layer, dispatch_output):
                return dispatch_output

            def _apply_sm100_trtllm_gen(self, layer, dispatch_output):
                pass
        ''',
    "srt/layers/moe/topk.py": '''
        from dataclasses import dataclass

        from sglang.srt.environ import envs
        from sglang.srt.utils import is_hip

        _use_aiter = is_hip()


        @dataclass
        class TopKConfig:
            correction_bias: object = None

            def correction_bias_for_dtype(self, dtype):
                """In another dtype."""
                return self.correction_bias


        def select_experts(hidden_states, router_logits, topk_config, *, layer_id=None, dynamic_expert_bias=None):
            correction_bias = topk_config.correction_bias_for_dtype(router_logits.dtype)
            return router_logits, correction_bias
        ''',
    "srt/layers/moe/moe_runner/aiter.py": """
        from __future__ import annotations

        from dataclasses import dataclass
        from typing import Any, Optional

        import torch

        from sglang.srt.environ import envs

        _MOE_SORTING_DISPATCH_POLICY = 0


        @dataclass
        class AiterMoeQuantInfo:
            w13_weight: torch.Tensor
            swiglu_limit: float = 0.0


        @dataclass
        class AiterRunnerInput:
            hidden_states: torch.Tensor
            output_dtype: Optional[torch.dtype] = None

            @property
            def runner_backend(self):
                return None


        @dataclass
        class AiterRunnerOutput:
            hidden_states: torch.Tensor


        class AiterRunnerCore:
            def run(self, runner_input, quant_info, running_state, hooks=None):
                if runner_input.hidden_states is None:
                    return AiterRunnerOutput(
                        hidden_states=torch.empty(
                            (0, 4)
                        )
                    )
                return AiterRunnerOutput(hidden_states=runner_input.hidden_states)
        """,
    "srt/layers/moe/moe_runner/flashinfer_trtllm.py": """
        from sglang.srt.environ import envs


        # About the function.
        def _fused_experts_flashinfer_mxfp4_sm100_trtllm_gen(dispatch_output, quant_info, runner_config):
            return dispatch_output
        """,
    "srt/model_executor/model_runner_components/weight_updater.py": """
        from sglang.srt.environ import envs


        class WeightUpdater:
            def update_weights_from_disk(self, model_path, load_format):
                return True, ""

            def update_weights_from_tensor(self, named_tensors, load_format=None):
                return True, ""

            def update_weights_from_ipc(self, recv_req):
                return True, ""

            def receive_weights_from_distributed(self, *, names):
                return names

            def load_weights_from_distributed(self, named_tensors):
                return True, ""

            def begin_weight_update(self):
                pass

            def end_weight_update(self, *, run_post_load):
                pass
        """,
    "srt/managers/scheduler_components/weight_updater.py": """
        from sglang.srt.environ import envs


        class SchedulerWeightUpdaterManager:
            def update_weights_from_disk(self, recv_req):
                pass

            def update_weights_from_distributed(
                self,
                recv_req,
            ):
                pass

            def update_weights_from_tensor(self, recv_req):
                pass

            def update_weights_from_ipc(self, recv_req):
                pass

            def end_weight_update(self, recv_req):
                pass

            def resume_memory_occupation(self, recv_req):
                pass

            def check_weights(self, recv_req):
                pass
        """,
    "srt/eplb/eplb_manager.py": """
        from sglang.srt.environ import envs


        def update_expert_location_with_recovery(*, model, nnodes):
            pass
        """,
    "srt/model_loader/loader.py": """
        from sglang.srt.environ import envs


        class DefaultModelLoader:
            @staticmethod
            def restore_weights_before_loading(model, target_device):
                for module in model.modules():
                    module.restore()
        """,
    "version.py": "",
    "__init__.py": "",
}


def write(root: Path, *, source: bool = False, release: str = "0.5.23") -> Path:
    """Writes the tree; returns the root to give to ``apply``.

    Args:
        root: an empty or new directory.
        source: the layout of a checkout instead of site-packages.
        release: what the tree says that it is; "" for one that does not say.
    """
    package = root / "python" / "sglang" if source else root / "sglang"
    for name, text in FILES.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    if release:
        (package / "_version.py").write_text(f"__version__ = version = '{release}'\n")
    if source:
        tests = root / "test" / "registered" / "unit"
        tests.mkdir(parents=True)
        (tests / "README.md").write_text("SGLang's tests\n")
    return root


def accept(setattr: Callable[[Any, str, Any], None]) -> None:
    """Makes the miniature's code the known code.

    Args:
        setattr: pytest's ``monkeypatch.setattr``.
    """
    from sglang_aiter_moe.intree import edit_mxfp4, edit_runner, edit_topk, edit_updates
    from sglang_aiter_moe.intree.anchors import Source, code_of, digest

    def source(name: str) -> Source:
        return Source(name, textwrap.dedent(FILES[name]).lstrip("\n").encode())

    mxfp4 = source("srt/layers/quantization/mxfp4.py")
    for name, method, test in (
        ("_CREATE", "create_weights", "_use_aiter"),
        ("_PROCESS", "process_weights_after_loading", "_use_aiter"),
        ("_RUNNER", "create_moe_runner", "moe_runner_backend.is_aiter()"),
        ("_APPLY", "apply", "_use_aiter"),
    ):
        function = mxfp4.find(f"Mxfp4MoEMethod.{method}")
        branch = edit_mxfp4.branches_of(function, test)[0]
        setattr(edit_mxfp4, name, {digest(code_of(branch.body.body))})
    for module, name, file, target in (
        (
            edit_mxfp4,
            "_APPLY_AITER",
            "srt/layers/quantization/mxfp4.py",
            "Mxfp4MoEMethod._apply_aiter",
        ),
        (edit_mxfp4, "_SELECT", "srt/layers/quantization/mxfp4.py", edit_mxfp4._SELECTOR),
        (edit_topk, "_CACHE", "srt/layers/moe/topk.py", "TopKConfig.correction_bias_for_dtype"),
        (edit_runner, "_RUN", "srt/layers/moe/moe_runner/aiter.py", "AiterRunnerCore.run"),
        (
            edit_updates,
            "_RESTORE",
            "srt/model_loader/loader.py",
            "DefaultModelLoader.restore_weights_before_loading",
        ),
    ):
        setattr(module, name, {digest(code_of(source(file).find(target)))})


def content(root: Path) -> dict[str, bytes]:
    """Every file below ``root`` but byte code and git's own."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not {"__pycache__", ".git"} & set(path.parts)
    }
