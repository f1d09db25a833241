"""The console that the commands print to."""

import codecs
import os
import re
import sys
import unicodedata

from rich.console import Console


class PlainConsole(Console):
    """Text is printed as it is, without markup. If the reader of a pipe has gone, the run continues in silence."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False)

    def on_broken_pipe(self) -> None:
        """Rich would end the process here."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


PLAIN = {
    "−": "-", "–": "-", "—": "-", "·": "*", "×": "x", "…": "...", "←": "<-", "→": "->", "‖": "||", "≈": "~", "∞": "inf",
    "√": "sqrt", "∝": "~", "½": "1/2", "ᵀ": "^T", "⟨": "<", "⟩": ">", "′": "'", "ℓ": "l", "≤": "<=", "≥": ">=",
    "²": "^2", "ḡ": "g", "│": "|", "└": "+",
}  # fmt: skip


def print_any_letter() -> None:
    """Let no character end a command, whatever the encoding of the terminal or pipe."""
    codecs.register_error("unskew", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="unskew")


def plain_spelling(character: str) -> str:
    """A character in ASCII: ``α`` is alpha, ``…`` three dots. What is not a sign or a Greek letter is escaped."""
    if character in PLAIN:
        return PLAIN[character]
    if greek := re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", unicodedata.name(character, "")):
        return greek.group(2).lower() if greek.group(1) == "SMALL" else greek.group(2).capitalize()
    code = ord(character)
    return f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(plain_spelling, error.object[error.start : error.end])), error.end
