"""The vocabulary of Caduceus and HyenaDNA: seven special tokens, then A, C, G, T and N.

Their folders define it by code, which is not executed; it is identical in all of them.
"""

from __future__ import annotations

from unmask.data.roles import Roles
from unmask.data.tokenizers import Tokenizer
from unmask.errors import ModelFolderError
from unmask.pretrained.base import Source
from unmask.pretrained.renaming import whole

SPECIAL = ("[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]")
LETTERS = "ACGTN"
END, MASK = SPECIAL.index("[SEP]"), SPECIAL.index("[MASK]")


def letters(source: Source) -> Tokenizer:
    """One token per letter, with as many ids as the embedding has rows, which is padded to a round number."""
    size = whole(source, source.config, "vocab_size")
    multiple = whole(source, source.config, "pad_vocab_size_multiple", 8)
    num_ids = -(-size // multiple) * multiple
    least = len(SPECIAL) + len(LETTERS)
    if not least <= size <= 2 * least:
        raise ModelFolderError(
            f"{source.where}: vocab_size of config.json is {size}; a vocabulary of the letters {LETTERS} has {least}"
        )
    return tokenizer_of(num_ids)


def tokenizer_of(num_ids: int) -> Tokenizer:
    """
    >>> tokenizer_of(16).encode("ACGTN"), tokenizer_of(16).decode([7, 3, 8])
    ([7, 8, 9, 10, 11], 'A[MASK]C')
    """
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    from unmask.data.subwords import Subwords

    vocab = {text: id for id, text in enumerate((*SPECIAL, *LETTERS))}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fixed = {*range(num_ids)} - {MASK, *(vocab[letter] for letter in LETTERS)}
    return Subwords(inner, Roles(mask=MASK, end=END, num_ids=num_ids, fixed=tuple(sorted(fixed))))
