"""A share of a corpus: for measuring what is learned from less text with everything else equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from unmask.corpora import Corpus, Document
from unmask.errors import DataError


def content_place(document: Document, salt: str = "") -> float:
    """A number in [0, 1) that depends only on the document's content.

    >>> content_place(Document("abc")) == content_place(Document("abc"), "share")
    False
    """
    content = f"{salt}{len(document.prompt)}\0{document.prompt}{document.text}".encode("utf-8", errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(content).digest()[:6], "big") / (1 << 48)


@dataclass(frozen=True)
class Share(Corpus):
    """A share of a corpus's documents, chosen by their content: a smaller share is contained in every larger one.

    held_out: the share of documents held out by a hash of their content. They are kept, so that measurements use the
    same text whatever the share.
    """

    corpus: Corpus
    share: float
    held_out: float = 0.0

    def documents(self) -> Iterator[Document]:
        seen = kept = 0
        for document in self.corpus.documents():
            seen += 1
            held_out = content_place(document) < self.held_out
            if held_out or content_place(document, "share ") < self.share:
                kept += not held_out
                yield document
        if seen and not kept:
            raise DataError(
                f"data.share = {self.share:g} takes none of the {seen:,} documents, which it chooses whole: "
                "give a larger share, or a corpus of more and shorter documents"
            )

    def fingerprint(self) -> str:
        return f"{self.share!r} of {self.corpus.fingerprint()} beside {self.held_out!r}"
