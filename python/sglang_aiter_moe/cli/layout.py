"""`layout`: where each byte goes; what layout a file is in; laying out ahead of time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sglang_aiter_moe.cli.output import JsonOption, console, write_json

WEIGHT_FORMS = ("separated", "gu_interleaved", "gu_interleaved_gfx1250")
SCALE_FORMS = ("separated", "a16w4", "a16w4_gate_up", "n32k4", "n32k4_gate_up")


def layout(
    form: Annotated[
        str | None,
        typer.Argument(
            metavar="FORM",
            help=f"Weights: {', '.join(WEIGHT_FORMS)}. Scales: {', '.join(SCALE_FORMS[1:])}; "
            "`separated` with --scales.",
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", help="Rows of one expert.")
    ] = None,
    cols: Annotated[
        int | None,
        typer.Option(
            "--cols",
            metavar="K",
            help="Elements a row: K/2 bytes of weights, K/32 bytes of scales.",
        ),
    ] = None,
    scales: Annotated[
        bool, typer.Option("--scales", help="The E8M0 scales of such rows, not the weights.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw it.", dir_okay=False)
    ] = None,
    lines: Annotated[int, typer.Option("--lines", help="Lines to show; 0 for all.", min=0)] = 40,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            metavar="FILE",
            help="Tell which layout a safetensors file's experts are in, with the evidence. Exit "
            "status 0: told, 1: it contradicts the file's own plan, 2: unknown.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="CONFIG",
            help="The model's config.json, directory or example (plan --examples).",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RAW", help="The raw checkpoint, as evidence."),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(
            "--pack",
            metavar="IN",
            help="Write one rank of a raw checkpoint as its kernels read it, with the plan in its "
            "metadata; by --plan, or by --config under --arch, --aiter and this environment.",
        ),
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="OUT", help="Where --pack writes: a directory.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="PLAN", help="A plan as JSON, from plan --json FILE."),
    ] = None,
    arch: Annotated[str, typer.Option("--arch", help="Of the GPU that will run it.")] = "gfx950",
    aiter: Annotated[
        str | None, typer.Option("--aiter", help="Its AITER: a release or a known commit.")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel size.", min=1)] = 1,
    ep: Annotated[
        int, typer.Option("--ep", help="Expert-parallel size, a divisor of --tp.", min=1)
    ] = 1,
    tp_rank: Annotated[
        int, typer.Option("--tp-rank", help="Which of the --tp / --ep ranks.", min=0)
    ] = 0,
    ep_rank: Annotated[int, typer.Option("--ep-rank", help="Which of --ep.", min=0)] = 0,
    json_target: JsonOption = None,
) -> None:
    """Show where each byte goes: packed position, and the row and byte it comes from.

    Of two halves of rows, the first is called gate and the second up, as in w13. With --check: tell the
    layout of a file. With --pack: lay out a checkpoint ahead of time.
    """
    if check is not None:
        from sglang_aiter_moe.cli import layout_check

        raise typer.Exit(
            layout_check.run(
                check, config, against, (tp, tp_rank), (ep, ep_rank), json_target=json_target
            )
        )
    if pack is not None:
        from sglang_aiter_moe.cli import layout_pack

        made = layout_pack.read_plan(plan, config, arch, aiter, (tp, tp_rank), (ep, ep_rank))
        layout_pack.run(pack, out_dir, made, tp_rank, ep_rank, json_target=json_target)
        return
    if form is None or rows is None or cols is None:
        raise typer.BadParameter("FORM with --rows and --cols, --check FILE or --pack IN")
    # torch takes seconds to import, and --help should not wait for it.
    from sglang_aiter_moe.cli import layout_picture
    from sglang_aiter_moe.cli.layout_runs import resolve, runs

    picture = resolve(form, rows=rows, cols=cols, scales=scales)
    found = runs(picture)
    out = console(json_target)
    out.print(
        f"{picture.title}: {rows} rows of {picture.row_bytes} raw bytes, "
        f"{len(picture.source)} packed bytes"
    )
    shown = found[:lines] if lines else found
    table = Table(box=None, pad_edge=False)
    for title in ("packed bytes", "from row", "its bytes", ""):
        table.add_column(title)
    for run in shown:
        table.add_row(
            f"{run.start}-{run.stop - 1}" if run.stop - run.start > 1 else str(run.start),
            "padding" if run.row is None else str(run.row),
            "0x7f" if run.row is None else run.columns_text,
            run.part,
        )
    out.print(table)
    if len(found) > len(shown):
        out.print(f"... {len(found) - len(shown)} more lines: --lines 0 shows all")
    if svg is not None:
        try:
            svg.write_text(layout_picture.draw(picture), encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"--svg {svg}: {error.strerror}") from error
        out.print(f"picture: {svg}")
    write_json(
        {
            "form": picture.form,
            "scales": picture.scales,
            "rows": rows,
            "cols": cols,
            "row_bytes": picture.row_bytes,
            "packed_shape": list(picture.packed_shape),
            "source": picture.source,
        },
        json_target,
    )
