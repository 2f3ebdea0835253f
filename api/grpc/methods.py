"""Methods of text-embeddings-inference's services as requests to HTTP routes: a message becomes the route's
JSON, and the route's JSON becomes a message."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from maxsimd.api.answer import Answer, ApiError
from maxsimd.api.grpc import tei_pb2 as pb
from maxsimd.api.handlers.classification import LabelScore
from maxsimd.api.handlers.operating import Info
from maxsimd.api.handlers.rerank import TeiRanked
from maxsimd.api.handlers.tei import SparseValue
from maxsimd.api.handlers.tokens import TeiToken, check_number_decoded
from maxsimd.api.reading import check_number

_DIRECTIONS = {pb.TRUNCATION_DIRECTION_RIGHT: "right", pb.TRUNCATION_DIRECTION_LEFT: "left"}
_MODEL_TYPES = {
    "embedding": pb.MODEL_TYPE_EMBEDDING,
    "classifier": pb.MODEL_TYPE_CLASSIFIER,
    "reranker": pb.MODEL_TYPE_RERANKER,
}
# Most calls at a time. TEI's default is the same.
MOST_CALLS = 512


@dataclass(frozen=True, slots=True)
class Method:
    """A method with one answer for each message: the route that answers it, the message's type, its `fields`
    for the route (given the most texts that it may have), a decoder of the route's answer, and the `response`
    that is made of that."""

    route: str
    request: type[Message]
    fields: Callable[[Any, int], dict[str, Any]] | None
    decoder: "msgspec.json.Decoder[Any]"
    response: Callable[[Any, Answer], Message]

    def body_of(self, data: bytes, most: int) -> bytes:
        """The route's body for a message. Raises ApiError."""
        return b"" if self.fields is None else encoded(self.fields(parsed(self.request, data), most))

    def message_of(self, answer: Answer) -> bytes:
        message: bytes = self.response(self.decoder.decode(answer.body), answer).SerializeToString()
        return message


def parsed(kind: type[Message], data: bytes) -> Any:
    """Raises ApiError (400) for bytes that are no such message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        message = f"the message is no {name}: it breaks off, or a text in it is not UTF-8; send a {name}"
        raise ApiError(400, message) from error


def encoded(fields: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(fields)


def _texts(request: Any) -> dict[str, Any]:
    """The fields that all requests with a text have, and those of optional ones that are set."""
    fields = {"inputs": request.inputs, **truncation_of(request)}
    for field, value in request.ListFields():
        if field.name in ("normalize", "prompt_name", "dimensions", "raw_scores"):
            fields[field.name] = value
    return fields


def truncation_of(request: Any) -> dict[str, Any]:
    direction = request.truncation_direction
    # The route refuses numbers that are no direction.
    return {
        "truncate": request.truncate,
        "truncation_direction": _DIRECTIONS.get(direction, str(direction)),
    }


def _text(request: Any, most: int) -> dict[str, Any]:
    return _texts(request)


def _pair(request: pb.PredictPairRequest, most: int) -> dict[str, Any]:
    if len(request.inputs) not in (1, 2):
        message = f"inputs has {len(request.inputs)} texts; send a text, or a pair of texts"
        raise ApiError(400, message, "inputs")
    return {**_texts(request), "inputs": [*request.inputs]}


def _ranking(request: pb.RerankRequest, most: int) -> dict[str, Any]:
    # Before Python's objects are made of them.
    check_number(len(request.texts), "texts", most)
    return ranking_fields(request, [*request.texts])


def ranking_fields(request: Any, texts: list[str]) -> dict[str, Any]:
    """The body of /rerank for the options of a message and its texts."""
    return {
        "query": request.query,
        "texts": texts,
        "raw_scores": request.raw_scores,
        "return_text": request.return_text,
        **truncation_of(request),
    }


def _encoding(request: pb.EncodeRequest, most: int) -> dict[str, Any]:
    if request.HasField("prompt_name"):
        message = "prompt_name is not supported here; put the prompt before the text in inputs"
        raise ApiError(400, message, "prompt_name")
    return {"inputs": request.inputs, "add_special_tokens": request.add_special_tokens}


def _decoding(request: pb.DecodeRequest, most: int) -> dict[str, Any]:
    check_number_decoded(len(request.ids), "ids")
    return {"ids": [*request.ids], "skip_special_tokens": request.skip_special_tokens}


def metadata_of(answer: Answer) -> pb.Metadata:
    """The cost of a request, by its answer."""
    times, headers = answer.timings, answer.headers
    assert times is not None
    seconds = {"total": times.whole, "tokenization": times.tokenise}
    seconds |= {"queue": times.queue, "inference": times.model}
    return pb.Metadata(
        compute_chars=int(headers["x-compute-characters"]),
        compute_tokens=int(headers["x-compute-tokens"]),
        **{f"{part}_time_ns": round(each * 1e9) for part, each in seconds.items()},
    )


def ranks_of(ranked: list[TeiRanked]) -> list[pb.Rank]:
    return [pb.Rank(index=one.index, text=one.text, score=one.score) for one in ranked]


def _vector(rows: list[list[float]], answer: Answer) -> Message:
    return pb.EmbedResponse(embeddings=rows[0], metadata=metadata_of(answer))


def _weights(rows: list[list[SparseValue]], answer: Answer) -> Message:
    values = [pb.SparseValue(index=one.index, value=one.value) for one in rows[0]]
    return pb.EmbedSparseResponse(sparse_embeddings=values, metadata=metadata_of(answer))


def _vectors(matrices: list[list[list[float]]], answer: Answer) -> Message:
    rows = [pb.TokenEmbedding(embeddings=row) for row in matrices[0]]
    return pb.EmbedAllResponse(token_embeddings=rows, metadata=metadata_of(answer))


def _predictions(labels: list[LabelScore], answer: Answer) -> Message:
    predictions = [pb.Prediction(score=one.score, label=one.label) for one in labels]
    return pb.PredictResponse(predictions=predictions, metadata=metadata_of(answer))


def _ranked(ranked: list[TeiRanked], answer: Answer) -> Message:
    return pb.RerankResponse(ranks=ranks_of(ranked), metadata=metadata_of(answer))


def _tokens(lists: list[list[TeiToken]], answer: Answer) -> Message:
    tokens = [
        pb.SimpleToken(id=one.id, text=one.text, special=one.special, start=one.start, stop=one.stop)
        for one in lists[0]
    ]
    return pb.EncodeResponse(tokens=tokens)


def _decoded(texts: list[str], answer: Answer) -> Message:
    return pb.DecodeResponse(text=texts[0])


def _described(info: Info, answer: Answer) -> Message:
    return pb.InfoResponse(
        version=info.version,
        model_id=info.model_id,
        model_dtype=info.model_dtype,
        model_type=_MODEL_TYPES[next(iter(info.model_type))],
        max_concurrent_requests=MOST_CALLS,
        max_input_length=info.max_input_length,
        max_batch_tokens=info.max_batch_tokens,
        max_client_batch_size=info.max_client_batch_size,
    )


def _method(route: str, request: type[Message], fields: Any, kind: Any, response: Any) -> Method:
    # Made here, because msgspec crashes if two threads prepare a type at a time.
    return Method(route, request, fields, msgspec.json.Decoder(kind), response)


RANKING = _method("/rerank", pb.RerankRequest, _ranking, list[TeiRanked], _ranked)
_EMBED = _method("/embed", pb.EmbedRequest, _text, list[list[float]], _vector)
_SPARSE = _method("/embed_sparse", pb.EmbedSparseRequest, _text, list[list[SparseValue]], _weights)
_ALL = _method("/embed_all", pb.EmbedAllRequest, _text, list[list[list[float]]], _vectors)
_PREDICT = _method("/predict", pb.PredictRequest, _text, list[LabelScore], _predictions)
_PAIR = _method("/predict", pb.PredictPairRequest, _pair, list[LabelScore], _predictions)
_TOKENIZE = _method("/tokenize", pb.EncodeRequest, _encoding, list[list[TeiToken]], _tokens)
_DECODE = _method("/decode", pb.DecodeRequest, _decoding, list[str], _decoded)

# By service and name. A stream has an answer for each message, in their order.
UNARY = {
    ("Info", "Info"): _method("/info", pb.InfoRequest, None, Info, _described),
    ("Embed", "Embed"): _EMBED,
    ("Embed", "EmbedSparse"): _SPARSE,
    ("Embed", "EmbedAll"): _ALL,
    ("Predict", "Predict"): _PREDICT,
    ("Predict", "PredictPair"): _PAIR,
    ("Rerank", "Rerank"): RANKING,
    ("Tokenize", "Tokenize"): _TOKENIZE,
    ("Tokenize", "Decode"): _DECODE,
}
STREAMS = {
    ("Embed", "EmbedStream"): _EMBED,
    ("Embed", "EmbedSparseStream"): _SPARSE,
    ("Embed", "EmbedAllStream"): _ALL,
    ("Predict", "PredictStream"): _PREDICT,
    ("Predict", "PredictPairStream"): _PAIR,
    ("Tokenize", "TokenizeStream"): _TOKENIZE,
    ("Tokenize", "DecodeStream"): _DECODE,
}
