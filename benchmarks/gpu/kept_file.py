"""JSON that outlives a run: written whole or not at all, and never lost to a file that begins anew."""

import json
from pathlib import Path
from typing import Any


def keep(file: Path, value: Any) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def set_aside(file: Path, why: str) -> None:
    """Under the first name of its kind that is free."""
    number = 1
    while (aside := file.with_name(f"{file.stem}.aside-{number}{file.suffix}")).exists():
        number += 1
    file.rename(aside)
    print(f"{file}: {why}; it is {aside.name} now, and what follows begins anew", flush=True)
