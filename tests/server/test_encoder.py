"""An encoder of transformers, served: the library's texts and scores, and no special token in an answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tiny_encoders import save_encoder
from unmask.model import Model
from unmask.objectives.mdlm import MDLM
from unmask.pretrained import read_pretrained
from unmask.server.app import make_app
from unmask.storage.model_folder import load_weights

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder("bert", folder)
    pretrained = read_pretrained(str(folder))
    tokenizer = pretrained.tokenizer
    network = pretrained.denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    load_weights(network, dict(pretrained.state), str(folder))
    how = {"length": 24, "packing": "pad", "anchor": "both"}
    return Model(denoiser=network, tokenizer=tokenizer, objective=MDLM(), **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def client(encoder: Model) -> Iterator[TestClient]:
    with TestClient(make_app(encoder, name="encoder"), base_url="http://localhost") as found:
        yield found


def test_texts_and_scores_are_the_library_s(encoder: Model, client: TestClient) -> None:
    gaps = "the [MASK:2] sat ☃ on [MASK]"
    filled = client.post("/fill", json={"text": gaps, "seed": 3}).json()["texts"][0]["text"]
    assert filled == encoder.fill(gaps, seed=3)[0]
    asked = {"prompt": "the cat", "max_tokens": 8, "seed": 4}
    written = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    assert written
    assert not [word for word in ("[CLS]", "[SEP]", "[PAD]", "[UNK]") if word in written]
    text = "the cat ☃ sat on the mat"
    answer = client.post("/score", json={"texts": [text], "num_samples": 8, "seed": 1}).json()["texts"][0]
    bound = encoder.score(text, num_samples=8, seed=1)
    assert answer["tokens"] == bound.tokens == 6
    assert answer["nats_per_token"] == pytest.approx(bound.nats_per_token, rel=1e-5)


def test_the_page_and_what_it_asks_first(client: TestClient) -> None:
    assert client.get("/").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "encoder"
