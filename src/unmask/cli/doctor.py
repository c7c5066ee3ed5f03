"""Check whether this machine can train, save, resume and sample.

List versions, devices, disk and network, then run a few seconds of each, and print one sentence per problem.

Examples:
  unmask doctor
  unmask doctor --out runs --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")
    parser.add_argument(
        "--out", default=".", metavar="FOLDER", help="where runs will be written (default: the current folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from unmask.doctor import examine

    findings = []
    for finding in examine(args.device, args.out):
        findings.append(finding)
        if not args.json:
            mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[finding.verdict]
            print(f"{mark}  {finding.what:<12} {finding.sentence}", flush=True)
    problems = sum(f.verdict == "problem" for f in findings)
    if args.json:
        print(json.dumps({"problems": problems, "findings": [asdict(f) for f in findings]}))
    elif problems:
        print(f"\n{problems} problem{'s' if problems > 1 else ''} found")
    else:
        print("\nthis machine is fine")
    return 1 if problems else 0
