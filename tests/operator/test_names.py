"""Names of children fit where Kubernetes puts them."""

from headway_operator import names
from headway_operator.state import ServiceKey


def test_every_child_of_the_longest_name_fits_into_a_label() -> None:
    longest = "n" * names.MAX_NAME_LENGTH
    children = [
        names.service(longest),
        names.replicas_service(longest),
        names.gateway(longest),
        names.admin_config_map(longest),
        names.memory_config_map(longest),
        names.revision(longest, "f" * names.HASH_LENGTH) + "-0123456789-01234",
        names.gateway(longest) + "-0123456789-01234",
    ]
    assert all(len(child) <= 63 for child in children)
    assert len(set(children)) == len(children)


def test_selectors_are_parts_of_the_labels() -> None:
    labels = {**names.component_labels("demo", "runtime"), names.REVISION_LABEL: "1a2b3c4d"}
    assert names.component_selector("demo", "runtime").items() <= labels.items()
    assert names.revision_selector("demo", "1a2b3c4d").items() <= labels.items()
    text = names.selector_text(names.component_selector("demo", "runtime"))
    assert text == "serving.headway.dev/component=runtime,serving.headway.dev/service=demo"


def test_the_audience_names_the_service() -> None:
    assert names.audience(ServiceKey("team", "demo")) == "team/demo"
