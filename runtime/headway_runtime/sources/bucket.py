"""The objects below a prefix of an S3 bucket, through botocore.

botocore brings what is AWS's: the chain of credentials, endpoints and regions from the environment and
~/.aws, signatures. With credentials nowhere, requests go out unsigned, which public buckets answer. Bytes are
fetched by `transfer`; every request names the etag that was listed, so that an object which is replaced
meanwhile is noticed and never mixed. Imports botocore, and so belongs into the process that fetches.

What an object is compared with, the first of these that it has: SHA-256 or CRC-32 of the whole object, the
MD5 of one part or of all parts. An object with none of them (CRC-64 alone, a key of KMS) is held to its size.
"""

import base64
import hashlib
import http.client
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's own name
    HTTPClientError,
)
from urllib3.exceptions import HTTPError as StreamBroken

from headway_runtime.errors import ModelFetchError, SourceRefusedError
from headway_runtime.sources.checksums import Checksum
from headway_runtime.sources.reference import BucketModel
from headway_runtime.sources.remote import (
    CONNECT_SECONDS,
    READ_SECONDS,
    Listing,
    RemoteFile,
    Stream,
    TransientError,
)
from headway_runtime.sources.wanted import may_be_wanted

DEFAULT_REGION = "us-east-1"
READ_BYTES = 1 << 18
_ETAG_OF_PARTS = re.compile(r"([0-9a-f]{32})-([1-9][0-9]*)")
_TRANSIENT_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"}
)


class Bucket:
    """One prefix of one bucket."""

    def __init__(self, model: BucketModel) -> None:
        self._model = model
        session = botocore.session.get_session()
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            # Who fetches asks again by itself.
            retries={"mode": "standard", "total_max_attempts": 1},
            user_agent_extra="headway",
        )
        try:
            self._has_credentials = session.get_credentials() is not None
            if not self._has_credentials:
                config = config.merge(Config(signature_version=UNSIGNED))
            # AWS_REGION is what all of AWS's libraries but this one read. Without a region it makes no
            # client, even for servers that have none.
            region = os.environ.get("AWS_REGION") or session.get_config_variable("region") or DEFAULT_REGION
            self._client: Any = session.create_client("s3", region_name=region, config=config)
        except (BotoCoreError, ValueError) as error:
            raise ModelFetchError(f"{model}: the settings for S3 are not usable: {error}") from error
        self._endpoint: str = self._client.meta.endpoint_url

    def listing(self) -> Listing:
        """Objects right below the prefix, with their checksums; identified by all names and etags."""
        prefix = f"{self._model.prefix}/" if self._model.prefix else ""
        files: list[RemoteFile] = []
        others: list[RemoteFile] = []
        token: dict[str, str] = {}
        while True:
            with self._asking():
                page = self._client.list_objects_v2(
                    Bucket=self._model.bucket, Prefix=prefix, Delimiter="/", **token
                )
            for row in page.get("Contents", ()):
                name = row["Key"].removeprefix(prefix)
                if may_be_wanted(name):
                    files.append(self._described(row["Key"], name))
                elif name:
                    # Never fetched; it is listed so that an error can say what was found instead.
                    others.append(RemoteFile(name, row["Size"], "", row["Key"], None))
            if not page.get("IsTruncated"):
                break
            token = {"ContinuationToken": page["NextContinuationToken"]}
        text = "\n".join(f"{file.path} {file.key}" for file in sorted(files, key=lambda one: one.path))
        return Listing(hashlib.sha256(text.encode()).hexdigest()[:40], (*files, *others))

    def _described(self, key: str, name: str) -> RemoteFile:
        with self._asking():
            head = self._client.head_object(Bucket=self._model.bucket, Key=key, ChecksumMode="ENABLED")
        etag, num_bytes = head["ETag"].strip('"'), int(head["ContentLength"])
        safe = hashlib.sha256(f"{key} {etag} {num_bytes}".encode()).hexdigest()
        return RemoteFile(name, num_bytes, safe, f"{etag} {key}", self._checksum(key, etag, head))

    def _checksum(self, key: str, etag: str, head: dict[str, Any]) -> Checksum | None:
        is_whole = head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        if is_whole and "-" not in (value := head.get("ChecksumSHA256") or "-"):
            return Checksum("sha256", _hex(value))
        if is_whole and "-" not in (value := head.get("ChecksumCRC32") or "-"):
            return Checksum("crc32", value)
        if head.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in head:
            return None
        if re.fullmatch("[0-9a-f]{32}", etag):
            return Checksum("md5", etag)
        if match := _ETAG_OF_PARTS.fullmatch(etag):
            return self._checksum_of_parts(key, etag, int(match[2]), int(head["ContentLength"]))
        return None

    def _checksum_of_parts(self, key: str, etag: str, num_parts: int, num_bytes: int) -> Checksum | None:
        """Of an upload in parts: all but the last are as long as the first, whose length the server tells."""
        try:
            with self._asking():
                first = self._client.head_object(Bucket=self._model.bucket, Key=key, PartNumber=1)
        except ModelFetchError:
            return None  # this server does not know parts
        part_bytes = int(first["ContentLength"])
        if part_bytes < 1 or -(-num_bytes // part_bytes) != num_parts:
            return None
        return Checksum("md5-parts", etag, part_bytes)

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[Stream]:
        """The bytes of an object as it was listed."""
        etag, _, key = file.locator.partition(" ")
        ranged = {"Range": f"bytes={offset}-"} if offset else {}
        with self._asking():
            answer = self._client.get_object(
                Bucket=self._model.bucket, Key=key, IfMatch=f'"{etag}"', **ranged
            )
        body = answer["Body"]
        try:
            begins_there = offset and str(answer.get("ContentRange", "")).startswith(f"bytes {offset}-")
            yield Stream(offset if begins_there else 0, self._chunks(body))
        finally:
            body.close()

    def close(self) -> None:
        """Give connections back."""
        self._client.close()

    def _chunks(self, body: Any) -> Iterator[bytes]:
        while True:
            try:
                chunk = body.read(READ_BYTES)
            except (BotoCoreError, StreamBroken, http.client.HTTPException, OSError) as error:
                raise TransientError(f"the connection to {self._endpoint} broke ({error})") from error
            if not chunk:
                return
            yield chunk

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            self._refuse(error)
        except (ConnectionError, HTTPClientError) as error:
            raise TransientError(f"{self._endpoint} cannot be reached ({error})") from error
        except BotoCoreError as error:
            raise ModelFetchError(f"{self._model}: {error}") from error

    def _refuse(self, error: ClientError) -> NoReturn:
        code = str(error.response.get("Error", {}).get("Code", ""))
        metadata = error.response.get("ResponseMetadata", {})
        status = int(metadata.get("HTTPStatusCode", 0))
        said = str(error.response.get("Error", {}).get("Message", ""))
        model = self._model
        if status >= 500 or status == 429 or code in _TRANSIENT_CODES:
            after = str(metadata.get("HTTPHeaders", {}).get("retry-after", ""))
            raise TransientError(
                f"{self._endpoint} answers {status} {code}", float(after) if after.isdigit() else None
            ) from error
        if code == "NoSuchBucket":
            message = (
                f"there is no bucket {model.bucket!r} at {self._endpoint}; look at its name and the endpoint"
            )
        elif status == 412:
            message = "an object was replaced while it was fetched; start again to fetch the new one"
        elif code == "NoSuchKey":
            message = "an object that was listed is gone; start again"
        elif status in (400, 401, 403) and not self._has_credentials:
            message = (
                f"{self._endpoint} answers {status} {code}, and no credentials were found; set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the role of the pod's service "
                "account"
            )
        elif status in (401, 403):
            message = (
                f"{self._endpoint} answers {status} {code} ({said}); the credentials that were found need "
                "s3:ListBucket on the bucket and s3:GetObject on its objects"
            )
        else:
            message = f"{self._endpoint} answers {status} {code} ({said})"
        # What was there a moment ago may be there again.
        kind = ModelFetchError if status == 412 or code == "NoSuchKey" else SourceRefusedError
        raise kind(f"{model}: {message}") from error


def _hex(base64_text: str) -> str:
    return base64.b64decode(base64_text).hex()
