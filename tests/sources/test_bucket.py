"""S3: models in buckets of a real server, with real signatures, and what faults on the way do."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.config import Config

from headway_runtime.errors import ModelFetchError
from headway_runtime.fit.headers import read_headers
from headway_runtime.sources import resolve_adapter
from headway_runtime.sources.bucket import Bucket
from headway_runtime.sources.cache_folders import store_of
from headway_runtime.sources.fetch import fetch
from headway_runtime.sources.fetch_process import check_config
from headway_runtime.sources.patience import Patience
from headway_runtime.sources.reference import BucketModel

KEYS = {"AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test"}
BUCKET = "models"
SHARD = "model-00002-of-00003.safetensors"
PART_BYTES = 5 << 20  # the least that S3 takes, but for the last one


@pytest.fixture(scope="session")
def owner(s3_server: str) -> Iterator[Any]:
    """A client of the bucket's owner, who puts models there."""
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=s3_server,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        # As older tools upload: without a checksum of their own, so that there are etags alone.
        config=Config(request_checksum_calculation="when_required"),
    )
    client.create_bucket(Bucket=BUCKET)
    yield client
    client.close()


@pytest.fixture
def user(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who fetches has the keys and the endpoint in the environment."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL_S3": s3_server}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def upload(owner: Any, request: pytest.FixtureRequest) -> Callable[..., BucketModel]:
    """Put files under a prefix of the test's own."""
    prefix = f"team/{hashlib.sha256(request.node.name.encode()).hexdigest()[:8]}"

    def put(files: dict[str, bytes], **options: Any) -> BucketModel:
        for name, content in files.items():
            owner.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=content, **options)
        return BucketModel(BUCKET, prefix)

    return put


Fetch = Callable[..., Path]


@pytest.fixture
def fetched(tmp_path: Path, impatient: Patience, watcher: Any) -> Fetch:
    def run(model: BucketModel, patience: Patience = impatient) -> Path:
        store = store_of(model, str(tmp_path / "cache"), os.environ)
        with closing(Bucket(model)) as bucket:
            return fetch(model, bucket, store, patience, watcher, check_config)

    return run


@pytest.mark.usefixtures("user")
def test_fetches_what_lies_right_below_the_prefix(
    upload: Any, fetched: Fetch, make_files: Any, holds: Any, watcher: Any
) -> None:
    files = make_files()
    model = upload({**files, "older/model.safetensors": b"x", "older/config.json": b"{}"})
    folder = fetched(model)
    holds(folder, files)
    assert watcher.arrived_bytes == watcher.expected == sum(p.stat().st_size for p in folder.iterdir())
    # Again: asked what there is, and nothing else.
    assert fetched(model) == folder
    assert watcher.arrived_bytes == watcher.expected


@pytest.mark.usefixtures("user")
def test_a_plan_needs_no_more_than_headers(
    s3_server: str,
    upload: Any,
    make_safetensors: Any,
    proxy: Any,
    cut: Any,
    impatient: Patience,
    watcher: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = make_safetensors()
    model = upload(files)
    between = proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{between.address}")
    # Whoever wants all of the weights meets a connection that breaks.
    between.cuts = [cut(after=2_900_000)] * 2
    store = store_of(model, str(tmp_path / "cache"), os.environ)
    with closing(Bucket(model)) as bucket:
        folder = fetch(model, bucket, store, impatient, watcher, check_config, headers_only=True)
    found = read_headers(folder)
    assert found is not None
    assert (found.num_files, found.num_bytes) == (2, 6_000_000)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*")) < 2_900_000
    assert store.complete(folder.name.removeprefix("headers-")) is None


@pytest.mark.usefixtures("user")
def test_an_adapter_lies_in_a_bucket_as_models_do(
    upload: Any, adapter_files: dict[str, bytes], tmp_path: Path
) -> None:
    model = upload({**adapter_files, "optimizer.pt": b"x"})
    folder = resolve_adapter(str(model), download_dir=str(tmp_path / "cache"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == adapter_files


@pytest.mark.usefixtures("user")
def test_an_object_that_is_replaced_makes_another_model(
    upload: Any, fetched: Fetch, make_files: Any, holds: Any, watcher: Any
) -> None:
    files = make_files()
    first = fetched(upload(files))
    newer = {**files, SHARD: os.urandom(1_000_000)}
    before = watcher.arrived_bytes
    second = fetched(upload(newer))
    holds(second, newer)
    holds(first, files)
    assert watcher.arrived_bytes - before == 1_000_000


@pytest.mark.usefixtures("user")
@pytest.mark.parametrize("algorithm", [None, "SHA256", "CRC32"])
def test_what_the_server_knows_of_an_object_is_what_it_is_compared_with(
    upload: Any, tiny: dict[str, bytes], algorithm: str | None
) -> None:
    model = upload(tiny, **({"ChecksumAlgorithm": algorithm} if algorithm else {}))
    with closing(Bucket(model)) as bucket:
        file = next(one for one in bucket.listing().files if one.path == "config.json")
    want = {None: "md5", "SHA256": "sha256", "CRC32": "crc32"}[algorithm]
    assert file.checksum is not None
    assert file.checksum.algorithm == want


@pytest.mark.usefixtures("user")
def test_uploads_in_parts_are_compared_part_by_part(
    owner: Any, upload: Any, fetched: Fetch, tiny: dict[str, bytes], holds: Any
) -> None:
    weights = os.urandom(2 * PART_BYTES + 12345)
    files = {**tiny, "model.safetensors": weights}
    model = upload({name: content for name, content in files.items() if name != "model.safetensors"})
    where = {"Bucket": BUCKET, "Key": f"{model.prefix}/model.safetensors"}
    upload_id = owner.create_multipart_upload(**where)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(weights), PART_BYTES), 1):
        body = weights[start : start + PART_BYTES]
        part = owner.upload_part(**where, UploadId=upload_id, PartNumber=number, Body=body)
        parts.append({"ETag": part["ETag"], "PartNumber": number})
    owner.complete_multipart_upload(**where, UploadId=upload_id, MultipartUpload={"Parts": parts})
    with closing(Bucket(model)) as bucket:
        file = next(one for one in bucket.listing().files if one.path == "model.safetensors")
    assert file.checksum is not None
    assert (file.checksum.algorithm, file.checksum.part_bytes) == ("md5-parts", PART_BYTES)
    assert (fetched(model) / "model.safetensors").read_bytes() == weights


@pytest.mark.usefixtures("user")
def test_broken_connections_are_gone_on_from_where_they_broke(
    s3_server: str,
    upload: Any,
    fetched: Fetch,
    make_files: Any,
    holds: Any,
    proxy: Any,
    cut: Any,
    watcher: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = make_files(num_shards=1, shard_bytes=4_000_000)
    model = upload(files)
    between = proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{between.address}")
    # Small files and answers pass; connections that carry weights break.
    between.cuts = [cut(after=1_500_000), cut(after=1_200_000)]
    holds(fetched(model), files)
    assert between.cuts == []
    assert watcher.arrived_bytes == watcher.expected


@pytest.mark.usefixtures("user")
def test_an_object_that_is_replaced_while_it_is_fetched_is_never_mixed(
    owner: Any, upload: Any, fetched: Fetch, make_files: Any, tmp_path: Path
) -> None:
    model = upload(make_files())
    with closing(Bucket(model)) as bucket:
        file = next(one for one in bucket.listing().files if one.path == SHARD)
        owner.put_object(Bucket=BUCKET, Key=f"{model.prefix}/{SHARD}", Body=b"newer")
        with pytest.raises(ModelFetchError, match="was replaced while it was fetched; start again"):
            bucket.open(file, 0).__enter__()


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, r"answers 403 AccessDenied, and no credentials were found; set AWS_ACCESS_KEY_ID"),
        (
            {**KEYS, "AWS_SECRET_ACCESS_KEY": "wrong"},
            r"answers 403 SignatureDoesNotMatch .*need s3:ListBucket",
        ),
        (
            {**KEYS, "AWS_ACCESS_KEY_ID": "AKIAOTHER"},
            r"answers 404 XAdminUserNotFound \(No user exists with the provided access key",
        ),
        (
            {"AWS_ACCESS_KEY_ID": "AKIATEST"},
            r"not usable: Partial credentials found in env, missing: AWS_SECRET_ACCESS_KEY",
        ),
        ({"AWS_PROFILE": "nobody"}, r"\(nobody\) could not be found"),
    ],
    ids=["none", "wrong secret", "unknown key", "half of them", "no such profile"],
)
def test_refusals_say_what_to_do(
    s3_server: str,
    owner: Any,
    fetched: Fetch,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    want: str,
) -> None:
    for name, value in {**environment, "AWS_ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelFetchError, match=want):
        fetched(BucketModel(BUCKET, "team/x"))


def test_credentials_of_a_profile_are_found(
    s3_server: str, upload: Any, fetched: Fetch, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.environ["HOME"]) / ".aws"
    folder.mkdir(parents=True)
    lines = ["[profile models]", f"endpoint_url = {s3_server}", "region = us-east-1"]
    (folder / "config").write_text("\n".join(lines))
    secrets = [f"{name.lower()} = {value}" for name, value in KEYS.items()]
    (folder / "credentials").write_text("\n".join(["[models]", *secrets]))
    monkeypatch.setenv("AWS_PROFILE", "models")
    assert (fetched(upload(tiny)) / "model.safetensors").read_bytes() == tiny["model.safetensors"]


@pytest.mark.usefixtures("user", "owner")
def test_a_bucket_or_prefix_that_is_not_there_is_named(fetched: Fetch) -> None:
    with pytest.raises(ModelFetchError, match=r"s3://nothing/x: there is no bucket 'nothing' at http://127"):
        fetched(BucketModel("nothing", "x"))
    with pytest.raises(ModelFetchError, match=r"s3://models/nothing: there is no config.json"):
        fetched(BucketModel(BUCKET, "nothing"))


@pytest.mark.usefixtures("user")
def test_a_server_that_is_gone_leaves_what_is_cached(
    s3_server: str, upload: Any, fetched: Fetch, tiny: Any, proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = upload(tiny)
    between = proxy(s3_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{between.address}")
    folder = fetched(model)
    between.close()
    assert fetched(model) == folder
    with pytest.raises(ModelFetchError, match=r"cannot be reached.*given up"):
        fetched(replace(model, prefix="other"))


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, "us-east-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_REGION": "eu-north-1", "AWS_DEFAULT_REGION": "eu-west-1"}, "eu-north-1"),
    ],
)
def test_the_region_is_the_environments(
    environment: dict[str, str], want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with closing(Bucket(BucketModel("models", "a"))) as bucket:
        assert bucket._client.meta.region_name == want


def test_two_servers_may_have_buckets_of_one_name() -> None:
    model = BucketModel("models", "a")
    paths = [
        store_of(model, "/cache", {"AWS_ENDPOINT_URL": url} if url else {}).path
        for url in ("", "http://one", "http://two")
    ]
    assert len(set(paths)) == 3


@pytest.mark.usefixtures("user")
def test_the_command_fetches_from_a_bucket(upload: Any, make_files: Any, headway: Any, holds: Any) -> None:
    files = make_files(num_shards=1)
    done = headway("fetch", str(upload(files)))
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    holds(folder, files)
    assert folder.is_relative_to(Path(os.environ["HOME"]) / ".cache" / "headway" / "models")
    offline = headway("fetch", str(upload({})), HEADWAY_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, done.stdout)
