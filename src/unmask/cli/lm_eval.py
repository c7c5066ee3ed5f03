"""Measure a model on the tasks of lm-evaluation-harness.

Everything after the command is passed to the harness's own command line: run, ls or validate, with its options.
--model_args takes pretrained=MODEL and, separated by commas: num_samples=64 (draws of a bound), order=NAME (confidence,
margin, entropy or left_to_right: an exact likelihood in that order), estimator, seed, separator and dtype; for tasks
that generate also sampler=NAME and any of its options (steps, temperature, ...). It needs pip install 'unmask[eval]'.

Log-likelihoods are exact for autoregressive models and fixed orders, otherwise bounds; a line below the table says
which.

Examples:
  unmask lm-eval run --model unmask --model_args pretrained=runs/mine --tasks lambada_openai --batch_size 16
  unmask lm-eval run --model unmask --model_args pretrained=runs/mine,order=confidence --tasks arc_easy --limit 100
  unmask lm-eval run --model unmask --model_args pretrained=runs/mine,sampler=block,size=16 --tasks task.yaml
  unmask lm-eval run --help
  unmask lm-eval ls tasks
"""

from __future__ import annotations

import argparse
import sys

from unmask.errors import UnmaskError, UsageError

OWN_MODEL = ("--model", "-M", "--config", "-C")  # with one of these the harness knows what to ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command", choices=["run", "ls", "validate"], help="a command of the harness; COMMAND --help shows its options"
    )
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="options of the harness; without --model the model is unmask"
    )


def run(args: argparse.Namespace) -> int:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as e:
        raise UsageError(
            "unmask lm-eval needs the package {package}; install it with: pip install 'unmask[eval]'",
            package=e.name or "lm_eval",
        ) from None
    from unmask.evaluation.harness.lm_eval_adapter import register

    model = register()
    given, sys.argv = sys.argv, ["unmask lm-eval", *harness_words(args.command, args.options)]  # it reads no other list
    try:
        cli_evaluate()
    except UnmaskError:
        raise
    except ValueError as e:  # how the harness refuses a task or an option
        raise UsageError(f"lm-eval: {e}") from e
    finally:
        sys.argv = given
    if model.latest is not None:
        print(f"unmask: {model.latest.asked.sentence()}")
    return 0


def harness_words(command: str, options: list[str]) -> list[str]:
    """The harness's command line: with our model where no other is named, on a device that is there.

    >>> harness_words("run", ["--tasks", "a", "--device", "cpu"])
    ['run', '--tasks', 'a', '--device', 'cpu', '--model', 'unmask']
    """
    from unmask.devices import pick_device
    from unmask.evaluation.harness.lm_eval_adapter import NAME

    given = {word.split("=")[0] for word in options}
    words = [command, *options]
    if command == "run" and options and not given & {*OWN_MODEL, "-h", "--help"}:
        words += ["--model", NAME]
        words += [] if "--device" in given else ["--device", str(pick_device(None))]  # its own default is cuda:0
    return words
