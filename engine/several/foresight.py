"""What a stage of a cascade refuses whichever documents come to it: found before any stage runs."""

from collections.abc import Sequence
from dataclasses import replace

from maxsimd.engine.engine import SCORE_DEFAULTS, Engine
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.media import Content
from maxsimd.engine.requests import Item, Scorable, ScoreOptions

# Hardly any text has fewer tokens.
_SHORTEST_TEXT = "a"


async def check_stage(
    engine: Engine, query: Scorable, documents: Sequence[Item], num_coming: int, options: ScoreOptions
) -> None:
    """Raises InvalidRequestError where the model refuses the query or the options, or where any `num_coming`
    of the documents include one that it refuses.

    Texts are tried from the longest down to the first that can be read, which usually is the longest. How
    many tokens all documents have together is left to the stage, because cached ones have none to run."""
    found: dict[int, InvalidRequestError] = {}
    # Of embeddings, and of pictures, the model takes all or none.
    one_of_each = {type(document): document for document in documents if not isinstance(document, str)}
    kinds = {kind: await _refusal(engine, query, one, options) for kind, one in one_of_each.items()}
    for i, document in enumerate(documents):
        if not isinstance(document, str):
            _note(found, i, kinds[type(document)])
    texts = [(i, document) for i, document in enumerate(documents) if isinstance(document, str)]
    if not texts:
        await _refusal(engine, query, _SHORTEST_TEXT, options)
    most = len(documents) - num_coming
    for i, text in sorted(texts, key=lambda each: -len(each[1])):
        if len(found) > most or not _note(found, i, await _refusal(engine, query, text, options)):
            break
    if len(found) > most:
        first = min(found)
        message = str(found[first]).replace("documents[0]", f"documents[{first}]")
        raise InvalidRequestError(message, found[first].param)


def _note(found: dict[int, InvalidRequestError], index: int, refusal: InvalidRequestError | None) -> bool:
    if refusal is not None:
        found[index] = refusal
    return refusal is not None


async def _refusal(
    engine: Engine, query: Scorable, document: Item, options: ScoreOptions
) -> InvalidRequestError | None:
    """Why the model does not take a document, as far as that is known without opening a picture. Raises
    InvalidRequestError for what is wrong with anything else."""
    try:
        complete: ScoreOptions = {**SCORE_DEFAULTS, **options, "cache": "bypass"}
        request = engine.score_processor.read(query, [document], complete)
        if isinstance(document, str):
            # Beside a picture there is no more room than beside the shortest text.
            queries = [_SHORTEST_TEXT if isinstance(each, Content) else each for each in request.queries]
            await engine.check_readable(replace(request, queries=tuple(queries)))
    except RequestTooLargeError:
        return None
    except InvalidRequestError as error:
        if error.param != "documents":
            raise
        return error
    return None
