"""Which form a busy engine lacks: steps that ran as a larger one, or kernel by kernel, for want of it.

Forms that are not recorded at the start follow while there is nothing to do. On a replica that always has
something to do they would never. So steps are counted by the form that they would take if it were there, and
one that was missed often enough is recorded between two steps. Counts only; no torch.
"""

from collections import Counter
from collections.abc import Iterable

from headway_runtime.graphs.forms import StepForm

# Steps that lack a form before requests wait for its recording, which takes as long as some tens of steps:
# so even where one form after the other is missed, at most a part of the time goes into recording.
MOST_MISSES = 200


class FormMisses:
    """due: the form to record now, if there is one."""

    def __init__(self) -> None:
        self.due: StepForm | None = None
        self._counts: Counter[StepForm] = Counter()

    def look(self, wanted: Iterable[StepForm], found: StepForm | None, lacked: StepForm) -> None:
        """A step takes `found`, or runs kernel by kernel. lacked: of its kind, with the rows that it has.

        wanted: not recorded yet.
        """
        kind = lacked.has_several, lacked.draws
        fitting = [
            one for one in wanted if (one.has_several, one.draws) == kind and one.num_rows >= lacked.num_rows
        ]
        best = min(fitting, key=lambda form: form.num_rows, default=None)
        if best is None or (found is not None and found.num_rows <= best.num_rows):
            return
        self._counts[best] += 1
        if self.due is None and self._counts[best] >= MOST_MISSES:
            self.due = best

    def forget(self, form: StepForm) -> None:
        """It is recorded, or will never be."""
        del self._counts[form]
        if self.due == form:
            self.due = None
