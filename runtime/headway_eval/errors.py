"""Every error the evaluation raises on purpose, in one tree; each ends it with "could not judge".

    HeadwayEvalError
    ├── OptionsError      a flag is wrong, or two do not go together
    ├── InputFileError    a file of text or tasks is not what it was named as: file, line, field, remedy
    └── ComparisonError   the two models cannot be compared as asked

A model that answers badly is no error but a verdict.
"""


class HeadwayEvalError(Exception):
    """Base of the tree; `str()` names the field, the value and the remedy."""


class OptionsError(HeadwayEvalError):
    """The flags do not describe an evaluation."""


class InputFileError(HeadwayEvalError):
    """A file that the user named cannot be used."""


class ComparisonError(HeadwayEvalError):
    """Nothing can be said of the one model by the other."""
