"""What a silent failure was made of, from recorded calls; and a process that is as fresh as a new one."""

import os
import sys
import types
from dataclasses import replace

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.matrix import rocm
from sglang_aiter_moe.matrix.cells import Cell
from sglang_aiter_moe.matrix.trace import Trace
from sglang_aiter_moe.portable.resolution import Call, Resolution
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

READ = Resolution(
    "flydsl_a16w4",
    "A16W4",
    "bf16",
    w13_layout="separated",
    w13_scale_layout="separated",
    w2_layout="separated",
    w2_scale_layout="separated",
    activation="situv2",
    beta=4.0,
    linear_beta=25.0,
)
SWIGLU = replace(READ, activation="swiglu", limit=7.0)


@pytest.mark.parametrize(
    "cell,packed,resolved,expected",
    [
        (Cell(), ["separated"], READ, []),
        (Cell(), ["gu_interleaved"], READ, ["layout"]),
        (Cell(), ["separated", "separated"], READ, ["packed twice"]),
        (Cell(), ["separated"], replace(READ, beta=1.0), ["betas"]),
        (Cell(), ["separated"], replace(READ, linear_beta=4.0, beta=1.0), ["betas"]),
        (Cell(activation="silu"), ["separated"], SWIGLU, ["activation", "limit"]),
        (Cell(activation="swiglu"), ["separated"], SWIGLU, []),
        (Cell(activation="swiglu_limit3"), ["separated"], SWIGLU, ["limit"]),
        (Cell(activation="swiglu", bias=True), [], replace(SWIGLU, uses_bias2=False), ["bias"]),
        (Cell(activation="swiglu", bias=True), [], SWIGLU, []),
        (Cell(), [], None, []),
    ],
)
def test_differences(cell, packed, resolved, expected):
    trace = Trace(packed=packed, resolved=resolved, inter=1024, hidden=256)
    assert trace.differences(cell) == expected


def test_experts_that_were_routed_otherwise():
    trace = Trace(packed=["separated"], resolved=READ, inter=1024, hidden=256, routing="routing")
    assert trace.differences(Cell(routing="fp32 bias")) == ["routing"]


@pytest.mark.parametrize(
    "skip,expected",
    [(0, []), (192, []), (193, ["pads"])],
)
def test_pads_that_cover_real_columns(skip, expected):
    # gpt-oss's format on 8 ranks: 64 real columns of 256.
    cell = Cell(activation="swiglu", rows="interleaved", parallel="tp8r0")
    for field in ("intermediate_skip_n", "intermediate_skip_k"):
        resolved = replace(SWIGLU, **{field: skip})
        trace = Trace(resolved=resolved, inter=256, hidden=512)
        assert trace.differences(cell) == expected
    trace = Trace(resolved=replace(SWIGLU, hidden_skip_n=193), inter=256, hidden=512)
    assert trace.differences(cell) == ["pads"]


@pytest.fixture
def untouched(monkeypatch):
    """The environment, torch and sys.modules as they were."""
    before = dict(os.environ)
    monkeypatch.setattr(torch.cuda, "get_device_properties", torch.cuda.get_device_properties)
    yield
    portable.uninstall()
    os.environ.clear()
    os.environ.update(before)


def test_a_trace_notes_packing_and_the_kernel(untouched):
    trace = Trace()
    aiter = rocm.start(Cell())
    trace.watch(aiter)
    shuffle = sys.modules["aiter.ops.shuffle"]
    weight = torch.zeros(1, 64, 128, dtype=torch.uint8)
    shuffle.shuffle_weight_a16w4(weight, 16, True)
    shuffle.shuffle_weight(weight, is_guinterleave=False, gate_up=True)
    shuffle.shuffle_weight(weight, is_guinterleave=False, gate_up=False)  # w2
    shuffle.shuffle_weight_a16w4(weight, 16, False)  # w2
    assert trace.packed == ["gu_interleaved", "separated"]
    call = Call(4, 2, 4, 256, 128, activation=3, beta=4.0, linear_beta=25.0)
    aiter.dispatcher.resolve(call)
    assert trace.resolved.w13_layout == "separated" and (trace.inter, trace.hidden) == (128, 256)


def test_a_cell_starts_with_its_own_environment_alone(untouched):
    os.environ |= {"AITER_SITUV2_A4W4": "1", "SGLANG_USE_AITER_MOE_GU_ITLV": "0"}
    os.environ |= {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "7", "SGLANG_AITER_MOE_ENABLE": "0"}
    rocm.start(Cell(a8w4="true", setting="K3_OPT=1", arch="gfx942", aiter="0.1.19"))
    read = {n: v for n, v in os.environ.items() if n.startswith(("AITER_", "GPTOSS_", "SGLANG_"))}
    assert read.items() >= {"AITER_SITUV2_A8W4": "true", "SGLANG_AITER_K3_OPT": "1"}.items()
    assert read["SGLANG_AITER_MOE_ENABLE"] == "0"  # what the worker was told stays
    assert not {"AITER_SITUV2_A4W4", "SGLANG_USE_AITER_MOE_GU_ITLV"} & set(read)
    assert "GPTOSS_SWIGLU_MXFP4_BF16_BOUND" not in read
    machine = portable.registry.current().machine
    assert (machine.arch, machine.release.label) == ("gfx942", "0.1.19")
    assert torch.cuda.get_device_properties(0).gcnArchName == "gfx942"


def test_a_change_sets_or_removes_its_variable(untouched):
    rocm.start(Cell(a8w4="1"))
    rocm.change_environment(Cell(a8w4="1", change="unset A8W4"))
    assert "AITER_SITUV2_A8W4" not in os.environ
    rocm.change_environment(Cell(change="set GU_ITLV=0"))
    assert os.environ["SGLANG_USE_AITER_MOE_GU_ITLV"] == "0"


MODULE = """
import functools
import os

def is_hip():
    return False

def is_cpu():
    return True

_is_hip = is_hip()
_is_cpu = is_cpu()
_use_aiter = os.environ.get("SGLANG_USE_AITER") == "1" and _is_hip
_counter = object()
if _is_hip:
    from aiter.ops.shuffle import shuffle_weight
if _use_aiter and False:
    _counter = None
if _is_cpu:
    chosen = "of the CPU"
else:
    chosen = "of the GPU"

@functools.cache
def probe():
    return os.environ.get("AITER_SITUV2_A8W4")
"""


def test_constants_and_caches_are_those_of_a_new_process(untouched, tmp_path, monkeypatch):
    file = tmp_path / "pretended.py"
    file.write_text(MODULE)
    module = types.ModuleType("pretended")
    module.__file__ = str(file)
    exec(compile(MODULE, str(file), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "pretended", module)
    monkeypatch.setattr(rocm, "MODULES", ("pretended",))
    kept = module._counter
    for cell in (Cell(a8w4="1"), Cell(a8w4="true")):
        rocm.start(cell)
        rocm.read_modules(cell)
        assert module._is_hip and module._use_aiter and not module._is_cpu
        assert module.shuffle_weight is sys.modules["aiter.ops.shuffle"].shuffle_weight
        assert module.probe() == cell.a8w4
        assert module.chosen == "of the GPU"
    assert module._counter is kept  # nothing else is executed again


def test_tensors_stay_on_the_one_device():
    x = torch.zeros(2)
    with rocm.one_device():
        assert x.to(device="cuda").device.type == x.to("cuda").device.type == "cpu"
        assert x.to(torch.float64).dtype == torch.float64
    assert torch.Tensor.to(x, torch.int32).dtype == torch.int32


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
