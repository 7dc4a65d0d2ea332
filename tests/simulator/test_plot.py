"""Pictures of runs made by hand: what stands where."""

from typing import Any

import numpy as np
import pytest

from headway_operator.slo import target_of
from headway_simulator.plot import Timeline, figure_of
from headway_simulator.timeline import Level, Minute


def minute(at: float, **changes: Any) -> Minute:
    known = {
        "at_seconds": at,
        "requests_per_second": 2.0,
        "wanted": 1,
        "ready": 1,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
        "joint_attainment": 0.9,
        "ttft_milliseconds": 300.0,
        "tpot_milliseconds": 30.0,
    }
    return Minute(**{**known, **changes})


def level(at: float, ready: int) -> Level:
    return Level(at, wanted=3, ready=ready, max_num_seqs=32, max_num_batched_tokens=1024)


def heights(axis: Any) -> dict[str, list[tuple[float, float, float]]]:
    """By label: (begin, end, height) of each step, in minutes."""
    found = {}
    for patch in axis.patches:
        heights, edges, _ = patch.get_data()
        found[patch.get_label()] = [*zip(edges[:-1], edges[1:], heights, strict=True)]
    return found


def test_the_last_minute_is_drawn_to_the_loads_end(build: Any) -> None:
    minutes = [minute(0.0), minute(60.0), minute(120.0, requests_per_second=5.0)]
    drawn = Timeline("t", minutes, [level(5.0, 1)], 150.0, oracle=[1, 2, 2])
    load, replicas, *_ = figure_of(drawn, target_of(build.service().spec)).axes
    assert heights(load)["requests/s"][-1] == (2.0, 2.5, 5.0)
    assert heights(replicas)["oracle"][-1] == (2.0, 2.5, 2.0)
    assert load.get_xlim() == (0.0, 2.5)
    shorter = Timeline("t", minutes[:1], [], 50.0)
    (short,) = heights(figure_of(shorter, target_of(build.service().spec)).axes[0])
    assert short == "requests/s"


def test_replicas_are_drawn_from_the_pass_on_that_saw_them(build: Any) -> None:
    """A minute's end as the height of all of it would show an answer to a jump before the jump."""
    passes = [level(5.0, 1), level(75.0, 2), level(90.0, 3)]
    shown = Timeline("t", [minute(0.0), minute(60.0)], passes, 120.0)
    replicas = figure_of(shown, target_of(build.service().spec)).axes[1]
    assert heights(replicas)["ready"] == [(5 / 60, 1.25, 1.0), (1.25, 1.5, 2.0), (1.5, 2.0, 3.0)]


def test_a_name_is_no_mathematics(build: Any) -> None:
    shown = Timeline("cost_$\\foo$.csv", [minute(0.0)], [level(0.0, 1)], 60.0)
    figure_of(shown, target_of(build.service().spec)).draw_without_rendering()


def test_panels_say_what_they_show_and_mark_the_jump_and_the_objective(build: Any) -> None:
    minutes = [minute(0.0), minute(60.0, joint_attainment=None, ttft_milliseconds=None)]
    shown = Timeline("t", minutes, [level(0.0, 1)], 120.0, jump_at_seconds=40.0)
    figure = figure_of(shown, target_of(build.service().spec))
    names = [axis.get_ylabel() for axis in figure.axes]
    assert names == ["requests/s", "replicas", "limits", "attained, %", "TTFT, ms", "TPOT, ms"]
    for axis in figure.axes:
        (jump,) = [line for line in axis.lines if line.get_label() == "jump"]
        assert np.asarray(jump.get_xdata()) == pytest.approx(40 / 60)
    attained = figure.axes[3]
    begun, unknown = heights(attained)["in each minute"]
    assert begun == (0.0, 1.0, 90.0)
    assert np.isnan(unknown[2])
    (objective,) = [line for line in attained.lines if line.get_label() == "objective"]
    assert np.asarray(objective.get_ydata()) == pytest.approx(95)


def test_a_legend_stands_beside_its_panel_and_covers_no_line(build: Any) -> None:
    figure = figure_of(Timeline("t", [minute(0.0)], [level(0.0, 1)], 60.0), target_of(build.service().spec))
    figure.draw_without_rendering()
    for axis in figure.axes:
        legend = axis.get_legend()
        assert legend is not None
        assert legend.get_window_extent().x0 >= axis.get_window_extent().x1
