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
    from unmask.evaluation.harness.lm_eval_adapter import NAME, register

    model = register()
    words = [args.command, *args.options]
    if args.command == "run" and args.options and not any(word.split("=")[0] in OWN_MODEL for word in words):
        words += ["--model", NAME]
    given, sys.argv = sys.argv, ["unmask lm-eval", *words]  # the harness reads no other list
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
