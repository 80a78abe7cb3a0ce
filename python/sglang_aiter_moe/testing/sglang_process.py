"""Makes this process a single SGLang model worker without an engine, in every supported release.

What an engine's scheduler does before it builds a model: load the plugins, publish the server arguments,
build the (one-rank) process groups. Then real layers can be constructed and called.
"""

from __future__ import annotations

import inspect
import json
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULT = "RESULT "


def become_single_rank(model_path: str | Path, port: int, **server_args: Any) -> Any:
    """Returns SGLang's ``ModelConfig`` of ``model_path``; the process can build its layers afterwards.

    Args:
        model_path: directory with a config.json.
        port: a free TCP port for the process group of one.
        server_args: further fields of SGLang's ``ServerArgs``.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel

    _allow_mxfp4()
    args = _server_args(model_path, **server_args)
    _publish(args)
    init_distributed_environment(
        backend="gloo",
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    initialize_model_parallel()
    model_config = ModelConfig.from_server_args(args)
    _initialize_attention(args, model_config)
    from sglang.srt.layers.moe import initialize_moe_config

    if inspect.signature(initialize_moe_config).parameters:
        initialize_moe_config(args)
    else:
        initialize_moe_config()
    return model_config


def _allow_mxfp4() -> None:
    """Up to 0.5.13 SGLang lists the quantization on CUDA and ROCm alone, later on every machine."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    QUANTIZATION_METHODS.setdefault("mxfp4", Mxfp4Config)


def _publish(args: Any) -> None:
    try:
        from sglang.srt import runtime_context

        publish = runtime_context.publish
    except (ImportError, AttributeError):  # before 0.5.17
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
        return
    if "ranks" in inspect.signature(publish).parameters:  # from 0.5.21
        publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    else:
        publish(args, role="scheduler")


def model_config_of(model_path: str | Path) -> Any:
    """SGLang's ``ModelConfig`` of a further checkpoint, in a process that is a worker already."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(_server_args(model_path))


def _server_args(model_path: str | Path, **fields: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    settings = {
        "model_path": str(model_path),
        "device": "cpu",
        "dtype": "bfloat16",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        **fields,
    }
    return ServerArgs(**settings)


def _initialize_attention(args: Any, model_config: Any) -> None:
    try:
        from sglang.srt.layers.dp_attention import initialize_dp_attention
    except ImportError:
        return
    known = {"server_args": args, "model_config": model_config}
    names = inspect.signature(initialize_dp_attention).parameters
    initialize_dp_attention(**{name: known[name] for name in names if name in known})


def build_carrier(model_config: Any, model_path: str | Path) -> Any:
    """The carrier model with its weights loaded and post-processed by SGLang's own loader functions."""
    from safetensors import safe_open
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.weight_utils import get_quant_config

    from sglang_aiter_moe.testing.carrier.carrier_model import CarrierForCausalLM

    quant_config = get_quant_config(model_config, LoadConfig(), {})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = CarrierForCausalLM(model_config.hf_config, quant_config)
    finally:
        torch.set_default_dtype(before)
    with safe_open(Path(model_path) / "model.safetensors", "pt") as file:
        model.load_weights([(name, file.get_tensor(name)) for name in file.keys()])  # noqa: SIM118
    process_after_loading(model)
    return model.eval()


def process_after_loading(model: torch.nn.Module) -> None:
    """What SGLang's model loader does after the weights are in (``postprocess_weights``)."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)


def release() -> str:
    """The SGLang release in this process."""
    import sglang

    return sglang.__version__


def report(probes: Mapping[str, Callable[[], Any]]) -> None:
    """Runs each probe and writes the JSON line, with what a probe raised in place of what it found."""
    result: dict[str, Any] = {"release": release()}
    for name, probe in probes.items():
        try:
            result[name] = probe()
        except Exception as error:  # one probe's failure is its own test's business
            traceback.print_exc()
            result[name] = {"error": f"{type(error).__name__}: {error}"}
    print_result(**result)


def print_result(**values: Any) -> None:
    """Writes one JSON line that the parent test process looks for."""
    print(RESULT + json.dumps(values), flush=True)


def printed(line: str, *marks: str) -> tuple[str, dict[str, Any]] | None:
    """(mark, values) of a line that such a process printed for its parent; None of any other line.

    Args:
        line: of its output. What a library printed without a newline, as progress bars do, may stand before the mark.
        marks: RESULT, or others that JSON follows.
    """
    found = re.search(f"({'|'.join(map(re.escape, marks))})(?={{)", line)
    if found is None:
        return None
    return found[1], json.JSONDecoder().raw_decode(line, found.end())[0]
