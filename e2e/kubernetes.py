"""kubectl and helm as functions, for tests: every call with a time limit, every failure with its output.

Knows nothing of Headway and nothing of how the cluster was made.
"""

import asyncio
import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

CALL_SECONDS = 60.0
POLL_SECONDS = 0.5

Object = dict[str, Any]
Spans = list[tuple[float, float]]
T = TypeVar("T")


class CallFailedError(AssertionError):
    """A command ended with a status other than 0; the message is its output."""


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """One cluster. `context` is that of a kubeconfig, empty for its current one.

    `has_pod_network`: whether this process reaches pods and Services by their addresses. `uninstalls`: when
    each `helm uninstall` began and ended, in seconds since the epoch. `older_charts`: when an older chart had
    today's operator run with the rights of its own.
    """

    context: str
    has_pod_network: bool
    uninstalls: Spans = field(default_factory=Spans, compare=False)
    older_charts: Spans = field(default_factory=Spans, compare=False)

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = CALL_SECONDS) -> str:
        """Run kubectl and return what it printed."""
        context = [f"--context={self.context}"] if self.context else []
        return _call(["kubectl", *context, *arguments], stdin, seconds)

    def helm(self, *arguments: str, seconds: float = CALL_SECONDS) -> str:
        """Run helm and return what it printed."""
        context = [f"--kube-context={self.context}"] if self.context else []
        began = time.time()
        try:
            return _call(["helm", *context, *arguments], None, seconds)
        finally:
            if arguments[0] == "uninstall":
                self.uninstalls.append((began, time.time()))

    def apply(self, *objects: Object) -> str:
        """`kubectl apply` as a user does it."""
        document = {"apiVersion": "v1", "kind": "List", "items": objects}
        return self.kubectl("apply", "--filename=-", stdin=json.dumps(document))

    def get(self, kind: str, name: str, namespace: str) -> Object:
        """One object. Raises CallFailedError when there is none."""
        output = self.kubectl("get", kind, name, f"--namespace={namespace}", "--output=json")
        found: Object = json.loads(output)
        return found

    def list(self, kinds: str, namespace: str, labels: str = "") -> list[Object]:
        """The objects of one or more kinds (`pods,services`) that match a label selector."""
        output = self.kubectl(
            "get", kinds, f"--namespace={namespace}", f"--selector={labels}", "--output=json"
        )
        items: list[Object] = json.loads(output)["items"]
        return items

    def raw(self, path: str) -> str:
        """GET a path of the API server, such as a pod's port through its proxy."""
        return self.kubectl("get", f"--raw={path}")

    @contextlib.contextmanager
    def service_url(self, name: str, namespace: str) -> Iterator[str]:
        """A base URL that reaches port 80 of a Service for as long as the context lasts."""
        if self.has_pod_network:
            yield f"http://{self.get('service', name, namespace)['spec']['clusterIP']}"
            return
        context = [f"--context={self.context}"] if self.context else []
        command = ["kubectl", *context, "port-forward", f"--namespace={namespace}", f"service/{name}", ":80"]
        # It reports every connection that a client closes; what matters shows in the requests themselves.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                found = re.search(r"127\.0\.0\.1:(\d+)", line)
                assert found, f"port-forward said {line!r}"
                yield f"http://127.0.0.1:{found.group(1)}"
            finally:
                process.terminate()


async def eventually(what: str, seconds: float, look: Callable[[], T | None]) -> T:
    """Call `look` in a thread until it returns something true; its AssertionErrors count as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        reason = ""
        try:
            if result := await asyncio.to_thread(look):
                return result
        except AssertionError as error:
            reason = f": {error}"
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:.0f} s{reason}")
        await asyncio.sleep(POLL_SECONDS)


def _call(command: list[str], stdin: str | None, seconds: float) -> str:
    answer = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds)
    if answer.returncode != 0:
        raise CallFailedError(f"{' '.join(command)}\n{answer.stdout}{answer.stderr}")
    return answer.stdout
