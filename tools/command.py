"""What every subcommand has in common: one-line errors, an example in `--help`, and `--json`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeAlias

from .streams import complain

__all__ = ["Command", "Help", "Parser", "Subparsers", "add_command"]


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that fits a screen: an option and what it does share a line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27)  # the longest option and its value take 24 columns

    def _format_action(self, action: argparse.Action) -> str:
        """As argparse does, but without a line that only says that commands are commands."""
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, as all errors of the command are, and whose help fits a screen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(*args, **kwargs)
        self._rare: list[argparse._ArgumentGroup] = []

    def add_rare_group(self, title: str) -> argparse._ArgumentGroup:
        """A group of options that few need: `--help-all` shows it, `--help` does not."""
        if not self._rare:
            self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, help="show the options that few need, too, and exit"
            )
        self._rare.append(self.add_argument_group(title))
        return self._rare[-1]

    def format_help(self) -> str:
        """What `--help` shows."""
        everything = self._action_groups
        self._action_groups = [group for group in everything if group not in self._rare]
        try:
            return super().format_help()
        finally:
            self._action_groups = everything

    def format_help_all(self) -> str:
        """What `--help-all` shows."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line on stderr."""
        complain(f"{message} (see: {self.prog} --help)")
        self.exit(2)


class _HelpAll(argparse.Action):
    """Prints the help of all options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


Subparsers: TypeAlias = "argparse._SubParsersAction[Parser]"
"""What `add_subparsers` returns; argparse has no public name for it and it takes no parameter at run time."""


class Command(Protocol):
    """A module that defines the subcommand it is named after."""

    __name__: str

    def add_parser(self, subparsers: Subparsers) -> None:
        """Register the subcommand with `add_command`."""


def add_command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    example: str,
    usage: str | None = None,
) -> Parser:
    """Register a subcommand.

    Args:
        subparsers: of the main parser.
        name: what the user types.
        run: called with the parsed arguments, returns the exit status. Whatever is slow to import, numpy included,
            is imported when it runs: `--help` must answer at once.
        summary: one line for `rockpage --help`.
        example: command lines for the end of the subcommand's `--help`; remarks may follow behind an empty line.
        usage: what to write behind the name in the first line of `--help`; None lists every option.

    Returns:
        The subcommand's parser, which already has `--json`, to add options to.
    """
    commands, gap, remarks = example.partition("\n\n")
    parser = subparsers.add_parser(
        name,
        usage=None if usage is None else f"%(prog)s {usage}",
        help=summary,
        description=summary[:1].upper() + summary[1:] + ".",
        epilog="example:\n" + textwrap.indent(commands, "  ") + gap + remarks,
        formatter_class=Help,
        allow_abbrev=False,  # scripts that abbreviate an option break when another is added
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)
    return parser
