"""From wire requests to arguments of the engine. Functions of their input, and of how many texts there may
be, which is checked before any of them is looked at."""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from maxsimd.api.answer import too_many_entries
from maxsimd.api.logs import printable
from maxsimd.api.reading_pictures import content_of, each_picture, has_pictures
from maxsimd.api.reading_vectors import is_vectors, vectors_of
from maxsimd.api.vectors import NUMBERS, Numbers
from maxsimd.api.wire import (
    ClassifyRequest,
    Common,
    Content,
    Contents,
    EmbeddingsRequest,
    LongDocuments,
    PoolingRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
    Scoring,
    TokenizeRequest,
)
from maxsimd.api.wire_cohere import CohereEmbedRequest
from maxsimd.api.wire_reranks import NvidiaRequest, RerankingRequest
from maxsimd.api.wire_tei import TeiTruncating, TeiVectorsRequest
from maxsimd.engine import InvalidRequestError, Truncation
from maxsimd.engine.media import Content as PictureContent
from maxsimd.engine.requests import InputType, Item

ToRank = tuple[Item, list[Item]]
# Texts and pictures, or the token ids of each text.
Inputs = list[str] | list[list[int]] | list[str | PictureContent]
# The longest line of YAML.
_ENDLESS = 2**31 - 1
# The most names and values that a request may have in what is written as YAML, which takes 8 microseconds for
# each, and the most lists and objects within each other.
_MOST_WRITTEN, _DEEPEST_WRITTEN = 10_000, 32
# A field's name and the object around it.
_AROUND_A_FIELD = 2


@dataclass
class RankFields:
    """The names of fields, with the place that each has in the text, and how many names and values may still
    be written as YAML."""

    places: Mapping[str, int]
    room: int = _MOST_WRITTEN


_PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
# Fields whose texts may be objects.
CONTENT_FIELDS = frozenset(
    {"query", *(name for pair in _PAIRS for name in pair), "passages", "input", "inputs", "content"}
)
_LIMITS = ("truncate_prompt_tokens", "max_tokens_per_query", "max_tokens_per_doc")
# Fields that text-embeddings-inference lacks in requests with `texts`.
_NOT_OF_TEI = frozenset(
    {"documents", "top_k", "truncation", "rank_fields", "truncation_side", "long_documents", "window_overlap"}
    | {*_LIMITS}
)
_OF_TEI = frozenset({"return_text", "truncate", "truncation_direction"})
_OF_MIXEDBREAD = frozenset({"input", "return_input"})
# Fields that only chats have, with the values that change nothing.
_OF_CHAT = {
    "add_generation_prompt": False,
    "continue_final_message": False,
    "add_special_tokens": True,
    "chat_template": None,
    "chat_template_kwargs": None,
}


# What a text is embedded for that is neither a query nor a document, as Cohere and Jina call it.
_OTHER_TYPES = ("classification", "clustering", "separation", "text-matching")
# Where the engine's messages name a field: at their beginning, or one of its texts.
_FIELD = re.compile(r"^(?:queries|documents)\b|\b(?:queries|documents)(?=\[\d)")
_INPUT = re.compile(r"\binput(?=\[)")


def texts_to_score(request: ScoreRequest, most: int) -> tuple[list[Item], list[Item]]:
    """The queries and documents of a score request, under whichever names they came."""
    pair = _pair_of(request)
    if pair is not None:
        first, second = pair
        queries, documents = getattr(request, first), getattr(request, second)
        check_count(documents, second, most)
        check_count(queries, first, most)
        return as_items(queries, first), as_items(documents, second)
    for first, second in _PAIRS:
        if getattr(request, first) is not None:
            raise InvalidRequestError(f"{second} is missing", second)
    raise InvalidRequestError("queries and documents are missing", "queries")


def texts_to_rank(request: RerankRequest, most: int) -> ToRank:
    """The query and the documents of a rerank request, `texts` before `documents`."""
    query = as_item(request.query, "query", "query")
    if request.texts is not None:
        check_count(request.texts, "texts", most)
        return query, [*request.texts]
    if request.documents is None:
        raise InvalidRequestError("documents is missing", "documents")
    check_count(request.documents, "documents", most)
    return query, as_items(request.documents, "documents", rank_places(request.rank_fields))


def rank_places(rank_fields: list[str] | None) -> RankFields | None:
    """The place of each field, for one request; None for no fields. One that is named twice counts once,
    where it is named first."""
    if not rank_fields:
        return None
    return RankFields({name: i for i, name in reversed(list(enumerate(rank_fields)))})


def unused_fields(request: msgspec.Struct) -> frozenset[str]:
    """Fields that the request's type has for requests of another shape, and that this one does not use."""
    match request:
        case ScoreRequest():
            return frozenset(name for pair in _PAIRS for name in pair) - {*names_of(request)}
        case RerankingRequest() if request.input is not None:
            return _OF_TEI | {"documents", "texts", "top_n", "return_documents", "cascade"}
        case RerankingRequest(texts=None):
            return _OF_TEI | _OF_MIXEDBREAD | {"top_k", "cascade"}
        case RerankingRequest():
            return _NOT_OF_TEI | _OF_MIXEDBREAD | {"cascade"}
        case RerankRequest(texts=None, top_k=None):
            return _OF_TEI
        case RerankRequest(texts=None):
            return _OF_TEI | {"top_n"}
        case RerankRequest():
            return _NOT_OF_TEI
        case NvidiaRequest() if request.truncate is not None:
            return frozenset({*_LIMITS, "truncation_side", "long_documents", "window_overlap"})
        case TeiVectorsRequest() if isinstance(request.inputs, dict):
            return frozenset({"normalize", "dimensions", "truncate", "truncation_direction", "prompt_name"})
        case TeiVectorsRequest():
            return frozenset({"parameters"})
        case TokenizeRequest() if request.inputs is not None:
            return frozenset({"text", "prompt", "return_token_strs"})
        case TokenizeRequest() if request.text is not None:
            return frozenset({"prompt"})
        case EmbeddingsRequest():
            return frozenset(_unused_for_vectors(request))
    return frozenset()


def _unused_for_vectors(request: EmbeddingsRequest) -> Iterator[str]:
    if request.messages is None:
        yield from (name for name, usual in _OF_CHAT.items() if getattr(request, name) not in (None, usual))
    elif request.modality is not None:
        yield "modality"
    if request.dimensions and request.output_dimension not in (None, request.dimensions):
        yield "output_dimension"
    if request.input_type is not None and not isinstance(request, PoolingRequest):
        yield "task"


def own_limits(request: object) -> list[str]:
    """The lengths that a request sets itself, as warnings name them."""
    given = ((name, getattr(request, name, None)) for name in _LIMITS)
    return [f"{name} ({value})" for name, value in given if value is not None and value > 0]


def instruction_of(request: Scoring) -> str | None:
    """The instruction, under either of its names."""
    if None not in (request.instruction, request.instruct) and request.instruction != request.instruct:
        raise InvalidRequestError("instruction and instruct say different things; leave out one", "instruct")
    return request.instruct if request.instruction is None else request.instruction


def _pair_of(request: ScoreRequest) -> tuple[str, str] | None:
    """The names under which queries and documents have come, the first that have both."""
    for first, second in _PAIRS:
        if getattr(request, first) is not None and getattr(request, second) is not None:
            return first, second
    return None


def names_of(request: ScoreRequest) -> tuple[str, str]:
    """Under which names queries and documents have come."""
    return _pair_of(request) or _PAIRS[0]


def in_its_words(names: tuple[str, str], error: InvalidRequestError) -> InvalidRequestError:
    """An error of the engine about queries or documents, with the `names` of the fields that were sent."""
    named = dict(zip(("queries", "documents"), names, strict=True))
    message = _FIELD.sub(lambda found: named[found[0]], str(error))
    # A request to rank has one query.
    message = message.replace("query[0]", "query")
    return InvalidRequestError(message, named.get(error.param or "", error.param))


@contextmanager
def input_called(name: str) -> Iterator[None]:
    """Errors of the engine about what is to be embedded name the field that was sent."""
    try:
        yield
    except InvalidRequestError as error:
        message = _INPUT.sub(name, str(error))
        raise InvalidRequestError(message, name if error.param == "input" else error.param) from error


def inputs_of(request: EmbeddingsRequest | ClassifyRequest, most: int) -> Inputs:
    if isinstance(request, EmbeddingsRequest) and request.modality not in (None, "text"):
        if request.modality != "image":
            raise InvalidRequestError(
                f"modality {request.modality} cannot be read here; use text or image", "modality"
            )
        return pictures_of(request.input, most, "input")
    return as_inputs(request.input, most)


def pictures_of(value: Any, most: int, param: str) -> list[str | PictureContent]:
    """Pictures given as strings, where a request says that they are."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values or not all(isinstance(each, str) for each in values):
        raise InvalidRequestError(f"{param} must be a list of pictures, and not empty", param)
    check_count(values, param, most)
    return [content_of({"image": each}, f"{param}[{i}]", param) for i, each in enumerate(values)]


def sequences_of(request: PredictRequest, most: int) -> tuple[list[str], list[str] | None, bool]:
    return as_sequences(request.inputs, most)


def check_count(contents: Any, param: str, most: int) -> None:
    """Refuses a list of more than `most` entries."""
    if isinstance(contents, list) and len(contents) > most:
        raise too_many_entries(param, len(contents), most)


def as_items(contents: Contents, param: str, rank_fields: RankFields | None = None) -> list[Item]:
    """One or many contents as texts or embeddings."""
    return [as_item(content, where, param, rank_fields) for where, content in _named(contents, param)]


def as_item(content: Content, where: str, param: str, rank_fields: RankFields | None = None) -> Item:
    """One content as a text, or as an embedding or pictures, if it is that and not a record with fields."""
    if not rank_fields and isinstance(content, dict):
        if is_vectors(content):
            return vectors_of(content, where, param)
        if has_pictures(content):
            return content_of(content, where, param)
    return as_text(content, where, param, rank_fields)


def as_texts(contents: Contents, param: str, rank_fields: RankFields | None = None) -> list[str]:
    """One or many contents as plain texts."""
    return [as_text(content, where, param, rank_fields) for where, content in _named(contents, param)]


def _named(contents: Contents, param: str) -> Iterator[tuple[str, Content]]:
    """One or many contents, each behind what errors call it."""
    several: Sequence[Content] = contents if isinstance(contents, list) else [contents]
    if not isinstance(contents, list):
        several = each_picture(contents) or several
    for i, content in enumerate(several):
        yield f"{param}[{i}]", content


def as_text(content: Content, where: str, param: str, rank_fields: RankFields | None = None) -> str:
    """The text of a string, of {"text": ...}, of {"content": "..."} or content parts, or, with Cohere's
    `rank_fields`, those of the named fields that a record has, a line each."""
    if isinstance(content, str):
        return content
    if rank_fields:
        return _record_text(content, rank_fields, where)
    if has_pictures(content):
        raise InvalidRequestError(f"{where} has a picture; only text can be read here", param)
    text = content.get("text", content.get("content"))
    if isinstance(text, list):
        return "\n".join(_part_text(part, where, param) for part in text)
    if isinstance(text, str):
        return text
    raise InvalidRequestError(f'{where} is an object without a "text" or "content" string', param)


def _record_text(record: dict[str, Any], rank_fields: RankFields, where: str) -> str:
    # Not every name is looked for in every record: of both there may be very many.
    places = rank_fields.places
    named = sorted(record.keys() & places.keys(), key=places.__getitem__)
    lines = [
        _field_text(name, record[name], rank_fields, where) for name in named if record[name] is not None
    ]
    if not lines:
        raise InvalidRequestError(
            f"{where} has none of the fields that rank_fields names; name at least one that it has",
            "rank_fields",
        )
    return "\n".join(lines)


def _field_text(name: str, value: Any, rank_fields: RankFields, where: str) -> str:
    """A field of a record as YAML, as Cohere's clients write records. A text is not quoted."""
    if isinstance(value, str | int):
        return f"{name}: {str(value).lower() if isinstance(value, bool) else value}"
    if isinstance(value, float) and math.isfinite(value):
        # As YAML's writer does, which takes much longer to begin.
        number = repr(value)
        return f"{name}: {number if '.' in number else number.replace('e', '.0e')}"
    rank_fields.room -= _size_as_yaml(name, value, rank_fields.room, where)
    import yaml  # late: few requests need it

    written: str = yaml.dump(
        {name: value}, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=_ENDLESS
    )
    return written.rstrip("\n")


def _size_as_yaml(name: str, value: Any, room: int, where: str) -> int:
    """How many names and values a field has. Raises InvalidRequestError if they are more than `room`, or too
    deep."""
    size, depth, level = _AROUND_A_FIELD + 1, 0, [value]
    while level:
        inner = [each for each in level if isinstance(each, dict | list)]
        depth += bool(inner)
        size += sum(len(each) * (2 if isinstance(each, dict) else 1) for each in inner)
        if depth > _DEEPEST_WRITTEN:
            raise InvalidRequestError(
                f"the field `{printable(name, 60)}` of {where} has more than {_DEEPEST_WRITTEN} lists and "
                "objects within each other; name another in rank_fields, or send it as a text",
                "rank_fields",
            )
        if size > room:
            raise InvalidRequestError(
                f"with the field `{printable(name, 60)}` of {where}, the lists and objects that rank_fields "
                f"names have more than {_MOST_WRITTEN} names and values in this request; name other fields, "
                "send fewer documents, or send such fields as texts",
                "rank_fields",
            )
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
    return size


@functools.cache
def _dumper() -> Any:
    """YAML's writer, in C where there is one, which writes values that are equal each time anew."""
    import yaml

    base = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return type("RecordDumper", (base,), {"ignore_aliases": lambda dumper, value: True})


def _part_text(part: Any, where: str, param: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError(f"{where} has a content part that is not text; only text can be scored", param)


def truncation_of(request: Common, default: LongDocuments) -> Truncation:
    """What the request says of over-long inputs; `default` where it says nothing. Only documents that are
    scored are read through windows: a vector or a label is one text's."""
    side = request.truncation_side
    tokens = request.truncate_prompt_tokens
    long_documents = request.long_documents or default
    # Voyage's.
    cut = getattr(request, "truncation", None)
    if cut is not None and tokens is None and request.long_documents is None:
        long_documents = "truncate" if cut else "error"
    # The server's own setting does not make an error of the lengths that a request sets itself.
    refuse = long_documents == "error" and (request.long_documents is not None or cut is False)
    if tokens is None and long_documents != "error":
        tokens = -1
    if not isinstance(request, Scoring):
        if request.long_documents == "window":
            raise InvalidRequestError(
                "long_documents window is only for documents that are scored; use truncate or error",
                "long_documents",
            )
        return Truncation(max_tokens=tokens, side=side, refuse=refuse and tokens is not None)
    limits = (tokens, request.max_tokens_per_query or None, request.max_tokens_per_doc or None)
    return Truncation(
        max_tokens=tokens,
        side=side,
        max_query_tokens=limits[1],
        max_document_tokens=limits[2],
        windows=long_documents == "window",
        window_overlap=request.window_overlap,
        refuse=refuse and any(limit is not None for limit in limits),
    )


def tei_truncation_of(
    request: RerankRequest | PredictRequest | TeiTruncating, default: LongDocuments
) -> Truncation:
    """What a request says of over-long inputs in text-embeddings-inference's words; `default` where it says
    nothing."""
    cut = request.truncate if request.truncate is not None else default != "error"
    side = (request.truncation_direction or "").lower()
    return Truncation(
        max_tokens=-1 if cut else None,
        side="left" if side == "left" else "right" if side else None,
        windows=request.truncate is None and default == "window" and not isinstance(request, TeiTruncating),
    )


def cohere_truncation_of(request: CohereEmbedRequest, default: LongDocuments) -> Truncation:
    """What a request says of over-long texts in Cohere's words: which end is cut off, or none."""
    cut = request.truncate != "NONE" if request.truncate is not None else default != "error"
    sides: dict[str | None, Literal["left", "right"]] = {"START": "left", "END": "right"}
    return Truncation(max_tokens=-1 if cut else None, side=sides.get(request.truncate))


def wants_activation(request: Scoring) -> bool:
    return not request.raw_scores if request.use_activation is None else request.use_activation


def wants_normalized(request: Scoring, default: bool) -> bool:
    """Whether scores are to be from 0 to 1; `default` where the request says nothing of it, nor wants raw
    ones."""
    raw = not wants_activation(request)
    if request.normalize and raw:
        raise InvalidRequestError("normalize and raw scores exclude each other; leave out one", "normalize")
    return default and not raw if request.normalize is None else request.normalize


def as_inputs(value: Any, most: int, param: str = "input") -> Inputs:
    """OpenAI's `input`: a text, texts, token ids, or lists of token ids."""
    if value is msgspec.UNSET:
        raise InvalidRequestError(f"{param} is missing", param)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token(value[0]) and all(_is_token(item) for item in value):
            return [value]
        check_count(value, param, most)
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, str | dict) for item in value):  # Jina's {"text": ...}, {"image": ...}
            return [*texts_and_pictures(value, param)]
        if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in value):
            return value
    raise InvalidRequestError(
        f"{_odd_entry(value, param)}{param} must be a text, a list of texts, a list of token ids or a list "
        "of those, and not empty",
        param,
    )


def _odd_entry(values: Any, param: str) -> str:
    """Says which entry of a list is of no kind that is taken, or of another than the first; "" for none."""
    first = None
    for i, value in enumerate(values if isinstance(values, list) else ()):
        kind = _kind_of_input(value)
        if kind is None:
            shown = "null" if value is None else "neither a text nor token ids"
            return f"{param}[{i}] is {shown}: "
        if first not in (None, kind):
            return f"{param}[{i}] is {kind}, but {param}[0] is {first}: "
        first = kind
    return ""


def _kind_of_input(value: Any) -> str | None:
    if isinstance(value, str | dict):
        return "a text"
    if _is_token(value):
        return "a token id"
    is_ids = isinstance(value, list) and value and all(map(_is_token, value))
    return "a list of token ids" if is_ids else None


def texts_and_pictures(values: list[Content], param: str) -> Iterator[str | PictureContent]:
    """Each of many contents as a text, or as pictures if it has some."""
    for where, value in _named(values, param):
        if isinstance(value, dict) and has_pictures(value):
            yield content_of(value, where, param)
        else:
            yield as_text(value, where, param)


def check_token_ids(inputs: Inputs, accepted: bool, param: str = "input") -> None:
    """Raises InvalidRequestError for token ids, unless they are accepted."""
    if not accepted and isinstance(inputs[0], list):
        raise InvalidRequestError(
            f"{param} has token ids, and another tokeniser's would get vectors that mean nothing; send texts "
            "(LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False), or have the server "
            "started with --accept-token-ids if they are its own (POST /tokenize)",
            param,
        )


def as_sequences(value: Any, most: int) -> tuple[list[str], list[str] | None, bool]:
    """text-embeddings-inference's `inputs`: texts, the second texts of pairs if they are such, and whether
    there are many."""
    check_count(value, "inputs", most)
    one = isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    given = [value] if one else value
    if isinstance(given, list) and given:
        sequences = [[item] if isinstance(item, str) else item for item in given]
        lengths = {_length_of(sequence) for sequence in sequences}
        if lengths == {1}:
            return [sequence[0] for sequence in sequences], None, not one
        if lengths == {2}:
            return [pair[0] for pair in sequences], [pair[1] for pair in sequences], not one
    where = f"inputs[{given.index(None)}] is null: " if isinstance(given, list) and None in given else ""
    raise InvalidRequestError(
        f"{where}inputs must be a text, a pair of texts, or a list of lists of one text or two", "inputs"
    )


def _length_of(sequence: Any) -> int:
    """How many texts a list holds; 0 for anything but a list of texts."""
    is_short = isinstance(sequence, list) and len(sequence) <= 2
    return len(sequence) if is_short and all(isinstance(text, str) for text in sequence) else 0


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def input_type_of(value: str | None, param: str = "input_type") -> InputType | None:
    """`query` or `document` from what clients call them."""
    if value is None or value in _OTHER_TYPES:
        return None
    if value in ("query", "search_query", "retrieval.query"):
        return "query"
    if value in ("document", "passage", "search_document", "retrieval.passage"):
        return "document"
    raise InvalidRequestError(f"{param} {value!r} is not known; use query or document", param)


def meaning_of(request: EmbeddingsRequest) -> InputType | None:
    """Whether texts are queries or documents, by `input_type`, or by Jina's `task`, which on /pooling is
    something else."""
    if request.input_type is None and not isinstance(request, PoolingRequest):
        return input_type_of(request.task, "task")
    return input_type_of(request.input_type)


def numbers_of(request: EmbeddingsRequest) -> Numbers:
    """In which numbers the vectors are to leave, whichever field says so."""
    for param in ("embed_dtype", "output_dtype", "embedding_type"):
        given = getattr(request, param)
        names = given if isinstance(given, list) else [given]
        if len(names) > 1:
            raise InvalidRequestError(f"{param} must be one kind of number here, not {len(names)}", param)
        for name in names:
            if name is None or name in ("auto", "base64"):
                continue
            numbers = "float32" if name == "float" else name
            if numbers not in NUMBERS:
                raise InvalidRequestError(
                    f"{param} {name!r} is not known; use float or one of {', '.join(NUMBERS)}", param
                )
            return cast("Numbers", numbers)
    return "float32"


def wants_base64(request: EmbeddingsRequest) -> bool:
    """OpenAI's way to say so, or Jina's."""
    return request.encoding_format == "base64" or request.embedding_type in ("base64", ["base64"])
