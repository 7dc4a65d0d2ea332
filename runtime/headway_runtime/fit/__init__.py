"""Whether a model fits a device's memory, and its speed at best: arithmetic, before any load.

Reads a model's config.json and, where they lie there, the headers of its weights; imports no torch. `headway
plan` shows this arithmetic, and an engine refuses by it (`admission`) what it would fail to load.
"""
