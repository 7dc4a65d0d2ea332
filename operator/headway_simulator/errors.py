"""Every error the simulator raises on purpose, in one tree.

    SimulatorError
    ├── TraceError     a trace cannot be read: names the file, the line and the field
    └── OptionsError   a flag, a step model or a manifest is wrong, or two do not go together

What befalls a single request of a simulation is no exception but its `Fate`.
"""


class SimulatorError(Exception):
    """Base of the tree; `str()` names the field, the value and the remedy."""


class TraceError(SimulatorError):
    """A trace file is not what its first line says it is."""


class OptionsError(SimulatorError):
    """What was asked cannot be simulated."""
