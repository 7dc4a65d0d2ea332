"""Command lines written for `vllm serve`: what is taken, what is refused, and what the guide says."""

import re
from pathlib import Path

import pytest

from headway_runtime.errors import ConfigError
from headway_runtime.server.options import build_parser, parse_options
from headway_runtime.server.vllm_flags import ANYWAY, REFUSED

GUIDE = Path(__file__).parent.parent.parent / "docs" / "serving.md"
TAKEN = [[flag, value] for flag, one in ANYWAY.items() for value in one.values]
TAKEN += [[flag] for flag, one in ANYWAY.items() if not one.values]


@pytest.mark.parametrize("arguments", TAKEN, ids=" ".join)
def test_what_the_server_does_anyway_is_taken_and_changes_nothing(
    model_folder: Path, arguments: list[str]
) -> None:
    assert parse_options([str(model_folder), *arguments], {}) == parse_options([str(model_folder)], {})


@pytest.mark.parametrize("flag", REFUSED)
def test_what_it_does_not_is_refused_with_what_to_use_instead(model_folder: Path, flag: str) -> None:
    for arguments in ([f"{flag}=other"], [flag, "other"], [flag]):
        with pytest.raises(ConfigError) as caught:
            parse_options([str(model_folder), *arguments], {})
        assert str(caught.value).startswith(flag)
        assert REFUSED[flag] in str(caught.value)


def test_code_of_a_model_cannot_be_asked_for(model_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--trust-remote-code .*no code of a model is ever run; leave it out"
    ):
        parse_options([str(model_folder), "--trust-remote-code"], {})


def test_a_flag_that_asks_for_more_than_it_does_names_the_value(model_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--pipeline-parallel-size='2' is vLLM's .* --tensor-parallel-size"
    ):
        parse_options([str(model_folder), "--pipeline-parallel-size", "2"], {})


def test_flags_that_are_named_as_a_way_out_are_there() -> None:
    known = set(build_parser()._option_string_actions)
    for flag, remedy in REFUSED.items():
        for named in re.findall(r"--[a-z][a-z-]+", remedy):
            assert named in known - {*ANYWAY, *REFUSED}, (flag, named)


def test_the_guide_lists_these_flags() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    section = text.partition("## A command line written for vLLM")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `--")]
    listed = {flag: cells for cells in rows for flag in re.findall(r"`(--[a-z-]+)", cells[1])}
    assert set(listed) == {*ANYWAY, *REFUSED}
    for flag, cells in listed.items():
        want = set(ANYWAY[flag].values) if flag in ANYWAY else set()
        assert set(re.findall(r"`([^`]+)`", cells[2])) == want, flag
        assert cells[2].strip().startswith("no") == (flag not in ANYWAY), flag
