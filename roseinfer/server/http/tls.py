"""TLS of a server: `--ssl-certfile` and the options beside it."""

import ssl

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError


def server_tls(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the context of HTTPS, None without a certificate. Raise `ConfigError` for unusable files and ciphers."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password is empty, since ssl would ask for it on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(f"ssl_certfile: cannot use {_names(config)}: {_reason(error)}") from error
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


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return str(error.reason or "it is not a PEM file").lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
