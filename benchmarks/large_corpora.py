"""The cost of tokenizing a corpus and of reading its shards: megabytes per second and core, and peak memory.

    python benchmarks/large_corpora.py TEXTS.jsonl.xz --tokenizer bpe16k.json --sizes 100 2000 [--nproc 1]

TEXTS is repeated, with a number before every text, up to the given megabytes of JSON lines. Each command runs in a
separate process. The operating system reports its peak resident memory, which does not grow with the corpus, and its
CPU seconds, which do not depend on other load.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

from unmask.corpora.sources import from_path

MB = 1_000_000
READ = """
import sys, time
import numpy as np
from unmask.corpora.tokens import Tokens
from unmask.data.loader import Loader
from unmask.data.packing import build_rows
from unmask.data.tokenizers import load_tokenizer
folder = sys.argv[1]
rows = build_rows(Tokens(path=folder), load_tokenizer(folder), length=512)
loader, began = Loader(rows, 64, 0), time.process_time()
for step in range(len(rows) // 64):
    loader.fetch(step)
print(rows.report.tokens / (time.process_time() - began))
"""


def write(texts: list[str], path: Path, megabytes: int) -> int:
    """JSON lines of about so many megabytes; how many bytes their texts have."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for turn in count():
            for text in texts:
                numbered = f"{turn} {text}"
                file.write(json.dumps({"text": numbered}, ensure_ascii=False) + "\n")
                size += len(numbered.encode())
                if size >= megabytes * MB:
                    return size
    raise AssertionError


def run(command: list[str]) -> tuple[str, float, float]:
    """Its output, its seconds of a core, and the megabytes of memory that the largest of its processes held."""
    # A process of its own waits for it, so that what the system tells is of this command and no earlier one.
    code = "import resource, subprocess, sys; out = subprocess.run(sys.argv[1:], capture_output=True, text=True); "
    code += "print(out.stdout, end=''); used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    code += "print(used.ru_utime + used.ru_stime, used.ru_maxrss); "
    code += "sys.stderr.write(out.stderr); sys.exit(out.returncode)"
    done = subprocess.run([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    *lines, used = done.stdout.splitlines()
    seconds, memory = used.split()
    return "\n".join(lines), float(seconds), int(memory) * 1024 / MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", help="a corpus, to be repeated")
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--sizes", nargs="+", type=int, default=[100, 2000], metavar="MB")
    parser.add_argument("--nproc", type=int, default=1)
    args = parser.parse_args()
    texts = [document.text for document in from_path(args.texts).documents()]
    print("| text, MB | processes | MB/s of a core | peak, MB | shards read, tokens/s | peak, MB |\n|" + " --- |" * 6)
    for megabytes in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            size = write(texts, Path(folder, "texts.jsonl"), megabytes)
            command = [sys.executable, "-m", "unmask", "tokenize", f"{folder}/texts.jsonl", f"{folder}/tokens"]
            command += ["--tokenizer", args.tokenizer, "--nproc", str(args.nproc), "--json"]
            _, seconds, peak = run(command)
            rate, _, reading = run([sys.executable, "-c", READ, f"{folder}/tokens"])
            cells = [f"{megabytes:,}", str(args.nproc), f"{size / MB / seconds:.1f}", f"{peak:.0f}"]
            print("| " + " | ".join([*cells, f"{float(rate):,.0f}", f"{reading:.0f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
