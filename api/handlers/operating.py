"""The routes for people who run a server: health, models, metrics, the cache, and loading and dropping
models."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from maxsimd import __version__
from maxsimd.api.answer import (
    Answer,
    ApiError,
    body_not_unicode,
    json_page,
    no_such_model,
    now,
    quoted,
    too_deep,
    too_large,
)
from maxsimd.api.handlers.route import LARGE_BODY, Body, Group, Route, Shown, Work, delete, get, read_body
from maxsimd.api.models import LastModelError, SeveralModels, find_model, served_names
from maxsimd.api.options import in_flags
from maxsimd.api.reading import UnreadField, unread_fields
from maxsimd.api.state import ServerState
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


class CardScale(msgspec.Struct):
    transform: Annotated[str, about("How the model's outputs become scores.", "maxsim")]
    min: Annotated[float | None, about("Lowest score; null for no bound.", 0)]
    max: Annotated[float | None, about("Highest score; null for no bound.", 1)]


class ModelCard(msgspec.Struct, kw_only=True):
    """A model. One that was never loaded has the first six fields."""

    id: Annotated[str, about("Name of the model in requests.", "all-MiniLM-L6-v2")]
    object: Annotated[str, about("Always `model`.", "model")] = "model"
    created: Created
    owned_by: Annotated[str, about("Always `maxsimd`; `infinity` on Infinity's routes.", "maxsimd")]
    root: Annotated[str | None, about("Checkpoint that the model was loaded from.", "all-MiniLM-L6-v2")]
    state: Annotated[str, about("ok, loading, dropped, or why it is not served.", "ok")]
    max_model_len: Annotated[int | msgspec.UnsetType, about("Most tokens that the model reads.", 512)] = (
        msgspec.UNSET
    )
    score_type: Annotated[str | msgspec.UnsetType, about("Kind of scoring.", "late-interaction")] = (
        msgspec.UNSET
    )
    score_scale: Annotated[
        CardScale | msgspec.UnsetType | None, about("Scale of scores; null for classifiers.")
    ] = msgspec.UNSET
    normalized_score_scale: Annotated[
        CardScale | msgspec.UnsetType | None, about("Scale with `normalize`; null if the model has none.")
    ] = msgspec.UNSET
    execution: Annotated[
        str | msgspec.UnsetType, about("How texts of different lengths run together.", "packed")
    ] = msgspec.UNSET
    device: Annotated[str | msgspec.UnsetType, about("Device that the model runs on.", "cpu")] = msgspec.UNSET
    kernels: Annotated[str | msgspec.UnsetType, about("Kernels that the model runs with.", "avx512")] = (
        msgspec.UNSET
    )
    checked: Annotated[
        list[str] | msgspec.UnsetType,
        about("What the self-check found at load.", ["packed batches match"]),
    ] = msgspec.UNSET


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
        list[str] | msgspec.UnsetType,
        about("Names of all models, if there are several.", ["rerank", "embed"]),
    ] = msgspec.UNSET


async def health(state: ServerState) -> Answer:
    """For liveness probes: 503 only if the process must be replaced."""
    return json_page(_status(state), status=503 if state.phase == "dead" else 200)


async def ready(state: ServerState) -> Answer:
    """For load balancers: 200 only while the server takes requests and does not drain."""
    if state.is_ready:
        return json_page(_status(state))
    return json_page(_status(state), status=503).with_headers(Retry_After="5")


def _status(state: ServerState) -> Status:
    if state.models is not None:
        meant_to_be = [name for name in state.models.names if state.models.state(name) != DROPPED]
        return Status(state.phase, models=Counts(len(served_names(state.models)), len(meant_to_be)))
    if state.fleet is None:
        return Status(state.phase)
    return Status(state.phase, replicas=Counts(*state.fleet.replicas))


async def show_version(state: ServerState) -> Answer:
    return json_page(Version(__version__))


async def models(state: ServerState) -> Answer:
    names = state.model_names if state.models is None else state.models.names
    return json_page(Models(data=[model_card(state, name) for name in names]))


def model(name: str) -> Work:
    """The handler of /v1/models/{name}."""

    async def show(state: ServerState, body: Body, tenant: str) -> Answer:
        state.check_model(name)
        return json_page(model_card(state, name if state.models is None else find_model(state.models, name)))

    return show


def model_card(state: ServerState, name: str) -> ModelCard:
    """The entry of /v1/models for one name of a model."""
    models = state.models
    facts = state.engine.facts if models is None else models.facts_of(name)
    card = ModelCard(
        id=name,
        created=now(),
        owned_by="maxsimd",
        root=facts.name if facts is not None else _configured(state, name),
        state="ok" if models is None else in_flags(models.state(name)),
    )
    if facts is None:
        return card
    return msgspec.structs.replace(
        card,
        max_model_len=facts.max_tokens,
        score_type=facts.score_type.value,
        score_scale=_scale(facts, normalize=state.config.normalize_scores and facts.normalizes),
        normalized_score_scale=_scale(facts, normalize=True),
        execution=facts.execution,
        device=facts.device,
        kernels=facts.kernels,
        checked=list(facts.findings),
    )


def _configured(state: ServerState, name: str) -> str | None:
    return None if state.models is None else state.models.setup_of(name).engine.model


def _scale(facts: ModelFacts, normalize: bool) -> CardScale | None:
    """The scale of scores by default, or of normalized ones; None if the model has none."""
    if facts.is_classifier or (normalize and not facts.normalizes):
        return None
    scale = facts.scales.of(use_activation=True, normalize=normalize)
    return CardScale(scale.transform, scale.least, scale.most)


async def info(state: ServerState) -> Answer:
    """text-embeddings-inference's description of the model, or of the first of several; clients look at
    `model_type`."""
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
            models=msgspec.UNSET if state.models is None else list(state.model_names),
        )
    )


def _tei_kind(model: ModelFacts) -> dict[str, Any]:
    """The model's purposes in text-embeddings-inference's words. The first key is the main one: some clients
    look at no other."""
    if model.is_classifier:
        return {"classifier": _labels(model)}
    ranking = {"reranker": _labels(model)}
    if model.score_type is ScoreType.LISTWISE or len(model.labels) == 1:
        return ranking
    if model.labels:
        return {**ranking, "classifier": _labels(model)}
    pooling = "splade" if model.dims.keys() == {"sparse_embed"} else model.embed_pooling or "none"
    embedding = {"embedding": {"pooling": pooling}}
    is_for_ranking = model.score_type is ScoreType.LATE_INTERACTION
    return {**ranking, **embedding} if is_for_ranking else {**embedding, **ranking}


def _labels(model: ModelFacts) -> dict[str, Any]:
    names = model.labels or ("relevance",)
    ids = {name: i for i, name in enumerate(names)}
    return {"id2label": {str(i): name for name, i in ids.items()}, "label2id": ids}


async def clear_cache(state: ServerState) -> Answer:
    """Removes all embeddings and scores from the cache."""
    await state.engine.clear_cache()
    return Answer(204)


async def metrics(state: ServerState) -> Answer:
    page = generate_latest(state.engine.metrics.registry)
    if state.fleet is not None:
        page = await state.fleet.metrics(page)
    return Answer(200, {"Content-Type": CONTENT_TYPE_LATEST}, page)


def _shown(summary: str) -> Shown:
    return Shown(Group.OPERATE, summary)


ROUTES = (
    get("/health", health, Status, shown=_shown("Liveness probe")),
    get("/ready", ready, Status, shown=_shown("Readiness probe")),
    get("/ping", ready, Status, shown=_shown("Readiness probe, as SageMaker calls it")),
    get("/info", info, Info, shown=_shown("Describe the model, for text-embeddings-inference's clients")),
    get("/version", show_version, Version, shown=_shown("Version of maxsimd")),
    get("/v1/models", models, Models, shown=_shown("List the models")),
    get("/models", models, Models, shown=_shown("List the models")),
    # Only for its methods: the answer depends on the name.
    get(MODEL_PATH, models, ModelCard, shown=_shown("Describe a model")),
    get("/metrics", metrics, CONTENT_TYPE_LATEST.partition(";")[0], shown=_shown("Prometheus metrics")),
    delete("/cache", clear_cache, shown=_shown("Empty the cache")),
)


CHANGE_METHODS = ("POST", "DELETE")


def changing(method: str, name: str) -> Work:
    """The work that loads or drops a model."""

    async def work(state: ServerState, body: Body, tenant: str) -> Answer:
        models = state.models
        assert models is not None
        with state.bodies.hold() as held:
            given = await read_body(state, body, held)
        if len(given) > LARGE_BODY:
            raise too_large("the body is too large; send none, because loading and dropping read no fields")
        state = state.warning_about(_fields_in(given), MODEL_PATH)
        is_load = method == "POST"
        answer = await (_load(state, models, name) if is_load else _drop(models, name))
        return answer.with_field_warnings(state.field_warnings)

    return work


class _NoFields(msgspec.Struct):
    """A load request has no fields: the server's configuration says how a model runs."""


def _fields_in(body: bytes | bytearray) -> list[UnreadField]:
    """The fields of an optional body, all of them unread. Raises ApiError (400) for names that are not UTF-8
    and for bodies nested too deeply."""
    try:
        return unread_fields(_NoFields(), msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
    except msgspec.DecodeError:
        return []
    except UnicodeDecodeError as error:
        raise body_not_unicode(error.reason) from error
    except RecursionError as error:
        raise too_deep() from error


def check_allowed(state: ServerState, headers: Mapping[str, str]) -> None:
    """Raises ApiError (403) without an admin's key."""
    if state.keys.is_admin(headers.get("authorization", "")):
        return
    if state.keys.has_admins:
        message = "this key may not load or drop models; send one that the file of keys gives admin=yes"
    else:
        message = (
            "models are loaded and dropped only where the file of keys (--api-key-file) gives a key admin=yes"
        )
    raise ApiError(403, "PermissionDeniedError", message)


async def _load(state: ServerState, models: SeveralModels, name: str) -> Answer:
    """Returns when the model is served."""
    if not models.may_load(name):
        message = (
            f"there is no model {quoted(name)} to load; name one of the configuration, or one in the "
            "folder of --models-dir by its path there"
        )
        raise ApiError(404, "NotFoundError", message, "name")
    state.check_ready()
    try:
        await models.load(name)
    except Exception as error:
        reason = in_flags(str(error)) or type(error).__name__
        message = f"the model {quoted(name)} cannot be loaded: {reason}"
        raise ApiError(422, "ModelLoadError", message, "name") from error
    return json_page(model_card(state, name))


async def _drop(models: SeveralModels, name: str) -> Answer:
    """Returns when the model is gone."""
    if name not in models.names:
        raise no_such_model(name, served_names(models))
    try:
        await models.drop(name)
    except LastModelError:
        message = "this is the last model that is served; load another first, or stop the server"
        raise ApiError(409, "ConflictError", message, "name") from None
    return Answer(204)


async def _depends_on_name(state: ServerState, body: Body, tenant: str) -> Answer:
    raise AssertionError("the work depends on the name")


# For /openapi.json, if there are admins.
CHANGE_ROUTES = (
    Route(MODEL_PATH, ("POST",), _depends_on_name, _shown("Load a model"), answers=(ModelCard,)),
    Route(MODEL_PATH, ("DELETE",), _depends_on_name, _shown("Drop a model"), status=204),
)
