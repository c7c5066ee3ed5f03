"""The queue of benchmarks/dna at toy size: what its comparison says of DNA."""

from __future__ import annotations

import gzip
import random
import tomllib
from pathlib import Path

import pytest

from unmask.comparison.compare import Comparison, compare
from unmask.config import load_config

DNA = Path(__file__).parents[1] / "benchmarks" / "dna"
QUEUE = tomllib.loads((DNA / "queue.toml").read_text())
SMALL = {"data.length": "32", "batch": "4", "denoiser.hidden": "16", "denoiser.blocks": "1", "valid_rows": "4"}
SMALL |= {"compile": "false"}  # takes a minute on a CPU


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Two steps of three systems, with the queue's options."""
    data, rng = tmp_path_factory.mktemp("genome"), random.Random(0)
    (data / "splits").mkdir()
    bases = "".join(rng.choice("ACGT") for _ in range(2000))
    (data / "genome.fa.gz").write_bytes(gzip.compress(f">chr20\n{bases}\n".encode()))
    for name, span in {"train": "0\t1500", "tasks": "100\t140", "test": "1600\t2000"}.items():
        (data / "splits" / f"{name}.bed").write_text(f"chr20\t{span}\n")
    options = {
        key: str(value).replace("{data}", str(data)) for key, value in QUEUE["setting"]["table6"]["options"].items()
    }
    recipes = [DNA / f"{name}.toml" for name in ("ar_mamba", "mdlm", "mdlm_ph")]
    return compare(recipes, tokens=256, out=data / "out", overrides=options | SMALL, draws=1, device="cpu", apart=False)


def test_the_queue_names_recipes_of_one_size() -> None:
    from unmask.comparison.cost import parameters
    from unmask.data.tokenizers import load_tokenizer

    tokenizer, sizes = load_tokenizer("dna"), {}
    for system in QUEUE["experiment"][0]["systems"]:
        config = load_config(DNA / f"{system}.toml")
        denoiser = config.denoiser.for_tokenizer(tokenizer)
        network = denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
        sizes[system] = parameters(network)[0]
    assert sizes.keys() == {"ar_mamba", "ar_hyena", "mdlm", "sedd", "plaid"}
    assert all(430_000 < size < 520_000 for size in sizes.values()), sizes


def test_dna_is_quoted_beside_the_papers_table_on_dna(compared: Comparison) -> None:
    quoted = {entry.system: entry.quoted and (entry.quoted.ppl, entry.quoted.data) for entry in compared.table.entries}
    assert quoted == {"ar_mamba": (3.067, "HG38"), "mdlm": (3.199, "HG38"), "mdlm_ph": None}
    page = (compared.out / "results.md").read_text()
    assert "≤ 3.199 (HG38)" in page
    assert "the whole human genome" in page
    assert "LM1B" not in page
    assert "OmniNet" not in page


def test_a_network_that_reads_both_strands_pays_for_both(compared: Comparison) -> None:
    both, one = (
        next(entry.cost["flops"] for entry in compared.table.entries if entry.system == system)
        for system in ("mdlm", "mdlm_ph")
    )
    assert 1.9 < both / one < 2.1
