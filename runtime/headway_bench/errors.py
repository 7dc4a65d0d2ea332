"""Every error the benchmark raises on purpose, in one tree.

    HeadwayBenchError
    ├── OptionsError     a flag is wrong, or two do not go together; exit status 2
    ├── InputFileError   a trace, a data set or a tokenizer cannot be used; exit status 2
    └── TargetError      the server cannot be benchmarked as asked; exit status 1
        └── NotReadyError    not yet: nothing listens there, or it is still starting

What befalls a single request of the load is no exception but a `failure` in its record.
"""


class HeadwayBenchError(Exception):
    """Base of the tree; `str()` names the field, the value and the remedy."""


class OptionsError(HeadwayBenchError):
    """The flags do not describe a load."""


class InputFileError(HeadwayBenchError):
    """A file that the user named is not what it was named as."""


class TargetError(HeadwayBenchError):
    """The server does not answer, or not as an OpenAI-compatible one does."""


class NotReadyError(TargetError):
    """The server does not answer, or says that it cannot serve now: worth asking again in a while."""
