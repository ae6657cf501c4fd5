"""The alphabet of byte-level BPE: a letter for each byte, so that a token is text (GPT-2)."""


def _byte_letters() -> list[str]:
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in own else next(others)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()
"""The letter of each byte in the texts of byte-level BPE tokens."""
_LETTERS = dict(enumerate(BYTE_LETTERS))


def in_letters(token: bytes) -> str:
    """A token's bytes in BYTE_LETTERS."""
    return token.decode("latin-1").translate(_LETTERS)
