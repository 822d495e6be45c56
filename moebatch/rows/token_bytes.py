"""What single tokens stand for: their bytes, since a character may be spread over several."""

import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""Stands for a space in the tokens of sentencepiece."""


class TokenBytes:
    """Bytes of the tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
        decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._alphabet = _byte_alphabet() if "ByteLevel" in decoder else None

    def of(self, token: int) -> bytes:
        """Bytes of one token; none if the tokenizer does not know it."""
        added = self._added.get(token)
        if added is not None:
            return added.encode("utf-8")
        text = self._tokenizer.convert_ids_to_tokens(token)
        if text is None:
            return b""
        if self._alphabet is not None and all(letter in self._alphabet for letter in text):
            return bytes(self._alphabet[letter] for letter in text)
        byte = _BYTE.fullmatch(text)
        if byte:
            return bytes([int(byte[1], 16)])
        return str(text).replace(_SPACE, " ").encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """Letters that stand for bytes in the vocabularies of byte-level tokenizers.

    Bytes that print in Latin-1 stand for themselves, the others in order from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    letters = {chr(byte): byte for byte in printing}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
