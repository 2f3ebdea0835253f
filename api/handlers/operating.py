"""The routes for those who run a server: health, models, metrics."""

from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from maxsimd.api.answer import Answer, json_page, now
from maxsimd.api.handlers.route import delete, get
from maxsimd.api.state import ServerState


async def health(state: ServerState) -> Answer:
    """For liveness probes: 503 only where nothing but a new process helps."""
    return json_page({"status": state.phase}, status=503 if state.phase == "dead" else 200)


async def ready(state: ServerState) -> Answer:
    """For load balancers: 200 only while requests are taken."""
    if state.is_ready:
        return json_page({"status": state.phase})
    return json_page({"status": state.phase}, status=503).with_headers(Retry_After="5")


async def show_version(state: ServerState) -> Answer:
    return json_page({"version": version("maxsimd")})


async def models(state: ServerState) -> Answer:
    card = {
        "id": state.model_name,
        "object": "model",
        "created": now(),
        "owned_by": "maxsimd",
        "root": state.engine.model.name,
        "max_model_len": state.engine.max_tokens,
        "score_type": state.engine.model.score_type.value,
        "execution": state.engine.device_model.prepared.execution,
        "checked": [str(finding) for finding in state.engine.device_model.prepared.findings],
    }
    return json_page({"object": "list", "data": [card]})


async def clear_cache(state: ServerState) -> Answer:
    """Removes the embeddings of all documents from the cache."""
    await state.engine.clear_cache()
    return Answer(204)


async def metrics(state: ServerState) -> Answer:
    page = generate_latest(state.engine.metrics.registry)
    return Answer(200, {"Content-Type": CONTENT_TYPE_LATEST}, page)


ROUTES = (
    get("/health", health),
    get("/ready", ready),
    get("/version", show_version),
    get("/v1/models", models),
    get("/metrics", metrics),
    delete("/cache", clear_cache),
)
