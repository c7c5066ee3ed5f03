"""Models: saved and loaded unchanged, refused by name when damaged, and used: generate, fill, score."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unmask
from damaging import Damage, edit
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.errors import DataError, ModelFolderError, UnmaskError, UsageError
from unmask.evaluation.bound import Bound
from unmask.model import Model, load
from unmask.objectives.d3pm import D3PM
from unmask.objectives.mdlm import MDLM
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.left_to_right import LeftToRight
from unmask.samplers.semi_ar import SemiAR
from unmask.sampling.canvas import Canvas


def untrained(denoiser: DiT, objective: Any = None, tokenizer: str = "bytes", length: int = 16) -> Model:
    """A network of random weights, the head included, so that its texts are not all alike."""
    torch.manual_seed(0)
    tok = load_tokenizer(tokenizer)
    network = denoiser.build(num_ids=tok.num_ids, mask_id=tok.mask_id)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return Model(denoiser=network, tokenizer=tok, objective=objective or MDLM(), length=length)


SMALL = {"size": "nano", "hidden": 16, "blocks": 2, "heads": 2}


# --- saved and loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("denoiser", "objective"),
    [
        (DiT(**SMALL), MDLM()),
        (DiT(**SMALL, tied=True), MDLM(form="count")),
        (DiT(**SMALL, conditioning="constant", cond_dim=8), MDLM(steps=5)),
        (DiT(**SMALL, conditioning="level", cond_dim=8), MDLM(noise=unmask.noise.Polynomial(power=3.0))),
        (DiT(**SMALL, conditioning="sigma", cond_dim=8, tied=True), D3PM(steps=7, zero_masking=True)),
        (DiT(**SMALL, causal=True), unmask.objectives.AR()),
    ],
    ids=["plain", "tied", "constant", "level", "sigma", "causal"],
)
def test_a_saved_model_is_the_same_model(tmp_path: Path, denoiser: DiT, objective: Any) -> None:
    model = untrained(denoiser, objective)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model", device="cpu")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (again.objective, again.denoiser.config, again.length) == (objective, denoiser, 16)
    assert again.tokenizer.fingerprint() == model.tokenizer.fingerprint()
    z = torch.randint(0, 258, (3, 16))
    level = torch.tensor([0.1, 0.5, 0.9])
    with torch.no_grad():
        assert again.denoiser(z, level).equal(model.denoiser(z, level))
    assert again.generate(num=3, length=12, seed=5) == model.generate(num=3, length=12, seed=5)
    assert again.score("a text").nats == model.score("a text").nats


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    untrained(DiT(**SMALL, tied=True)).save(tmp_path / "m")
    assert "output.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    network = load(tmp_path / "m", device="cpu").denoiser
    assert network.output.weight is network.embed.weight


def test_a_run_folder_is_its_model(trained: Any) -> None:
    from_run, from_model = load(trained.folder, device="cpu"), load(trained.model_folder, device="cpu")
    assert from_run.generate(seed=3) == from_model.generate(seed=3)
    assert from_run.num_parameters == from_model.num_parameters == trained.record.info["parameters"]


def test_saving_replaces_a_model_and_nothing_else(tmp_path: Path, trained: Any) -> None:
    first, second = untrained(DiT(**SMALL)), untrained(DiT(**SMALL, tied=True))
    first.save(tmp_path / "m")
    second.save(tmp_path / "m")
    assert load(tmp_path / "m", device="cpu").denoiser.config.tied
    copy = tmp_path / "run"
    shutil.copytree(trained.folder, copy)
    with pytest.raises(UsageError, match="is no part of a model; give a folder of its own"):
        first.save(copy)  # a run with its checkpoints
    assert (copy / "checkpoints").is_dir()
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="is a file"):
        first.save(tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m", "run"]  # nothing half-written beside them


def test_dtype_and_device(trained: Any) -> None:
    assert next(load(trained.folder, device="cpu", dtype="bf16").denoiser.parameters()).dtype == torch.bfloat16
    assert load(trained.folder, device="cpu", dtype="bf16").generate(length=6)[0]
    with pytest.raises(UsageError, match="unknown dtype 'fp8'; known: fp32"):
        load(trained.folder, device="cpu", dtype="fp8")
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        load(trained.folder, device="gpu")


def test_parts_that_do_not_fit_are_refused() -> None:
    bytes_, chars = load_tokenizer("bytes"), load_tokenizer("chars")
    network = DiT(**SMALL).build(num_ids=258, mask_id=257)
    with pytest.raises(UsageError, match="258 ids with mask 257, the tokenizer 29 with mask 28"):
        Model(denoiser=network, tokenizer=chars, objective=MDLM(), length=8)
    with pytest.raises(UsageError, match="needs a causal denoiser"):
        Model(denoiser=network, tokenizer=bytes_, objective=unmask.objectives.AR(), length=8)


def test_a_wrapped_function_is_used_but_not_saved(tmp_path: Path) -> None:
    tok = load_tokenizer("chars")
    table = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 29), vocab_size=28, mask_id=28)
    model = Model(denoiser=table, tokenizer=tok, objective=MDLM(), length=8)
    assert len(model.fill("abc[MASK:4]")[0]) == 7
    with pytest.raises(UsageError, match="only a denoiser made by a plug-in can be saved"):
        model.save(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


# --- refused by name --------------------------------------------------------------------------------------------------


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return damage


def poison(value: float) -> Damage:
    return tensors(lambda t: t["norm.weight"].__setitem__(3, value))


def cut(name: str, keep: float) -> Damage:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return damage


class Mine:
    """What a hostile pickle would do."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Mine()))


def torch_pickled(folder: Path) -> None:
    torch.save({"norm.weight": Mine()}, folder / "model.safetensors")


DAMAGES: list[tuple[str, Damage, str]] = [
    ("missing tensor", tensors(lambda t: t.pop("norm.weight")), "the tensor norm.weight is missing"),
    ("extra tensor", tensors(lambda t: t.update(evil=torch.ones(2))), "the tensor evil is unexpected"),
    (
        "wrong shape",
        tensors(lambda t: t.update({"norm.weight": torch.ones(31)})),
        r"norm.weight has shape \(31,\), the config asks for \(32,\)",
    ),
    ("nan", poison(math.nan), "norm.weight holds numbers that are not finite"),
    ("inf", poison(math.inf), "norm.weight holds numbers that are not finite"),
    (
        "integers",
        tensors(lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.long)})),
        "norm.weight holds numbers that are not finite floats",
    ),
    ("truncated", cut("model.safetensors", 0.7), "is damaged or no safetensors file"),
    ("cut to nothing", cut("model.safetensors", 0), "is damaged or no safetensors file"),
    ("pickle", pickled, "is damaged or no safetensors file"),
    ("torch pickle", torch_pickled, "is damaged or no safetensors file"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    ("no config", lambda f: (f / "config.json").unlink(), "config.json is missing"),
    ("no tokenizer", lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    ("cut config", cut("config.json", 0.5), "config.json is not valid JSON"),
    ("config no object", lambda f: (f / "config.json").write_text("[]"), "format_version is None"),
    ("deep config", lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
    ("not utf-8", lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "it is not UTF-8 text"),
    (
        "other tokenizer",
        lambda f: (f / "tokenizer.json").write_text(load_tokenizer("chars").to_json()),
        "config.json says 258 ids with mask 257, tokenizer.json has 29 with mask 28",
    ),
    ("strange tokenizer", lambda f: (f / "tokenizer.json").write_text('{"unmask": "byts"}'), "did you mean 'bytes'"),
    ("later version", edit(format_version=3), "format_version is 3, this unmask reads 1 and 2"),
    ("no version", edit(format_version=...), "format_version is None"),
    ("text version", edit(format_version="1"), "format_version is '1'"),
    ("unknown key", edit(code="import os"), "unknown key 'code'"),
    ("unknown denoiser key", edit(denoiser__widht=3), "unknown key 'denoiser.widht'"),
    ("unknown objective key", edit(objective__eval="1"), "unknown key 'objective.eval'"),
    ("unknown denoiser", edit(denoiser__name="os"), "config.json: denoiser: unknown denoiser 'os'"),
    ("denoiser by path", edit(denoiser__name="../evil"), "unknown denoiser"),
    ("wrong type", edit(denoiser__dropout="high"), r"denoiser\.dropout: expected float, got 'high'"),
    ("no denoiser", edit(denoiser=...), "denoiser is missing or not dict"),
    ("length no number", edit(length="16"), "length is missing or not int"),
    ("length true", edit(length=True), "length is missing or not int"),
    ("length 0", edit(length=0), "length is 0, not between 1 and"),
    ("length absurd", edit(length=10**15), "length is 1000000000000000, not between"),
    ("other vocabulary", edit(num_ids=10**12), "config.json says 1000000000000 ids"),
    ("other size", edit(denoiser__hidden=36), "has shape .*the config asks for"),
    ("causal by edit", edit(denoiser__causal=True), "sees both sides"),
]


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_damaged_folder_is_refused_by_name(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch, damage: Damage, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "m"
    shutil.copytree(trained.model_folder, folder)
    load(folder, device="cpu")  # it was whole
    damage(folder)
    with pytest.raises(UnmaskError, match=message) as error:
        load(folder, device="cpu")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "lie",
    [
        {"denoiser__hidden": 1 << 15},
        {"denoiser__hidden": 2_000_000_000},
        {"denoiser__hidden": 10**18},
        {"denoiser__blocks": 100_000},
        {"denoiser__blocks": 10**12},
        {"denoiser__blocks": 8},
        {"denoiser__conditioning": "constant", "denoiser__cond_dim": 1 << 16},
        {"denoiser__conditioning": "constant", "denoiser__cond_dim": 10**15},
        {"denoiser__size": "medium", "denoiser__hidden": None, "denoiser__blocks": None, "denoiser__heads": None},
    ],
    ids=str,
)
def test_a_config_that_lies_about_its_sizes_costs_nothing(tmp_path: Path, trained: Any, lie: dict[str, Any]) -> None:
    folder = tmp_path / "m"
    shutil.copytree(trained.model_folder, folder)
    edit(**lie)(folder)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ModelFolderError, match=r"config asks for|is missing|far more than|beyond any network"):
        load(folder, device="cpu")
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 100e6
    assert time.monotonic() - began < 10


def test_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="no model folder"):
        load(tmp_path / "nowhere")


# --- generate ---------------------------------------------------------------------------------------------------------


def test_prompt_and_suffix_are_kept(model: Model) -> None:
    for text in model.generate(num=4, length=20, prompt="the ç", suffix="!\nend", seed=1):
        assert text.startswith("the ç")
        assert text.endswith("!\nend")
        assert model.tokenizer.mask_id not in model.tokenizer.encode(text)
        assert "[MASK]" not in text


def test_every_prompt_gets_its_texts_in_order(model: Model) -> None:
    texts = model.generate(num=2, length=24, prompt=["the ", "a dog "], seed=2)
    assert [t.startswith("the ") for t in texts] == [True, True, False, False]
    assert [t.startswith("a dog ") for t in texts] == [False, False, True, True]
    assert len(set(texts)) == 4  # each row is driven by its own key


def test_a_text_does_not_depend_on_the_batch_around_it(model: Model, ar_model: Model) -> None:
    for m in (model, ar_model):
        for sampler in (None, LeftToRight(temperature=0.7, top_k=20)):
            four = m.generate(num=4, length=20, prompt="the ", seed=7, sampler=sampler)
            assert m.generate(num=1, length=20, prompt="the ", seed=7, sampler=sampler) == four[:1]
            assert m.generate(num=3, length=20, prompt="the ", seed=7, sampler=sampler) == four[:3]
        mixed = m.generate(length=20, prompt=["the ", "a dog ran", "", "no rat ate the"], seed=7)
        assert m.generate(length=20, prompt="the ", seed=7) == mixed[:1]
        assert m.generate(length=20, prompt=["x", "a dog ran", "yy", "zzzz"], seed=7)[1] == mixed[1]
        assert m.generate(length=20, prompt=["", "", ""], seed=7)[2] == mixed[2]


def test_rows_of_different_lengths_do_not_see_each_other(model: Model) -> None:
    texts = ["the [MASK:3] sat", "a dog [MASK:8] to the red [MASK:5]", "[MASK:2]"]
    # Random weights attend to everything, so that one visible token of padding would show.
    for m in (model, untrained(DiT(**SMALL), length=64), untrained(DiT(**SMALL, conditioning="level"), length=64)):
        for seed in range(8):
            together = m.fill(texts, seed=seed)
            assert m.fill(texts[0], seed=seed) == together[:1]
            assert m.fill(["[MASK]", texts[1]], seed=seed)[1] == together[1]
            assert m.fill(["[MASK:9] x", "y [MASK]", texts[2]], seed=seed)[2] == together[2]
    # Beyond the window, too: where a row's windows lie does not depend on the longest row.
    long = ["the [MASK:30] sat", "a dog [MASK:60] to the red [MASK:25]", "[MASK:41]"]
    for m in (model, untrained(DiT(**SMALL))):
        together = m.fill(long, seed=4)
        assert m.fill(long[0], seed=4) == together[:1]
        assert m.fill([long[2], long[1]], seed=4)[1] == together[1]
        assert m.fill(["[MASK]", "[MASK]", long[2]], seed=4)[2] == together[2]


def test_seeds_decide(model: Model) -> None:
    assert model.generate(seed=1) == model.generate(seed=1)
    assert model.generate(seed=1) != model.generate(seed=2)
    assert model.generate(seed=2**80 + 1) != model.generate(seed=2**80 + 2)


def test_beyond_the_window_text_is_written_window_by_window(model: Model) -> None:
    seen: list[Any] = []
    text = model.generate(length=100, prompt="the cat", seed=3, watch=seen.append)[0]
    assert model.length == 32
    assert len(seen[-1].tokens_BL[0]) == 100
    assert not bool((seen[-1].tokens_BL == model.tokenizer.mask_id).any())
    assert text.startswith("the cat")
    # The network is never shown more than its window.
    lengths = []
    real = model.denoiser.trunk
    model.denoiser.trunk = lambda z, *a, **k: (lengths.append(z.shape[1]), real(z, *a, **k))[1]
    try:
        assert model.generate(length=100, prompt="the cat", seed=3)[0] == text
    finally:
        del model.denoiser.trunk
    assert max(lengths) == 32
    with pytest.raises(UsageError, match="a window of 33 is beyond the 32 tokens the model was trained on"):
        model.generate(length=100, sampler=SemiAR(window=33))
    explicit = SemiAR(window=32, inner=Ancestral(noise=model.objective.noise))
    assert model.generate(length=100, prompt="the cat", seed=3, sampler=explicit)[0] == text
    assert model.generate(length=100, prompt="the cat", suffix="mat", seed=3)[0].endswith("mat")


def test_an_autoregressive_model_has_no_windows(ar_model: Model) -> None:
    assert ar_model.generate(length=32, prompt="the", seed=0)[0].startswith("the")
    with pytest.raises(UsageError, match="length 33 is beyond the model's window of 32 tokens"):
        ar_model.generate(length=33)


def ending(model: Model) -> Model:
    """Writes end-of-text wherever it may."""
    with torch.no_grad():
        model.denoiser.output.bias[model.tokenizer.eot_id] = 1e3
    return model


def test_end_of_text_ends_the_text(fresh_model: Model) -> None:
    model = ending(fresh_model)
    assert model.generate(num=2, length=20, prompt="the cat") == ["the cat", "the cat"]
    assert model.generate(length=20) == [""]
    # Where something stands behind the gap nothing may end the text before it.
    text = model.generate(length=20, prompt="the cat", suffix=" end")[0]
    assert text.endswith(" end")
    assert "<|endoftext|>" not in text
    assert len(text.encode()) >= 20
    filled = model.fill("the [MASK:4] sat")[0]
    assert filled.endswith(" sat")
    assert "<|endoftext|>" not in filled


def test_watching_tells_every_step(model: Model) -> None:
    seen: list[Any] = []
    text = model.generate(length=16, prompt="the", sampler=Ancestral(steps=None), seed=1, watch=seen.append)[0]
    assert len(seen) == 13  # one token a call
    assert all(len(step.token_N) == 1 for step in seen)
    assert model.tokenizer.decode(seen[-1].tokens_BL[0].tolist()).startswith(text)
    masks = [int((step.tokens_BL == model.tokenizer.mask_id).sum()) for step in seen]
    assert masks == list(range(12, -1, -1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate(length=4, prompt="the cat"), "the prompt takes 7 tokens and the suffix 0.*length 4"),
        (lambda m: m.generate(length=10, prompt="the cat", suffix="mat"), "7 tokens and the suffix 3"),
        (lambda m: m.generate(prompt="x" * 32), "the prompt takes 32 tokens"),
        (lambda m: m.generate(prompt=["a", "x" * 40]), "the prompt takes 40 tokens"),
        (lambda m: m.generate(length=0), "length 0"),
        (lambda m: m.generate(length=-3), "length -3"),
        (lambda m: m.generate(num=0), "num must be at least 1"),
        (lambda m: m.generate(num=-1), "num must be at least 1"),
        (lambda m: m.generate(prompt=[]), "at least one"),
        (lambda m: m.generate(prompt="see [MASK]"), r"the prompt contains the mask's spelling '\[MASK\]'"),
        (lambda m: m.generate(suffix="[MASK:3]"), r"the suffix contains the mask's spelling '\[MASK:3\]'"),
        (lambda m: m.fill("no gap here"), r"no gap in 'no gap here': write \[MASK\]"),
        (lambda m: m.fill(["[MASK]", "none"]), "no gap in 'none'"),
        (lambda m: m.fill([]), "nothing to fill"),
        (lambda m: m.fill("[MASK:0]"), "a gap holds between 1 and"),
        (lambda m: m.score([]), "nothing to score"),
        (lambda m: m.score("a", num_samples=0), "num_samples must be at least 1"),
        (lambda m: m.score("a", estimator="exact"), "unknown estimator 'exact'"),
        (lambda m: m.score("a", estimator="T=0"), "unknown estimator"),
    ],
)
def test_wrong_use_is_refused(model: Model, call: Callable[[Model], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(model)


# --- fill -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[MASK]",
        "the [MASK:3] sat on [MASK] mat\n",
        "[MASK:2]x[MASK:2]",
        "  two  spaces [MASK] \t and tabs\r\n",
        "[MASK:2][MASK:3]",
        "ünï[MASK:4]çödé 🙂[MASK]",
        "x" * 60 + "[MASK:5]" + "y" * 60,  # far beyond the window
    ],
)
def test_fill_changes_nothing_but_the_gaps(model: Model, text: str) -> None:
    parts = re.split(r"\[MASK(?::\d+)?\]", text)
    pattern = "(.+?)".join(map(re.escape, parts))
    for seed in range(3):
        filled = model.fill(text, seed=seed)[0]
        assert re.fullmatch(pattern, filled, re.DOTALL), filled
        assert "[MASK" not in filled
        gaps = sum(int(n or 1) for n in re.findall(r"\[MASK(?::(\d+))?\]", text))
        ids = [i for part in parts for i in part.encode()]
        row: list[Any] = []
        model.fill(text, seed=seed, watch=row.append)
        tokens = row[-1].tokens_BL[0].tolist()
        assert len(tokens) == len(ids) + gaps
        assert model.tokenizer.eot_id not in tokens


def test_an_autoregressive_model_fills_only_the_end(ar_model: Model) -> None:
    assert ar_model.fill("the cat [MASK:4]")[0].startswith("the cat ")
    filled = ar_model.fill(["the cat [MASK:4]", "a [MASK:2]"])
    assert filled[0] == ar_model.fill("the cat [MASK:4]")[0]
    for text in ("the [MASK:3] sat", "[MASK] cat [MASK]"):
        with pytest.raises(UsageError, match="cannot see what stands behind a gap"):
            ar_model.fill(text)
    with pytest.raises(UsageError, match="cannot see what stands behind a gap"):
        ar_model.generate(prompt="the", suffix="end")
    with pytest.raises(UsageError, match="use left_to_right"):
        ar_model.generate(sampler=Ancestral())


def test_unknown_characters() -> None:
    model = untrained(DiT(**SMALL), tokenizer="chars")
    assert set(model.generate(length=16)[0]) <= set(" abcdefghijklmnopqrstuvwxyz")
    for call in (
        lambda: model.generate(prompt="Hello"),
        lambda: model.fill("Hello [MASK]"),
        lambda: model.score("Hello"),
    ):
        with pytest.raises(DataError, match="the tokenizer chars knows only space and a-z, the text has 'H'"):
            call()


# --- score ------------------------------------------------------------------------------------------------------------

TEXTS = ["the cat sat on the mat", "a", "", "no rat ate the oat cake and the sun set and the moon rose on the mat ü"]


def test_a_score_is_the_sum_of_its_parts(model: Model, ar_model: Model) -> None:
    for m in (model, ar_model):
        whole = m.score(TEXTS, num_samples=4)
        tokens = [len(t.encode()) + 1 for t in TEXTS]  # its end-of-text is part of a text
        assert whole.tokens_B.tolist() == tokens
        assert whole.tokens == sum(tokens)
        assert whole.nats == pytest.approx(float(whole.nats_B.sum()), rel=1e-12)
        assert whole.num_bytes == sum(len(t.encode()) for t in TEXTS)
        assert whole.bits_per_byte == pytest.approx(whole.nats / math.log(2) / whole.num_bytes)
        assert whole.ppl == pytest.approx(math.exp(whole.nats / whole.tokens))
        assert whole.nats_B.shape == (4,)
        assert m.score("").bits_per_byte is None  # no byte to divide by
        again = m.score(TEXTS, num_samples=4)
        assert again.nats_B.equal(whole.nats_B)


def test_an_exact_score_of_a_text_is_its_own(ar_model: Model) -> None:
    together = ar_model.score(TEXTS)
    alone = [ar_model.score(text).nats for text in TEXTS]
    torch.testing.assert_close(together.nats_B, torch.tensor(alone, dtype=torch.float64), rtol=1e-6, atol=0)
    assert ar_model.score(TEXTS, seed=1).nats == together.nats
    # One token at a time, straight from the logits; the long text goes window by window.
    ids = [*TEXTS[3].encode(), ar_model.tokenizer.eot_id]
    nats = 0.0
    for lo in range(0, len(ids), ar_model.length):
        window = torch.tensor([ids[lo : lo + ar_model.length]])
        with torch.no_grad():
            logits = ar_model.denoiser(window)
        logits[..., ar_model.tokenizer.mask_id] = -torch.inf
        log_p = torch.log_softmax(logits.double(), dim=-1)
        nats -= float(log_p.gather(2, window[..., None]).sum())
    assert alone[3] == pytest.approx(nats, rel=1e-5)


def test_windows_of_a_long_text_add_up(model: Model) -> None:
    ids = [*TEXTS[3].encode(), model.tokenizer.eot_id]
    rows = [ids[lo : lo + 32] for lo in range(0, len(ids), 32)]
    assert len(rows) == 3
    canvas = Canvas.of_rows(rows, mask_id=-1, pad_id=model.tokenizer.eot_id)
    parts: Bound = model.objective.bound(model.denoiser, canvas.tokens, canvas.valid_BL, seed=3, num_samples=8)
    score = model.score(TEXTS[3], seed=3, num_samples=8)
    assert score.nats == pytest.approx(parts.nats, rel=1e-9)
    assert (score.tokens, len(score.nats_B)) == (len(ids), 1)


def test_many_texts_are_scored_in_batches_that_do_not_matter(model: Model) -> None:
    texts = [f"the cat {i}" for i in range(70)]
    whole = model.score(texts, num_samples=1)
    assert model.score(texts[:33], num_samples=1).nats_B.tolist() == pytest.approx(whole.nats_B[:33].tolist(), rel=1e-5)


def test_estimators_agree(model: Model) -> None:
    """Each is unbiased for the same bound: their difference stays within a few standard errors."""
    text = "the cat sat on the mat"
    found = {name: model.score(text, num_samples=256, estimator=name) for name in ("count", "time")}
    difference = found["count"].nats_per_token - found["time"].nats_per_token
    error = math.hypot(found["count"].standard_error, found["time"].standard_error)
    assert abs(difference) < 5 * error
    assert error < 0.5
    assert model.score(text).nats_per_token < model.score("zqxj kvw#@!%&*() ZQXJ").nats_per_token  # it learnt something


@pytest.mark.parametrize("anchor", ["none", "begin"])
def test_a_model_of_sentences_begins_every_row_as_it_was_trained(anchor: str, tmp_path: Path) -> None:
    """[CLS] stands first in every training row of `sentence` packing, though no sampler may write it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "text.txt").write_text("a b c\nb a\nc c a\n" * 20, encoding="utf-8")
    overrides = {
        "out": str(tmp_path / "run"),
        "tokenizer": str(tmp_path),
        "steps": "3",
        "batch": "4",
        "data.train": "text",
        "data.train.path": str(tmp_path / "text.txt"),
        "data.packing": "sentence",
        "data.anchor": anchor,
        "data.length": "8",
        "denoiser.hidden": "16",
    }
    unmask.train(unmask.load_config("demo", overrides), device="cpu")
    model = load(tmp_path / "run")
    assert model.begin == [model.tokenizer.bos_id]
    canvas, parts = model.prompted(1, 8, "", "")
    assert canvas.tokens[0].tolist() == [*model.begin, *[model.tokenizer.mask_id] * 7]
    assert [part.gap for part in parts[0]] == [7, 0]
    shown: list[int] = []
    model.generate(num=1, length=8, watch=lambda step: shown.append(int(step.tokens_BL[0, 0])))
    assert not {*shown} & {*model.begin}
    for text in [*model.generate(num=5, length=8), *model.fill(["a [MASK] c", "[MASK:3]"])]:
        assert not {"[CLS]", "[PAD]", "[SEP]", "[MASK]", "[UNK]"} & set(text.split())
    # Where it is no anchor the begin token is scored, as it was in the rows that were trained on.
    assert model.score("a b c").tokens == (5 if anchor == "none" else 4)


def test_the_bound_of_one_draw_has_no_interval() -> None:
    bound = untrained(DiT(hidden=16, blocks=1, heads=2)).score("the cat", num_samples=1)
    assert math.isnan(bound.standard_error)
    assert bound.summary()["ppl_ci95"] is None
    json.dumps(bound.summary(), allow_nan=False)


def test_guidance_follows_the_prompt_and_keeps_it(model: Model, trained_ar: Any) -> None:
    plain = model.generate(4, 24, "the cat", seed=3)
    assert model.generate(4, 24, "the cat", seed=3, guidance=0.0) == plain
    guided = model.generate(
        4, 24, "the cat", seed=3, guidance=300.0
    )  # a barely trained model hardly looks at its prompt
    assert guided != plain
    assert all(text.startswith("the cat") for text in guided)
    assert model.fill("the [MASK:3] sat", guidance=1.0)[0].endswith(" sat")
    with pytest.raises(UsageError, match="needs a condition"):
        model.generate(guidance=1.0)
    with pytest.raises(UsageError, match="diffusion model"):
        load(trained_ar.folder, device="cpu").generate(1, 16, "the", guidance=1.0)
