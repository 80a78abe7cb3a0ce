"""The parsers of docs/contract.md section b.5, and that the table has every variable of that section."""

import os
import sys

import pytest

from sglang_aiter_moe import environ
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

SPELLINGS = [
    None,
    "",
    "0",
    "1",
    "true",
    "True",
    "TRUE",
    "yes",
    "YES",
    "on",
    " 1",
    "1 ",
    "01",
    "junk",
]

AITER_ON = {
    "AITER_SITUV2_A8W4": {"1"},
    "AITER_SITUV2_A4W4": {"1"},
    "AITER_FLYDSL_FORCE": {None, "1"},
    "AITER_FORCE_A8W4": {"", "1"},  # a substring test
    "AITER_MOE_A8W4_BYPASS_QUANT": {"1"},
    "AITER_USE_CK_MOE_SORTING": {"1"},
    "AITER_USE_FLYDSL_MOE_SORTING": {"1"},
    "AITER_FLYDSL_STAGE2_FP8": {"1"},
    "AITER_MXFP4_INTERMEDIATE": {"1"},
    "AITER_FLYDSL_FORCE_REDUCE": {"1"},
    "AITER_USE_GROUPED_GEMM": {"1", "true", "True", "yes", "YES"},
    "AITER_FORCE_GFX1250": {"1", "true", "True", "yes", "YES"},
}
SGLANG_ON = {
    "AITER_SITUV2_A8W4": {"1", "true", "True", "TRUE"},
    "AITER_SITUV2_A4W4": {"1", "true", "True", "TRUE"},
    "AITER_FORCE_A8W4": {"1", "true", "True", "TRUE"},
    "SGLANG_USE_AITER_MOE_GU_ITLV": set(SPELLINGS) - {"0"},  # junk is the default, which is on
}
INTEGERS = {
    "AITER_BF16_FP8_MOE_BOUND": 256,
    "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": 256,
    "AITER_BYPASS_TUNE_CONFIG": 0,
    "AITER_KSPLIT": 0,
    "AITER_USE_NT": -1,
}
OURS = {
    "SGLANG_AITER_MOE_ENABLE",
    "SGLANG_AITER_MOE_BACKEND",
    "SGLANG_AITER_MOE_A16W4_KERNEL",
    "SGLANG_AITER_MOE_RELOAD_STAGING",
    "SGLANG_AITER_MOE_ALLOW_UNTESTED",
}


@pytest.mark.parametrize("value", SPELLINGS)
@pytest.mark.parametrize("name", AITER_ON)
def test_aiter_switches(name, value):
    assert environ.VARIABLES[name].aiter_reads(value) is (value in AITER_ON[name])


@pytest.mark.parametrize("value", SPELLINGS)
@pytest.mark.parametrize("name", SGLANG_ON)
def test_sglang_switches(name, value):
    assert environ.VARIABLES[name].sglang_reads(value) is (value in SGLANG_ON[name])


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    read = environ.VARIABLES[name].aiter_reads
    assert read(None) == INTEGERS[name]
    assert [read(v) for v in ("0", "-1", " 7 ", "1_000")] == [0, -1, 7, 1000]
    for junk in ("", "x", "1.5", "0x10"):
        with pytest.raises(ValueError):
            read(junk)


def test_sort_backend():
    read = environ.VARIABLES["AITER_MOE_SORT_BACKEND"].aiter_reads
    assert [read(None), read("Opus")] == ["auto", "opus"]


@pytest.mark.parametrize("value", SPELLINGS)
def test_the_flags_disagree_where_the_contract_says(value):
    """Unset, 0 and 1 are read alike by both; of the rest, every kind of `true` is not."""
    flag = environ.VARIABLES["AITER_SITUV2_A8W4"]
    alike = flag.sglang_reads(value) == flag.aiter_reads(value)
    assert alike is (value is None or value.lower() != "true")


def test_the_table_is_whole():
    names = {*AITER_ON, *SGLANG_ON, *INTEGERS, *OURS, "AITER_MOE_SORT_BACKEND", "AITER_CONFIG_FMOE"}
    names |= {
        "SGLANG_USE_AITER", "SGLANG_AITER_K3_OPT", "SGLANG_USE_AITER_MOE_GU_ITLV",
        "SGLANG_ROCM_SMALLM_MOE", "SGLANG_K3_FLYDSL_AR_NORM",
    }  # fmt: skip
    assert names <= set(environ.VARIABLES)
    for variable in environ.VARIABLES.values():
        assert variable.meaning and variable.when and variable.accepted
        assert variable.readers or "Nothing" in variable.meaning


def test_readers():
    assert environ.VARIABLES["AITER_SITUV2_A8W4"].readers == ("SGLang", "AITER")
    assert environ.VARIABLES["AITER_KSPLIT"].readers == ("AITER",)
    assert environ.VARIABLES["AITER_KSPLIT"].sglang_reads("1") is None
    assert environ.VARIABLES["SGLANG_USE_AITER"].aiter_reads("1") is None


def test_snapshot(monkeypatch):
    monkeypatch.setenv("AITER_KSPLIT", "2")
    monkeypatch.delenv("AITER_USE_NT", raising=False)
    names = ("AITER_KSPLIT", "AITER_USE_NT")
    assert environ.snapshot(names) == {"AITER_KSPLIT": "2", "AITER_USE_NT": None}
    assert environ.snapshot(names, {}) == dict.fromkeys(names)


def test_holds(monkeypatch):
    monkeypatch.setenv("AITER_KSPLIT", "2")
    monkeypatch.delenv("AITER_USE_NT", raising=False)
    seen = environ.encoded([("AITER_KSPLIT", "2"), ("AITER_USE_NT", None)])
    assert environ.holds(seen) is hasattr(os.environ, "_data")
    monkeypatch.setenv("AITER_USE_NT", "")
    assert environ.holds(seen) is False
    monkeypatch.delenv("AITER_USE_NT")
    monkeypatch.setenv("AITER_KSPLIT", "3")
    assert environ.holds(seen) is False


def test_inside_the_block_the_variables_are_exactly_as_given_and_then_as_before(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    monkeypatch.setenv("AITER_KSPLIT", "4")
    monkeypatch.delenv("AITER_SITUV2_A4W4", raising=False)
    monkeypatch.delenv("NOT_IN_THE_TABLE", raising=False)
    with environ.exactly({"AITER_SITUV2_A4W4": "1", "AITER_KSPLIT": "2", "NOT_IN_THE_TABLE": "x"}):
        assert "AITER_SITUV2_A8W4" not in os.environ
        assert (os.environ["AITER_SITUV2_A4W4"], os.environ["NOT_IN_THE_TABLE"]) == ("1", "x")
        assert os.environ["AITER_KSPLIT"] == "2"
    assert os.environ["AITER_SITUV2_A8W4"] == "1" and os.environ["AITER_KSPLIT"] == "4"
    assert not {"AITER_SITUV2_A4W4", "NOT_IN_THE_TABLE"} & set(os.environ)


def test_of_other_names_the_rest_stays(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    monkeypatch.setenv("AITER_KSPLIT", "4")
    with environ.exactly({}, ["AITER_SITUV2_A8W4"]):
        assert "AITER_SITUV2_A8W4" not in os.environ and os.environ["AITER_KSPLIT"] == "4"
    assert os.environ["AITER_SITUV2_A8W4"] == "1"


def test_an_error_inside_puts_them_back_too(monkeypatch):
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    with pytest.raises(KeyError), environ.exactly({"AITER_SITUV2_A4W4": "1"}):
        raise KeyError
    assert os.environ["AITER_SITUV2_A8W4"] == "1" and "AITER_SITUV2_A4W4" not in os.environ


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
