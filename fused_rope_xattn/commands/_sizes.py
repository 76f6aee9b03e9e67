"""Sizes of a problem on the command line."""

from __future__ import annotations

import argparse

from ..verify.case import DTYPES, Case


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--batch", type=int, default=4)
    sizes.add_argument("--tq", type=int, default=64, help="queries")
    sizes.add_argument("--tk", type=int, default=128, help="keys")
    sizes.add_argument("--dim", type=int, default=256, help="width of queries and of the output")
    sizes.add_argument("--kv-dim", type=int, help="width of keys and values (default: --dim)")
    sizes.add_argument("--heads", type=int, default=8)
    sizes.add_argument("--kv-heads", type=int, help="key and value heads (default: --heads)")
    sizes.add_argument("--head-dim", type=int, help="default: --dim / --heads")
    sizes.add_argument("--dtype", choices=DTYPES, default="bf16")
    sizes.add_argument("--bias", action="store_true", help="biases on all four projections")
    sizes.add_argument("--dropout", type=float, default=0.0)
    sizes.add_argument("--causal", action="store_true")
    sizes.add_argument("--projected-kv", action="store_true", help="keys and values are finished")


def case_from(args: argparse.Namespace) -> Case:
    if args.head_dim is None and args.dim % args.heads:
        raise SystemExit(
            f"--head-dim is needed: {args.dim} is not a multiple of {args.heads} heads"
        )
    return Case(
        "own sizes",
        args.batch,
        args.tq,
        args.tk,
        H=args.heads,
        D=args.head_dim or args.dim // args.heads,
        Dq=args.dim,
        Dkv=args.kv_dim,
        Hkv=args.kv_heads,
        dtype=args.dtype,
        biases="qkvo" if args.bias else "",
        causal=args.causal,
        dropout_p=args.dropout,
        projected=args.projected_kv,
    )
