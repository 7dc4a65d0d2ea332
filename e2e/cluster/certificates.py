"""The cluster's certificate authority, certificates and kubeconfigs, made afresh for each start."""

import json
import subprocess
from pathlib import Path

from e2e.cluster.settings import API_SERVICE_IP, NODE_IP, NODE_NAME, Settings

VALID_DAYS = "30"
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def folder(settings: Settings) -> Path:
    return settings.work / "pki"


def create(settings: Settings) -> None:
    """Write keys, certificates and the kubeconfigs of the administrator and of kubelet."""
    pki = folder(settings)
    pki.mkdir()
    _openssl(
        pki, "req", "-x509", *NEW_KEY, "-keyout", "ca.key", "-out", "ca.crt",
        "-subj", "/CN=headway-e2e-ca", "-days", VALID_DAYS,
    )  # fmt: skip
    _openssl(pki, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    _openssl(pki, "ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    service_names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    addresses = ["127.0.0.1", NODE_IP, API_SERVICE_IP]
    names = [f"DNS:{name}" for name in service_names] + [f"IP:{address}" for address in addresses]
    _certificate(pki, "apiserver", "/O=kubernetes/CN=kube-apiserver", names)
    _certificate(pki, "admin", "/O=system:masters/CN=admin", ["DNS:admin"])
    _certificate(
        pki, "kubelet", f"/O=system:nodes/CN=system:node:{NODE_NAME}", [f"DNS:{NODE_NAME}", f"IP:{NODE_IP}"]
    )
    _kubeconfig(pki, "admin", settings.kubeconfig)
    _kubeconfig(pki, "kubelet", settings.work / "kubelet.kubeconfig")


def _certificate(pki: Path, name: str, subject: str, alternative_names: list[str]) -> None:
    extensions = pki / f"{name}.ext"
    extensions.write_text(
        f"subjectAltName={','.join(alternative_names)}\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    request, certificate = f"{name}.csr", f"{name}.crt"
    _openssl(pki, "req", *NEW_KEY, "-keyout", f"{name}.key", "-out", request, "-subj", subject)
    _openssl(
        pki, "x509", "-req", "-in", request, "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
        "-days", VALID_DAYS, "-out", certificate, "-extfile", str(extensions),
    )  # fmt: skip


def _kubeconfig(pki: Path, user: str, path: Path) -> None:
    server = {"server": f"https://{NODE_IP}:6443", "certificate-authority": str(pki / "ca.crt")}
    keys = {"client-certificate": str(pki / f"{user}.crt"), "client-key": str(pki / f"{user}.key")}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "headway-e2e", "cluster": server}],
        "users": [{"name": user, "user": keys}],
        "contexts": [{"name": "headway-e2e", "context": {"cluster": "headway-e2e", "user": user}}],
        "current-context": "headway-e2e",
    }
    path.write_text(json.dumps(document, indent=1))


def _openssl(pki: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=pki, check=True, timeout=60, capture_output=True)
