"""The server's configuration. The command line is generated from it and from the engine's."""

import math
import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

from maxsimd.engine.config import option

_server, _processes = partial(option, group="server"), partial(option, group="processes")
_security, _main_limit = partial(option, group="security"), partial(option, group="limits")
_limit = partial(option, within="limit")
_COUNTS = (
    *("max_body_mb", "max_bodies_mb", "max_documents", "max_images", "max_connections"),
    *("batch_file_mb", "batch_mb", "batch_days"),
)
_TIMEOUTS = ("header_seconds", "transfer_seconds", "idle_seconds", "replica_timeout_seconds")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#]+")


class SetupError(Exception):
    """The server cannot be set up as configured. The message, one line, says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server: addresses, limits, keys and logs."""

    host: str = _server("127.0.0.1", "Address; 0.0.0.0 or :: for all", metavar="ADDRESS", is_usual=True)
    port: int = _server(8000, "Port; 0 for a free one", is_usual=True)
    grpc_port: int | None = _server(
        None, "Port for text-embeddings-inference's gRPC clients; 0 for a free one", metavar="N"
    )
    fronts: int = _processes(1, "Processes that take requests, on the same port")
    replicas: int = _processes(1, "Processes that each load the model", is_usual=True)
    tls_cert: str | None = _security(
        None, "PEM file with the certificate chain, to serve HTTPS", metavar="FILE"
    )
    tls_key: str | None = _security(
        None, "PEM file with the private key, if --tls-cert lacks it", metavar="FILE"
    )
    served_model_name: tuple[str, ...] = _server(
        (), "Model name in requests and answers; repeatable", metavar="NAME", is_usual=True
    )
    models_dir: str | None = _processes(
        None, "Folder of models that admin keys may load and unload while the server runs", metavar="FOLDER"
    )
    api_key: tuple[str, ...] = _security((), "Key that clients must send; repeatable", metavar="KEY")
    api_key_file: str | None = _security(
        None, "File of keys, one a line; read again after a change", metavar="FILE", is_usual=True
    )
    cors_origin: tuple[str, ...] = _security(
        (), "Origin whose pages may use the server, or * for all; repeatable", metavar="ORIGIN"
    )
    max_body_mb: int = _main_limit(64, "Largest request body, in MiB")
    max_bodies_mb: int = _limit(256, "Most MiB of request bodies in work; requests beyond get 429")
    max_documents: int = _main_limit(10_000, "Most documents or texts in a request")
    max_images: int = _limit(64, "Most pictures in a request")
    allowed_media_host: tuple[str, ...] = _security(
        (), "Host, or origin, from which requests may fetch pictures by URL; repeatable", metavar="HOST"
    )
    allowed_media_dir: str | None = _security(
        None, "Folder from which requests may read pictures as file:///...", metavar="FOLDER"
    )
    long_documents: Literal["truncate", "window", "error"] = _server(
        "truncate", "truncate, window or error", metavar="ACTION", is_usual=True
    )
    accept_token_ids: bool = _server(False, "Accept token ids in place of texts, from this model's tokenizer")
    strict_fields: bool = _server(False, "Refuse requests with unknown fields instead of warning")
    normalize_scores: bool = _server(
        False, "Return scores from 0 to 1 by default, from models whose scores have bounds"
    )
    max_connections: int | None = _limit(
        None, "Most open connections", by_default="the descriptor limit, at most 10000"
    )
    header_seconds: float = _limit(10.0, "Longest time for the headers of a request, or for a TLS handshake")
    transfer_seconds: float = _limit(
        30.0, "Window for averaging transfer speed, and the longest pause allowed"
    )
    min_bytes_per_second: int = _limit(8192, "Lowest average speed of sending a body or reading an answer")
    idle_seconds: float = _limit(75.0, "Time after which an idle connection is closed")
    drain_seconds: float = _server(
        5.0, "Seconds after SIGTERM in which /ready answers 503 and work is still accepted"
    )
    grace_seconds: float = _server(30.0, "Seconds after the drain in which requests may finish")
    replica_timeout_seconds: float = _limit(
        5.0, "Silence after which a replica gets no work until it answers again"
    )
    restart_on_failure: bool = _server(
        False,
        "Restart a failed engine, except after a GPU error; the fifth failure in ten minutes ends the server",
    )
    usage_file: str | None = _server(
        None, "SQLite file that keeps usage by tenant, model and day", metavar="FILE"
    )
    batch_dir: str | None = _server(
        None, "Folder for batch jobs and their files; several servers may share it", metavar="FOLDER"
    )
    batch_file_mb: int = _limit(200, "Largest file of batch requests, in MiB")
    batch_mb: int = _limit(4096, "Most MiB of a tenant's files, with the results of its batch jobs")
    batch_days: int = _limit(30, "Days after which files and batch jobs are dropped")
    log_level: Literal["debug", "info", "warning", "error"] = _server(
        "info", "Lowest level to log: debug, info, warning or error", metavar="LEVEL"
    )
    log_format: Literal["text", "json"] = _server("text", "Format of the log: text or json", metavar="FORMAT")

    @property
    def is_fleet(self) -> bool:
        """Whether more than one process serves."""
        return self.fronts > 1 or self.replicas > 1

    def __post_init__(self) -> None:
        for names, least, most, rule in (
            (("fronts", "replicas"), 1, 64, "from 1 to 64"),
            (("port", "grpc_port"), 0, 65_535, "from 0 to 65535"),
            (("min_bytes_per_second",), 0, math.inf, "at least 0"),
            (_COUNTS, 1, math.inf, "at least 1"),
            (_TIMEOUTS, math.ulp(0.0), sys.float_info.max, "a number above 0"),
            (("drain_seconds", "grace_seconds"), 0, sys.float_info.max, "a number from 0 on"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not least <= value <= most:
                    raise ValueError(f"{name} must be {rule}, not {value}")
        if self.models_dir is not None:
            if self.is_fleet:
                raise ValueError("models_dir is for one process; leave it out, or fronts and replicas")
            if self.restart_on_failure:
                raise ValueError("models_dir excludes restart_on_failure; leave one of them out")
            if len(self.served_model_name) > 1:
                raise ValueError("with models_dir a model has one served_model_name; leave out the others")
        if self.fronts > 1 and self.grpc_port is not None:
            raise ValueError("grpc_port needs one front; leave fronts out, or use several replicas")
        if self.is_fleet and self.restart_on_failure:
            raise ValueError(
                "restart_on_failure is for one process; with several, an engine that dies is started again"
            )
        if not all(key.strip() for key in self.api_key):
            raise ValueError("api_key must not be empty; leave the option out to ask for no key")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert; set both")
        for origin in self.cors_origin:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origin must be * or like https://example.com, and have no path, not {origin!r}"
                )
