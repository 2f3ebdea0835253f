"""LangChain's package for OpenAI. By default it sends the ids of OpenAI's own tokens, which mean something
else to another model: that must be refused, and never give vectors of nonsense."""

import os
from importlib.util import find_spec
from pathlib import Path

from plain import BI_ENCODER, DOCUMENTS, QUERY, check_vectors, error_of

# The table of tokens is loaded from the web, but litellm comes with a copy.
_LITELLM = find_spec("litellm")
assert _LITELLM is not None
assert _LITELLM.origin is not None
os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(_LITELLM.origin).parent / "litellm_core_utils" / "tokenizers")

from langchain_openai import OpenAIEmbeddings  # noqa: E402
from openai import BadRequestError  # noqa: E402

_OPTIONS = {"model": "text-embedding-ada-002", "base_url": BI_ENCODER + "/v1", "api_key": "none"}


def is_refused_where_it_sends_token_ids() -> None:
    embeddings = OpenAIEmbeddings(**_OPTIONS)
    error = error_of(BadRequestError, lambda: embeddings.embed_documents(list(DOCUMENTS)))
    assert "check_embedding_ctx_length=False" in str(error), error
    error = error_of(BadRequestError, lambda: embeddings.embed_query(QUERY))
    assert "check_embedding_ctx_length=False" in str(error), error


def embeds_where_it_sends_texts() -> None:
    embeddings = OpenAIEmbeddings(**_OPTIONS, check_embedding_ctx_length=False)
    check_vectors(embeddings.embed_documents(list(DOCUMENTS)), DOCUMENTS)
    check_vectors([embeddings.embed_query(QUERY)], [QUERY])
