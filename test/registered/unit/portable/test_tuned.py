import sys

import pytest

from sglang_aiter_moe.portable import explain
from sglang_aiter_moe.portable.tuned import padded_tokens, read_csv
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

SHAPE = {"num_experts": 8, "topk": 2, "hidden_size": 512, "intermediate_size": 256}
COLUMNS = (
    "cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,"
    "use_g1u1,doweight_stage1,block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,_tag"
)


def row(kernel1, kernel2="flydsl_moe2_x", a="float4_e2m1fn_x2", act="Silu", token=64, **more):
    values = {
        "cu_num": 256,
        "token": token,
        "model_dim": 512,
        "inter_dim": 256,
        "expert": 8,
        "topk": 2,
        "act_type": f"ActivationType.{act}",
        "dtype": "torch.bfloat16",
        "q_dtype_a": f"torch.{a}",
        "q_dtype_w": "torch.float4_e2m1fn_x2",
        "q_type": "QuantType.per_1x32",
        "use_g1u1": 1,
        "doweight_stage1": 0,
        "block_m": 32,
        "ksplit": 0,
        "kernelName1": kernel1,
        "kernelName2": kernel2,
        "run_1stage": 0,
    } | more
    return ",".join(str(values.get(c, "")) for c in COLUMNS.split(","))


@pytest.fixture
def table(tmp_path):
    def write(*rows, name="tuned.csv"):
        path = tmp_path / name
        path.write_text("\n".join((COLUMNS, *rows)) + "\n")
        return {"AITER_CONFIG_FMOE": str(path)}

    return write


def resolve(activation, env, tokens=64, **kwargs):
    return explain(activation=activation, tokens=tokens, env=env, **{**SHAPE, **kwargs})


@pytest.mark.parametrize(
    "tokens, padded",
    [
        (0, 1),
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
        (16385, 32768),
        (32767, 32768),
        (32768, 32768),
        (100000, 32768),
        (131072, 131072),
        (10**6, 131072),
    ],
)
def test_padded_tokens(tokens, padded):
    assert padded_tokens(tokens) == padded


@pytest.mark.parametrize(
    "kernel1, kernel2, family, requantization",
    [
        (
            "flydsl_moe1_afp4_wfp4_bf16_t32x64x256_w2",
            "flydsl_moe2_afp4",
            "flydsl_a4w4",
            "roundup_bf16",
        ),
        (
            "flydsl_moe1_afp4_wfp4_bf16_t32x64x256_w2_fp4",
            "flydsl_moe2_afp4",
            "flydsl_a4w4",
            "epilogue",
        ),
        (
            "flydsl_moe1_afp4_wfp4_bf16_t32x64x256",
            "flydsl_moe2_layout_afp4",
            "flydsl_a4w4",
            "epilogue",
        ),
        ("flydsl_mxmoe_g1_a4w4_16x128x256", "flydsl_mxmoe_g2_a4w4", "mxmoe", "roundup_fp32"),
        ("moe_ck2stages_gemm1_256x128", "moe_ck2stages_gemm2", "ck2stages", "roundup_bf16"),
        ("moe_ck2stages_gemm1_256x128", "flydsl_moe2_afp4", "ck2stages", "roundup_bf16"),
    ],
)
def test_the_name_decides_the_family(table, kernel1, kernel2, family, requantization):
    r = resolve("silu", table(row(kernel1, kernel2)))
    assert (r.family, r.requantization, r.tuned) == (family, requantization, True)
    assert (r.kernel1, r.kernel2) == (kernel1, kernel2)


def test_flat_assembly(table):
    r = resolve(
        "silu", table(row("_ZN5aiter50fmoe_bf16_pertokenMXfp4_g1u1_flat", "", run_1stage=1))
    )
    assert (r.family, r.mode, r.limit) == ("asm", "A4W4", None)


def test_a_marker_name_changes_nothing(table):
    env = table(row("swiglu_mxfp4_bf16_x", "swiglu_mxfp4_bf16_y", a="bfloat16", act="Swiglu"))
    assert resolve("swiglu", env).family == "cktile_splitk"


def test_opus(table):
    names = ("opus_moe1_afp8_wfp4_bf16_t128x256", "opus_moe2_afp8_wfp4")
    env = table(row(*names, a="float8_e4m3fn", act="Situv2")) | {"AITER_SITUV2_A8W4": "1"}
    r = resolve("situv2", env)
    assert (r.family, r.w13_layout, r.requantization) == ("opus_a8w4", "gu_interleaved", "epilogue")
    assert (r.beta, r.linear_beta) == (4.0, 25.0)  # elsewhere 1 and 1
    # dropped, heuristics instead: one weight unshuffled, a stage-2 bias, a release without SiTUv2 in Opus
    assert resolve("situv2", env, has_bias=True).family == "flydsl_a8w4"
    assert resolve("situv2", env, aiter="0.1.19.post2").family == "flydsl_a8w4"
    assert resolve("situv2", env, aiter="6dc26b7a8").family == "opus_a8w4"


def test_exact_activation_first_then_any(table):
    swiglu = row("flydsl_moe1_afp4_wfp4_t1_fp4", act="Swiglu", token=256)
    silu = row("flydsl_mxmoe_g1_a4w4", "flydsl_mxmoe_g2_a4w4", token=256)
    env = table(silu, swiglu)
    assert resolve("swiglu", env, 256).family == "flydsl_a4w4"
    assert resolve("silu", env, 256).family == "mxmoe"
    r = resolve("gelu", env, 256)
    assert (r.family, r.activation) == ("mxmoe", "silu")


def test_what_the_key_holds(table):
    env = table(row("flydsl_mxmoe_g1_a4w4", "flydsl_mxmoe_g2_a4w4"))
    assert resolve("silu", env).tuned
    assert resolve("silu", env, 50).tuned  # padded to 64
    for other in (
        {"tokens": 65},
        {"num_experts": 16},
        {"topk": 4},
        {"hidden_size": 1024},
        {"intermediate_size": 512},
        {"doweight_stage1": True},
        {"gate_mode": "interleave", "tokens": 64},
    ):
        tokens = other.pop("tokens", 64)
        try:
            assert not resolve("silu", env, tokens, **other).tuned, other
        except RuntimeError as error:  # interleave below the bound has no kernel
            assert "Unsupported scales" in str(error)


def test_expert_parallel_strips_the_masked_slot(table):
    env = table(row("flydsl_moe1_afp4_wfp4_t1_fp4"))
    assert resolve("silu", env, topk=3, has_expert_mask=True).tuned
    assert not resolve("silu", env, topk=2, has_expert_mask=True).tuned


def test_tier_below(table):
    env = table(row("flydsl_moe1_afp4_wfp4_t1_fp4", token=32768))
    assert resolve("silu", env, 200000).tuned
    assert not resolve("silu", env, 16384).tuned


def test_fallback_tag_and_other_rows_are_left_out(table):
    env = table(
        row("cktile_a8w4", _tag="flydsl_fallback"),
        row("x", q_dtype_w="torch.float8_e4m3fn"),
        row("x", doweight_stage1=1),
        row("x", use_g1u1=0),
        row("x", a="int8"),
        row("x", act="No"),
    )
    assert read_csv(env["AITER_CONFIG_FMOE"]) == []


def test_several_files_and_a_gfx_column(table, tmp_path):
    first = table(row("a"))["AITER_CONFIG_FMOE"]
    path = tmp_path / "gfx.csv"
    path.write_text(f"gfx,{COLUMNS}\ngfx942,{row('b')}\n")
    assert [r.arch for r in read_csv(str(path))] == ["gfx942"]
    env = {"AITER_CONFIG_FMOE": f"{path}:{first}"}
    assert resolve("silu", env).family == "flydsl_a4w4"


def test_a_missing_file_raises():
    with pytest.raises(OSError):
        resolve("silu", {"AITER_CONFIG_FMOE": "/nonexistent.csv"})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
