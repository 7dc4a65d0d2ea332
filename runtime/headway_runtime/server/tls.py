"""Serving HTTPS: the flags (names as in vLLM), and their check at the start.

The certificate is checked before anything else starts, so that a wrong file is told at once. `ssl` is
imported only where it is asked for.
"""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.argument_types import integer
from headway_runtime.errors import ConfigError

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files in PEM form. cert_reqs: 0 asks clients for no certificate, 1 takes one, 2 wants one.

    refresh: whether renewed files are taken up while the server runs.
    """

    certfile: str
    keyfile: str | None
    ca_certs: str | None
    cert_reqs: int
    refresh: bool


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--ssl-certfile", metavar="PATH", help="serve HTTPS with this certificate (PEM, its chain after it)")
    add("--ssl-keyfile", metavar="PATH", help="its key, where the certificate's file does not hold it")
    add("--ssl-ca-certs", metavar="PATH", help="who signs the certificates of clients")
    add(
        "--ssl-cert-reqs",
        type=integer(0, 2),
        choices=(0, 1, 2),
        default=0,
        help="certificates of clients: 0 none, 1 checked if there is one, 2 required (default %(default)s)",
    )
    add("--enable-ssl-refresh", action="store_true", help="take up renewed files without a restart")


def tls_options(arguments: argparse.Namespace) -> TlsOptions | None:
    """What was asked for, or None for plain HTTP. ConfigError if the files are of no use."""
    if arguments.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "enable_ssl_refresh"):
            if value := getattr(arguments, name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag}={value!r} needs --ssl-certfile; add it, or leave {flag} out")
        return None
    if arguments.ssl_cert_reqs and arguments.ssl_ca_certs is None:
        raise ConfigError(
            f"--ssl-cert-reqs={arguments.ssl_cert_reqs} needs --ssl-ca-certs, against which to check"
        )
    options = TlsOptions(
        certfile=arguments.ssl_certfile,
        keyfile=arguments.ssl_keyfile,
        ca_certs=arguments.ssl_ca_certs,
        cert_reqs=arguments.ssl_cert_reqs,
        refresh=arguments.enable_ssl_refresh,
    )
    tls_context(options)
    return options


def tls_context(options: TlsOptions) -> "ssl.SSLContext":
    """What connections are accepted with. ConfigError names the file that is of no use."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_files(context, options)
    context.verify_mode = ssl.VerifyMode(options.cert_reqs)
    return context


def load_files(context: "ssl.SSLContext", options: TlsOptions) -> None:
    """Have `context` use what the files hold now. ConfigError names the one that is of no use."""
    flags = f"--ssl-certfile={options.certfile!r}"
    if options.keyfile is not None:
        flags += f" --ssl-keyfile={options.keyfile!r}"
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(options.certfile, options.keyfile, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{flags}: {error}; give a certificate and its unencrypted key in PEM form"
        ) from error
    if options.ca_certs is not None:
        try:
            context.load_verify_locations(options.ca_certs)
        except OSError as error:
            raise ConfigError(
                f"--ssl-ca-certs={options.ca_certs!r}: {error}; give certificates in PEM form"
            ) from error
