"""Parse layer numbers from options, such as 0-3 or 0,2,4-5."""

from __future__ import annotations

from attncache_core.errors import InvalidInput


def is_count(text: str) -> bool:
    """Return whether the text consists of ASCII digits only."""
    return text.isascii() and text.isdigit()


def parse_layers(text: str, layers: int, *, field: str) -> frozenset[int]:
    """Parse numbers like `0-3` or `0,2,4-5`.

    layers: the number of layers of the model. field: the option's name, for errors. Raises InvalidInput if
    the text has another form, or if a number is not below `layers`.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (is_count(first) and is_count(last)):
            raise InvalidInput(f"{field}: layers are written like 0-3 or 0,2,4-5", field=field)
        if to_number(last) >= layers:
            raise InvalidInput(f"{field}: the model has layers 0 to {layers - 1}", field=field)
        chosen.update(range(to_number(first), to_number(last) + 1))
    if not chosen:
        raise InvalidInput(f"{field}: a range of layers counts upwards, like 0-3", field=field)
    return frozenset(chosen)


def to_number(digits: str) -> int:
    """Convert digits to a number. Of more than nine digits, only the first nine count."""
    # int() raises ValueError for thousands of digits. A number of nine digits is too large for every caller.
    return int(digits.lstrip("0")[:9] or "0")
