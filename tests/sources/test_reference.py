"""Sources as users write them: what they name, and what is wrong with others."""

from pathlib import Path

import pytest

from headway_runtime.errors import ConfigError
from headway_runtime.sources import is_offline, resolve
from headway_runtime.sources.reference import (
    BucketModel,
    BundledModel,
    ClaimModel,
    FolderModel,
    HubModel,
    Reference,
    RegistryModel,
    parse,
)

DIGEST = "sha256:" + "0a" * 32
COMMIT = "0a" * 20


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("bundled://headway-tiny", BundledModel("headway-tiny")),
        ("/models/a", FolderModel(Path("/models/a"))),
        ("models", FolderModel(Path("models"))),
        ("file:///models/a%20b", FolderModel(Path("/models/a b"))),
        ("hf://Org-1/Name_2.5-1B", HubModel("Org-1/Name_2.5-1B", "main")),
        ("hf://org/name@v1.0", HubModel("org/name", "v1.0")),
        ("hf://org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
        (f"hf://org/name@{COMMIT}", HubModel("org/name", COMMIT)),
        ("s3://bucket/a/b/", BucketModel("bucket", "a/b")),
        ("s3://bucket", BucketModel("bucket", "")),
        ("s3://bucket/with space", BucketModel("bucket", "with space")),
        ("oci://r.example.com/org/name:v1", RegistryModel("r.example.com", "org/name", "v1")),
        ("oci://registry:5000/name", RegistryModel("registry:5000", "name", "latest")),
        ("oci://localhost/name", RegistryModel("localhost", "name", "latest")),
        (f"oci://r.example/a/b-c_d@{DIGEST}", RegistryModel("r.example", "a/b-c_d", DIGEST)),
        (f"oci://r.example:5000/a:tag@{DIGEST}", RegistryModel("r.example:5000", "a", DIGEST)),
        ("pvc://claim-1/a/b/", ClaimModel("claim-1", "a/b")),
        ("pvc://claim", ClaimModel("claim", "")),
    ],
)
def test_a_source_names_what_it_says(source: str, want: Reference) -> None:
    assert parse(source) == want


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("ftp://a/b", "hf://ORG/NAME"),
        ("hf://name", "want hf://ORG/NAME"),
        ("hf://a/b/c", "want hf://ORG/NAME"),
        ("hf://a/b@", "want hf://ORG/NAME"),
        ("hf://a/b@../x", "want hf://ORG/NAME"),
        ("hf://a--b/c", "want hf://ORG/NAME"),
        ("hf://../c", "want hf://ORG/NAME"),
        ("hf://a/b.git", "want hf://ORG/NAME"),
        ("hf://", "want hf://ORG/NAME"),
        ("s3://", "want s3://BUCKET/PREFIX"),
        ("s3://b/x", "want s3://BUCKET/PREFIX"),
        ("s3://bucket/a\nb", "want s3://BUCKET/PREFIX"),
        ("oci://name", "want oci://REGISTRY/REPOSITORY"),
        ("oci://org/name:v1", "a host with a dot or a port"),
        ("oci://r.example/Name", "in lower case"),
        ("oci://r.example/a@sha256:12", "want oci://REGISTRY/REPOSITORY"),
        ("pvc://Claim/x", "want pvc://CLAIM/PATH"),
        ("pvc://claim/../x", "want pvc://CLAIM/PATH"),
        ("file://models", "file:///absolute/folder"),
    ],
)
def test_what_names_nothing_is_refused_with_the_form_that_is_wanted(source: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(source)
    assert repr(source) in str(caught.value)
    assert remedy in str(caught.value)


def test_the_flag_names_a_revision_too() -> None:
    assert parse("hf://org/name", "v2") == HubModel("org/name", "v2")
    assert parse("hf://org/name@v2", "v2") == HubModel("org/name", "v2")
    for source, flag, complaint in (
        ("hf://org/name@v1", "v2", "two revisions"),
        ("hf://org/name", "a b", "--revision='a b'"),
        ("hf://org/name", "../x", "--revision='../x'"),
        ("s3://bucket/x", "v1", "--revision='v1' is for hf:// sources"),
        ("bundled://headway-tiny", "v1", "--revision='v1' is for hf:// sources"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            parse(source, flag)


def test_what_never_changes_is_told_from_what_may() -> None:
    pinned = [f"hf://a/b@{COMMIT}", f"oci://r.example/a@{DIGEST}"]
    moving = ["hf://a/b", "hf://a/b@v1", "oci://r.example/a:v1", "s3://bucket/a"]
    models = [parse(source) for source in (*pinned, *moving)]
    assert all(isinstance(one, HubModel | BucketModel | RegistryModel) for one in models)
    want = [COMMIT, DIGEST.removeprefix("sha256:"), None, None, None, None]
    assert [getattr(one, "pinned", None) for one in models] == want


def test_a_claim_is_for_pods() -> None:
    with pytest.raises(ConfigError, match=r"by pods alone.*spec\.model\.source"):
        resolve("pvc://claim/model")


def test_a_repository_without_its_scheme_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"or hf://org/name if that is a repository"):
        resolve("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        resolve("org/name")
    assert "hf://" not in str(caught.value)


def test_offline_is_for_all_sources_or_for_the_hub_alone() -> None:
    hub, bucket = parse("hf://a/b"), parse("s3://bucket/a")
    assert isinstance(hub, HubModel)
    assert isinstance(bucket, BucketModel)
    assert is_offline(hub, {"HEADWAY_OFFLINE": "1"})
    assert is_offline(bucket, {"HEADWAY_OFFLINE": "true"})
    assert is_offline(hub, {"HF_HUB_OFFLINE": "yes"})
    assert not is_offline(bucket, {"HF_HUB_OFFLINE": "1"})
    assert not is_offline(hub, {"HF_HUB_OFFLINE": "0"})
