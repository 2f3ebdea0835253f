"""The server's configuration, beside the engine's; the command line is generated from both."""

from dataclasses import dataclass
from typing import Literal

from maxsimd.engine.config import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the HTTP server listens, guards itself and logs."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    served_model_name: str | None = option(None, "Name of the model in requests and responses; else its own.")
    api_key: tuple[str, ...] = option((), "Key that clients must send as a bearer token; repeatable.")
    api_key_file: str | None = option(None, "File with one accepted key a line.")
    max_body_mb: int = option(64, "Largest request body in MiB.")
    max_bodies_mb: int = option(
        256,
        "Most MiB of bodies that are worked on at a time; requests beyond are refused (429).",
    )
    max_documents: int = option(10_000, "Most documents or texts in one request.")
    long_documents: Literal["truncate", "window", "error"] = option(
        "truncate",
        "What /rerank does with over-long documents unless the request says; window reads them whole.",
    )
    grace_seconds: float = option(30.0, "After SIGTERM, how long requests in flight may take to finish.")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least severe level that is logged."
    )
    log_format: Literal["text", "json"] = option("text", "Log lines for people or for machines.")

    def __post_init__(self) -> None:
        for name in ("max_body_mb", "max_bodies_mb", "max_documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
