"""Ways to learn faster, each alone beside one baseline: same seeds, same texts, same held-out rows and masks.

    export PYTHONPATH=src:benchmarks
    python -m ways.prepare --train train.jsonl.xz --valid valid.jsonl.xz --tokenizer tokenizer.json --out tokens.npz.xz
    python -m ways.run --tokens tokens.npz.xz --out runs.jsonl --processes 4 --seeds 3 --seconds 540
    python -m ways.run --tokens tokens.npz.xz --out runs.jsonl --time 30
    python -m ways.table runs.jsonl
    python -m ways.run --tokens tokens.npz.xz --out runs.jsonl --ways half+mixed --seeds 3      # two at once

`run` writes a line after each run and skips what is there, so it may be killed and called again.
"""
