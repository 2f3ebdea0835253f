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
    """Options of the HTTP server: addresses, limits, keys and logs."""

    host: str = option(
        "127.0.0.1", "Address; 0.0.0.0 or :: for all", group="server", metavar="ADDRESS", is_usual=True
    )
    port: int = option(8000, "Port; 0 for a free one", group="server", is_usual=True)
    fronts: int = option(1, "Processes that take requests, on the same port", group="processes")
    replicas: int = option(1, "Processes that each load the model", group="processes", is_usual=True)
    tls_cert: str | None = option(
        None, "PEM file with the certificate chain, to serve HTTPS", group="security", metavar="FILE"
    )
    tls_key: str | None = option(
        None, "PEM file with the private key, if --tls-cert lacks it", group="security", metavar="FILE"
    )
    served_model_name: tuple[str, ...] = option(
        (), "Model name in requests and answers; repeatable", group="server", metavar="NAME", is_usual=True
    )
    models_dir: str | None = option(
        None,
        "Folder of models that admin keys may load and unload while the server runs",
        group="processes",
        metavar="FOLDER",
    )
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send; repeatable", group="security", metavar="KEY", is_usual=True
    )
    api_key_file: str | None = option(
        None,
        "File of keys, one a line with its tenant's limits; read again after a change",
        group="security",
        metavar="FILE",
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the server, or * for all; repeatable",
        group="security",
        metavar="ORIGIN",
    )
    max_body_mb: int = option(64, "Largest request body, in MiB", group="limits")
    max_bodies_mb: int = option(
        256, "Most MiB of request bodies in work; requests beyond get 429", within="limit"
    )
    max_documents: int = option(10_000, "Most documents or texts in a request", group="limits")
    max_images: int = option(64, "Most pictures in a request", within="limit")
    allowed_media_host: tuple[str, ...] = option(
        (),
        "Host, or origin, from which requests may fetch pictures by URL; repeatable",
        group="security",
        metavar="HOST",
    )
    allowed_media_dir: str | None = option(
        None,
        "Folder from which requests may read pictures as file:///...",
        group="security",
        metavar="FOLDER",
    )
    long_documents: Literal["truncate", "window", "error"] = option(
        "truncate", "Long texts: truncate, window or error", group="server", metavar="ACTION", is_usual=True
    )
    accept_token_ids: bool = option(
        False, "Accept token ids in place of texts, from this model's tokenizer", group="server"
    )
    strict_fields: bool = option(
        False, "Refuse requests with unknown fields instead of warning", group="server"
    )
    normalize_scores: bool = option(
        False, "Return scores from 0 to 1 by default, from models whose scores have bounds", group="server"
    )
    max_connections: int | None = option(
        None,
        "Most open connections",
        within="limit",
        by_default="the descriptor limit, at most 10000",
    )
    header_seconds: float = option(
        10.0, "Longest time for the headers of a request, or for a TLS handshake", within="limit"
    )
    transfer_seconds: float = option(
        30.0, "Window for averaging transfer speed, and the longest pause allowed", within="limit"
    )
    min_bytes_per_second: int = option(
        8192, "Lowest average speed of sending a body or reading an answer", within="limit"
    )
    idle_seconds: float = option(75.0, "Time after which an idle connection is closed", within="limit")
    drain_seconds: float = option(
        5.0, "Seconds after SIGTERM in which /ready answers 503 and work is still accepted", group="server"
    )
    grace_seconds: float = option(
        30.0, "Seconds after the drain in which requests may finish", group="server"
    )
    replica_timeout_seconds: float = option(
        5.0, "Silence after which a replica gets no work until it answers again", within="limit"
    )
    restart_on_failure: bool = option(
        False,
        "Restart a failed engine, except after a GPU error; the fifth failure in ten minutes ends the server",
        group="server",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Lowest level to log: debug, info, warning or error", group="server", metavar="LEVEL"
    )
    log_format: Literal["text", "json"] = option(
        "text", "Format of the log: text or json", group="server", metavar="FORMAT"
    )

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
            raise ValueError("tls_key needs tls_cert; set both")
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
