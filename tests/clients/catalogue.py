"""The clients: for each, the environment that it runs in and the file with its checks."""

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Client:
    """`name` is that of its examples and of the file with its checks, if there is one; `environment` that of
    what is installed for it."""

    name: str
    environment: str

    @property
    def script(self) -> Path:
        if self.environment == "node":
            return HERE / "node" / f"{self.name}.mjs"
        return HERE / "checks" / f"{self.name}.py"


# As few environments as the pins of the clients allow.
_NAMES = {
    "vendors": ("with_openai", "with_cohere", "with_huggingface_hub", "with_voyageai", "with_mixedbread",
                "with_rerankers"),
    "infinity": ("with_infinity_client",),
    "langchain": ("with_langchain_cohere", "with_langchain_huggingface"),
    "litellm": ("with_litellm", "with_langchain_openai"),
    "llama_index": ("with_llama_index",),
    "haystack": ("with_haystack",),
    "node": ("with_npm_openai", "with_npm_cohere", "with_npm_ai"),
    "databases": ("with_qdrant", "with_chroma", "with_pgvector", "with_milvus", "with_search_engines"),
    "frameworks": ("in_langchain", "in_llama_index", "in_haystack", "in_lancedb"),
    "schemathesis": ("with_schemathesis",),
}  # fmt: skip
CLIENTS = tuple(Client(name, environment) for environment, names in _NAMES.items() for name in names)
