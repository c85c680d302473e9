"""The command ``fccl``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fccl import _info
from fccl._version import __version__
from fccl.bench import command as bench_command
from fccl.demo import command as demo_command

__all__ = ["main"]

_DESCRIPTION = """\
fccl: fused collectives for PyTorch.

  fccl info                   what fccl found on this machine, and whether ranks can share memory here
  fccl bench all_reduce       measure a collective, compared with Gloo and with memcpy
  fccl demo                   train a small model with fccl and with Gloo, side by side

In a program:

  import fccl                                             # registers the backend
  torch.distributed.init_process_group("fccl")            # plain PyTorch
  import fccl.lightning                                   # Lightning:
  Trainer(strategy="fccl", devices=2, accelerator="cpu")
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="fccl", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"fccl {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _info.add_parser(subparsers)
    bench_command.add_parser(subparsers)
    demo_command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit status. Wrong arguments raise SystemExit(2), as argparse does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(arguments)
    try:
        status: int = args.run(args, arguments)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone: not an error, but nothing more to say either.
        sys.stdout = None  # type: ignore[assignment]
        return 141
    except KeyboardInterrupt:
        print("fccl: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
