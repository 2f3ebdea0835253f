"""Documents that requests name by their digests."""

import json
from base64 import urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers import handle
from maxsimd.api.state import ServerState
from maxsimd.engine import (
    DocumentDigest,
    Engine,
    EngineConfig,
    Engines,
    InvalidRequestError,
    Stage,
    Truncation,
    UnknownDocumentsError,
)
from maxsimd.engine.cache.documents import DocumentTexts
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction
from tests.unit.calling_handlers import Pieces

TEXTS = ["Paris is the capital of France.", "Berlin lies on the Spree.", "w", "long " * 700]
QUERY = "What is the capital of France?"
DIGESTS = [*map(DocumentDigest.of, TEXTS)]
KINDS = [late_interaction.stanford, bi_encoders.bge, cross_encoders.bert, language_models.jina_reranker_v3]


@pytest.mark.parametrize("save", KINDS, ids=lambda save: str(save.__qualname__))
async def test_digests_stand_for_texts_over_a_restart(tmp_path: Path, save: Callable[[Path], str]) -> None:
    options: dict[str, Any] = {
        "dtype": "float32",
        "cache_dir": str(tmp_path / "cache"),
        "document_store_mb": 1,
    }
    checkpoint = save(tmp_path / "checkpoint")
    async with Engine(checkpoint, **options) as engine:
        right = await engine.score(QUERY, TEXTS)
        with pytest.raises(UnknownDocumentsError, match="4 documents are unknown") as raised:
            await engine.score(QUERY, [*DIGESTS, *DIGESTS], tenant="a")
        assert raised.value.digests == tuple(map(str, DIGESTS))
        added = await engine.add_documents(TEXTS, tenant="a")
        assert (added.digests, added.not_kept) == (DIGESTS, ())
        assert (await engine.score(QUERY, DIGESTS, tenant="a")).scores == pytest.approx(
            right.scores, abs=1e-6
        )
        with pytest.raises(UnknownDocumentsError):
            await engine.score(QUERY, DIGESTS[:1], tenant="b")
        # A text beside digests is known from then on.
        await engine.score(QUERY, [DIGESTS[0], "new"], tenant="a")
        await engine.score(QUERY, [DocumentDigest.of("new")], tenant="a")
    async with Engine(checkpoint, **options) as engine:
        found = await engine.rerank(QUERY, DIGESTS, tenant="a", explain=True)
        assert [each.score for each in found] == pytest.approx(sorted(right.scores, reverse=True), abs=1e-6)
        assert {each.document for each in found} == {*DIGESTS}
        async with engine.stream(QUERY, DIGESTS, tenant="a") as stream:
            assert {one.document for new in [new async for new in stream] for one in new} == {*DIGESTS}
        await engine.clear_cache()
        with pytest.raises(UnknownDocumentsError):
            await engine.score(QUERY, DIGESTS, tenant="a")


async def test_without_texts_only_cached_embeddings_are_named(tmp_path: Path) -> None:
    async with Engine(late_interaction.stanford(tmp_path / "colbert"), cache_mb=1) as engine:
        added = await engine.add_documents([*TEXTS, *(f"{i} " * 30 for i in range(1000))])
        assert len(added.not_kept) > 20, "there is no room"
        kept = [digest for i, digest in enumerate(added.digests) if i not in added.not_kept]
        assert (await engine.score(QUERY, kept)).usage.cached_documents == len(kept)
        for options in ({"explain": True}, {"cache": "bypass"}, {"cache": "refresh"}):
            with pytest.raises(InvalidRequestError, match="their texts are needed"):
                await engine.score(QUERY, kept, **options)
        with pytest.raises(UnknownDocumentsError):
            await engine.score(QUERY, kept, truncation=Truncation(max_tokens=-1, max_document_tokens=3))
        with pytest.raises(InvalidRequestError, match=r"queries\[0\] is a digest"):
            await engine.score(kept[0], TEXTS)
    async with Engine(cross_encoders.bert(tmp_path / "bert")) as engine:
        for refused in (engine.score(QUERY, DIGESTS), engine.add_documents(TEXTS)):
            with pytest.raises(InvalidRequestError, match="document_store_mb"):
                await refused


async def test_a_cascade_takes_digests(tmp_path: Path) -> None:
    first, last = EngineConfig(), EngineConfig(model=cross_encoders.bert(tmp_path), document_store_mb=1)
    async with Engines({"first": first, "last": last}) as engines:
        for name in engines.names:
            await engines[name].add_documents(TEXTS)
        stages = [Stage("first", 2), Stage("last")]
        found, right = [await engines.rerank(QUERY, each, stages) for each in (DIGESTS, TEXTS)]
        assert [one.document for one in found.results] == [DIGESTS[one.index] for one in right.results]


@pytest.mark.parametrize("on_disk", [False, True])
def test_texts_are_bounded_for_each_tenant(tmp_path: Path, on_disk: bool) -> None:
    texts = DocumentTexts(1 << 20, tmp_path if on_disk else None)
    texts.of("b").put([(DIGESTS[1].value, TEXTS[1])])
    digests = [bytes([i]) * 32 for i in range(40)]
    texts.of("a").put([(digest, "x" * 100_000) for digest in digests])
    found = [texts.of("a").get(digest) is not None for digest in digests]
    assert found == [False] * (40 - sum(found)) + [True] * sum(found), "the oldest have left"
    assert 0 < sum(found) <= 10
    assert texts.of("b").get(DIGESTS[1].value) == TEXTS[1]
    assert texts.nbytes <= 2 << 20
    texts.clear()
    assert (texts.of("b").get(DIGESTS[1].value), len(texts)) == (None, 0)
    texts.close()


async def test_requests_name_documents_by_digest(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one name=a\ntwo\nthree\n")

    async def ask(path: str, key: str, **body: object) -> tuple[int, Any]:
        pieces = Pieces([json.dumps(body).encode()])
        answer = await handle(state, "POST", path, {"authorization": f"Bearer {key}"}, pieces)
        return answer.status, json.loads(answer.body)

    async with Engine(cache_dir=str(tmp_path / "cache")) as engine:
        state = ServerState(engine, ServerConfig(api_key_file=str(keys)))
        texts = [{"title": "Paris"}, "Berlin"]
        status, added = await ask("/documents", "one", documents=texts, rank_fields=["title"])
        digests = [sha256(text).hexdigest() for text in (b"title: Paris", b"Berlin")]
        assert (status, [each["digest"] for each in added["data"]]) == (200, digests)
        base64 = urlsafe_b64encode(bytes.fromhex(digests[1])).decode().rstrip("=")
        named = [
            {"digest": digests[0].upper(), "id": "p"},
            {"digest": base64, "id": 7},
            {"text": "x", "id": "t"},
        ]
        status, ranked = await ask("/rerank", "one", query="q", documents=named, rank_fields=["text"])
        shown = {each["index"]: each["document"] for each in ranked["results"]}
        assert shown == {
            0: {"digest": digests[0], "id": "p"}, 1: {"digest": digests[1], "id": 7},
            2: {"text": "text: x", "id": "t"},
        }  # fmt: skip
        for wrong in ("", "0" * 63, "g" * 64, 7, None):
            assert (await ask("/rerank", "one", query="q", documents=[{"digest": wrong}]))[0] == 400
        bodies: dict[str, dict[str, Any]] = {
            "/rerank": {"query": "q", "documents": named},
            "/documents": {"documents": "d"},
        }
        for path, body in bodies.items():
            status, refused = await ask(path, "two", **body)
            assert (status, "this key has no name" in refused["error"]["message"]) == (400, True)
        assert (await ask("/documents", "one", documents=[{"embedding": [1.0]}]))[0] == 400
