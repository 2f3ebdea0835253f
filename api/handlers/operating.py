"""The routes for people who run a server: health, models, metrics, the cache, and loading and dropping
models."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from maxsimd import __version__
from maxsimd.api.answer import Answer, ApiError, json_page, no_such_model, now, quoted
from maxsimd.api.handlers.bodies import LARGE_BODY, NAMES, Body, read_body, wrong_bodies_refused
from maxsimd.api.handlers.rerank import ScoreScale
from maxsimd.api.handlers.route import Group, Route, Shown, get
from maxsimd.api.models import SeveralModels
from maxsimd.api.options import in_flags
from maxsimd.api.reading import unread_fields
from maxsimd.api.state import ServerState
from maxsimd.api.usage import as_csv
from maxsimd.api.wire import AlwaysList, Created, Model, about
from maxsimd.engine.config import ScoreType
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.several.engines import DROPPED

# Names of models may have slashes.
MODEL_PATH = "/v1/models/{name}"


class Counts(msgspec.Struct):
    ready: Annotated[int, about("Number that can answer.", 2)]
    of: Annotated[int, about("Number that should.", 2)]


class Status(msgspec.Struct, omit_defaults=True):
    status: Annotated[str, about("starting, ok, restarting, draining or dead.", "ok")]
    models: Annotated[Counts | None, about("Models, on a server of several.")] = None
    replicas: Annotated[Counts | None, about("Replicas, on a server of several processes.")] = None


class Version(msgspec.Struct):
    version: Annotated[str, about("Version of maxsimd.", __version__)]


class CardScale(ScoreScale):
    pass


class ModelCard(msgspec.Struct, kw_only=True):
    """A model. One that was never loaded has the first six fields."""

    id: Annotated[str, about("Name of the model in requests.", "all-MiniLM-L6-v2")]
    object: Annotated[str, about("Always `model`.", "model")] = "model"
    created: Created
    owned_by: Annotated[str, about("Always `maxsimd`; `infinity` on Infinity's routes.", "maxsimd")]
    root: Annotated[str | None, about("Checkpoint that the model was loaded from.", "all-MiniLM-L6-v2")]
    state: Annotated[str, about("ok, loading, dropped, or why it is not served.", "ok")]
    max_model_len: Annotated[int | UnsetType, about("Most tokens that the model reads.", 512)] = UNSET
    score_type: Annotated[str | UnsetType, about("Kind of scoring.", "late-interaction")] = UNSET
    score_scale: Annotated[CardScale | UnsetType | None, about("Scale of scores; null for classifiers.")] = (
        UNSET
    )
    normalized_score_scale: Annotated[
        CardScale | UnsetType | None, about("Scale with `normalize`; null if the model has none.")
    ] = UNSET
    execution: Annotated[str | UnsetType, about("How texts of different lengths run together.", "packed")] = (
        UNSET
    )
    device: Annotated[str | UnsetType, about("Device that the model runs on.", "cpu")] = UNSET
    kernels: Annotated[str | UnsetType, about("Kernels that the model runs with.", "avx512")] = UNSET
    checked: Annotated[
        list[str] | UnsetType,
        about("What the self-check found at load.", ["packed batches match"]),
    ] = UNSET


class Models(msgspec.Struct, kw_only=True):
    object: AlwaysList = "list"
    data: Annotated[list[ModelCard], about("The models.")]


class Info(msgspec.Struct, kw_only=True):
    """text-embeddings-inference's description of the model."""

    model_id: Model
    model_sha: Annotated[None, about("Always null.", None)] = None
    model_dtype: Annotated[str, about("Number format of the weights.", "float32")]
    model_type: Annotated[
        dict[str, Any],
        about("Purposes of the model, main one first.", {"embedding": {"pooling": "mean"}}),
    ]
    max_input_length: Annotated[int, about("Most tokens that the model reads.", 512)]
    max_client_batch_size: Annotated[int, about("Most documents of a request.", 1000)]
    max_batch_tokens: Annotated[int, about("Most tokens of a step.", 16384)]
    auto_truncate: Annotated[bool, about("Whether long texts are truncated.", True)]
    version: Annotated[str, about("Version of maxsimd.", __version__)]
    models: Annotated[
        list[str] | UnsetType,
        about("Names of all models, if there are several.", ["rerank", "embed"]),
    ] = UNSET


async def health(state: ServerState) -> Answer:
    """For liveness probes: 503 only if the process must be replaced."""
    return json_page(_status(state), status=503 if state.phase == "dead" else 200)


async def ready(state: ServerState) -> Answer:
    """For load balancers: 200 only while the server takes requests and does not drain."""
    if state.is_ready:
        return json_page(_status(state))
    return json_page(_status(state), status=503).with_headers(Retry_After="5")


def _status(state: ServerState) -> Status:
    status = Status(state.phase)
    if state.models is not None:
        meant_to_be = [name for name in state.models.names if state.models.state(name) != DROPPED]
        status.models = Counts(len(state.models.served_names), len(meant_to_be))
    elif state.fleet is not None:
        status.replicas = Counts(*state.fleet.replicas)
    return status


async def show_version(state: ServerState) -> Answer:
    return json_page(Version(__version__))


async def models(state: ServerState) -> Answer:
    names = state.model_names if state.models is None else state.models.names
    return json_page(Models(data=[model_card(state, name) for name in names]))


async def show_model(state: ServerState) -> Answer:
    name = state.name_in_path
    state.check_model(name)
    return json_page(model_card(state, name if state.models is None else state.models.find(name)))


def model_card(state: ServerState, name: str) -> ModelCard:
    """The entry of /v1/models for one name of a model."""
    models = state.models
    facts = state.engine.facts if models is None else models.facts_of(name)
    card = ModelCard(id=name, created=now(), owned_by="maxsimd", root=None, state="ok")
    if models is not None:
        card.root, card.state = models.setups[name].engine.model, in_flags(models.state(name))
    if facts is None:
        return card
    return msgspec.structs.replace(
        card,
        root=facts.name,
        max_model_len=facts.max_tokens,
        score_type=facts.score_type.value,
        score_scale=_scale(facts, normalize=state.config.normalize_scores and facts.normalizes),
        normalized_score_scale=_scale(facts, normalize=True),
        execution=facts.execution,
        device=facts.device,
        kernels=facts.kernels,
        checked=list(facts.findings),
    )


def _scale(facts: ModelFacts, normalize: bool) -> CardScale | None:
    """The scale of scores by default, or of normalized ones; None if the model has none."""
    if not facts.has_score or (normalize and not facts.normalizes):
        return None
    scale = facts.scales.normalized if normalize else facts.scales.default
    return CardScale(scale.transform, scale.least, scale.most)


async def info(state: ServerState) -> Answer:
    """text-embeddings-inference's description of the model, or of the first of several."""
    model = state.engine.facts
    return json_page(
        Info(
            model_id=state.model_name,
            # With int8 weights, this is the type of everything else.
            model_dtype=model.precision.partition(" ")[0],
            model_type=_tei_kind(model),
            max_input_length=model.max_tokens,
            max_client_batch_size=state.config.max_documents,
            max_batch_tokens=model.step_tokens,
            auto_truncate=state.config.long_documents != "error",
            version=__version__,
            models=UNSET if state.models is None else list(state.model_names),
        )
    )


def _tei_kind(model: ModelFacts) -> dict[str, Any]:
    """The model's purposes for text-embeddings-inference's clients. Some look only at the first key."""
    if not model.has_score:
        return {"classifier": _labels(model)}
    ranking = {"reranker": _labels(model)}
    if model.score_type.scores_together or len(model.labels) == 1:
        return ranking
    if model.labels:
        return {**ranking, "classifier": _labels(model)}
    pooling = "splade" if model.dims.keys() == {"sparse_embed"} else model.embed_pooling or "none"
    embedding = {"embedding": {"pooling": pooling}}
    is_for_ranking = model.score_type is ScoreType.LATE_INTERACTION
    return {**ranking, **embedding} if is_for_ranking else {**embedding, **ranking}


def _labels(model: ModelFacts) -> dict[str, Any]:
    names = list(enumerate(model.labels or ("relevance",)))
    return {"id2label": {str(i): name for i, name in names}, "label2id": {name: i for i, name in names}}


async def clear_cache(state: ServerState, body: Body) -> Answer:
    """Removes all embeddings and scores from the cache."""
    await state.engine.clear_cache()
    return Answer(204)


class UsageRow(msgspec.Struct):
    """Usage of one tenant and model on one day."""

    day: Annotated[str, about("Day, in UTC.", "2026-01-31")]
    tenant: Annotated[str, about("Tenant of the key; empty without keys.", "search")]
    model: Model
    requests: Annotated[int, about("Requests answered.", 120)]
    documents: Annotated[int, about("Their documents or texts.", 12_000)]
    tokens: Annotated[int, about("Their tokens.", 1_500_000)]
    cached_tokens: Annotated[int, about("Tokens of these that did not run.", 900_000)]
    device_seconds: Annotated[float, about("Their seconds in steps, shared by tokens.", 41.7)]
    refused: Annotated[int, about("Requests that got a 429 or a 413.", 2)]


class UsageReport(msgspec.Struct, kw_only=True):
    object: AlwaysList = "list"
    data: Annotated[list[UsageRow], about("By day, tenant and model.")]


USAGE = frozenset({"/usage", "/usage.csv"})


async def show_usage(state: ServerState) -> Answer:
    """The tenant's own usage; all usage for keys of admins, and on a server without keys."""
    tenant = _tenant_shown(state)

    def page() -> Answer:
        rows = state.usage.rows(tenant)
        return json_page(UsageReport(data=[UsageRow(*key, *astuple(used)) for key, used in rows]))

    return await asyncio.to_thread(page)


async def show_usage_as_csv(state: ServerState) -> Answer:
    tenant = _tenant_shown(state)
    table = await asyncio.to_thread(lambda: as_csv(state.usage.rows(tenant)))
    return Answer(200, {"Content-Type": "text/csv; charset=utf-8"}, table)


def _tenant_shown(state: ServerState) -> str | None:
    """The tenant whose usage a request may see; None for all. Raises ApiError (403) for a key whose usage is
    not kept apart."""
    if state.fleet is not None and not state.usage.is_kept:
        message = "with several processes, usage is known only with --usage-file; start the server with it"
        raise ApiError(400, message)
    if state.is_admin or not state.keys.are_asked_for:
        return None
    if state.usage.is_kept and state.keys.may_change_number(state.tenant):
        message = "usage is kept by the names of keys, and this key has none; add name=... in --api-key-file"
        raise ApiError(403, message)
    return state.tenant


async def metrics(state: ServerState) -> Answer:
    fleet, registry = state.fleet, state.engine.metrics.registry
    page = generate_latest(registry) if fleet is None else await fleet.metrics()
    return Answer(200, {"Content-Type": CONTENT_TYPE_LATEST}, page)


_shown = partial(Shown, Group.OPERATE)


ROUTES = (
    get("/health", health, Status, shown=_shown("Liveness probe")),
    get("/ready", ready, Status, shown=_shown("Readiness probe")),
    get("/ping", ready, Status, shown=_shown("Readiness probe, as SageMaker calls it")),
    get("/info", info, Info, shown=_shown("Describe the model, for text-embeddings-inference's clients")),
    get("/version", show_version, Version, shown=_shown("Version of maxsimd")),
    get("/v1/models", models, Models, shown=_shown("List the models")),
    get("/models", models, Models, shown=_shown("List the models")),
    get(MODEL_PATH, show_model, ModelCard, shown=_shown("Describe a model")),
    get("/metrics", metrics, CONTENT_TYPE_LATEST.partition(";")[0], shown=_shown("Prometheus metrics")),
    get("/usage", show_usage, UsageReport, shown=_shown("Usage by day and model; of all tenants for admins")),
    get("/usage.csv", show_usage_as_csv, "text/csv", shown=_shown("The same as CSV")),
    Route("/cache", ("DELETE",), clear_cache, _shown("Empty the cache"), status=204),
)


async def load(state: ServerState, body: Body) -> Answer:
    """Returns when the model is served."""
    state, models, name = await _changing(state, body)
    state.check_ready()
    try:
        await models.add(name)
    except ApiError:
        raise
    except Exception as error:
        reason = in_flags(str(error)) or type(error).__name__
        raise ApiError(422, f"the model {quoted(name)} cannot be loaded: {reason}", "name") from error
    return json_page(model_card(state, name)).with_field_warnings(state.field_warnings)


async def drop(state: ServerState, body: Body) -> Answer:
    """Returns when the model is gone."""
    state, models, name = await _changing(state, body)
    if name not in models.names:
        raise no_such_model(name, models.served_names)
    state.check_ready()
    await models.remove(name)
    return Answer(204).with_field_warnings(state.field_warnings)


async def _changing(state: ServerState, body: Body) -> tuple[ServerState, SeveralModels, str]:
    """Reads the body of a request that loads or drops a model. Returns the state with the warnings about its
    fields, all models, and the name."""
    with state.held as held:
        given = await read_body(state, body, held)
    if len(given) > LARGE_BODY:
        raise ApiError(413, "the body is too large; send none, because loading and dropping read no fields")
    unread = []
    with wrong_bodies_refused(), suppress(msgspec.DecodeError):  # a body is optional
        unread = unread_fields(_NoFields(), NAMES.decode(given))
    assert state.models is not None
    return state.warning_about(unread, MODEL_PATH), state.models, state.name_in_path


class _NoFields(msgspec.Struct):
    """A load request has no fields: the server's configuration says how a model runs."""


def check_allowed(state: ServerState, headers: Mapping[str, str]) -> None:
    """Raises ApiError (403) without an admin's key."""
    message = "this key may not load or drop models; send one that the file of keys gives admin=yes"
    if not state.keys.has_admins:
        message = "models are loaded and dropped only where the file of keys (--api-key-file) gives a key "
        message += "admin=yes"
    if not state.keys.is_admin(headers.get("authorization", "")):
        raise ApiError(403, message)


CHANGE_ROUTES = (
    Route(MODEL_PATH, ("POST",), load, _shown("Load a model"), answers=(ModelCard,)),
    Route(MODEL_PATH, ("DELETE",), drop, _shown("Drop a model"), status=204),
)
