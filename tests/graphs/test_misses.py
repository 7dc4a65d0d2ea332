"""What steps lack is due once enough of them have lacked it."""

import pytest

from headway_runtime.graphs import misses
from headway_runtime.graphs.forms import StepForm
from headway_runtime.graphs.misses import FormMisses

WANTED = [
    StepForm(128),
    StepForm(72),
    StepForm(64),
    StepForm(256, draws=False),
    StepForm(72, has_several=True),
]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> FormMisses:
    monkeypatch.setattr(misses, "MOST_MISSES", 3)
    return FormMisses()


def test_the_smallest_form_that_would_hold_a_step_is_the_one_it_lacks(counted: FormMisses) -> None:
    for _ in range(2):
        counted.look(WANTED, StepForm(256), StepForm(65))
        assert counted.due is None
    counted.look(WANTED, StepForm(256), StepForm(72))

    assert counted.due == StepForm(72)


def test_steps_that_run_kernel_by_kernel_lack_a_form_of_their_kind(counted: FormMisses) -> None:
    for _ in range(3):
        counted.look(WANTED, None, StepForm(3, draws=False))

    assert counted.due == StepForm(256, draws=False)


@pytest.mark.parametrize(
    ("found", "lacked"),
    [
        pytest.param(StepForm(66), StepForm(65), id="the best one there is planned"),
        pytest.param(StepForm(72), StepForm(65), id="it is recorded already"),
        pytest.param(None, StepForm(129), id="none holds it"),
    ],
)
def test_a_step_that_would_run_no_better_lacks_nothing(
    found: StepForm | None, lacked: StepForm, counted: FormMisses
) -> None:
    for _ in range(9):
        counted.look(WANTED, found, lacked)

    assert counted.due is None


def test_one_form_is_due_at_a_time(counted: FormMisses) -> None:
    for _ in range(3):
        counted.look(WANTED, None, StepForm(65))
        counted.look(WANTED, None, StepForm(1))
    assert counted.due == StepForm(72)
    counted.forget(StepForm(72))
    left = [one for one in WANTED if one != StepForm(72)]

    counted.look(left, None, StepForm(1))

    assert counted.due == StepForm(64)
    counted.forget(StepForm(64))
    assert counted.due is None


def test_a_form_is_missed_for_hundreds_of_steps_before_requests_wait_for_it() -> None:
    counted = FormMisses()
    for _ in range(199):
        counted.look(WANTED, None, StepForm(65))
    assert counted.due is None

    counted.look(WANTED, None, StepForm(65))

    assert counted.due == StepForm(72)
