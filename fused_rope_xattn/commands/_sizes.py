"""Sizes of a problem on the command line."""

from __future__ import annotations

import argparse

from ..verify.case import AXES, DTYPES, MASKS, NORMS, POSITIONS, ROPES, Case
from ..verify.cases import OPTIONS


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
    sizes.add_argument("--value-dim", type=int, help="width of separate values (default: none)")
    sizes.add_argument("--out-dim", type=int, help="width of the output; 0: no output projection")
    sizes.add_argument("--bias", action="store_true", help="biases on all four projections")
    sizes.add_argument("--dropout", type=float, default=0.0)
    sizes.add_argument("--causal", action="store_true")
    sizes.add_argument("--projected-kv", action="store_true", help="keys and values are finished")
    options = parser.add_argument_group("options of the call, with random contents")
    options.add_argument("--rope", choices=ROPES, default="interleaved")
    options.add_argument("--positions", choices=POSITIONS, default="default")
    options.add_argument("--q-norm", choices=NORMS, default="none")
    options.add_argument("--k-norm", choices=NORMS, default="none")
    options.add_argument("--kv-lengths", choices=("none", "ragged", "zero"), default="none")
    options.add_argument("--mask", choices=MASKS, default="none", help="axes of kv_keep_mask")
    options.add_argument("--attn-bias", choices=OPTIONS["bias"], default="none", help="its axes")
    options.add_argument("--scale", type=float, help="default: head dim ** -0.5")
    options.add_argument("--lse", action="store_true", help="also return the log-sum-exp")


def case_from(args: argparse.Namespace) -> Case:
    if args.head_dim is None and args.dim % args.heads:
        raise SystemExit(
            f"--head-dim is needed: {args.dim} is not a multiple of {args.heads} heads"
        )
    if args.rope in AXES and args.positions == "default":
        raise SystemExit(f"--positions is needed: {args.rope} has {AXES[args.rope]} axes")
    return Case(
        "own sizes",
        args.batch,
        args.tq,
        args.tk,
        H=args.heads,
        D=args.head_dim or args.dim // args.heads,
        Dq=args.dim,
        Dkv=args.kv_dim,
        Dv=args.value_dim,
        Dout=args.out_dim,
        Hkv=args.kv_heads,
        dtype=args.dtype,
        biases="qkvo" if args.bias else "",
        causal=args.causal,
        dropout_p=args.dropout,
        projected=args.projected_kv,
        rope=args.rope,
        positions=args.positions,
        q_norm=args.q_norm,
        k_norm="none" if args.projected_kv else args.k_norm,
        lengths=args.kv_lengths,
        mask=args.mask,
        bias=args.attn_bias,
        scale=args.scale,
        lse=args.lse,
    )
