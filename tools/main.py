"""Entry point of the `rockpage` command: parses, dispatches, and turns failures into one line and a status.

Exit status: 0 done; 1 the answer is no (a model does not fit, a machine could do better); 2 bad input or a failure,
with one line on stderr, or a machine's failure, which is the answer of `doctor`; 130 interrupted by Ctrl-C, 143 by
SIGTERM, 129 by a terminal that closed; 141 whoever read our output has gone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from . import (
    bench,
    cache,
    calibrate,
    convert,
    demo,
    doctor,
    export,
    models,
    plan,
    replay,
    run,
    score,
    selftest,
    tokenize,
)
from .command import Command, Help, Parser
from .signals import unwinding_signals
from .streams import complain, prepare_streams
from .terminal import preserved_terminal

__all__ = ["main"]

COMMANDS: tuple[Command, ...] = (
    demo,
    run,
    score,
    tokenize,
    plan,
    replay,
    doctor,
    convert,
    export,
    calibrate,
    selftest,
    models,
    cache,
    bench,
)
"""The subcommands, in the order of `--help`."""

EXAMPLE = """\
example:
  rockpage run --chat --prompt "Why does a bearing run hot?\""""

INTERRUPTED = 128 + 2
"""What a shell reports for a process that SIGINT ended."""

READER_GONE = 128 + 13
"""What a shell reports for a process that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit status. `ROCKPAGE_DEBUG=1` in the environment lets failures through with their traceback.

    Raises:
        SystemExit: by argparse, after `--help`, `--version` or a usage error; by SIGTERM and SIGHUP.
    """
    prepare_streams()
    # Read when numpy is first imported. The emulated NPU's small products gain nothing from OpenBLAS's threads, which
    # spin while they wait: beside a busy neighbour a step then takes several times as long.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.stdout is None:
        complain("stdout is closed: give it a file, a pipe, or /dev/null")
        return 2
    with unwinding_signals() as unwinding, preserved_terminal():
        try:
            args = _parser().parse_args(argv)
            _import_numpy()
            status: int = args.run(args)
            sys.stdout.flush()  # a broken pipe must show here, where it is handled, not at exit
        except KeyboardInterrupt:
            if sys.stderr is not None:
                sys.stderr.write("\n")  # the shell's prompt starts on its own line
            return INTERRUPTED
        except BrokenPipeError:
            # Python flushes stdout once more at exit; what it still holds has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE
        except Exception as error:
            if unwinding.status is not None:  # something made another error of the signal's exception
                return unwinding.status
            message = _explain(error)
            if message is None or os.environ.get("ROCKPAGE_DEBUG") == "1":
                raise
            complain(message)
            return 2
    return status if unwinding.status is None else unwinding.status


def _import_numpy() -> None:
    """Every subcommand needs it; where a signal's handler raises, C code that is being initialised fails or aborts."""
    from npu.interrupts import held_signals

    with held_signals():
        importlib.import_module("numpy")


def _parser() -> Parser:
    parser = Parser(
        prog="rockpage",
        usage="%(prog)s [-h] [--version] COMMAND ...",  # shows the options; a list of them would not fit the screen
        description="Many conversations of one small language model in one paged KV cache.",
        epilog=EXAMPLE,
        formatter_class=Help,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(prog=parser.prog, title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def _explain(error: Exception) -> str | None:
    """What to say of a failure that is the input's or the system's; None for a bug of ours."""
    from hostcache.errors import RockpageError

    if isinstance(error, RockpageError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return None


class _Version(argparse.Action):
    """Prints the installed version; looked up only when asked for, since that reads the file system."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rockpage {version('rockpage')}")
        parser.exit()
