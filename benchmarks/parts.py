"""Split a large file into parts and join them again; the parts and the whole are checked against their SHA-256.

    python benchmarks/parts.py split model.gguf parts/ --most 12   # parts/model.gguf.001 ... and parts/model.gguf.json
    python benchmarks/parts.py join parts/ model.gguf              # exit code 75: these parts are still missing

The list of parts (.json) is small and must accompany them. join with a file in place of the folder copies it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from unmask.storage.atomic import atomic_file, atomic_text

MISSING = 75
CHUNK = 1 << 20


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split(file: Path, folder: Path, most: int) -> list[Path]:
    """Parts of at most `most` bytes, and the list of them."""
    if most < 1:
        raise SystemExit("--most is above 0")
    folder.mkdir(parents=True, exist_ok=True)
    paths, said = [], []
    with file.open("rb") as source:
        while data := source.read(most):
            path = folder / f"{file.name}.{len(paths) + 1:03d}"
            path.write_bytes(data)
            paths.append(path)
            said.append({"name": path.name, "sha256": hashlib.sha256(data).hexdigest()})
    whole = {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256(file), "parts": said}
    atomic_text(folder / f"{file.name}.json", json.dumps(whole, indent=1) + "\n")
    return paths


def join(source: Path, file: Path) -> list[str]:
    """The whole file, written at once; the names of the parts that are not there or not whole, if any."""
    if source.is_file():
        with atomic_file(file) as temp:
            shutil.copyfile(source, temp)
        return []
    lists = sorted(source.glob("*.json"))
    if len(lists) != 1:
        raise SystemExit(f"{source} holds {len(lists)} lists of parts (.json), not one")
    said: dict[str, Any] = json.loads(lists[0].read_text(encoding="utf-8"))
    paths = {source / part["name"]: part["sha256"] for part in said["parts"]}
    if odd := [path.name for path, known in paths.items() if not path.is_file() or sha256(path) != known]:
        return odd
    if file.exists() and sha256(file) == said["sha256"]:
        return []
    with atomic_file(file) as temp:
        with temp.open("wb") as out:
            for path in paths:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, out, CHUNK)
        if sha256(temp) != said["sha256"]:
            raise SystemExit(
                f"the parts in {source} are whole, and together they are not {said['name']}: split it again"
            )
    return []


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("split")
    one.add_argument("file", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("--most", type=float, default=12.0, metavar="MIB", help="of a part (default 12)")
    other = commands.add_parser("join")
    other.add_argument("source", type=Path)
    other.add_argument("file", type=Path)
    args = parser.parse_args(words)
    if args.command == "split":
        print(f"{len(split(args.file, args.folder, int(args.most * (1 << 20))))} parts in {args.folder}")
        return 0
    if missing := join(args.source, args.file):
        print(f"missing or not whole: {', '.join(missing)}", file=sys.stderr)
        return MISSING
    print(args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
