"""Help is read on a screen of 80 columns: it fits, it says something of every option, it shows how to begin."""

from __future__ import annotations

import argparse
import io
import itertools
import re
import shlex
from types import SimpleNamespace

import pytest

from tools.command import Command, Parser
from tools.inputs import read_text
from tools.main import COMMANDS

from .command_line import assert_refused, run_here

NAMES = [module.__name__.rpartition(".")[2] for module in COMMANDS]
SCREEN = 24
"""Lines of a terminal."""

TWO_SCREENS = 50
"""Lines that a subcommand's help may take."""


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *command: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = run_here(capsys, *command, "--help")
    assert outcome.status == 0
    return outcome.out.splitlines()


def test_the_commands_fit_a_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = help_of(capsys, monkeypatch)
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) < 80
    summaries = lines[lines.index("commands:") + 1 : lines.index("example:") - 1]
    assert [line.split()[0] for line in summaries] == NAMES  # each on a line of its own
    assert lines[-1].startswith("  rockpage ")


@pytest.mark.parametrize("command", NAMES)
def test_a_command_fits_two_screens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    lines = help_of(capsys, monkeypatch, command)
    assert len(lines) <= TWO_SCREENS
    assert max(map(len, lines)) < 80
    assert lines[0].startswith(f"usage: rockpage {command} ")
    example = lines[lines.index("example:") + 1 :]
    assert f"  rockpage {command}" in example[0]
    for line in itertools.takewhile(str.strip, example):
        assert line.startswith("  ")
        assert shlex.split(line)  # what is pasted leaves no quote open
    assert [line for line in lines if line != line.rstrip()] == []


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All of a command, those of its kinds included."""
    actions: list[argparse.Action] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            actions += [option for kind in action.choices.values() for option in options_of(kind)]
        else:
            actions.append(action)
    return actions


@pytest.mark.parametrize("command", ["demo", "run", "score"])
def test_what_few_need_is_shown_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """`--help-all` has every option that there is."""
    shown = options_in(help_of(capsys, monkeypatch, command))
    outcome = run_here(capsys, command, "--help-all")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) < 80
    parsers = argparse.ArgumentParser().add_subparsers(parser_class=Parser)
    COMMANDS[NAMES.index(command)].add_parser(parsers)
    everything = {action.option_strings[-1] for action in parsers.choices[command]._actions if action.option_strings}
    assert options_in(lines) == everything - {"--model"}  # MODEL's other name
    assert {"--help-all", "--pool", "--runtime"} <= shown
    assert {"--prefill-chunk", "--activations"} <= everything - shown


def options_in(lines: list[str]) -> set[str]:
    """Those that have a line of their own."""
    return {word for line in lines if line.startswith("  -") for word in re.findall(r"--[\w-]+", line.split("  ")[1])}


@pytest.mark.parametrize("module", COMMANDS, ids=NAMES)
def test_every_option_says_what_it_does(module: Command) -> None:
    parsers = argparse.ArgumentParser().add_subparsers(parser_class=Parser)
    module.add_parser(parsers)
    (parser,) = parsers.choices.values()
    silent = [option.dest for option in options_of(parser) if len((option.help or "").split("(default")[0]) < 8]
    assert silent == []


@pytest.mark.parametrize(("command", "option"), [("run", "--prompt"), ("score", "--text-file"), ("tokenize", "--text")])
def test_a_text_in_the_models_place_is_led_to_its_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    """Before anything is read from stdin, which is a terminal that nobody types into."""
    monkeypatch.setattr("sys.stdin", None)
    text = "Why does a bearing run hot?"
    assert_refused(run_here(capsys, command, text), f"cannot open model file {text}", f"write {option} before it")


def test_who_waits_at_a_terminal_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = SimpleNamespace(isatty=lambda: True, buffer=io.BytesIO(b"hello"))
    monkeypatch.setattr("sys.stdin", typed)
    assert read_text(None, None) == "hello"
    assert capsys.readouterr() == ("", "rockpage: reading from the terminal; Ctrl-D ends the text\n")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"piped")))
    assert read_text(None, "-") == "piped"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["a.gguf"], "a.gguf"),
        (["--model", "a.gguf"], "a.gguf"),
        (["--model=a.gguf", "--json"], "a.gguf"),
        ([], None),
    ],
)
@pytest.mark.parametrize("command", ["tokenize", "run", "export attention --out x"])
def test_a_model_is_named_by_its_place_or_by_its_option(command: str, arguments: list[str], model: str | None) -> None:
    parser = Parser()
    subparsers = parser.add_subparsers()
    for module in COMMANDS:
        module.add_parser(subparsers)
    assert parser.parse_args([*command.split(), *arguments]).model == model
