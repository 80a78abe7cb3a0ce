"""Which of AITER's rows a plan meets; rows that AITER itself would not take are not counted."""

import sys

import pytest

from sglang_aiter_moe.aiter_files import tables
from sglang_aiter_moe.cli.plan_report import Setting
from sglang_aiter_moe.errors import ContractError
from sglang_aiter_moe.model_config import moe_layers, read_config
from sglang_aiter_moe.testing import fake_aiter_checkout as fake
from sglang_aiter_moe.testing.registration import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

K3 = (3584, 384, 896, 16)


def plan(name="kimi-k3", tp=8, ep=1, **env):
    return Setting("gfx950", "0.1.20", env).plan(moe_layers(read_config(name), tp=tp, ep=ep).spec)


def look_up(tmp_path, rows, the_plan, counts):
    path = fake.write_table(tmp_path / "x_tuned_fmoe.csv", rows)
    return tables.coverage(the_plan, tables.read_rows([path]), counts)


A4W4 = {"AITER_SITUV2_A4W4": "1", "SGLANG_AITER_K3_OPT": "1"}


def test_hits_and_misses_by_padded_token_count(tmp_path):
    rows = [fake.tuned_row(t, "A4W4", K3, kernels=(f"s1_{t}", f"s2_{t}")) for t in (1, 4, 16)]
    found = look_up(tmp_path, rows, plan(**A4W4), [1, 2, 3, 4, 16, 17])
    assert [(c.tokens, c.row and c.row.kernels) for c in found] == [
        (1, ("s1_1", "s2_1")),
        (2, None),
        (4, ("s1_4", "s2_4")),  # 3 tokens are padded to 4
        (16, ("s1_16", "s2_16")),
        (32, None),
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "A8W4"},
        {"shape": (3584, 512, 896, 16)},
        {"shape": (3584, 384, 896, 8)},
        {"cu_num": 80},
        {"gfx": "gfx942"},
        {"doweight_stage1": 1},
        {"q_type": "QuantType.per_1x128"},
        {"q_dtype_w": "torch.float8_e4m3fn"},
        {"_tag": "flydsl_fallback"},
    ],
)
def test_a_row_with_another_key_is_a_miss(tmp_path, other):
    row = {"tokens": 1, "mode": "A4W4", "shape": K3} | other
    (found,) = look_up(tmp_path, [fake.tuned_row(**row)], plan(**A4W4), [1])
    assert found.row is None and found.other is None


def test_a_row_of_another_activation_is_shown_as_such(tmp_path):
    # AITER's second lookup ignores the activation (docs/contract.md section b.2).
    row = fake.tuned_row(1, "A4W4", K3, activation="Silu")
    (found,) = look_up(tmp_path, [row], plan(**A4W4), [1])
    assert found.row is None and found.other.activation == "silu"


def test_an_expert_mask_takes_one_off_topk(tmp_path):
    the_plan = plan(ep=8, **A4W4)
    hidden, inter = the_plan.padded_hidden_size, the_plan.padded_intermediate_size
    rows = [fake.tuned_row(1, "A4W4", (hidden, inter, 112, topk)) for topk in (16, 15)]
    (found,) = look_up(tmp_path, rows, the_plan, [1])
    assert found.row.shape[3] == 15


def test_aiters_own_tables_or_those_of_the_variable(tmp_path):
    package = fake.write_package(tmp_path)
    models = package / "configs" / "model_configs"
    for name in ("a_tuned_fmoe.csv", "a_untuned_fmoe.csv", "b_tuned_fmoe_x.csv", "c_gemm.csv"):
        fake.write_table(models / name, [])
    fake.write_table(package / "configs" / "tuned_fmoe.csv", [])
    names = [path.name for path in tables.table_files(package, {})]
    assert names == ["tuned_fmoe.csv", "a_tuned_fmoe.csv", "b_tuned_fmoe_x.csv"]
    given = {"AITER_CONFIG_FMOE": "/x/one.csv:/y/two.csv"}
    assert [str(p) for p in tables.table_files(package, given)] == ["/x/one.csv", "/y/two.csv"]


def test_written_rows_are_read_back(tmp_path):
    path = fake.write_table(tmp_path / "in.csv", [fake.tuned_row(t, "A8W4", K3) for t in (1, 2)])
    rows = tables.read_rows([path])
    tables.write_table(rows, tmp_path / "out.csv")
    again = tables.read_rows([tmp_path / "out.csv"])
    assert [r.text for r in again] == [r.text for r in rows]


def test_what_is_no_table_is_refused(tmp_path):
    bad = tmp_path / "bad.csv"
    bad.write_text("a,b\n1,2\n")
    long = tmp_path / "long.csv"
    long.write_text(f"token\n{'1' * 200_000}\n")  # longer than a cell that the csv module takes
    for path in (bad, long, tmp_path / "nowhere.csv"):
        with pytest.raises(ContractError, match=path.name):
            tables.read_rows([path])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
