"""A table of configurations as a file: read, changed, and written a class to a line."""

import json
from collections.abc import Mapping
from pathlib import Path

Table = dict[str, dict[str, dict[str, int]]]


def read_table(file: Path) -> Table:
    """Empty where there is none."""
    if not file.is_file():
        return {}
    table: Table = json.loads(file.read_text(encoding="utf-8"))
    return table


def changed(table: Table, kernel: str, shape_class: str, values: Mapping[str, int]) -> Table:
    """A copy with that entry; all others stay, and stay in their order."""
    found = {name: dict(classes) for name, classes in table.items()}
    found.setdefault(kernel, {})[shape_class] = dict(values)
    return found


def rendered(table: Table) -> str:
    """As the committed ones are."""
    kernels = []
    for kernel, classes in table.items():
        lines = [f"    {json.dumps(name)}: {json.dumps(values)}" for name, values in classes.items()]
        kernels.append(f"  {json.dumps(kernel)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(kernels) + "\n}\n"


def write_table(file: Path, table: Table) -> None:
    part = file.with_suffix(".part")
    part.write_text(rendered(table), encoding="utf-8")
    part.replace(file)
