"""Embeddings in the shapes of Cohere, Ollama and Voyage. Their other routes are beside those that they
resemble."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from maxsimd.api import reading, wire
from maxsimd.api.answer import Answer, new_id
from maxsimd.api.handlers import embeddings
from maxsimd.api.handlers.operating import Version, show_version
from maxsimd.api.handlers.route import Form, Group, Shown, answer_of, get, post
from maxsimd.api.models import Wanted
from maxsimd.api.state import ServerState
from maxsimd.api.wire import about
from maxsimd.engine import InvalidRequestError
from maxsimd.engine.media import Content as PictureContent

TextsAndPictures = list[str | PictureContent]

# Cohere's types by their numbers. Its 8-bit types have no place for a scale.
_NUMBERS: Mapping[str, embeddings.Numbers] = {
    "float": "float32",
    "base64": "float32",
    "binary": "binary",
    "ubinary": "ubinary",
}

_SIDES: Mapping[str | None, wire.Direction] = {"START": "left", "END": "right"}

# A picture of one pixel, and an input of parts.
_PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
_PARTS = [{"content": [{"type": "text", "text": wire.DOCUMENTS[1]}]}]

EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """`texts`, or `images`, or, in the second version, `inputs` of content parts."""

    model: wire.ModelField = None
    texts: Annotated[list[str] | None, about("Texts.", wire.DOCUMENTS)] = None
    inputs: Annotated[
        list[wire.Content] | None, about("Objects with `content`: parts with text or a picture.", _PARTS)
    ] = None
    images: Annotated[list[str] | None, about("Pictures, as data URLs.", [_PIXEL])] = None
    input_type: Annotated[
        wire.Name | None, about("`search_query`, `search_document` or `image`.", "search_document")
    ] = None
    embedding_types: Annotated[
        list[EmbeddingType] | None,
        about("Number formats: float, base64, binary or ubinary. Default: float.", ["float"]),
    ] = None
    output_dimension: wire.Dimensions = None
    TRUNCATES: ClassVar = ("START", "END")
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        about(
            "Side of long texts that loses tokens; NONE refuses them. Default: as the server and the "
            "tokenizer are set.",
            "END",
        ),
    ] = None


class CohereEmbedResponse(wire.Warned, kw_only=True):
    id: wire.Id
    embeddings: Annotated[
        Any,
        about(
            "Vectors; in version 2, or with `embedding_types`, by their number format.",
            {"float": [[0.12, -0.05, 0.4]]},
            schema={"anyOf": [{"type": "array"}, {"type": "object"}]},
        ),
    ]
    texts: Annotated[list[str], about("The texts of the request.", wire.DOCUMENTS)]
    meta: Annotated[
        dict[str, Any],
        about(
            "What Cohere's clients read.",
            {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 27}},
        ),
    ]
    response_type: Annotated[
        Literal["embeddings_floats", "embeddings_by_type"],
        about("Whether `embeddings` are lists or by number format.", "embeddings_by_type"),
    ]


class OllamaOptions(msgspec.Struct):
    """Options of a model's runner, such as `num_ctx`: none is read, and each is named in a warning."""


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    model: wire.ModelField = None
    input: wire.Texts
    truncate: wire.Truncate = None
    dimensions: Annotated[
        wire.NotNegative | None, about("Length of the vectors; 0: the model's. Default: 0.", 128)
    ] = None
    options: Annotated[OllamaOptions | None, about("Not read: each is named in a warning.", {})] = None


class OllamaEmbedResponse(wire.Warned, kw_only=True):
    """Durations are in nanoseconds. The model is loaded before the server takes requests."""

    model: wire.Model
    embeddings: Annotated[list[Any], about("A vector of length 1 for each text.", [[0.12, -0.05, 0.4]])]
    total_duration: Annotated[int, about("Time taken, in nanoseconds.", 12_500_000)]
    load_duration: Annotated[int, about("Always 0: the model is loaded before.", 0)] = 0
    prompt_eval_count: Annotated[int, about("Tokens of all texts.", 27)]


class MultimodalRequest(msgspec.Struct, kw_only=True):
    """Inputs of parts: texts and pictures."""

    inputs: Annotated[
        list[wire.Content], about("Objects with `content`: parts with text or a picture.", _PARTS)
    ]
    model: wire.ModelField = None
    input_type: wire.InputType = None
    truncation: wire.Truncate = None
    output_dimension: wire.Dimensions = None
    output_dtype: Annotated[
        Literal["float", "binary", "ubinary"] | None, about("Number format. Default: float.", "float")
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, about("Lists, or base64. Default: float.", "base64")
    ] = None
    output_encoding: Annotated[
        Literal["base64"] | None, about("Older name for `encoding_format`.", "base64")
    ] = None


class MultimodalEmbedding(msgspec.Struct, kw_only=True):
    embedding: wire.OneVector
    index: wire.Index
    object: Annotated[Literal["embedding"], about("Always `embedding`.", "embedding")] = "embedding"


class MultimodalUsage(wire.Usage, kw_only=True):
    """Voyage's client reads all these numbers."""

    text_tokens: Annotated[int, about("Tokens of all inputs; 0 if some have pictures.", 27)]
    image_pixels: Annotated[int, about("Always 0: pixels are not counted.", 0)]
    video_pixels: Annotated[int, about("Always 0: no videos are read.", 0)]


class MultimodalResponse(wire.Warned, kw_only=True):
    data: Annotated[list[MultimodalEmbedding], about("A vector for each input.")]
    model: wire.Model
    usage: Annotated[MultimodalUsage, about("Tokens that the request took.")]
    object: wire.AlwaysList = "list"


async def _cohere(
    version: str, state: ServerState, body: CohereEmbedRequest, texts: TextsAndPictures
) -> Answer:
    """Lists of numbers by their types; in version 1 bare lists, unless types are named."""
    by_type = version == "2" or body.embedding_types is not None
    types = list(dict.fromkeys(body.embedding_types or ("float",)))
    for name in types:
        if name not in _NUMBERS:
            raise InvalidRequestError(
                f"embedding_types {name} is not given here; use {', '.join(_NUMBERS)}", "embedding_types"
            )
    of_pictures = body.input_type == "image" and not any(isinstance(text, str) for text in texts)
    embeddings.check_embeddings(state, len(texts) * len(types), body.output_dimension)
    with reading.with_request_field_names(input=_cohere_field(body), dimensions="output_dimension"):
        result = await state.engine.embed(
            texts,
            input_type=embeddings.input_type_of(state, "document" if of_pictures else body.input_type),
            prompt_name=embeddings.prompt_name_of(state, None),
            dimensions=body.output_dimension,
            truncation=reading.truncation_by_switch(
                None if body.truncate is None else body.truncate != "NONE",
                _SIDES.get(body.truncate),
                state.config.long_documents,
                body,
            ),
            tenant=state.tenant,
        )
    echoed = [text for text in texts if isinstance(text, str)]
    billed = {"input_tokens": result.usage.prompt_tokens}
    if len(echoed) < len(texts):
        billed["images"] = sum(
            len(content.pictures) for content in texts if isinstance(content, PictureContent)
        )

    def build(warnings: wire.Warnings) -> CohereEmbedResponse:
        rows, vectors = result.embeddings, {}
        for name in types if by_type else ():
            encoded = [embeddings.encode_vectors(row, _NUMBERS[name], name == "base64") for row in rows]
            vectors[name] = [each.data for each in encoded]
        return CohereEmbedResponse(
            id=new_id("embd"),
            embeddings=vectors or [embeddings.encode_rows(row) for row in rows],
            texts=echoed,
            meta={"api_version": {"version": version}, "billed_units": billed},
            response_type="embeddings_by_type" if by_type else "embeddings_floats",
            warnings=warnings,
        )

    characters = sum(map(len, echoed))
    return await answer_of(state, body, result, build, result.embeddings.size * len(types), characters)


def _cohere_field(request: CohereEmbedRequest) -> str:
    """The field with the texts or pictures, one of three."""
    named = [name for name in ("texts", "images", "inputs") if getattr(request, name) is not None]
    if not named:
        raise InvalidRequestError("texts is missing", "texts")
    if len(named) > 1:
        raise InvalidRequestError(f"{' and '.join(named)} exclude each other; leave out one", named[1])
    return named[0]


def _parts_of(
    request: CohereEmbedRequest | MultimodalRequest, most: int, name: str = "inputs"
) -> TextsAndPictures:
    values = getattr(request, name)
    reading.check_count(values, name, most)
    if not values:
        raise InvalidRequestError(f"{name} is empty; give at least one", name)
    if name == "images":
        return reading.pictures_of(values, most, name)
    return reading.texts_and_pictures(values, name)


async def ollama_embed(state: ServerState, body: OllamaEmbedRequest, inputs: reading.Inputs) -> Answer:
    """One vector of length 1 for each text."""
    reading.check_token_ids(inputs, state.config.accept_token_ids)
    dimensions, model = body.dimensions or None, state.model_name
    embeddings.check_embeddings(state, len(inputs), dimensions)
    result = await state.engine.embed(
        inputs,
        input_type=embeddings.input_type_of(state, None),
        prompt_name=embeddings.prompt_name_of(state, None),
        dimensions=dimensions,
        truncation=reading.truncation_by_switch(body.truncate, None, state.config.long_documents, body),
        tenant=state.tenant,
    )

    def build(warnings: wire.Warnings) -> OllamaEmbedResponse:
        return OllamaEmbedResponse(
            model=model,
            embeddings=[embeddings.encode_rows(row) for row in embeddings.in_unit_length(result.embeddings)],
            total_duration=round(result.timings.whole * 1e9),
            prompt_eval_count=result.usage.prompt_tokens,
            warnings=warnings,
        )

    return await answer_of(state, body, result, build, result.embeddings.size)


async def multimodal_embeddings(
    state: ServerState, body: MultimodalRequest, inputs: TextsAndPictures
) -> Answer:
    """Voyage's. Inputs with pictures are never truncated."""
    embeddings.check_embeddings(state, len(inputs), body.output_dimension)
    with reading.with_request_field_names(input="inputs", dimensions="output_dimension"):
        result = await state.engine.embed(
            inputs,
            input_type=embeddings.input_type_of(state, body.input_type),
            prompt_name=embeddings.prompt_name_of(state, None),
            dimensions=body.output_dimension,
            truncation=reading.truncation_by_switch(body.truncation, None, state.config.long_documents, body),
            tenant=state.tenant,
        )
    model, as_base64 = state.model_name, "base64" in (body.encoding_format, body.output_encoding)
    numbers = _NUMBERS[body.output_dtype or "float"]
    tokens = result.usage.prompt_tokens
    has_pictures = not all(isinstance(each, str) for each in inputs)
    usage = MultimodalUsage(
        prompt_tokens=tokens,
        total_tokens=tokens,
        text_tokens=0 if has_pictures else tokens,
        image_pixels=0,
        video_pixels=0,
    )

    def build(warnings: wire.Warnings) -> MultimodalResponse:
        rows = [embeddings.encode_vectors(row, numbers, as_base64).data for row in result.embeddings]
        data = [MultimodalEmbedding(embedding=row, index=i) for i, row in enumerate(rows)]
        return MultimodalResponse(data=data, model=model, usage=usage, warnings=warnings)

    return await answer_of(state, body, result, build, result.embeddings.size)


COHERE_ROUTES = tuple(
    route
    for version in ("1", "2")
    for route in post(
        (f"/v{version}/embed",),
        Form(
            CohereEmbedRequest,
            lambda request, most: _parts_of(request, most, _cohere_field(request)),
            partial(_cohere, version),
            Wanted.VECTORS,
        ),
        Shown(
            Group.COHERE,
            f"Embed texts or pictures, version {version}",
            {"texts": wire.DOCUMENTS, "input_type": "search_document", "embedding_types": ["float"]},
        ),
        CohereEmbedResponse,
    )
)
VOYAGE_ROUTES = post(
    ("/v1/multimodalembeddings",),
    Form(MultimodalRequest, _parts_of, multimodal_embeddings, Wanted.VECTORS),
    Shown(Group.OTHERS, "Voyage: embed texts and pictures", {"inputs": _PARTS}),
    MultimodalResponse,
)
OLLAMA_ROUTES = (
    *post(
        ("/api/embed",),
        Form(OllamaEmbedRequest, embeddings.read_inputs, ollama_embed, Wanted.VECTORS),
        Shown(Group.OTHERS, "Ollama: embed texts", {"input": wire.DOCUMENTS}),
        OllamaEmbedResponse,
    ),
    get("/api/version", show_version, Version, shown=Shown(Group.OTHERS, "Ollama: maxsimd's version")),
)
