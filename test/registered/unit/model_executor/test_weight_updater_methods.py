"""Each of SGLang's update methods: what it is given, what it answers, and who hears of a failure."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.srt.layers.quantization import mxfp4, mxfp4_reload
from sglang_aiter_moe.srt.model_executor.model_runner_components import weight_updater
from sglang_aiter_moe.testing.loaded_layers import load, random_raw
from sglang_aiter_moe.testing.registration import register_cpu_ci
from sglang_aiter_moe.testing.updated_model import GATE, NAME, SPEC, Updater, half_way, never, sent

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


@pytest.fixture
def updater(monkeypatch):
    monkeypatch.delenv(mxfp4_reload.STAGING, raising=False)
    yield Updater()
    assert not mxfp4_reload.RUNNING.written and mxfp4_reload.RUNNING.depth == 0


# --- what SGLang's methods are given, and what they say -----------------------------------------------------------

DONE = (True, "done")


def recorded(seen, result=DONE):
    def original(*args, **kwargs):
        seen.append((args, kwargs))
        return result

    return original


@pytest.mark.parametrize("ours", [True, False])
def test_every_argument_reaches_sglangs_method(ours):
    """With layers of ours and without."""
    updater = Updater() if ours else SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    seen, names = [], (["a"], ["uint8"], [(1,)])
    original = recorded(seen)
    assert weight_updater.from_disk(original, updater, "path", "auto", None, x=1) == DONE
    assert weight_updater.from_tensor(original, updater, [], "auto") == DONE
    assert weight_updater.from_received(original, updater, []) == DONE
    assert weight_updater.from_distributed(original, updater, *names, "group", y=2) == DONE
    assert weight_updater.from_ipc(original, updater, "request") == DONE
    assert weight_updater.receiving(original, updater, 1, z=3) == DONE
    assert weight_updater.begin_session(original, updater, 1, z=3) == DONE
    assert weight_updater.end_session(original, updater, 1, z=3) == DONE
    assert seen == [
        ((updater, "path", "auto", None), {"x": 1}),
        ((updater, [], "auto"), {}),
        ((updater, []), {}),
        ((updater, *names, "group"), {"y": 2}),
        ((updater, "request"), {}),
        *[((updater, 1), {"z": 3})] * 3,
    ]


@pytest.mark.parametrize(
    "dtype, refused", [("uint8", False), (torch.uint8, False), ("odd", False), ("float32", True)]
)
def test_a_dtype_comes_by_name_or_as_it_is(updater, dtype, refused):
    """One that torch does not have is for SGLang to refuse."""
    names, shapes = [f"{NAME}.0.w2.weight_packed"], [[256, 64]]
    found = weight_updater.from_distributed(lambda *_: DONE, updater, names, [dtype], shapes)
    assert (found == DONE) is not refused
    if refused:
        assert "has dtype torch.float32" in found[1]


def test_names_without_a_shape_are_a_failure_of_the_caller(updater):
    success, message = weight_updater.from_distributed(
        never, updater, [f"{NAME}.0.w2.weight_packed", "b"], ["uint8"] * 2, [(256, 64)]
    )
    assert not success and message.startswith("ValueError")


def test_serialised_tensors_are_checked_by_their_names(updater):
    """Each rank unpacks its own: neither shape nor dtype is known here."""
    assert weight_updater.from_tensor(
        lambda *_: DONE, updater, [(f"{NAME}.0.w1.weight_packed", object())]
    )[0]
    success, message = weight_updater.from_tensor(
        never, updater, [(f"{NAME}.0.w9.weight_packed", object())]
    )
    assert not success and "w9" in message


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int8,
        torch.float8_e8m0fnu,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
    ],
)
def test_the_dtypes_of_a_files_header_are_torchs(tmp_path, dtype):
    save_file({"a": torch.zeros(2, 3).to(dtype)}, tmp_path / "model.safetensors")
    assert list(weight_updater._in_files(str(tmp_path))) == [("a", (2, 3), dtype)]


def test_a_dtype_that_nobody_loads_is_not_checked(tmp_path):
    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert list(weight_updater._in_files(str(tmp_path))) == [("a", (2,), None)]


# --- failures that SGLang reports ---------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["none", "host"])
@pytest.mark.parametrize("success", [True, False])
def test_what_sglang_undoes_from_disk_is_undone_where_a_copy_exists(
    updater, monkeypatch, tmp_path, staging, success
):
    """After a failure it loads the old files; with a copy there is nothing that it could get wrong."""
    monkeypatch.setenv(mxfp4_reload.STAGING, staging)
    new, message = random_raw(SPEC, 2), "as SGLang says it"

    def original(*_):
        load(updater.experts, new)
        return success, message

    assert weight_updater.from_disk(original, updater, str(tmp_path)) == (success, message)
    kept = success or staging == "none"
    assert updater.unchanged is not kept
    mxfp4.moe_quant_info(updater.experts)


@pytest.mark.parametrize("by_name", [True, False])
def test_only_the_tensors_that_are_chosen_may_be_left_open(updater, tmp_path, by_name):
    save_file(dict(sent()) | {"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "m.safetensors")
    chosen = lambda name: name == "a" or "experts" in name  # noqa: E731
    arguments = ((), {"weight_name_filter": chosen}) if by_name else (("auto", chosen), {})

    def original(*_, **__):
        updater.gate.data.fill_(7)
        raise OSError("connection lost")

    args, kwargs = arguments
    told = weight_updater.from_disk(original, updater, str(tmp_path), *args, **kwargs)
    assert told == (False, "OSError: connection lost")
    with pytest.raises(ContractError) as caught:
        mxfp4.moe_quant_info(updater.experts)
    assert caught.value.what.endswith("1 tensors beside the experts are open: a")


def test_what_another_rank_refused_is_not_tried(updater, monkeypatch, caplog):
    monkeypatch.setattr(weight_updater, "failure_elsewhere", lambda reason: "rank 1: no space")
    assert weight_updater.from_tensor(never, updater, []) == (False, "refused: rank 1: no space")
    assert updater.unchanged and not caplog.records


def test_ones_own_reason_goes_before_another_ranks(updater, monkeypatch, caplog):
    monkeypatch.setattr(weight_updater, "failure_elsewhere", lambda reason: "rank 1: no space")
    monkeypatch.setenv(mxfp4_reload.STAGING, "disk")
    success, message = weight_updater.from_tensor(never, updater, [])
    assert not success and message.startswith("ContractError: " + mxfp4_reload.STAGING)
    assert caplog.records[-1].exc_info, "with its traceback"


@pytest.mark.parametrize("success", [True, False])
def test_what_failed_elsewhere_is_a_failure_here(monkeypatch, success):
    monkeypatch.setattr(weight_updater, "failure_elsewhere", lambda reason: "rank 1: lost")
    result = (success, "as SGLang says it")
    if success:
        with pytest.raises(weight_updater._Unsuccessful) as caught:
            weight_updater._on_all_ranks(lambda: result)
        assert caught.value.result == (False, "rank 1: lost")
    else:
        assert weight_updater._on_all_ranks(lambda: result) == result


def test_a_failure_here_is_told_and_stays_what_it_was(monkeypatch):
    told = []
    monkeypatch.setattr(weight_updater, "failure_elsewhere", told.append)

    def write():
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        weight_updater._on_all_ranks(write)
    assert told == ["connection lost"]


def test_a_nan_scale_is_told_to_the_others_before_anything_is_packed(updater, monkeypatch):
    told = []
    monkeypatch.setattr(weight_updater, "failure_elsewhere", told.append)

    def original(*_):
        new = random_raw(SPEC, 2)
        new["w2_weight_scale"][1, 2, 3] = 0xFF
        load(updater.experts, new)
        return DONE

    success, message = weight_updater.from_tensor(original, updater, [])
    assert not success and "w2_weight_scale[1, 2, 3]" in message
    assert told[0] is None and "w2_weight_scale[1, 2, 3]" in told[1] and len(told) == 2


# --- sessions and direct writes --------------------------------------------------------------------------------------


def test_a_session_ends_even_if_sglangs_end_fails(updater):
    weight_updater.begin_session(lambda _: mxfp4.restore_raw(updater.experts), updater)
    load(updater.experts, random_raw(SPEC, 2))

    def end(_):
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        weight_updater.end_session(end, updater)
    mxfp4.moe_quant_info(updater.experts)


def test_a_session_that_sglang_could_not_begin_is_none(updater):
    def begin(_):
        mxfp4.restore_raw(updater.experts)
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        weight_updater.begin_session(begin, updater)
    assert mxfp4_reload.RUNNING.depth == 0 and updater.unchanged
    mxfp4.moe_quant_info(updater.experts)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_failure_in_a_session_concerns_every_step_of_it(updater, steps):
    done = lambda *_: DONE  # noqa: E731
    weight_updater.begin_session(lambda _: None, updater)
    if steps == 2:
        assert weight_updater.from_tensor(done, updater, [("model.norm", torch.zeros(1))]) == DONE
    assert not weight_updater.from_tensor(half_way(updater), updater, [(GATE, torch.zeros(1))])[0]
    weight_updater.end_session(lambda _: None, updater)
    with pytest.raises(ContractError, match=f"{steps} tensors beside the experts are open"):
        mxfp4.moe_quant_info(updater.experts)


def test_the_step_after_the_last_session_begins_anew(updater):
    weight_updater.begin_session(lambda _: None, updater)
    weight_updater.from_tensor(lambda *_: DONE, updater, [("model.norm", torch.zeros(1))])
    weight_updater.end_session(lambda _: None, updater)
    assert not weight_updater.from_tensor(half_way(updater), updater, [(GATE, torch.zeros(1))])[0]
    with pytest.raises(ContractError, match=f"1 tensors beside the experts are open: {GATE}"):
        mxfp4.moe_quant_info(updater.experts)


@pytest.mark.parametrize("load_format", ["direct", "auto", None])
def test_only_direct_writes_open_what_they_name(updater, load_format):
    opened = []

    def original(*_):
        opened.extend(mxfp4_reload.weights_of(updater.experts).opened)
        return DONE

    tensors = [(f"{NAME}.w2_weight", torch.zeros(4, 256, 64, dtype=torch.uint8))]
    assert weight_updater.from_tensor(original, updater, tensors, load_format) == DONE
    assert opened == (["w2_weight"] if load_format == "direct" else []) and updater.unchanged


def test_a_direct_write_of_everything_heals_an_invalid_layer(updater):
    new = random_raw(SPEC, 2)

    def half(*_):
        load(updater.experts, {"w2_weight": new["w2_weight"]})
        raise OSError("connection lost")

    assert not weight_updater.from_tensor(half, updater, sent())[0]

    def direct(_, named_tensors, load_format):
        for name, tensor in named_tensors:
            getattr(updater.experts, name.rpartition(".")[2]).data.copy_(tensor)
        return DONE

    tensors = [(f"{NAME}.{name}", tensor) for name, tensor in new.items()]
    assert weight_updater.from_tensor(direct, updater, tensors[1:], "direct") == DONE
    with pytest.raises(ContractError, match="no valid weights"):
        mxfp4.moe_quant_info(updater.experts)
    assert weight_updater.from_tensor(direct, updater, tensors[:1], "direct") == DONE
    mxfp4.moe_quant_info(updater.experts)


@pytest.mark.parametrize("reload", [True, False])
def test_sglangs_restore_opens_every_layer_but_for_its_own_quantised_reload(
    updater, monkeypatch, reload
):
    loader = ModuleType("sglang.srt.model_loader.loader")
    asked = []
    loader.QuantizedRLModelLoader = SimpleNamespace(
        is_reload_scenario=lambda model: asked.append(model) or reload
    )
    package = ModuleType("sglang.srt.model_loader")
    package.loader = loader
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, loader.__name__, loader)
    weight_updater.restore_raw_in(updater.whole)
    state = mxfp4_reload.weights_of(updater.experts)
    assert asked == [updater.whole] and bool(state.opened) is not reload
    state.close()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
