"""The ``fa4`` command: run, supports, plan, env.

Exit status 0; 1 where the emulator has findings or the numbers rule does not hold; 2 with one line
on stderr for bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from fa4.arch import gpu_name
from fa4.backends import BACKENDS
from fa4.errors import MissingDependencyError
from fa4.features import FEATURES
from fa4.problem import DTYPES, dtype_name
from fa4.support import supports
from kernels.common.plan import GPU_ARCHS, KernelPlan
from roofline import command
from roofline.command import Parser, UsageError, json_text, tile_option


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""

    def action() -> int:
        args = _parser().parse_args(argv)
        return int(args.command(args))

    return command.run(
        "fa4",
        action,
        refused=(ValueError, TypeError, MissingDependencyError),
        failed=(NotImplementedError,),  # what the emulator does not model
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fa4", description="FlashAttention-4, on a GPU or a modelled one.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_supports(commands)
    _add_plan(commands)
    env = commands.add_parser("env", help="versions, driver, GPUs and cache, for a bug report")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(command=_env)
    return parser


_MAX_SIZE = 2**31 - 1  # what the kernel's 32-bit coordinates reach

# -- options ---------------------------------------------------------------------------------------


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 1 <= value <= _MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text} is out of range: give 1 to {_MAX_SIZE}")
    return value


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 0 to 2^64 - 1")
    return int(text)


def _gpu(text: str) -> str:
    """A GPU name for a name or an architecture."""
    try:
        return gpu_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("plan fields; each has the best known default").add_argument
    add("--tile", type=tile_option, metavar="MxN", help="query rows x keys of one CTA (256x128)")
    add("--ctas", type=_positive, metavar="N", help="CTAs that share an MMA (1)")
    add("--exp2-share", type=float, metavar="F", help="share of exp2 by polynomial, 0 to 1")
    add("--rescale-threshold", type=float, metavar="TAU", help="log2 units; 0 rescales always (8)")
    add("--kv-stages", type=_positive, metavar="N", help="K and V tiles in flight")


def _plan_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The plan fields that were asked for."""
    fields: dict[str, Any] = {
        "ctas": args.ctas,
        "exp2_emulated_share": args.exp2_share,
        "rescale_threshold": args.rescale_threshold,
        "kv_stages": args.kv_stages,
    }
    if args.tile:
        rows, fields["tile_n"] = args.tile
        plan = KernelPlan.forward()
        if (rows, fields["tile_n"]) != (plan.tile_q, plan.tile_n):
            raise UsageError(
                f"--tile {rows}x{fields['tile_n']}: this kernel's tile is {plan.tile_q}x"
                f"{plan.tile_n}, two stages of {plan.tile_m} query rows; leave --tile out, or price"
                " others with roofline tiles"
            )
        fields["tile_m"] = rows // plan.q_stages
    return {name: value for name, value in fields.items() if value is not None}


def _add_gpu(parser: argparse.ArgumentParser, help: str, **options: Any) -> None:
    parser.add_argument(
        "--gpu", metavar="GPU", help=f"{', '.join(GPU_ARCHS)} or sm_*; {help}", **options
    )


# -- run -------------------------------------------------------------------------------------------

# option: (its default, a number or the option that it follows; what it is)
_SHAPE: dict[str, tuple[int | str, str]] = {
    "batch": (1, "sequences"),
    "seqlen": (512, "queries of a sequence"),
    "seqlen_k": ("seqlen", "keys of a sequence"),
    "heads": (1, "heads of q"),
    "kv_heads": ("heads", "heads of k and v"),
    "head_dim": (128, "of q and k"),
    "head_dim_v": ("head_dim", "of v"),
}


# As kernels.emulator.schedule lists them (a test compares); importing that costs half a second.
_EMULATION = {
    "schedule": ("round_robin", "run_until_blocked", "random", "adversarial"),
    "visibility": ("eager", "late"),
    "profile": ("silicon", "isa"),
}


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="attention on a file or random input, checked against float64",
        description="Run attention; print its plan, errors against float64, findings and budget.",
    )
    add = parser.add_argument
    add("--input", metavar="FILE", help="safetensors file with q, k and v (else random)")
    for name, (default, what) in _SHAPE.items():
        shown = f"as --{default.replace('_', '-')}" if isinstance(default, str) else default
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=_positive, metavar="N", help=f"{what} ({shown})")
    add("--dtype", metavar="DTYPE", help=f"{', '.join(DTYPES)}, or bf16, fp16 ... (bfloat16)")
    add(
        "--seed",
        type=_seed,
        metavar="N",
        help="of the random input and of the emulator's scheduler (0)",
    )
    add("--causal", action="store_true", help="bottom-right aligned causal mask")
    _add_gpu(parser, "the emulator's model (b200)", type=_gpu)
    add("--backend", default="auto", metavar="NAME", help=f"{', '.join(BACKENDS)} (auto)")
    for name, values in _EMULATION.items():
        add(f"--{name}", choices=values, help=f"of the emulator ({values[0]})")
    add("--processes", type=_positive, metavar="N", help="worker processes of the emulator (1)")
    add("--no-checks", action="store_true", help="emulate without looking for races: faster")
    add("--json", action="store_true", help="print JSON")
    add(
        "--progress", action="store_true", help="draw the progress bar though stderr is no terminal"
    )
    _add_plan_options(parser)
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    from fa4 import run

    outcome = run.run(
        _inputs(args),
        causal=args.causal,
        backend=args.backend,
        gpu=args.gpu,
        plan_fields=_plan_fields(args),
        seed=args.seed or 0,
        emulation=_emulation(args),
        show_progress=True if args.progress else None,
        announce=(lambda text: None) if args.json else print,
    )
    print(json_text(outcome.to_dict()) if args.json else outcome)
    return 1 if outcome.faults else 0


def _emulation(args: argparse.Namespace) -> dict[str, Any]:
    """The emulator's options that were asked for."""
    names = (*_EMULATION, "processes")
    asked = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return asked | ({"checks": False} if args.no_checks else {})


def _inputs(args: argparse.Namespace) -> Any:
    from fa4 import inputs

    if args.input is not None:
        if not args.input:
            raise UsageError("--input is empty: give the name of a safetensors file")
        given = [name for name in (*_SHAPE, "dtype") if getattr(args, name) is not None]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(f"{options} with --input: the file says so; leave one of them out")
        return inputs.load(args.input)
    name = dtype_name(args.dtype or "bfloat16")
    if name not in DTYPES:
        raise UsageError(f"--dtype {args.dtype}: give one of {', '.join(DTYPES)}")

    def size(name: str) -> int:
        default = _SHAPE[name][0]
        value: int | None = getattr(args, name)
        return value or (size(default) if isinstance(default, str) else default)

    return inputs.random(
        batch=size("batch"),
        seqlen_q=size("seqlen"),
        seqlen_k=size("seqlen_k"),
        heads=size("heads"),
        kv_heads=size("kv_heads"),
        head_dim=size("head_dim"),
        head_dim_v=size("head_dim_v"),
        dtype=DTYPES[name],
        seed=args.seed or 0,
    )


# -- supports, plan, env ---------------------------------------------------------------------------


def _add_supports(commands: Any) -> None:
    parser = commands.add_parser(
        "supports",
        help="what runs on a GPU, and why not",
        description="Say yes or no with the reason, for each feature or the one that is named.",
    )
    _add_gpu(parser, "none: a machine without one (this machine's)")
    add = parser.add_argument
    add("--feature", metavar="NAME", help=f"one of {', '.join(FEATURES)} (all)")
    add("--backend", default="auto", metavar="NAME", help=f"{', '.join(BACKENDS)} (auto)")
    add("--dtype", default="bfloat16", metavar="DTYPE", help="of q, k and v (bfloat16)")
    add("--head-dim", type=_positive, default=128, metavar="N", help="of q and k (128)")
    add("--head-dim-v", type=_positive, metavar="N", help="of v (as --head-dim)")
    add("--heads", type=_positive, default=1, metavar="N", help="heads of q (1)")
    add("--kv-heads", type=_positive, metavar="N", help="heads of k and v (as --heads)")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_supports)


def _supports(args: argparse.Namespace) -> int:
    names = FEATURES if args.feature is None else [args.feature]
    answers = {
        name: supports(
            name,
            gpu=args.gpu,
            backend=args.backend,
            dtype=args.dtype,
            head_dim=args.head_dim,
            head_dim_v=args.head_dim_v,
            heads=args.heads,
            kv_heads=args.kv_heads,
        )
        for name in names
    }
    if args.json:
        print(json_text({name: {"ok": a.ok, "reason": a.reason} for name, a in answers.items()}))
    else:
        for name, answer in answers.items():
            print(f"{name:14} {'yes' if answer else 'no ':3}  {answer.reason}")
    return 0


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="the kernel's tile, SMEM, TMEM, roles and registers, and why",
        description="Print the plan of the forward kernel, and why it is that one, without "
        "compiling it.",
    )
    _add_gpu(parser, "(b200)", type=_gpu, default="b200")
    add = parser.add_argument
    add("--dtype", default="bfloat16", metavar="DTYPE", help="bfloat16 or float16 (bfloat16)")
    add("--head-dim", type=int, default=128, metavar="N", help="16 to 128, multiple of 16 (128)")
    add("--causal", action="store_true", help="bottom-right aligned causal mask")
    add("--json", action="store_true", help="print JSON")
    _add_plan_options(parser)
    parser.set_defaults(command=_plan)


def _plan(args: argparse.Namespace) -> int:
    from fa4.plan import explain

    found = explain(
        args.gpu, dtype_name(args.dtype), args.head_dim, args.causal, _plan_fields(args)
    )
    print(json_text(found.to_dict()) if args.json else found)
    return 0


def _env(args: argparse.Namespace) -> int:
    from fa4.environment import as_text, environment

    facts = environment()
    print(json_text(facts) if args.json else as_text(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
