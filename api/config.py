"""The server's configuration. The command line is generated from it and from the engine's."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from maxsimd.engine.config import option

_MOST_PROCESSES = 64
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#]+")


class SetupError(Exception):
    """The server cannot be set up as configured. The message, one line, says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the HTTP server listens, guards itself and logs."""

    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 for all IPv4 addresses, :: for all of IPv4 and IPv6."
    )
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    fronts: int = option(1, "Processes that take requests, on the same port.")
    replicas: int = option(
        1,
        "Processes that each load the model, over which requests are spread; with several, --device may name "
        "several too, as cuda:0,cuda:1.",
    )
    tls_cert: str | None = option(
        None, "File with the certificate chain (PEM), to speak HTTPS instead of HTTP."
    )
    tls_key: str | None = option(
        None, "File with its private key (PEM); may be left out if --tls-cert holds it."
    )
    served_model_name: tuple[str, ...] = option(
        (), "Name of the model in requests and responses, the first of several; else its own. Repeatable."
    )
    models_dir: str | None = option(
        None,
        "Folder with models, which whoever has an admin's key may load and drop while the server runs, each "
        "by its path there.",
    )
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send as a bearer token; repeatable. MAXSIMD_API_KEY may hold keys too."
    )
    api_key_file: str | None = option(
        None,
        "File with one accepted key a line, and what its tenant may use behind it; read again when changed.",
    )
    cors_origin: tuple[str, ...] = option(
        (), "Origin whose pages may use the server from a browser, or * for all; repeatable."
    )
    max_body_mb: int = option(64, "Largest request body in MiB.")
    max_bodies_mb: int = option(
        256,
        "Most MiB of bodies that are worked on at a time; requests beyond get 429. With more in answers that "
        "are being read, the slowest readers are cut off.",
    )
    max_documents: int = option(10_000, "Most documents or texts in one request.")
    max_images: int = option(64, "Most pictures in one request.")
    allowed_media_host: tuple[str, ...] = option(
        (),
        "Host from which pictures are fetched that requests name by URL, over HTTPS, or an origin such as "
        "http://example.com:8080; repeatable. Else none are fetched.",
    )
    allowed_media_dir: str | None = option(
        None,
        "Folder of this machine from which requests may name pictures as file:///...; else there is none.",
    )
    long_documents: Literal["truncate", "window", "error"] = option(
        "truncate",
        "What is done with inputs that are too long unless the request says; window reads documents whole "
        "that are scored, and cuts other texts.",
    )
    accept_token_ids: bool = option(
        False,
        "Take token ids in place of texts. Clients send those of other tokenizers by default, which mean "
        "something else here, so they are refused otherwise.",
    )
    strict_fields: bool = option(
        False, "Refuse requests with fields that the route does not read, instead of warning about them."
    )
    normalize_scores: bool = option(
        False, "Give scores from 0 to 1, unless a request says normalize false or wants raw scores."
    )
    max_connections: int | None = option(
        None, "Most connections at a time; by default what the limit on descriptors allows, 10,000 at most."
    )
    header_seconds: float = option(10.0, "Longest that a request's headers may take, and a TLS handshake.")
    transfer_seconds: float = option(
        30.0,
        "Over how long the speed of a body, or of reading an answer, is measured: the longest standstill.",
    )
    min_bytes_per_second: int = option(
        8192, "Least speed of bodies and of reading answers, on average over --transfer-seconds."
    )
    idle_seconds: float = option(75.0, "How long a connection stays open between requests.")
    drain_seconds: float = option(
        5.0, "After SIGTERM or SIGHUP, how long work is still accepted while /ready answers 503."
    )
    grace_seconds: float = option(30.0, "After the drain, how long requests in flight may take to finish.")
    replica_timeout_seconds: float = option(
        5.0, "How long a replica may be silent before it gets no more work. It gets work once it answers."
    )
    restart_on_failure: bool = option(
        False,
        "Start the engine again, in the same process, after it has died; a fifth death within ten minutes "
        "ends the server.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least severe level that is logged."
    )
    log_format: Literal["text", "json"] = option("text", "Log lines for people or for machines.")

    @property
    def is_fleet(self) -> bool:
        """Whether more than one process serves."""
        return self.fronts > 1 or self.replicas > 1

    def __post_init__(self) -> None:
        for name in ("fronts", "replicas"):
            if not 1 <= getattr(self, name) <= _MOST_PROCESSES:
                raise ValueError(f"{name} must be from 1 to {_MOST_PROCESSES}, not {getattr(self, name)}")
        if self.models_dir is not None:
            self._check_alone()
        if self.is_fleet and self.restart_on_failure:
            raise ValueError(
                "restart_on_failure is for one process; with several, an engine that dies is started again"
            )
        for name in ("max_body_mb", "max_bodies_mb", "max_documents", "max_images", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("header_seconds", "transfer_seconds", "idle_seconds", "replica_timeout_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, not {getattr(self, name)}")
        for name in ("drain_seconds", "grace_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number from 0 on, not {getattr(self, name)}")
        if self.min_bytes_per_second < 0:
            raise ValueError(f"min_bytes_per_second must not be negative, not {self.min_bytes_per_second}")
        if not 0 <= self.port <= 65_535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        if not all(key.strip() for key in self.api_key):
            raise ValueError("api_key must not be empty; leave the option out to ask for no key")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key is of no use without tls_cert; give both")
        for origin in self.cors_origin:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origin must be * or like https://example.com, and have no path, not {origin!r}"
                )

    def _check_alone(self) -> None:
        """Raises ValueError for options that `models_dir` excludes."""
        if self.is_fleet:
            raise ValueError("models_dir is for one process; leave it out, or fronts and replicas")
        if self.restart_on_failure:
            raise ValueError("models_dir is for servers without restart_on_failure; leave one of them out")
        if len(self.served_model_name) > 1:
            raise ValueError("with models_dir a model has one served_model_name; leave out the others")
