"""Suites: tasks whose files are in a folder, fine-tuned with the same options, in one table beside the
paper's figures."""

from __future__ import annotations

import importlib

from unmask.errors import UsageError, did_you_mean
from unmask.finetuning.suites.base import TaskSuite

SUITES = {"glue": "glue", "genomic-benchmarks": "genomic_benchmarks"}  # name → module


def find_suite(name: str) -> TaskSuite:
    """The suite with that name.

    >>> find_suite("genomic-benchmarks").title
    'Genomic Benchmarks'
    """
    if name not in SUITES:
        raise UsageError(f"unknown suite {name!r}; {did_you_mean(name, SUITES)}")
    suite: TaskSuite = importlib.import_module(f"unmask.finetuning.suites.{SUITES[name]}").SUITE
    return suite
