"""Says which path and which kernels a problem takes, and why; needs no GPU."""

from __future__ import annotations

import argparse

from .. import plan
from ..planner import GPU
from ._call import planned_call
from ._sizes import add_size_arguments, case_from

HELP = "say which path and kernels a problem takes, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    parser.add_argument(
        "--path", choices=("auto", "fused", "split", "composite"), default="auto", help="to ask for"
    )
    parser.add_argument(
        "--capability",
        metavar="X.Y",
        help="compute capability to plan for (default: the GPU that is here, or an H200)",
    )
    parser.add_argument("--sms", type=int, default=132, help="with --capability: multiprocessors")


def run(args: argparse.Namespace) -> int:
    gpu = GPU.current()
    if args.capability:
        major, _, minor = args.capability.partition(".")
        if not (major.isdigit() and minor.isdigit()):
            raise SystemExit(f"--capability: want a number like 9.0, got {args.capability}")
        gpu = GPU(f"GPU of capability {args.capability}", (int(major), int(minor)), args.sms)
    try:
        call_args, call_kwargs = planned_call(case_from(args))
        print(f"{gpu.name}: {plan(*call_args, **call_kwargs, path=args.path, gpu=gpu)}")
    except (TypeError, ValueError) as error:
        raise SystemExit(str(error)) from error
    return 0
