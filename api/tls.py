"""The certificate that the server shows, where it speaks HTTPS itself."""

import ssl

from maxsimd.api.config import ServerConfig, SetupError


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """How to speak TLS, 1.2 or later; None for plain HTTP. Raises SetupError for files that do not serve."""
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    files = f"--tls-cert {config.tls_cert!r}"
    if config.tls_key is not None:
        files += f" and --tls-key {config.tls_key!r}"
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, _no_password)
    except ssl.SSLError as error:
        reason = (error.reason or "no PEM").lower().replace("_", " ")
        raise SetupError(f"cannot use {files}: {reason}; give a certificate chain and its own key") from error
    except OSError as error:
        raise SetupError(f"cannot read {files}: {error.strerror}") from error
    return context


def _no_password() -> str:
    raise SetupError(
        "the key of --tls-key has a password; give one without (openssl pkey -in KEY -out PLAIN)"
    )
