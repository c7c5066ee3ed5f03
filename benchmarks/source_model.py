"""The source of the stories as a model of ours: llama2.c's stories15M as a folder that transformers and unmask read.

    python benchmarks/source_model.py model.bin tokenizer.bin stories15m-hf --check valid.txt.xz
    unmask import hf:stories15m-hf stories15m

Where both files are says benchmarks/more_stories.py. The token that ends a text there also begins the next, so both are
one token here, <|endoftext|>. --check compares texts' tokens, probabilities and greedy continuations with llama2.c's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

import unmask
from llama2c import BEGIN, Llama, Pieces
from unmask.corpora.sources import from_path
from unmask.pretrained.sentencepiece import BPE, BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, Piece, SpmFile, vocabulary_of
from unmask.samplers import Sampler
from unmask.storage.atomic import atomic_folder
from unmask.storage.tensor_file import write_tensors

END = "<|endoftext|>"
KINDS = {0: ("<unk>", UNKNOWN), BEGIN: (END, CONTROL), 2: ("</s>", CONTROL)}  # no text has them


def vocabulary(pieces: Pieces) -> str:
    """tokenizer.json: the same tokens, but that a letter of Latin-1 that is no piece is its bytes here."""

    def piece(id: int) -> Piece:
        if id in KINDS:
            return Piece(KINDS[id][0], kind=KINDS[id][1])
        if 3 <= id < 259:
            return Piece(f"<0x{id - 3:02X}>", kind=BYTE)
        return Piece(pieces.piece[id].decode().replace(" ", SPACE), pieces.score[id], NORMAL)

    said = SpmFile([piece(id) for id in range(len(pieces.piece))], BPE, byte_fallback=True, one_space=False)
    return str(vocabulary_of(said).to_str())


def tensors(llama: Llama) -> dict[str, Tensor]:
    """The weights by transformers' names. There the two numbers that are turned together stand half a head apart."""

    def halves(weight: Tensor) -> Tensor:
        return weight.view(llama.heads, -1, 2, llama.dim).transpose(1, 2).reshape(llama.dim, llama.dim)

    held = {"model.embed_tokens.weight": llama.embedding, "model.norm.weight": llama.norm}
    for n in range(llama.layers):
        layer = {
            "input_layernorm": llama.norm1[n],
            "self_attn.q_proj": halves(llama.wq[n]),
            "self_attn.k_proj": halves(llama.wk[n]),
            "self_attn.v_proj": llama.wv[n],
            "self_attn.o_proj": llama.wo[n],
            "post_attention_layernorm": llama.norm2[n],
            "mlp.gate_proj": llama.w1[n],
            "mlp.up_proj": llama.w3[n],
            "mlp.down_proj": llama.w2[n],
        }
        held |= {f"model.layers.{n}.{name}.weight": weight for name, weight in layer.items()}
    return {name: weight.contiguous() for name, weight in held.items()}


def config(llama: Llama) -> dict[str, object]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(llama.embedding),
        "hidden_size": llama.dim,
        "intermediate_size": llama.w1.shape[1],
        "num_hidden_layers": llama.layers,
        "num_attention_heads": llama.heads,
        "num_key_value_heads": llama.heads,
        "max_position_embeddings": llama.length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BEGIN,
        "eos_token_id": BEGIN,
    }


def write(llama: Llama, pieces: Pieces, out: Path) -> None:
    """A new folder of transformers."""
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "unk_token": "<unk>"}
    about |= {"clean_up_tokenization_spaces": False}
    with atomic_folder(out) as temp:
        (temp / "config.json").write_text(json.dumps(config(llama), indent=2) + "\n")
        (temp / "tokenizer.json").write_text(vocabulary(pieces), encoding="utf-8")
        (temp / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
        write_tensors(temp / "model.safetensors", tensors(llama), {"format": "pt"})


@torch.inference_mode()
def check(llama: Llama, pieces: Pieces, model: unmask.Model, texts: list[str]) -> list[str]:
    """What differs from llama2.c; what both say to the texts is printed, their ends included."""
    wrong, most, nats, tokens, size = [], 0.0, 0.0, 0, 0
    greedy = model.make_sampler(temperature=0.0)
    for number, text in enumerate(texts, 1):
        ids = pieces.encode(text)
        if model.tokenizer.encode(text) != ids:
            wrong.append(f"text {number} has other tokens")
        if model.tokenizer.decode(ids) != text:
            wrong.append(f"text {number} does not come back letter by letter")
        row = [*ids, BEGIN][: llama.length]
        logits = llama.step(torch.tensor([[BEGIN, *row[:-1]]]), 0, llama.cache(1))[0]
        theirs = -logits.log_softmax(-1)[range(len(row)), row]
        h_LD = model.hidden(torch.tensor([row]))[0]
        ours = -model.denoiser.head(h_LD)[:, : len(pieces.piece)].log_softmax(-1)[range(len(row)), row]
        most = max(most, float((ours - theirs).abs().max()))
        nats, tokens, size = nats + float(ours.sum()), tokens + len(row), size + len(text.encode())
        begin = ids[: llama.length // 4]
        if number <= 8 and (found := _goes_on(model, greedy, begin)) != (told := _follows(llama, begin)):
            wrong.append(f"text {number} goes on with {found}, in llama2.c with {told}")
    print(
        f"{len(texts)} texts at temperature 1: {nats / tokens:.4f} nats/token, {nats / math.log(2) / size:.4f} "
        f"bits/byte; a token's nats differ by {most:.1e} at most"
    )
    return wrong


def _follows(llama: Llama, ids: list[int]) -> list[int]:
    """The likeliest tokens after these, one after another, in llama2.c's network."""
    row, cache = [BEGIN, *ids], llama.cache(1)
    new, at = torch.tensor([row]), 0
    while len(row) <= llama.length:
        best = int(llama.step(new, at, cache)[0, -1].argmax())
        at, new = len(row), torch.tensor([[best]])
        row.append(best)
    return _ended(row[1 + len(ids) :])


def _goes_on(model: unmask.Model, sampler: Sampler, ids: list[int]) -> list[int]:
    canvas = model.canvas([[*ids, *[model.tokenizer.mask_id] * (model.length - len(ids))]], may_end=True)
    return _ended(model.run(canvas, sampler)[0][len(ids) :])


def _ended(row: list[int]) -> list[int]:
    return row[: row.index(BEGIN)] if BEGIN in row else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path, help="folder to write; must be new")
    parser.add_argument("--check", type=Path, help="texts on which it is compared with llama2.c's network")
    parser.add_argument("--num", type=int, default=200, help="texts of --check")
    args = parser.parse_args()
    llama = Llama(args.weights, "cpu")
    pieces = Pieces(args.tokenizer, len(llama.embedding))
    write(llama, pieces, args.out)
    if args.check is None:
        return
    texts = [document.text for document in islice(from_path(str(args.check)).documents(), args.num)]
    with tempfile.TemporaryDirectory() as temp:
        subprocess.run(
            [sys.executable, "-m", "unmask", "import", f"hf:{args.out}", f"{temp}/model"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        wrong = check(llama, pieces, unmask.load(f"{temp}/model", device="cpu", dtype="fp32"), texts)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
