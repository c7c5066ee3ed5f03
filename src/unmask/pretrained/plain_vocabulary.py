"""Our built-in vocabularies (bytes, chars, dna) in the format of `tokenizers`: the same ids for the same text."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from unmask.data.dna import Dna
from unmask.data.subwords import Subwords
from unmask.data.tokenizers import EOT_TEXT, MASK_TEXT, Bytes, Chars, Tokenizer
from unmask.errors import UsageError


def vocabulary_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """A vocabulary of `tokenizers`, in which the mask is a special token that may be spelled out in a text.

    >>> from unmask.data.tokenizers import load_tokenizer
    >>> vocabulary_of(load_tokenizer("dna")).encode("acgN[MASK]").ids
    [0, 1, 2, 4, 6]
    """
    if isinstance(tokenizer, Subwords):
        return tokenizers.Tokenizer.from_str(tokenizer.to_vocabulary())
    if isinstance(tokenizer, Bytes):
        inner = _bytes()
    elif isinstance(tokenizer, Chars | Dna):
        inner = _letters([tokenizer.token_text(id) for id in range(tokenizer.eot_id)])
        if isinstance(tokenizer, Dna):
            lower = [normalizers.Replace(letter.lower(), letter) for letter in inner.get_vocab()]
            inner.normalizer = normalizers.Sequence(lower)
    else:
        raise UsageError(f"the tokenizer {type(tokenizer).__name__} has no form that transformers reads")
    # The order of special ids in all three: end of text, then the mask.
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOT_TEXT, MASK_TEXT)])
    return inner


def _bytes() -> tokenizers.Tokenizer:
    # Byte-level BPE spells a byte by its Latin-1 character if that is printable, otherwise by one from 256 up, in
    # order.
    plain = {b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE}
    hidden = [b for b in range(256) if b not in plain]
    vocab = {chr(b) if b in plain else chr(256 + hidden.index(b)): b for b in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _letters(letters: list[str]) -> tokenizers.Tokenizer:
    """One token per letter; a text with any other character is refused, as by our tokenizer."""
    inner = tokenizers.Tokenizer(models.WordLevel({letter: id for id, letter in enumerate(letters)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner
