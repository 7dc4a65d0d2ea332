"""A model repository of the Hugging Face Hub, through the Hub's own library.

The library brings what is the Hub's: its endpoint and token, the listing, addresses, how redirects are
followed and what refusals mean. The bytes are fetched by `transfer`, as the library neither continues an
interrupted download nor compares what it got with the checksum. Imports the library, and so belongs into the
process that fetches.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

# Else the library asks the Hub for more than the user asked for: a list of names to put into its user agent.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

from headway_runtime.errors import ModelFetchError, SourceRefusedError
from headway_runtime.sources.checksums import Checksum
from headway_runtime.sources.http_answers import (
    TIMEOUT,
    chunks_of,
    is_transient,
    offset_of,
    retry_after,
    unreachable,
)
from headway_runtime.sources.reference import HubModel
from headway_runtime.sources.remote import Listing, RemoteFile, Stream, TransientError

LIBRARY = "headway"


class Hub:
    """One repository at one revision."""

    def __init__(self, model: HubModel, endpoint: str = constants.ENDPOINT) -> None:
        self._model = model
        self._commit = model.revision
        self._endpoint = endpoint
        self._headers = build_hf_headers(library_name=LIBRARY)

    def listing(self) -> Listing:
        """Of the commit that the revision names now: files at its top."""
        model = self._model
        try:
            api = HfApi(endpoint=self._endpoint, library_name=LIBRARY)
            info = api.model_info(
                model.repository, revision=model.revision, files_metadata=True, timeout=TIMEOUT.read
            )
        except HFValidationError as error:
            raise ModelFetchError(f"{model}: {error}") from error
        except HfHubHTTPError as error:
            self._refuse(error)
        except httpx2.HTTPError as error:
            raise unreachable(error, self._endpoint) from error
        if info.sha is None:
            raise ModelFetchError(
                f"{model}: {self._endpoint} does not say which commit it is; does HF_ENDPOINT name a Hub?"
            )
        self._commit = info.sha
        files = []
        for sibling in info.siblings or ():
            path = sibling.rfilename
            if "/" in path or sibling.size is None or sibling.blob_id is None:
                continue
            if sibling.lfs is not None:
                key, checksum = sibling.lfs.sha256, Checksum("sha256", sibling.lfs.sha256)
            else:
                key, checksum = sibling.blob_id, Checksum("git-sha1", sibling.blob_id)
            files.append(RemoteFile(path, sibling.size, key, path, checksum))
        return Listing(info.sha, tuple(files))

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[Stream]:
        """The bytes of a file of the commit, from the storage that the Hub redirects to."""
        url = hf_hub_url(self._model.repository, file.locator, revision=self._commit, endpoint=self._endpoint)
        headers = {**self._headers, "accept-encoding": "identity"}
        if offset:
            headers["range"] = f"bytes={offset}-"
        try:
            # The client takes the token off where a redirect leaves the Hub.
            with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
                self._check(response, file)
                yield Stream(offset_of(response, offset), chunks_of(response))
        except httpx2.HTTPError as error:
            raise unreachable(error, self._endpoint) from error

    def close(self) -> None:
        """Nothing: the library keeps one session for all."""

    def _check(self, response: httpx2.Response, file: RemoteFile) -> None:
        try:
            hf_raise_for_status(response)
        except HfHubHTTPError as error:
            self._refuse(error)
        first = response.history[0] if response.history else response
        etag = first.headers.get("x-linked-etag") or first.headers.get("etag") or ""
        etag = etag.removeprefix("W/").strip('"')
        if len(etag) == len(file.key) and etag != file.key:
            raise ModelFetchError(
                f"{self._model}: {file.path} has the etag {etag!r} where the Hub's list says {file.key!r}; "
                "start again, and if it stays so, what HF_ENDPOINT names is no faithful mirror"
            )

    def _refuse(self, error: HfHubHTTPError) -> NoReturn:
        model, status = self._model, error.response.status_code
        has_token = get_token() is not None
        token = "the token of HF_TOKEN" if os.environ.get("HF_TOKEN") else "the stored token"
        asked = f"{token} does not open it" if has_token else "no token was given"
        if isinstance(error, GatedRepoError):
            message = (
                f"access to it is granted by its owner, and {asked}; ask for access on the model's page and "
                "set HF_TOKEN to a token of that account"
            )
        elif isinstance(error, RevisionNotFoundError):
            message = (
                f"there is no revision {model.revision!r}; name a branch, tag or commit of the repository"
            )
        elif isinstance(error, RemoteEntryNotFoundError):
            message = "a file that its list names is not there; start again, it may have changed meanwhile"
        elif isinstance(error, RepositoryNotFoundError) or status in (401, 403):
            message = (
                f"there is no such repository at {self._endpoint}, or it is private and {asked}; look at the "
                "name, or set HF_TOKEN to a token that may read it"
            )
        elif is_transient(status):
            raise TransientError(
                f"{self._endpoint} answers {status}", retry_after(error.response.headers)
            ) from error
        else:
            message = f"{self._endpoint} answers {status}: {error.server_message or error}"
        raise SourceRefusedError(f"{model}: {message}") from error
