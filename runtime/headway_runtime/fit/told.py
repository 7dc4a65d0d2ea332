"""Numbers for people: sizes in binary units, counts with commas."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def told_bytes(num_bytes: float) -> str:
    """4 MiB, 14.96 GiB; with its sign."""
    size, sign = abs(num_bytes), "-" if num_bytes < 0 else ""
    power = 0
    while size >= 1024 and power < len(UNITS) - 1:
        size /= 1024
        power += 1
    text = f"{size:.2f}" if power else f"{size:.0f}"
    return f"{sign}{text} {UNITS[power]}"


def told_count(number: int, noun: str) -> str:
    """1 file, 2,000 files."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def told_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def told_number(number: float) -> str:
    """8.03 B, 1.24 T: with a letter for thousands of them."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return f"{number:.0f}"
