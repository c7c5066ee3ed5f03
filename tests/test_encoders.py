"""Encoders of transformers as denoisers: the numbers are transformers' own, and runs begin, end and go on with them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unmask
from tiny_encoders import FAMILIES, save_encoder, texts_of
from unmask.config import DataConfig, OptimConfig, RunConfig, load_config
from unmask.corpora import Memory
from unmask.data.packing import pack_texts
from unmask.data.tokenizers import tokenizer_from_json
from unmask.denoisers.encoder import Encoder, EncoderNetwork
from unmask.denoisers.encoder.lora import is_low_rank
from unmask.errors import UsageError
from unmask.model import Model
from unmask.objectives import MDLM, MLM, UDLM
from unmask.pretrained import Pretrained, read_pretrained
from unmask.storage.model_folder import load_weights, unshared
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.loop import train
from unmask.training.optim import make_optimizer

pytest.importorskip("transformers")

FAST = OptimConfig(lr=3e-3, muon=False, schedule="constant", warmup=2, ema=0.9)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder of each family, and the transformers model that was saved there."""
    folder = tmp_path_factory.mktemp("encoders")
    return {family: (folder / family, save_encoder(family, folder / family)) for family in FAMILIES}


def network_of(pretrained: Pretrained, **changes: Any) -> EncoderNetwork:
    tokenizer = pretrained.tokenizer
    denoiser = dataclasses.replace(pretrained.denoiser, **changes)  # type: ignore[type-var]
    network = denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    denoiser.describe(network)
    load_weights(network, network.begins_anew() | dict(pretrained.state), "")
    assert isinstance(network, EncoderNetwork)
    return network.eval()


def model_of(folder: Path, objective: Any = MDLM(), **changes: Any) -> Model:
    pretrained = read_pretrained(f"hf:{folder}")
    network, tokenizer = network_of(pretrained, **changes), pretrained.tokenizer
    return Model(
        denoiser=network, tokenizer=tokenizer, objective=objective, length=20, packing="sentence", anchor="both"
    )


def run_config(out: Path, family: str = "bert", **changes: Any) -> RunConfig:
    data = DataConfig(train=Memory(texts=tuple(texts_of(family))), packing="sentence", length=20)
    plain: dict[str, Any] = {"data": data, "optim": FAST, "steps": 8, "batch": 8, "valid_rows": 8, "sample_every": 0}
    return RunConfig(**plain | {"out": str(out), "save_every": 4} | changes)


def some_rows(pretrained: Pretrained) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with masks, of which one is shorter than the others."""
    generator = torch.Generator().manual_seed(1)
    z_BL = torch.randint(5, 20, (3, 25), generator=generator)
    z_BL[:, 4:7] = pretrained.tokenizer.mask_id
    z_BL[:, 0] = pretrained.tokenizer.bos_id or 0
    valid_BL = torch.ones(3, 25, dtype=torch.bool)
    valid_BL[1, 14:] = False
    return z_BL, valid_BL


# --- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers(family: str, saved: dict[str, tuple[Path, Any]]) -> None:
    folder, theirs = saved[family]
    pretrained = read_pretrained(f"hf:{folder}")
    network, mask_id = network_of(pretrained), pretrained.tokenizer.mask_id
    z_BL, valid_BL = some_rows(pretrained)
    inputs = {"input_ids": z_BL.masked_fill(~valid_BL, theirs.config.pad_token_id), "attention_mask": valid_BL.long()}
    if family == "esm":  # masks read as nothing; the scaling with their number is left out: see the next test
        weight_IE = theirs.esm.embeddings.word_embeddings.weight
        weight_IE[mask_id], theirs.esm.embeddings.token_dropout = 0, False
    logits_BLI = theirs(**inputs).logits
    ours_BLI = network(z_BL.masked_fill(~valid_BL, pretrained.tokenizer.eot_id), valid_BL=valid_BL)
    fixed = list(pretrained.tokenizer.fixed_ids)
    predicted = [id for id in range(network.num_ids) if id not in fixed and id != mask_id]
    assert (ours_BLI - logits_BLI)[valid_BL][:, predicted].abs().max() < 1e-5
    assert torch.isneginf(ours_BLI[..., fixed]).all()
    assert logits_BLI.std() > 0.3  # they differ, so that to be equal says something
    # and where only some positions are asked for
    at_BK = torch.tensor([[4, 6], [5, 0], [20, 3]])
    chosen = network.head(network.trunk(z_BL, valid_BL=valid_BL, at_BK=at_BK))
    flat = network.head(network.trunk_at(z_BL, None, torch.tensor([4, 30, 53]), valid_BL=valid_BL))
    assert torch.allclose(chosen[0, 0], ours_BLI[0, 4], atol=1e-5)
    assert torch.allclose(flat[:, predicted], ours_BLI.flatten(0, 1)[[4, 30, 53]][:, predicted], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_keys_that_a_config_leaves_out_are_those_of_transformers(
    family: str, saved: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    import transformers

    shutil.copytree(saved[family][0], tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    said = json.loads(path.read_text())
    usual = type(saved[family][1].config)().to_dict()
    kept = {name: value for name, value in said.items() if name == "model_type" or usual.get(name) != value}
    assert len(kept) < len(said)
    path.write_text(json.dumps(kept))
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "folder").eval()
    pretrained = read_pretrained(f"hf:{tmp_path / 'folder'}")
    network, mask_id = network_of(pretrained), pretrained.tokenizer.mask_id
    z_BL, _ = some_rows(pretrained)
    if family == "esm":
        theirs.esm.embeddings.token_dropout, theirs.esm.embeddings.word_embeddings.weight[mask_id] = False, 0
    open_I = ~torch.isneginf(network.closed_I)
    open_I[mask_id] = False
    gap_BLI = network(z_BL) - theirs(input_ids=z_BL, attention_mask=torch.ones_like(z_BL)).logits
    assert gap_BLI[..., open_I].abs().max() < 1e-5


@torch.no_grad()
def test_esm_is_what_it_was_trained_as_at_the_share_of_masks_of_its_training(
    saved: dict[str, tuple[Path, Any]],
) -> None:
    """Its embeddings are scaled by 0.88 / (1 - share of masks), which is 1 where 3 of 25 are masked."""
    folder, _ = saved["esm"]
    import transformers

    theirs = transformers.EsmForMaskedLM.from_pretrained(folder).eval()
    assert theirs.config.token_dropout
    pretrained = read_pretrained(f"hf:{folder}")
    z_BL, _ = some_rows(pretrained)
    predicted = [id for id in range(29) if id not in pretrained.tokenizer.fixed_ids and id != 28]
    ours, both = network_of(pretrained)(z_BL), theirs(z_BL).logits
    assert (ours - both)[..., predicted].abs().max() < 1e-4
    z_BL[:, 8] = pretrained.tokenizer.mask_id
    assert (network_of(pretrained)(z_BL) - theirs(z_BL).logits)[..., predicted].abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_written_out_loss(family: str, saved: dict[str, tuple[Path, Any]]) -> None:
    """The chunked loss through weight and bias against torch's own through the logits, over what can be written."""
    from unmask.objectives.chunked_loss import weighted_nats

    pretrained = read_pretrained(f"hf:{saved[family][0]}")
    network = network_of(pretrained)
    z_BL, valid_BL = some_rows(pretrained)
    flat_N, x_N, weight_N = (
        torch.tensor([4, 5, 29, 54]),
        torch.tensor([5, 7, 9, 11]),
        torch.tensor([1.0, 0.5, 2.0, 3.0]),
    )
    gradients = []
    for written_out in (True, False):
        network.zero_grad()
        h_ND = network.trunk_at(z_BL, None, flat_N, valid_BL=valid_BL)
        if written_out:
            nats, _ = weighted_nats(network, h_ND, x_N, weight_N)
        else:
            logits_NI = network.head(h_ND).index_fill(1, torch.tensor([network.mask_id]), -torch.inf)
            nats = (weight_N * torch.nn.functional.cross_entropy(logits_NI, x_N, reduction="none")).sum()
        nats.backward()  # type: ignore[no-untyped-call]
        named = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        gradients.append((nats.detach(), named))
    (one, grads), (other, reference) = gradients
    assert torch.allclose(one, other)
    assert grads.keys() == reference.keys()
    for name, grad in grads.items():
        assert torch.allclose(grad, reference[name], atol=2e-5), name


def test_muon_gets_the_linear_maps_of_the_blocks(saved: dict[str, tuple[Path, Any]]) -> None:
    for family, (folder, _) in saved.items():
        network = network_of(read_pretrained(f"hf:{folder}"))
        matrices = network.matrices()
        assert len(matrices) >= 2 * 4
        assert not [
            name for name in matrices if "embed" in name or "predict" in name or "head." in name.split("lm_")[-1]
        ]
        assert set(matrices.values()) == ({1, 2, 3} if family == "modernbert" else {1})
        make_optimizer(network, OptimConfig())


def test_what_it_cannot_do_is_refused(saved: dict[str, tuple[Path, Any]]) -> None:
    network = network_of(read_pretrained(f"hf:{saved['bert'][0]}"))
    z_BL = torch.full((1, 41), 7)
    with pytest.raises(UsageError, match="reads at most 40 tokens, got 41"):
        network.trunk(z_BL)
    with pytest.raises(UsageError, match="reads tokens, not vectors"):
        network.trunk(torch.zeros(1, 4, 32))
    with pytest.raises(UsageError, match="does not support blocks"):
        network.trunk(z_BL[:, :4], attend=unmask.denoisers.Attend(blocks=torch.tensor([0, 0, 1, 1])))
    for settings, sentence in (
        ({"hidden_size": "64"}, "settings.hidden_size must be a whole number from 1 to"),
        ({"hidden_size": 30}, "a width of 30 is no multiple of 12 heads"),
        ({"hiden_size": 64}, "settings.hiden_size is unknown; did you mean 'hidden_size'?"),
        ({"hidden_act": "__import__"}, "settings.hidden_act is '__import__'"),
        ({"num_hidden_layers": True}, "settings.num_hidden_layers must be a whole number"),
        ({"layer_norm_eps": math.nan}, "settings.layer_norm_eps must be a number from 0 to 1"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Encoder(settings=settings)
    with pytest.raises(UsageError, match="names the id 300, the vocabulary has 258"):
        Encoder(settings={"pad_token_id": 300}).build(num_ids=258, mask_id=257)
    with pytest.raises(UsageError, match="never predicts its special tokens, which the process uniform of UDLM"):
        model_of(saved["bert"][0], UDLM())


# --- the bound --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_bound_is_of_a_distribution_over_what_can_be_written() -> None:
    """Enumerated: the chain that opens a position at a time in random order gives probabilities that sum to 1 over all
    texts of ids that are neither fixed nor the mask, and the bound is at least -log p of each."""
    torch.manual_seed(3)
    L, fixed, mask_id, words = 3, (0, 2), 4, (1, 3, 5)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    network = Encoder(settings=sizes, fixed=fixed).build(num_ids=6, mask_id=mask_id).double().eval()
    for p in network.parameters():
        p.copy_(torch.randn(p.shape, dtype=p.dtype) * 0.7)
    objective = MDLM(form="count")
    predictor = objective.predictor(network)

    def log_x_theta(visible: dict[int, int], at: int) -> torch.Tensor:
        z_BL = torch.tensor([[0, *(visible.get(i, mask_id) for i in range(L)), 2]])
        query = unmask.Query(z_BL, torch.ones(1), torch.tensor([[at + 1]]), torch.tensor([[True]]), at + 2)
        return predictor(query)[0]

    orders, total = list(itertools.permutations(range(L))), 0.0
    for text in itertools.product(words, repeat=L):
        p = sum(
            math.exp(
                sum(float(log_x_theta({i: text[i] for i in order[:k]}, order[k])[text[order[k]]]) for k in range(L))
            )
            for order in orders
        ) / len(orders)
        total += p
        bound = sum(  # the count form: n uniform in 1..L, then a uniform set of n masks
            L
            / n
            / L
            / math.comb(L, n)
            * sum(-float(log_x_theta({i: text[i] for i in range(L) if i not in hidden}, at)[text[at]]) for at in hidden)
            for n in range(1, L + 1)
            for hidden in itertools.combinations(range(L), n)
        )
        assert bound >= -math.log(p) - 1e-12
    assert total == pytest.approx(1, abs=1e-12)
    assert torch.isneginf(log_x_theta({}, 0)[[*fixed, mask_id]]).all()


def test_fixed_tokens_are_neither_noised_nor_scored(saved: dict[str, tuple[Path, Any]]) -> None:
    """Frames, ends of documents inside a row, and words that the vocabulary does not know."""
    tokenizer = read_pretrained(f"hf:{saved['bert'][0]}").tokenizer
    assert tokenizer_from_json(tokenizer.to_json()).fingerprint() == tokenizer.fingerprint()
    cls, sep = tokenizer.bos_id, tokenizer.eot_id
    texts = ["the cat ☃ sat", "a dog"]
    rows = pack_texts(texts, tokenizer, "wrap", 14, "both")
    batch = rows.take(np.arange(len(rows)))
    whole = batch.x[0].tolist()
    assert whole[0] == cls
    assert whole[batch.valid_len[0] - 1] == sep
    assert tokenizer.decode(whole[1 : batch.valid_len[0] - 1]) == "the cat [UNK] sat [SEP] a dog [SEP]"
    scored_BL = unmask.data.batch.batch_of(batch, seed=0, step=0).scored_BL
    fixed = torch.isin(torch.from_numpy(batch.x), torch.tensor(tokenizer.fixed_ids))
    assert scored_BL.any()
    assert not (scored_BL & fixed).any()
    assert int(scored_BL.sum()) == rows.report.tokens == rows.counts(np.arange(len(rows)))[0]
    assert rows.report.bytes == len("the cat sat") + len("a dog")  # a snowman is given, and so is the blank before it
    for policy in ("pad", "sentence"):
        alone = pack_texts(texts, tokenizer, policy, 14, "both")
        assert alone.take(np.array([1])).x[0, :4].tolist()[::3] == [cls, alone.take(np.array([1])).x[0, 3]]
        assert int((alone.take(np.array([1])).x == sep).sum()) >= 1
        assert alone.report.tokens == rows.report.tokens


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_bound_and_the_folder_needs_no_other(
    family: str, saved: dict[str, tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path / "run", family, steps=25, valid_every=25, save_every=25)
    bounds: list[float] = []

    class Remember(unmask.Callback):
        def on_valid(self, step: int, bound: Any) -> None:
            bounds.append(bound.nats_per_token)

    model = train(config, init=f"hf:{saved[family][0]}", device="cpu", callbacks=[Remember()])
    assert bounds[-1] < bounds[0] - 0.3
    assert model.anchor == "both"
    assert model.length == 20

    def nowhere(*args: Any, **how: Any) -> Any:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr("socket.socket.connect", nowhere)
    monkeypatch.setattr("unmask.pretrained.source.Folder", nowhere)
    again = unmask.load(tmp_path / "run")
    text = texts_of(family)[0]
    assert again.score(text, seed=1).nats == model.score(text, seed=1).nats
    generated = again.generate(2, 12, seed=2)
    assert generated == model.generate(2, 12, seed=2)
    assert all(generated)
    again.save(tmp_path / "copy")
    assert unmask.load(tmp_path / "copy").generate(2, 12, seed=2) == generated


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("packing", ["wrap", "sentence"])
def test_a_killed_run_goes_on_bit_for_bit_without_the_source(
    lora_rank: int, packing: Any, saved: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    class Killed(unmask.Callback):
        def on_step(self, report: Any) -> None:
            if report.step == 5:
                raise KeyboardInterrupt

    source = tmp_path / "source"
    save_encoder("bert", source)
    mine = Encoder(lora_rank=lora_rank, dropout=0.2)
    data = dataclasses.replace(run_config(tmp_path).data, packing=packing)
    one, other = (run_config(tmp_path / name, denoiser=mine, data=data) for name in ("whole", "stopped"))
    whole = train(one, init=f"hf:{source}", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        train(other, init=f"hf:{source}", device="cpu", callbacks=[Killed()])
    (source / "model.safetensors").unlink()
    gone_on = train(load_config(tmp_path / "stopped", {"data.train": data.train}), resume=True, device="cpu")
    for a, b in itertools.zip_longest(whole.denoiser.parameters(), gone_on.denoiser.parameters()):
        assert a.equal(b)
    config = json.loads((tmp_path / "stopped" / "model" / "config.json").read_text())["denoiser"]
    assert (config["lora_rank"], config["dropout"]) == (0, 0.2)
    assert not [name for name in unshared(whole.denoiser) if is_low_rank(name)]


# --- low-rank adaptation ----------------------------------------------------------------------------------------------


def test_low_rank_changes_are_learned_alone_and_merged(saved: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder = saved["bert"][0]
    before = dict(read_pretrained(f"hf:{folder}").state)
    config = run_config(tmp_path / "run", denoiser=Encoder(lora_rank=2, lora_alpha=4.0))
    model = train(config, init=f"hf:{folder}", device="cpu")
    checkpoint = load_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    for name, tensor in before.items():
        assert checkpoint.tensors["model"][name].equal(tensor), name  # the encoder itself has not moved
    weights, average = unshared(model.denoiser), checkpoint.tensors["ema"]
    name = "encoder.bert.encoder.layer.0.attention.self.query"
    change = 2 * average[f"{name}.lora_up"] @ average[f"{name}.lora_down"]
    assert change.abs().max() > 1e-4
    assert torch.allclose(weights[f"{name}.weight"], before[f"{name}.weight"] + change, atol=1e-6)
    assert model.denoiser.config == dataclasses.replace(model.denoiser.config, lora_rank=0)


def test_low_rank_maps_are_those_of_peft(saved: dict[str, tuple[Path, Any]]) -> None:
    peft = pytest.importorskip("peft")
    folder, _ = saved["roberta"]
    pretrained = read_pretrained(f"hf:{folder}")
    network = network_of(pretrained, lora_rank=3, lora_alpha=6.0)
    z_BL, valid_BL = some_rows(pretrained)
    plain = network_of(pretrained)
    assert torch.equal(plain.trunk(z_BL, valid_BL=valid_BL), network.trunk(z_BL, valid_BL=valid_BL))  # B begins at 0
    how = peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=r".*\.layer\..*(query|key|value|dense)")
    peft.inject_adapter_in_model(how, plain.encoder)
    generator, adapted = torch.Generator().manual_seed(0), 0
    theirs = dict(plain.named_parameters())
    with torch.no_grad():
        for name, p in network.named_parameters():
            if is_low_rank(name):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
                stem, _, last = name.rpartition(".")
                theirs[f"{stem}.{'lora_A' if last == 'lora_down' else 'lora_B'}.default.weight"].copy_(p)
                adapted += 1
    assert adapted == 2 * 2 * 6
    made, reference = (one.eval().trunk(z_BL, valid_BL=valid_BL) for one in (network, plain))
    assert torch.allclose(made, reference, atol=1e-5)
    merged = network.saved(unshared(network))[1]
    whole = network_of(pretrained)
    load_weights(whole, merged, "merged")
    assert torch.allclose(whole.trunk(z_BL, valid_BL=valid_BL), made, atol=1e-5)
    assert {name for name, p in network.named_parameters() if p.requires_grad} == {
        *filter(is_low_rank, unshared(network))
    }


# --- use --------------------------------------------------------------------------------------------------------------


def test_no_special_token_in_ten_thousand_samples(saved: dict[str, tuple[Path, Any]]) -> None:
    model = model_of(saved["bert"][0])
    names = model.sampler_names()
    assert {"ancestral", "confidence", "gibbs", "left_to_right", "remdm"} <= set(names)
    never = torch.tensor([*model.tokenizer.fixed_ids, model.tokenizer.mask_id])
    num, samples = -(-10_000 // len(names)), 0
    for name in names:
        few = {"steps": 4} if name in ("posterior", "predictor_corrector", "remdm") else {}
        sampler = model.make_sampler(name, temperature=4.0, **few)
        canvas = model.canvas([[*model.begin, *[model.tokenizer.mask_id] * 2, *model.end]] * num, may_end=True)
        rows = torch.tensor(model.run(canvas, sampler))
        assert not torch.isin(rows[:, 1:-1], never).any(), name
        assert (rows[:, 0] == model.tokenizer.bos_id).all()
        assert (rows[:, -1] == model.tokenizer.eot_id).all()
        samples += len(rows)
    assert samples >= 10_000


def test_fill_refine_guide_constrain_and_score(saved: dict[str, tuple[Path, Any]]) -> None:
    model = model_of(saved["bert"][0], MLM())
    assert model.sampler_names()
    filled = model.fill(["the [MASK] sat on the [MASK:2]", "a [MASK:1..2]"], seed=1)
    assert filled[0].startswith("the ")
    assert " sat on the " in filled[0]
    assert "[UNK]" in model.refine("the cat ☃ sat on the mat", share=0.9, seed=2)[0]  # what is unknown stays
    held = model.generate(4, 10, "the cat", constraint=unmask.constraints.Contains(phrases=("dog",)), seed=3)
    assert all("dog" in text for text in held)
    assert model.generate(1, 10, "the cat", guidance=1.0, seed=3)
    pseudo, bound = (model.score("the cat sat", estimator=name) for name in ("pseudo", "count"))
    assert (pseudo.kind, bound.kind) == ("pseudo", "upper bound")
    assert bound.num_bytes == len("the cat sat")
    assert int(bound.tokens_B) == 3
    assert model.score("☃", num_samples=4).nats == 0
    assert [token.text for token in bound.explain()[0]] == ["the", "cat", "sat"]
