"""Encoders of transformers on a GPU: the same loss and gradients in bf16 as in float32, ids that stay out. Skipped
without a GPU."""

from __future__ import annotations

import pytest
import torch

from unmask.data.batch import make_batch
from unmask.denoisers.encoder import Encoder
from unmask.objectives.mdlm import MDLM
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: encoders are not tested on one"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
FIXED = (0, 1, 2, 3)


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert", "roberta"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_bf16_is_near_float32(family: str, lora_rank: int) -> None:
    torch.manual_seed(0)
    encoder = Encoder(family=family, settings=SIZES | {"pad_token_id": 0}, fixed=FIXED, lora_rank=lora_rank)  # type: ignore[arg-type]
    network = encoder.build(num_ids=300, mask_id=4).to("cuda").train()
    x_BL = torch.randint(5, 300, (8, 64))
    valid_len_B = torch.tensor([64, 64, 64, 64, 50, 40, 30, 64])
    batch = make_batch(x_BL, valid_len_B, seed=0, step=0, fixed_ids=FIXED)
    losses, gradients = [], []
    for half in (False, True):
        network.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = MDLM().loss(network, batch)
        (loss.nats / loss.tokens).backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.nats.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.98


def test_nothing_fixed_is_drawn() -> None:
    torch.manual_seed(0)
    network = Encoder(settings=SIZES, fixed=FIXED).build(num_ids=40, mask_id=4).to("cuda", torch.bfloat16).eval()
    canvas = Canvas.blank(num=256, length=16, mask_id=4, seed=1).to("cuda")
    objective = MDLM()
    tokens = sample(network, canvas, objective.sampler(), objective=objective).tokens
    assert not torch.isin(tokens.cpu(), torch.tensor([*FIXED, 4])).any()
