"""The command line: `unmask COMMAND`, one file a command. torch is imported only inside commands.

A command's file has a docstring (its first line is the summary, of at most 68 characters), `add_arguments(parser)`
and `run(args) -> exit code`.
Exit codes: 0 done, 1 failed, 2 wrong use, 75 stopped and can go on.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import errno
import importlib
import os
import pkgutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from unmask import __version__
from unmask.errors import UnmaskError, UsageError, did_you_mean
from unmask.plugin_modules import FLAG, HELP, load_plugins, split_plugins

WIDTH = 100  # columns of a paragraph at most


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point: runs a command and exits."""
    if sys.stdout is None:  # closed by who started us: what is said goes nowhere
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    # torch's threads wait for each other by spinning, which costs many times the work itself once another program has
    # one of the cores. They still spin for some microseconds; read when torch is imported, by a command.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code; every foreseeable error is one line on stderr."""
    try:
        try:
            code = _dispatch(argv)
        except SystemExit as e:  # argparse, after --help
            code = int(e.code or 0)
        sys.stdout.flush()  # here, not when Python ends, where nobody could tell what is wrong with it
        return code
    except UnmaskError as e:
        return _fail(str(e), e.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader of stdout went away (head, a closed pager): not our failure; keep Python from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        hint = "; free some space and run it again" if e.errno == errno.ENOSPC else ""
        name = f" ({e.filename})" if e.filename else ""
        return _fail(f"{e.strerror or e}{name}{hint}", 1)
    except MemoryError:
        return _fail("out of memory; use a smaller batch, length or model", 1)


def _fail(message: str, code: int) -> int:
    message = " ".join(message.split())
    rank = os.environ.get("RANK", "0")  # one of several processes
    if "RANK" in os.environ:
        from unmask.distributed.launch import leave_note

        if leave_note(code, message):
            return code  # who started us says it, once
    if rank == "0" or code != UsageError.exit_code:  # a wrong use is everybody's: the first says it
        where = "" if rank == "0" or message.startswith("rank ") else f"rank {rank}: "
        print(f"unmask: {where}{message}", file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> int:
    argv, plugins = split_plugins(words)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"unmask {__version__}")
        return 0
    commands = _commands()
    if argv[0] not in commands:
        raise UsageError(f"unknown command {argv[0]!r}; {did_you_mean(argv[0], commands)}")
    load_plugins(plugins)  # before the command lists what there is to choose from
    module = importlib.import_module(f"{__name__}.{commands[argv[0]]}")
    parser = Parser(
        prog=f"unmask {argv[0]}",
        description=module.__doc__,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    rest, overrides = argv[1:], dict[str, str]()
    if getattr(module, "TAKES_OVERRIDES", False):
        rest, overrides = _split_overrides(rest, parser)
    # Texts may stand before and after options.
    parse = parser.parse_intermixed_args if getattr(module, "TAKES_TEXTS", False) else parser.parse_args
    args = parse(rest)
    args.overrides, args.words = overrides, words  # with the plug-ins, for the processes of --nproc
    try:
        code: int = module.run(args)
        sys.stdout.flush()
    except RuntimeError as e:  # torch reports exhausted memory so
        if "out of memory" in str(e).lower() or "can't allocate memory" in str(e).lower():
            raise UnmaskError("out of memory; use a smaller batch, length or model") from None
        raise
    return code


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Paragraphs fill the line, lists of examples stay as they are; positional arguments are in capitals."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        width = min(width, WIDTH)
        how: dict[str, Any] = {"initial_indent": indent, "subsequent_indent": indent, "break_on_hyphens": False}
        parts = text.strip().split("\n\n")
        return "\n\n".join(part if "\n  " in part else textwrap.fill(part, width, **how) for part in parts)

    def _get_default_metavar_for_positional(self, action: argparse.Action) -> str:
        return action.dest.upper()


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line like all others."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        if unknown != message and (close := self.closest(unknown)):
            raise UsageError(f"{self.prog} has no option {unknown}; did you mean {close!r}?")
        raise UsageError(f"{message}; see {self.prog} --help")

    def closest(self, option: str) -> str | None:
        """The option that a misspelled one is likely to be."""
        options = [FLAG, *(known for known in self._option_string_actions if known.startswith("--"))]
        return next(iter(difflib.get_close_matches(option, options, n=1, cutoff=0.75)), None)

    def knows(self, option: str) -> bool:
        return option in self._option_string_actions

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(str(value), map(str, action.choices))
            raise UsageError(f"{'/'.join(action.option_strings) or action.dest}: {value!r} is not a choice; {hint}")


def _commands() -> dict[str, str]:
    """Command → module: lm-eval is lm_eval, and a trailing underscore (import_) only keeps the file importable."""
    path = [str(Path(__file__).parent)]
    return {
        m.name.rstrip("_").replace("_", "-"): m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")
    }


def _overview() -> str:
    lines = ["unmask: masked diffusion language models", "", "usage: unmask COMMAND ...", ""]
    for command, module in sorted(_commands().items()):
        source = (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {command:<9} {summary}")
    return "\n".join([*lines, "", "unmask COMMAND --help shows the options of a command and examples.", HELP])


def _split_overrides(words: list[str], parser: Parser) -> tuple[list[str], dict[str, str]]:
    """What argparse shall read, and the overrides: `--optim.lr 1e-3 --objective.noise=cosine` → dotted keys and texts.

    The config gives them their types. They may stand anywhere, so an override's value is never taken for the recipe.
    """
    rest: list[str] = []
    options: dict[str, str] = {}
    queue = iter(words)
    for word in queue:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key or parser.knows(f"--{key}"):
            rest.append(word)
            continue
        if not equals:
            value = next(queue, "")
            if not value or value.startswith("--"):
                if close := parser.closest(word):
                    raise UsageError(f"{parser.prog} has no option {word}; did you mean {close!r}?")
                raise UsageError(f"--{key} needs a value, as in --{key} VALUE")
        options[key.replace("-", "_")] = value
    return rest, options
