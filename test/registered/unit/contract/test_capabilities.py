"""Capabilities by release, by commit, and by testing an imported AITER feature by feature."""

import sys
from enum import IntEnum
from types import ModuleType

import pytest

from sglang_aiter_moe.contract import Capabilities
from sglang_aiter_moe.contract.capabilities import FEATURES
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

# docs/contract.md section e, by hand: first release tag of each feature.
FIRST_TAG = {
    "pads_and_bias": "0.1.7",
    "gate_mode": "0.1.13",
    "swiglu_bf16_bound": "0.1.14",
    "swiglu_limit": "0.1.14",
    "gate_mode_decides": "0.1.14",
    "round_up_scales": "0.1.16",
    "flydsl_force": "0.1.16",
    "force_a8w4": "0.1.17",
    "scale_padding": "0.1.18",
    "mxmoe": "0.1.18",
    "gfx1250_shuffle": "0.1.18",
    "situv2": "0.1.19",
    "shared_expert": "0.1.19.post1",
    "situv2_a4w4": "0.1.19.post1",
    "opus_situv2": "0.1.20",
    "a16w4_port": "0.1.20",
    "runtime_betas": "0.1.20",
}
TAGS = [
    "0.1.7", "0.1.12", "0.1.13", "0.1.14", "0.1.16", "0.1.16.post3", "0.1.17", "0.1.18", "0.1.19",
    "0.1.19.post1", "0.1.19.post2", "0.1.20", "0.1.20.post1",
]  # fmt: skip
ORDER = {tag: i for i, tag in enumerate(TAGS)}


@pytest.mark.parametrize("tag", TAGS)
def test_by_release(tag):
    made = Capabilities.for_release(tag)
    assert made.identified and tag in made.name
    expected = {f for f, first in FIRST_TAG.items() if ORDER[first] <= ORDER[tag]}
    assert made.features == expected
    assert Capabilities.for_release("v" + tag) == made


def test_in_no_release():
    newest = Capabilities.for_release("0.1.20.post1")
    assert set(FEATURES) - newest.features == {
        "stage2_scatter", "no_combine", "output", "quant_dtype_a",
    }  # fmt: skip


def test_6dc26b7a8():
    """#4534, of 2026-08-05: Opus SiTUv2 and the A4W4 flag are in, the A16W4 port is not yet."""
    for text in ("6dc26b7a8", "6dc26b7a81", "6dc26b7"):
        made = Capabilities.for_release(text)
        assert made.has("opus_situv2") and made.has("situv2_a4w4") and made.has("shared_expert")
        assert not made.has("a16w4_port") and not made.has("runtime_betas")
        assert made.flydsl_needed == "0.3.0"


@pytest.mark.parametrize(
    "commit, pin",
    [
        ("1262e0a696", "0.3.1"), ("868ac1f7aa", "0.3.0"), ("00cbe979f2", "0.3.0"),
        ("3135022616", "0.2.4"), ("c2b69b9b87", "0.2.4"), ("76ea4ac325", None),
    ],
)  # fmt: skip
def test_flydsl_pins_by_commit(commit, pin):
    made = Capabilities.for_release(commit)
    assert made.flydsl_needed == pin and commit in made.name


def test_snapshot_commit():
    made = Capabilities.for_release("e4048607a535ace3a2b51ded31b1c8c2d45c0879")
    assert made.has("stage2_scatter") and made.has("runtime_betas") and made.identified


def test_newer_than_known():
    made = Capabilities.for_release("0.3.0")
    assert not made.identified and "0.1.20.post1" in made.how
    assert made.features == Capabilities.for_release("0.1.20.post1").features


def test_two_numbers_are_a_release_and_one_is_none():
    assert Capabilities.for_release("0.2").features == Capabilities.for_release("0.3.0").features
    with pytest.raises(ContractError, match="neither a release nor a commit"):
        Capabilities.for_release("4")


@pytest.mark.parametrize("text", ["", "latest", "deadbeef", "1234567", None])
def test_neither_release_nor_commit(text):
    with pytest.raises(ContractError, match="neither a release nor a commit"):
        Capabilities.for_release(text)


@pytest.mark.parametrize(
    "tag, pin",
    [
        ("0.1.20", "0.3.1"), ("0.1.20.post1", "0.3.1"), ("0.1.19.post1", "0.3.0"),
        ("0.1.19.post2", "0.3.0"), ("0.1.19", "0.2.4"), ("0.1.18", "0.2.4"), ("0.1.17", None),
    ],
)  # fmt: skip
def test_flydsl_pins(tag, pin):
    """section e and the pairs of AITER and flydsl that were compiled."""
    assert Capabilities.for_release(tag).flydsl_needed == pin


def test_kwargs():
    assert Capabilities.for_release("0.1.12").kwargs == {
        "hidden_pad", "intermediate_pad", "bias1", "bias2",
    }  # fmt: skip
    assert {"gate_mode", "swiglu_limit"} <= Capabilities.for_release("0.1.14").kwargs
    assert "beta" not in Capabilities.for_release("0.1.18").kwargs
    assert {"beta", "linear_beta"} <= Capabilities.for_release("0.1.19").kwargs
    for name in ("no_combine", "output", "quant_dtype_a"):
        assert name not in Capabilities.for_release("0.1.20").kwargs


def test_unknown_feature():
    with pytest.raises(KeyError):
        Capabilities.for_release("0.1.20").has("telepathy")


def test_dict_round_trip():
    made = Capabilities.for_release("0.1.19").with_flydsl("0.2.4", available=False)
    assert Capabilities.from_dict(made.to_dict()) == made
    assert made.flydsl == "0.2.4" and not made.flydsl_available


# --- an imported AITER --------------------------------------------------------------------------


def aiter_modules(
    keywords, *, version=None, situv2=True, source="", shuffle=("moe_shuffle_weight",)
):
    """Stand-ins with the signature, names and source text that a release has."""
    aiter, fused = ModuleType("aiter"), ModuleType("aiter.fused_moe")
    names = ["Silu", "Gelu", "Swiglu", *(["Situv2"] if situv2 else [])]
    aiter.ActivationType = IntEnum("ActivationType", names, start=0)
    if version:
        aiter.__version__ = version
    parameters = ", ".join(["x", "w1", *(f"{k}=None" for k in keywords)])
    exec(f"def fused_moe({parameters}): pass", fused.__dict__)
    shuffles = ModuleType("aiter.ops.shuffle")
    for name in shuffle:
        setattr(shuffles, name, None)
    modules = {"aiter": aiter, "aiter.fused_moe": fused, "aiter.ops.shuffle": shuffles}
    return modules, fused, source


OLD = ["hidden_pad", "intermediate_pad", "bias1", "bias2", "gate_mode"]
NOW = [*OLD, "swiglu_limit", "beta", "linear_beta", "shared_w1"]
VARIABLES = " ".join(
    (
        "AITER_BF16_FP8_MOE_BOUND",
        "AITER_SITUV2_A8W4",
        "AITER_FORCE_A8W4",
        "AITER_FLYDSL_FORCE",
        "GPTOSS_SWIGLU_MXFP4_BF16_BOUND ",
    )
)


@pytest.fixture
def detect(monkeypatch):
    def run(*args, **kwargs):
        modules, fused, source = aiter_modules(*args, **kwargs)
        monkeypatch.setattr(
            "sglang_aiter_moe.contract.capabilities.inspect.getsource",
            lambda module: source if module is fused else "",
        )
        return Capabilities.from_modules(modules)

    return run


def test_no_aiter():
    made = Capabilities.from_modules({})
    assert not made.identified and "newest rule" in made.how
    assert made.has("situv2_a4w4") and made.has("runtime_betas")


def test_feature_test_beats_the_version(detect):
    """A build that states v0.1.20 but whose signature and source say otherwise is what it is."""
    made = detect(NOW[:6], version="0.1.20", situv2=False, source=VARIABLES, shuffle=())
    assert not made.has("situv2") and not made.has("gfx1250_shuffle")
    assert not made.has("shared_expert") and not made.has("situv2_a4w4")
    assert made.has("gate_mode") and made.has("gate_mode_decides")


def test_a4w4_flag_by_source(detect):
    assert not detect(NOW, version="0.1.19.post1", source=VARIABLES).has("situv2_a4w4")
    assert detect(NOW, version="0.1.19", source=VARIABLES + "AITER_SITUV2_A4W4").has("situv2_a4w4")


def test_keywords_that_no_release_has(detect):
    made = detect([*NOW, "no_combine", "output"], version="0.1.20", source=VARIABLES)
    assert made.has("no_combine") and made.has("output") and not made.has("quant_dtype_a")


def test_situv2_needs_name_and_keywords(detect):
    assert not detect(NOW[:6], version="0.1.20", source=VARIABLES).has("situv2")
    assert not detect(NOW, version="0.1.20", situv2=False, source=VARIABLES).has("situv2")
    assert detect(NOW, version="0.1.19", source=VARIABLES).has("situv2")


def test_before_gate_mode_decided(detect):
    made = detect(OLD, version="0.1.13", situv2=False, shuffle=())
    assert made.has("gate_mode") and not made.has("gate_mode_decides")


def test_version_decides_what_cannot_be_tested(detect):
    assert detect(NOW, version="0.1.20", source=VARIABLES).has("runtime_betas")
    assert not detect(NOW, version="0.1.19.post2", source=VARIABLES).has("runtime_betas")
    made = detect(NOW, version="0.1.20.dev3+g6dc26b7a8", source=VARIABLES)
    assert made.has("opus_situv2") and not made.has("runtime_betas") and "6dc26b7" in made.name


def test_no_version_takes_the_newest_rule(detect):
    made = detect(NOW, source=VARIABLES)
    assert not made.identified and made.has("runtime_betas") and "newest rule" in made.how


def test_bound_that_an_import_froze():
    modules, fused, _ = aiter_modules(NOW, version="0.1.20")
    assert Capabilities.from_modules(modules).swiglu_bf16_bound is None
    fused._SWIGLU_MXFP4_BF16_BOUND = 512
    assert Capabilities.from_modules(modules).swiglu_bf16_bound == 512


def test_flydsl_of_an_import():
    modules, _, _ = aiter_modules(NOW, version="0.1.20")
    assert not Capabilities.from_modules(modules).flydsl_available
    modules["aiter.ops.flydsl.moe_common"] = ModuleType("aiter.ops.flydsl.moe_common")
    assert Capabilities.from_modules(modules).flydsl_available
    utils = ModuleType("aiter.ops.flydsl.utils")
    utils.is_flydsl_available = lambda: True
    alone = {n: m for n, m in modules.items() if n != "aiter.ops.flydsl.moe_common"}
    assert Capabilities.from_modules(
        alone | {"aiter.ops.flydsl.utils": utils}
    ).flydsl_available  # asked
    utils.is_flydsl_available = lambda: False
    flydsl = ModuleType("flydsl")
    flydsl.__version__ = "0.3.0"
    modules |= {"aiter.ops.flydsl.utils": utils, "flydsl": flydsl}
    found = Capabilities.from_modules(modules)
    assert not found.flydsl_available and found.flydsl == "0.3.0"


@pytest.mark.parametrize("release", ["0.1.14", "0.1.19", "0.1.19.post1", "6dc26b7a8", "0.1.20"])
def test_portable_is_recognised(release):
    """The executable AITER of each release shows the features of that release."""
    portable = pytest.importorskip("sglang_aiter_moe.portable")
    with portable.installed(arch="gfx950", aiter=release):
        found = Capabilities.from_modules(sys.modules)
    assert found.features == Capabilities.for_release(release).features
    assert found.identified and found.flydsl_available


def test_portable_without_flydsl_is_recognised():
    portable = pytest.importorskip("sglang_aiter_moe.portable")
    with portable.installed(arch="gfx950", aiter="0.1.20", flydsl=False):
        assert not Capabilities.from_modules(sys.modules).flydsl_available


def test_gate_mode_alone_does_not_decide(detect):
    assert not detect(OLD, source=VARIABLES).has("gate_mode_decides")


@pytest.mark.parametrize("stated", ["git-main", "0"])
def test_a_version_that_says_nothing(detect, stated):
    made = detect(NOW, version=stated, source=VARIABLES)
    assert not made.identified and made.has("runtime_betas")


def test_a_signature_that_says_nothing():
    modules, fused, _ = aiter_modules(NOW, version="0.1.19")
    fused.fused_moe = lambda *args, **kwargs: None
    found = Capabilities.from_modules(modules)
    assert found.features == Capabilities.for_release("0.1.19").features
    fused.fused_moe = print.__class__  # no signature at all
    assert Capabilities.from_modules(modules).has("situv2")


def test_names_and_shuffles_may_be_missing():
    modules, _, _ = aiter_modules(NOW, version="0.1.19")
    del modules["aiter.ops.shuffle"]
    del modules["aiter"].ActivationType
    assert (
        Capabilities.from_modules(modules).features == Capabilities.for_release("0.1.19").features
    ) is False  # shared_w1 is in the signature
    assert Capabilities.from_modules(modules).has("gfx1250_shuffle")


@pytest.mark.parametrize(
    "feature, variable",
    [
        ("force_a8w4", "AITER_FORCE_A8W4"),
        ("flydsl_force", "AITER_FLYDSL_FORCE"),
        ("swiglu_bf16_bound", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND"),
    ],
)
def test_variables_by_source(detect, feature, variable):
    """Whatever the version says, a source text without the variable has not got it."""
    assert detect(NOW, version="0.1.20", source=VARIABLES).has(feature)
    without = VARIABLES.replace(variable, "")
    assert not detect(NOW, version="0.1.20", source=without).has(feature)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
