import importlib.util
import subprocess
import sys
import textwrap

import pytest
import torch

from sglang_aiter_moe import portable
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.portable import registry
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def nothing_installed():
    yield
    while registry._installed:
        portable.uninstall()
    assert "aiter" not in sys.modules


def test_the_names_that_callers_import():
    portable.install()
    import aiter
    from aiter import ActivationType, QuantType, biased_grouped_topk, dtypes  # noqa: F401
    from aiter.fused_moe import fused_moe, fused_topk, moe_sorting
    from aiter.ops.flydsl.moe_common import GateMode
    from aiter.ops.shuffle import (  # noqa: F401
        moe_shuffle_scale,
        moe_shuffle_weight,
        shuffle_scale,
        shuffle_scale_a16w4,
        shuffle_weight,
        shuffle_weight_a16w4,
    )
    from aiter.utility.fp4_utils import e8m0_shuffle  # noqa: F401

    assert fused_moe is portable.fused_moe is aiter.fused_moe.fused_moe
    assert moe_sorting is portable.moe_sorting and fused_topk is portable.fused_topk
    assert [a.value for a in (ActivationType.Silu, ActivationType.Gelu)] == [0, 1]
    assert [a.value for a in (ActivationType.Swiglu, ActivationType.Situv2)] == [2, 3]
    assert QuantType.per_1x32.value == 3
    assert GateMode("interleave") is GateMode.INTERLEAVE and GateMode.SEPARATED == "separated"
    assert dtypes.fp4x2 is torch.float4_e2m1fn_x2 and dtypes.fp8 is torch.float8_e4m3fn
    assert aiter.__version__ == "0.1.20"
    assert importlib.util.find_spec("aiter").origin == registry.ORIGIN


def test_an_import_that_portable_lacks_fails_as_one():
    portable.install()
    with pytest.raises(ImportError):
        import aiter.mla  # noqa: F401
    with pytest.raises(ImportError):
        from aiter import get_hip_quant  # noqa: F401


@pytest.mark.parametrize(
    "aiter, situv2, moe_common, moe_shuffle",
    [
        ("0.1.12", False, False, False),
        ("0.1.13", False, False, False),
        ("0.1.14", False, True, False),
        ("0.1.18", False, True, True),
        ("0.1.19", True, True, True),
        ("0.1.20", True, True, True),
    ],
)
def test_releases_have_their_modules(aiter, situv2, moe_common, moe_shuffle):
    with portable.installed(aiter=aiter):
        import aiter as module

        assert hasattr(module.ActivationType, "Situv2") is situv2
        assert ("aiter.ops.flydsl.moe_common" in sys.modules) is moe_common
        assert hasattr(module.ops.shuffle, "moe_shuffle_weight") is moe_shuffle


def test_without_flydsl():
    with portable.installed(flydsl=False), pytest.raises(ImportError):
        from aiter.ops.flydsl.moe_common import GateMode  # noqa: F401


def test_install_replaces_and_uninstall_restores():
    first = portable.install()
    second = portable.install(arch="gfx942")
    assert portable.current() is second is not first
    assert sys.modules["aiter"].dtypes.fp8 is torch.float8_e4m3fnuz
    portable.uninstall()
    assert "aiter" not in sys.modules
    portable.uninstall()  # nothing left to do


def test_installed_nests():
    with portable.installed(aiter="0.1.18") as outer:
        with portable.installed(aiter="0.1.20") as inner:
            assert portable.current() is inner
            assert sys.modules["aiter"].__version__ == "0.1.20"
        assert portable.current() is outer
        assert sys.modules["aiter"].__version__ == "0.1.18"
    assert "aiter" not in sys.modules


def test_installed_restores_after_an_error():
    with pytest.raises(KeyError), portable.installed():
        raise KeyError
    assert "aiter" not in sys.modules


def test_imported_functions_keep_their_machine(monkeypatch):
    monkeypatch.delenv("AITER_SITUV2_A8W4", raising=False)
    with portable.installed(arch="gfx1250"):
        from aiter.jit.utils.chip_info import get_gfx
    with portable.installed(arch="gfx950"):
        assert get_gfx() == "gfx1250"


@pytest.mark.parametrize(
    "arguments, what",
    [
        ({"arch": "gfx90a"}, "arch"),
        ({"aiter": "1.x"}, "AITER release"),
        ({"a16w4_kernel": "interleave"}, "a16w4_kernel"),
        ({"extensions": ("quant_dtype_a",)}, "extensions"),
    ],
)
def test_bad_arguments(arguments, what):
    with pytest.raises(ValueError, match=what):
        portable.install(**arguments)
    assert "aiter" not in sys.modules


def package(tmp_path, name, *files):
    for file in files:
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("MARK = 1\n")


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_real_aiter_is_not_hidden(on_path):
    package(on_path, "aiter", "__init__.py", "ops/__init__.py", "ops/shuffle.py")
    with pytest.raises(ContractError, match="real AITER is installed at") as info:
        portable.install()
    assert "force=True" in str(info.value) and "aiter" not in sys.modules
    with pytest.raises(ContractError), portable.installed():
        pass
    portable.install(force=True)
    assert portable.is_portable(sys.modules["aiter"])
    portable.uninstall()
    import aiter

    assert aiter.MARK == 1
    with pytest.raises(ContractError):  # also when it is loaded already
        portable.install()
    with portable.installed(force=True):
        assert portable.is_portable(sys.modules["aiter"])
    assert sys.modules["aiter"] is aiter
    for name in [n for n in sys.modules if n.split(".")[0] == "aiter"]:
        del sys.modules[name]


def test_pypi_aiter_is_another_project(on_path):
    package(on_path, "aiter", "__init__.py", "asynciter.py")
    portable.install()
    assert portable.is_portable(sys.modules["aiter"])


def test_default_machine_without_installing():
    assert portable.current().machine.release.label == "0.1.20"
    assert portable.shuffle_weight(torch.zeros(1, 16, 32, dtype=torch.uint8)).is_shuffled
    with pytest.raises(AttributeError, match="nonsense"):
        _ = portable.nonsense


def test_importing_portable_loads_neither_plan_nor_triton():
    program = """
        import sys
        import sglang_aiter_moe.portable as p
        p.install()
        from aiter.fused_moe import fused_moe
        loaded = [m for m in sys.modules if m.startswith("sglang_aiter_moe.")]
        bad = [m for m in loaded if m.split(".")[1] not in ("errors", "numerics", "portable")]
        assert not bad, bad
        assert "sglang_aiter_moe.portable.triton" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
