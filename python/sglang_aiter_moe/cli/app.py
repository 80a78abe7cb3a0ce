"""The typer application. Commands import what they compute with when they run, not at start."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from sglang_aiter_moe.cli import (
    apply,
    bench,
    check_tests,
    doctor,
    env,
    eval,
    execute,
    layout,
    matrix,
    plan,
    prebuild,
    verify,
)
from sglang_aiter_moe.cli.output import write_refusal
from sglang_aiter_moe.errors import ContractError


class ContractGroup(TyperGroup):
    """Shows a ContractError as three lines and exit status 2 in place of a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ContractError as error:
            print(f"error: {error.what}", file=sys.stderr)
            print(f"  allowed: {error.allowed}", file=sys.stderr)
            print(f"  to fix:  {error.fix}", file=sys.stderr)
            write_refusal(error)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=ContractGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="AITER's MXFP4 MoE contract for SGLang: plan, check and explain it.",
)


@app.callback()
def main() -> None:
    """AITER's MXFP4 MoE contract for SGLang: plan, check and explain it.

    Exit status: 0 what was checked holds, 1 it does not, 2 the input was refused; --json then holds
    {"refused": {"what", "allowed", "fix"}}.
    """


app.command("verify")(verify.verify)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("prebuild")(prebuild.prebuild)
app.command("matrix")(matrix.matrix)
app.command("env")(env.env)
app.command("layout")(layout.layout)
app.command("execute")(execute.execute)
app.command("eval")(eval.evaluate)
app.command("apply")(apply.apply)
app.command("check-tests")(check_tests.check_tests)
app.add_typer(bench.app, name="bench")
