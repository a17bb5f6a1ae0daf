"""Text of models and users made safe to print, and numbers made easy to read."""

from __future__ import annotations

import unicodedata

# Overrides and isolates can make a line read as another; the plain marks U+200E and U+200F cannot.
_BIDI = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: str) -> str:
    """Return `text` without control characters; line feeds and tabs stay."""
    return "".join(c for c in text if c in "\n\t" or (unicodedata.category(c) not in {"Cc", "Cs"} and c not in _BIDI))


def one_line(text: str) -> str:
    """Return `text` cleaned and on one line, runs of white space as one space."""
    return " ".join(clean(" ".join(text.split())).split())


def size(count: int) -> str:
    """Return a number of bytes for people: ``size(1536) == "1.5 KiB"``."""
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1023.95 or unit == "TiB":  # 1023.95 would print as 1024.0
            break
    return f"{value:,.1f} {unit}"
