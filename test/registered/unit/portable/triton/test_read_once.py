"""The hint that weights are read once: on every bulk copy of the kernels that are declared so, and on no others."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

pytest.importorskip("triton")

from triton import knobs  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from sglang_aiter_moe.nvptx.launch import Device  # noqa: E402
from sglang_aiter_moe.nvptx.layer import run_layer  # noqa: E402
from sglang_aiter_moe.portable.triton.hopper import read_once  # noqa: E402
from sglang_aiter_moe.portable.triton.hopper.fp8_launch import (  # noqa: E402
    Fp8Config,
    Ring,
    run_fp8,
)
from sglang_aiter_moe.testing.triton_cases import Case, run_case  # noqa: E402

COPY = (
    "@%p5 cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r39], "
    "[%rd17, {%r40, %r40, %r41, %r42}], [%r38];"
)
HINTED = COPY.replace("bytes [", "bytes.L2::cache_hint [").replace(
    "[%r38];", f"[%r38], {read_once.EVICT_FIRST};"
)


def test_every_bulk_copy_gets_the_hint_once():
    other = "ld.global.b32 %r1, [%rd1];"
    assert read_once.hint(f"{COPY}\n{other}\n{COPY}") == f"{HINTED}\n{other}\n{HINTED}"


@pytest.mark.parametrize("text", ["ld.global.b32 %r1, [%rd1];", HINTED, COPY.replace("4d", "5D")])
def test_a_kernel_without_such_a_copy_is_refused(text):
    with pytest.raises(ValueError, match="no bulk copy"):
        read_once.hint(text)


def _stages(hook) -> dict:
    stages = {"ptx": lambda source, metadata: COPY}
    hook("backend", stages, "options", "language", 90)
    return stages


def test_a_kernel_that_is_compiled_meanwhile_and_a_hook_of_others_are_left_alone(monkeypatch):
    seen = []

    def others(*of):
        seen.append(of[1:2])
        return None if of else ("key", "hash")

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", others)
    with read_once._hinted("mine"):
        hook = knobs.runtime.add_stages_inspection_hook
        stages = _stages(hook)
        assert stages["ptx"](None, {"name": "mine"}) == HINTED
        assert stages["ptx"](None, {"name": "theirs"}) == COPY
        assert hook() == ("key", "hash") and seen == [(stages,), ()]
    assert knobs.runtime.add_stages_inspection_hook is others


def test_the_hook_goes_when_a_compilation_fails(monkeypatch):
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    with pytest.raises(RuntimeError), read_once._hinted("mine"):
        raise RuntimeError
    assert knobs.runtime.add_stages_inspection_hook is None


def test_two_threads_that_compile_keep_their_hints(monkeypatch):
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    began, second_began, go, go_two = (threading.Event() for _ in range(4))
    hinted = {}

    def compile(name, entered, until):
        with read_once._hinted(name):
            entered.set()
            until.wait(5)
            hook = knobs.runtime.add_stages_inspection_hook
            hinted[name] = hook and _stages(hook)["ptx"](None, {"name": name})

    one = threading.Thread(target=compile, args=("one", began, go))
    one.start()
    began.wait(5)
    two = threading.Thread(target=compile, args=("two", second_began, go_two))
    two.start()
    second_began.wait(0.2)  # not while "one" compiles
    go.set()
    one.join()
    go_two.set()
    two.join()
    assert hinted == {"one": HINTED, "two": HINTED}
    assert knobs.runtime.add_stages_inspection_hook is None


def test_what_a_layer_launches_has_it():
    case = Case("small", tokens=3, hidden=256, inter=64)
    config = Fp8Config(8, Ring(4, 16, 3, 2), Ring(4, 16, 2, 3))
    launches = []

    def runner(request, *operands):
        launches.extend(run_layer(request, *operands, form=(run_fp8, config), device=Device))

    run_case(case, "cpu", 1, runner)
    hinted = {launch.kernel: launch.assembly.count(read_once.EVICT_FIRST) for launch in launches}
    assert hinted["stage1_fp8"] >= 2 and hinted["stage2_fp8"] >= 2, hinted
    assert hinted["prepare_fp8"] == hinted["combine_hopper"] == 0, hinted
    parts = next(launch for launch in launches if launch.kernel == "combine_hopper")
    assert "discard.global.L2" in parts.assembly


def test_a_kernel_with_the_hint_has_a_key_of_its_own(monkeypatch):
    monkeypatch.setattr(GluonASTSource, "hash", lambda self: "kernel")
    source = object.__new__(read_once.Source)
    with_hint = source.hash()
    assert with_hint != "kernel"
    monkeypatch.setattr(read_once, "EVICT_FIRST", "0x0")
    assert source.hash() != with_hint


def test_a_compilation_that_lost_the_hint_is_an_error(monkeypatch):
    """Another hook put its own PTX in place."""
    source = SimpleNamespace(fn=SimpleNamespace(__name__="stage"))
    made = SimpleNamespace(asm={"ptx": COPY})
    monkeypatch.setattr(read_once.triton, "compile", lambda *a, **k: made)
    with pytest.raises(RuntimeError, match="stage lack their cache hint"):
        read_once.compile(source)
    made.asm["ptx"] = read_once.hint(COPY)
    assert read_once.compile(source) is made


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
