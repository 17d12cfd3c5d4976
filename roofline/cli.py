"""The `roofline` command: budgets of tiles, the choice among them, and the numbers beneath.

Exit status 0, or 2 with one line on stderr for bad input.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roofline import command
from roofline.budgets import budget
from roofline.command import Parser, json_text
from roofline.errors import RooflineError
from roofline.gemm import Gemm, parse_gemm
from roofline.gpus import FIELDS, GPU_NAMES, find_gpu, gpus
from roofline.intervals import measurements, wgmmas
from roofline.problem import Problem, bounds, visible_share
from roofline.text import (
    gpu_text,
    gpus_text,
    intervals_text,
    problem_text,
    tiles_text,
    wgmma_text,
)
from roofline.tile import check_size, parse_tile

#: FlashAttention-4's tiles, per CTA.
DEFAULT_TILES = {"forward": "256x128", "backward": "128x128"}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="roofline", description="What limits an attention kernel on a GPU.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_budget(commands)
    _add_tiles(commands)
    _add_gpus(commands)
    _add_intervals(commands)
    _add_simulate(commands)
    _add_report(commands)
    _add_shares(commands)
    return parser


def _add_gpu_option(parser: argparse.ArgumentParser, default: str | None) -> None:
    text = f"{', '.join(GPU_NAMES)}, an architecture (sm_100a) or a TOML file"
    parser.add_argument("--gpu", default=default, metavar="GPU", help=text)


def _add_budget(commands: Any) -> None:
    parser = commands.add_parser(
        "budget",
        help="MMA, SMEM and exp cycles of a tile, and which of them binds",
        description="MMA, SMEM and exp cycles of one KV iteration of one CTA, and what binds.",
    )
    _add_gpu_option(parser, "b200")
    add = parser.add_argument
    add("--tile", metavar="MxN", help="query rows x keys of one CTA (256x128; backward 128x128)")
    _add_shape_options(parser)
    add("--ctas", type=int, default=1, metavar="N", help="CTAs that share an MMA: 1 or 2")
    add(
        "--exp2-share",
        type=float,
        default=0.0,
        metavar="F",
        help="share of the exponentials computed by polynomial, 0 to 1 (0)",
    )
    _add_problem_options(parser)
    add("--ignore-fit", action="store_true", help="price a tile that the GPU has no room for")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_budget)


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--head-dim", type=int, default=128, metavar="D", help="of Q and K (128)")
    add("--head-dim-v", type=int, metavar="DV", help="of V (as --head-dim)")
    add("--pass", dest="direction", default="forward", metavar="PASS", help="forward or backward")
    add("--dtype", default="bf16", help="bf16, fp16, tf32, fp8, mxfp8 or nvfp4")


def _add_problem_options(parser: argparse.ArgumentParser, *, visible: bool = True) -> None:
    """The shape of a whole problem; its traffic and time are printed if --seqlen is given.

    visible: whether it may have a mask that only its visible share is known of.
    """
    add = parser.add_argument_group("whole problem, with --seqlen").add_argument
    add("--seqlen", type=int, metavar="S", help="queries of each sequence")
    add("--seqlen-k", type=int, metavar="SK", help="keys of each sequence (as --seqlen)")
    add("--batch", type=int, metavar="B", help="sequences (1)")
    add("--heads", type=int, metavar="H", help="query heads (1)")
    add("--kv-heads", type=int, metavar="HK", help="key heads (as --heads)")
    add("--causal", action="store_true", help="bottom-right aligned causal mask")
    if visible:
        add("--visible", type=float, metavar="F", help="share of the pairs another mask leaves")
    else:
        parser.set_defaults(visible=None)


def _problem(args: argparse.Namespace) -> Problem | None:
    """The whole problem asked for, or None."""
    if args.seqlen is None:
        return None
    heads = 1 if args.heads is None else args.heads
    return Problem(
        batch=1 if args.batch is None else args.batch,
        seqlen=args.seqlen,
        seqlen_k=args.seqlen if args.seqlen_k is None else args.seqlen_k,
        heads=heads,
        kv_heads=heads if args.kv_heads is None else args.kv_heads,
        causal=args.causal,
        visible=None if args.visible is None else visible_share(args.visible),
    )


def _needs_seqlen(args: argparse.Namespace) -> str | None:
    """What to say when options of a whole problem were given without its length."""
    if args.seqlen is not None:
        return None
    for name in ("batch", "seqlen_k", "heads", "kv_heads"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise RooflineError(f"{name} {value}: must be a positive integer")
    if args.visible is not None:
        visible_share(args.visible)
    names = ("seqlen_k", "batch", "heads", "kv_heads", "causal", "visible")
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n) not in (None, False)]
    return f"{', '.join(given)}: for a whole problem; add --seqlen" if given else None


def _add_gpus(commands: Any) -> None:
    parser = commands.add_parser(
        "gpus",
        help="the GPU numbers, each with its tag and source",
        description="Every GPU number with its unit, tag (measured, vendor, derived, assumed), "
        "and with --gpu its source.",
    )
    _add_gpu_option(parser, None)
    parser.add_argument("--json", action="store_true", help="print JSON, sources included")
    parser.set_defaults(run=_run_gpus)


def _add_tiles(commands: Any) -> None:
    parser = commands.add_parser(
        "tiles",
        help="every tile that fits, ranked for a problem, with reasons",
        description="Every tile that fits, ranked by predicted time, with the reason of each. "
        "Without --batch and --heads: 32k tokens and a hidden size of 2048.",
    )
    _add_gpu_option(parser, "b200")
    _add_shape_options(parser)
    add = parser.add_argument
    add("--tile", metavar="MxN", help="only this tile; an error says why if it does not fit")
    add("--top", type=int, default=8, metavar="N", help="tiles to print (8)")
    _add_problem_options(parser)
    add("--json", action="store_true", help="print JSON: every tile, and those that do not fit")
    parser.set_defaults(run=_run_tiles)


def _run_tiles(args: argparse.Namespace) -> str:
    from roofline.tiles import only_tile, rank

    gpu = find_gpu(args.gpu)
    head_dim = check_size("head_dim", args.head_dim)
    if args.top <= 0:
        raise RooflineError(f"top {args.top}: must be positive")
    _published_problem(args, head_dim)
    problem = _problem(args)
    assert problem is not None
    ranking = rank(
        gpu, problem, head_dim, args.head_dim_v, direction=args.direction, dtype=args.dtype
    )
    if args.tile is not None:
        ranking = only_tile(ranking, *parse_tile(args.tile))
    return json_text(ranking.to_dict()) if args.json else tiles_text(ranking, args.top)


def _add_intervals(commands: Any) -> None:
    parser = commands.add_parser(
        "intervals",
        help="measured cycles of tcgen05.mma and wgmma beside the closed form, every residual",
        description="Cycles of tcgen05.mma measured on a B200, or of wgmma on an H200, beside the "
        "closed form.",
    )
    _add_gpu_option(parser, "b200")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_intervals)


def _run_intervals(args: argparse.Namespace) -> str:
    if find_gpu(args.gpu).has_tmem:
        rows = measurements()
        return json_text([row.to_dict() for row in rows]) if args.json else intervals_text(rows)
    wgmma = wgmmas()
    return json_text([row.to_dict() for row in wgmma]) if args.json else wgmma_text(wgmma)


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="cycles of a kernel on a problem, unit by unit, without a GPU",
        description="Runs a few tiles of a kernel on the emulator, replays them on a model of the "
        "SM and fills the GPU with them. Without --batch and --heads: 32k tokens and a hidden size "
        "of 2048.",
    )
    _add_gpu_option(parser, "b200")
    add = parser.add_argument
    add("--kernel", default="fa4", metavar="NAME", help="fa4, or MODULE:FUNCTION of a workload")
    add("--head-dim", type=int, default=128, metavar="D", help="of Q, K and V (128)")
    add("--dtype", default="bf16", help="bf16 or fp16")
    _add_problem_options(parser, visible=False)
    add("--exp2-share", type=float, metavar="F", help="emulated share of exp2 (the plan's own)")
    add("--gemm", metavar="MxNxK", help="a matrix product, for a --kernel that computes one")
    add("--clock", default="burst", metavar="C", help="burst (default), sustained or GHz")
    add("--no-gains", action="store_true", help="skip the replays with faster units")
    add("--timeline", metavar="FILE", help="write a work item's timeline for ui.perfetto.dev")
    add("--save-records", metavar="FILE", help="write the records of the longest probe (.npz)")
    add("--records", metavar="FILE", help="replay a file of records instead of emulating")
    add("--assumptions", action="store_true", help="print the model's constants and their sources")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_simulate)


def _run_simulate(args: argparse.Namespace) -> str:
    from roofline.cycles import pages
    from roofline.cycles.hardware import latencies
    from roofline.cycles.predict import predict, replay_file

    if args.assumptions:
        number = find_gpu(args.gpu).arch_number
        if args.json:
            return json_text({name: q.to_dict() for name, q in latencies(number).items()})
        return pages.assumptions_text(number)
    _check_outputs(args, ("timeline", "save_records"))
    if args.records is not None:
        if not args.records.strip():
            raise RooflineError(f"records {args.records!r}: must name a file")
        replayed = replay_file(args.records, find_gpu(args.gpu))
        return json_text(replayed.to_dict()) if args.json else pages.records_text(replayed)
    head_dim = check_size("head_dim", args.head_dim)
    problem: Problem | Gemm | None
    if args.gemm is not None:
        problem = parse_gemm(args.gemm)
    else:
        _published_problem(args, head_dim)
        problem = _problem(args)
    assert problem is not None
    found = predict(
        args.gpu,
        problem,
        head_dim,
        kernel=args.kernel,
        dtype=args.dtype,
        clock=args.clock,
        gains=not args.no_gains,
        timeline=bool(args.timeline),
        options={} if args.exp2_share is None else {"exp2_emulated_share": args.exp2_share},
    )
    if args.timeline:
        title = f"{found.work.name} on {found.gpu.name}"
        _write(args.timeline, pages.perfetto(found.spans, title))
    if args.save_records:
        try:
            found.records.save(args.save_records)
        except OSError as error:
            raise RooflineError(f"{args.save_records}: {error.strerror}") from None
    return json_text(found.to_dict()) if args.json else pages.simulate_text(found)


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="a page on a kernel and a GPU: speeds, units, waits, tiles, plots",
        description="A page in Markdown on what limits a kernel on a GPU. Without --seqlen, "
        "--batch and --heads: 32k tokens, a hidden size of 2048, details at 8192.",
    )
    _add_gpu_option(parser, "b200")
    add = parser.add_argument
    add("--kernel", default="fa4", metavar="NAME", help="fa4, or MODULE:FUNCTION of a workload")
    add("--head-dim", type=int, default=128, metavar="D", help="of Q, K and V (128)")
    _add_problem_options(parser, visible=False)
    add("--measured-ms", type=float, metavar="MS", help="your own timing of the problem")
    add("--no-shares", action="store_true", help="skip the sweep over emulated shares of exp2")
    add("--out", metavar="FOLDER", help="write report.md and the plots (PNG, SVG) there")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_report)


def _run_report(args: argparse.Namespace) -> str:
    from roofline import report

    folder = None if args.out is None else _folder(args.out)
    head_dim = check_size("head_dim", args.head_dim)
    _published_problem(args, head_dim)
    made = report.make(
        args.gpu,
        head_dim,
        args.causal,
        problem=_problem(args),
        kernel=args.kernel,
        measured_ms=args.measured_ms,
        shares=not args.no_shares,
    )
    if folder is None:
        return json_text(made.to_dict()) if args.json else report.markdown(made).rstrip()
    from roofline.plots import save

    files = save(made, folder)
    _write(str(folder / "report.md"), report.markdown(made, files))
    if args.json:
        return json_text(made.to_dict())
    return "\n".join(str(path) for path in (folder / "report.md", *files))


def _add_shares(commands: Any) -> None:
    parser = commands.add_parser(
        "shares",
        help="which emulated share of exp2 is best, and what binds then",
        description="The best emulated share of exp2 for head dimensions 64, 128 and 192/128 in "
        "bf16 and fp8: by the pipes alone, with latencies, and as replayed where there is a "
        "kernel.",
    )
    _add_gpu_option(parser, "b200")
    parser.add_argument(
        "--replay", action="store_true", help="emulate and replay anew: minutes, and no table"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_shares)


def _run_shares(args: argparse.Namespace) -> str:
    from roofline.shares import shares, text

    found = shares(args.gpu, replay=args.replay)
    return json_text([row.to_dict() for row in found]) if args.json else text(found)


def _folder(path: str) -> Path:
    """The folder to write to, made if it is not there."""
    if not path.strip():
        raise RooflineError(f"out {path!r}: must name a folder")
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RooflineError(f"out {path!r}: cannot be made: {error.strerror}") from None
    return folder


def _check_outputs(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Files to write can be opened: said before minutes of work, not after them."""
    for name in names:
        path = getattr(args, name)
        if path is None:
            continue
        there = os.path.lexists(path)
        try:
            with open(path, "ab"):
                pass
        except OSError as error:
            option = name.replace("_", "-")
            raise RooflineError(f"{option} {path!r}: cannot be written: {error.strerror}") from None
        if not there:  # the work may still fail
            os.remove(path)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RooflineError(f"{path}: cannot be written: {error.strerror}") from None


def _published_problem(args: argparse.Namespace, head_dim: int) -> None:
    """The published benchmark's problem where nothing is said: 32k tokens, hidden size 2048."""
    if args.seqlen is None:
        args.seqlen = 8192
    if args.heads is None:
        args.heads = max(1, 2048 // head_dim) if args.kv_heads is None else args.kv_heads
    if args.batch is None:
        args.batch = max(1, 32768 // max(1, args.seqlen))


def _run_budget(args: argparse.Namespace) -> str:
    default = DEFAULT_TILES.get(args.direction, "256x128")
    tile_m, tile_n = parse_tile(default if args.tile is None else args.tile)
    result = budget(
        args.gpu,
        tile_m,
        tile_n,
        args.head_dim,
        args.head_dim_v,
        direction=args.direction,
        ctas=args.ctas,
        dtype=args.dtype,
        exp2_emulated_share=args.exp2_share,
    )
    if result.excesses and not args.ignore_fit:
        reasons = "; ".join(str(excess) for excess in result.excesses)
        raise RooflineError(
            f"tile {tile_m}x{tile_n} does not fit {result.tile.gpu.name}: {reasons}; "
            "take a smaller tile, or --ignore-fit to price it all the same"
        )
    problem, hint = _problem(args), _needs_seqlen(args)
    whole = bounds(problem, result) if problem else None
    if args.json:
        page = result.to_dict()
        page["problem"] = whole.to_dict() if whole else None
        page["notes"] += [hint] if hint else []
        return json_text(page)
    parts = [str(result), problem_text(whole) if whole else "", f"note: {hint}" if hint else ""]
    return "\n\n".join(part for part in parts if part)


def _run_gpus(args: argparse.Namespace) -> str:
    if args.gpu:
        gpu = find_gpu(args.gpu)
        return json_text(gpu.to_dict()) if args.json else gpu_text(gpu)
    if args.json:
        return json_text({gpu.name: gpu.to_dict() for gpu in gpus()})
    return gpus_text(gpus(), tuple(FIELDS))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""

    def action() -> int:
        args = _parser().parse_args(argv)
        print(args.run(args))
        return 0

    return command.run("roofline", action, refused=(RooflineError,))
