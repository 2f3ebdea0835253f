"""The routes for those who run a server: health, models, metrics, tokens."""

from importlib.metadata import version

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from maxsimd.api import wire
from maxsimd.api.state import STATE, now
from maxsimd.engine import InvalidRequestError

routes = web.RouteTableDef()


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """For liveness probes: 503 only where nothing but a new process helps."""
    state = request.app[STATE]
    return web.json_response({"status": state.phase}, status=503 if state.phase == "dead" else 200)


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """For load balancers: 200 only while requests are taken."""
    state = request.app[STATE]
    if state.is_ready:
        return web.json_response({"status": state.phase})
    return web.json_response({"status": state.phase}, status=503, headers={"Retry-After": "5"})


@routes.get("/version")
async def show_version(request: web.Request) -> web.Response:
    return web.json_response({"version": version("maxsimd")})


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    card = {
        "id": state.model_name,
        "object": "model",
        "created": now(),
        "owned_by": "maxsimd",
        "root": state.engine.model.name,
        "max_model_len": state.engine.max_tokens,
        "score_type": state.engine.model.score_type.value,
        "execution": state.engine.on_device.prepared.execution,
        "checked": [str(finding) for finding in state.engine.on_device.prepared.findings],
    }
    return web.json_response({"object": "list", "data": [card]})


@routes.delete("/cache")
async def clear_cache(request: web.Request) -> web.Response:
    """Forgets all embeddings of documents that are kept."""
    await request.app[STATE].engine.clear_cache()
    return web.Response(status=204)


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    page = generate_latest(request.app[STATE].engine.metrics.registry)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = await state.read(request, wire.TokenizeRequest)
    text = body.text if body.text is not None else body.prompt
    if text is None:
        raise InvalidRequestError("text is missing", "text")
    ids, tokens = await state.engine.in_thread(lambda: state.engine.tokenizer.encode_whole(text))
    shown = tokens if body.return_token_strs else None
    return await state.answer(wire.TokenizeResponse(ids, len(ids), state.engine.max_tokens, shown), len(ids))


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    body = await state.read(request, wire.DetokenizeRequest)
    tokenizer = state.engine.tokenizer
    if any(token >= tokenizer.vocabulary_size for token in body.tokens):
        raise InvalidRequestError(f"tokens must be below {tokenizer.vocabulary_size}", "tokens")
    text = await state.engine.in_thread(lambda: tokenizer.decode(body.tokens))
    return await state.answer({"text": text, "prompt": text}, len(body.tokens))
