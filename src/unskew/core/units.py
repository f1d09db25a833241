"""Bytes, seconds and counts as messages show them."""


def format_bytes(count: float) -> str:
    """Bytes in a suitable unit: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < (999.5 if unit == "B" else 999.95):
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_duration(seconds: float) -> str:
    """Seconds in suitable units: 3.2 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_rate(rate: float) -> str:
    """A number per second: whole, or with two digits where it is small."""
    return f"{rate:,.0f}" if rate >= 9.5 else f"{rate:.2g}"


def counted(count: int, word: str) -> str:
    """A count and its noun: 1 round, 2 rounds."""
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{count:,} {word if count == 1 else plural}"


def span(low: int, high: int, word: str) -> str:
    """A range, or one number if both ends are equal: 2 to 9 examples, 242 examples."""
    return counted(high, word) if low == high else f"{low:,} to {counted(high, word)}"


def format_emd(emd: float | None) -> str:
    """The clients' label skew; None: their labels are unknown here."""
    return "unknown" if emd is None else f"{emd:.2f}"
