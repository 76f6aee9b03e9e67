"""python -m fused_rope_xattn {info,plan,selftest,bench,fuzz,demo}"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .commands import bench, demo, fuzz, info, plan, selftest

COMMANDS = {
    "info": info,
    "plan": plan,
    "selftest": selftest,
    "bench": bench,
    "fuzz": fuzz,
    "demo": demo,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fused_rope_xattn",
        description="Fused, trainable cross-attention with rotary position embeddings.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
