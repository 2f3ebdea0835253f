"""Our reranker in Haystack, in the framework's own process."""

from haystack import Document, Pipeline
from plain import BEST, DOCUMENTS, LATE_INTERACTION, QUERY, check_ranking

from maxsimd import SyncEngine
from maxsimd.integrations.haystack import MaxsimdRanker

_OPTIONS = {"dtype": "float32", "threads": 1}


def _documents() -> list[Document]:
    return [Document(content=text, meta={"place": i}) for i, text in enumerate(DOCUMENTS)]


def _check(pipeline: Pipeline, top: int) -> None:
    asked = {"ranker": {"query": QUERY, "documents": _documents()}}
    best = pipeline.run(asked)["ranker"]["documents"]
    check_ranking(LATE_INTERACTION, [(each.meta["place"], each.score) for each in best], top)


def ranks_in_a_pipeline_that_is_saved_and_loaded() -> None:
    pipeline = Pipeline()
    pipeline.add_component("ranker", MaxsimdRanker(top_k=3, **_OPTIONS))
    _check(pipeline, 3)
    # Pipelines that were saved before name this module.
    assert "maxsimd.integrations.haystack.MaxsimdRanker" in pipeline.dumps()
    allowed = {"allowed_modules": ["maxsimd.integrations.haystack"]}
    from_dict = Pipeline.from_dict(pipeline.to_dict(), **allowed)
    for loaded in (from_dict, Pipeline.loads(pipeline.dumps(), **allowed)):
        assert loaded.to_dict() == pipeline.to_dict()
        _check(loaded, 3)
        loaded.get_component("ranker").close()
    pipeline.get_component("ranker").close()


def is_loaded_with_a_ranker_of_each_own_setting() -> None:
    settings = {"top_k": 2, "score_threshold": 0.5, "normalize": True, "meta_fields_to_embed": ["place"]}
    ranker = MaxsimdRanker(**settings, **_OPTIONS)
    assert MaxsimdRanker.from_dict(ranker.to_dict()).to_dict() == ranker.to_dict()


def takes_an_engine_that_runs() -> None:
    with SyncEngine(**_OPTIONS, progress=False) as engine:
        ranker = MaxsimdRanker(engine=engine)
        documents = _documents()
        best = ranker.run(query=QUERY, documents=documents, top_k=1)["documents"]
        assert [each.meta["place"] for each in best] == [BEST]
        assert documents[BEST].score is None
        assert ranker.run(query=QUERY, documents=[]) == {"documents": []}
        try:
            ranker.to_dict()
        except ValueError:
            return
    raise AssertionError("a ranker with an engine was saved")
