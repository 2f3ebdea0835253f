"""The routes for those who run a server: health, models, metrics, tokens."""

from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from maxsimd.api import wire
from maxsimd.api.answer import Answer, json_page, now, wire_answer
from maxsimd.api.handlers.route import delete, get, post
from maxsimd.api.state import ServerState
from maxsimd.engine import InvalidRequestError


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


async def tokenize(state: ServerState, body: wire.TokenizeRequest) -> Answer:
    text = body.text if body.text is not None else body.prompt
    if text is None:
        raise InvalidRequestError("text is missing", "text")
    ids, tokens = await state.engine.in_thread(lambda: state.engine.tokenizer.encode_whole(text), len(text))
    shown = tokens if body.return_token_strs else None
    response = wire.TokenizeResponse(ids, len(ids), state.engine.max_tokens, shown)
    return await wire_answer(state.engine, response, len(ids))


async def detokenize(state: ServerState, body: wire.DetokenizeRequest) -> Answer:
    tokenizer = state.engine.tokenizer
    if any(token >= tokenizer.vocabulary_size for token in body.tokens):
        raise InvalidRequestError(f"tokens must be below {tokenizer.vocabulary_size}", "tokens")
    text = await state.engine.in_thread(lambda: tokenizer.decode(body.tokens), len(body.tokens))
    return await wire_answer(state.engine, {"text": text, "prompt": text}, len(body.tokens))


ROUTES = (
    get("/health", health),
    get("/ready", ready),
    get("/version", show_version),
    get("/v1/models", models),
    get("/metrics", metrics),
    delete("/cache", clear_cache),
    post("/tokenize", wire.TokenizeRequest, tokenize),
    post("/detokenize", wire.DetokenizeRequest, detokenize),
)
