"""TLS of a server: `--ssl-certfile` and the options beside it."""

import ssl

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError, reason_of

# What OpenSSL misses, if it gives no reason of its own.
_ONE_FILE = "it must have a certificate and its private key in PEM; or name the key's file with --ssl-keyfile"
_TWO_FILES = "the first must have a certificate, the second its private key, in PEM"


def server_tls(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the context of HTTPS, None without a certificate. Raise `ConfigError` for unusable files and ciphers."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password is empty, since ssl would ask for it on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        pem = _ONE_FILE if config.ssl_keyfile is None else _TWO_FILES
        raise ConfigError(f"ssl_certfile: cannot use {_names(config)}: {_reason(error, pem)}") from error
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs: cannot use {config.ssl_ca_certs!r}: {_reason(error)}") from error
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigError(f"ssl_ciphers: no cipher is known in {config.ssl_ciphers!r}") from error
    return context


def _names(config: ServerConfig) -> str:
    key = "" if config.ssl_keyfile is None else f" with the key {config.ssl_keyfile!r}"
    return f"{config.ssl_certfile!r}{key}"


def _reason(error: Exception, pem: str = "it is not a PEM file") -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason.lower().replace("_", " ") if error.reason else pem
    return reason_of(error)
