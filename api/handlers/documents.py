"""The route that makes documents known by their digests, for requests that rank without their texts."""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from maxsimd.api import reading, wire
from maxsimd.api.answer import Answer, usage_of
from maxsimd.api.handlers.route import Form, Group, Shown, answer_of, post
from maxsimd.api.models import Wanted
from maxsimd.api.state import ServerState
from maxsimd.api.wire import about
from maxsimd.engine import AddedDocuments, InvalidRequestError


class AddRequest(wire.Common, kw_only=True):
    """Documents to add. Requests that name them have the same limits of lengths."""

    documents: Annotated[wire.Contents, about("Texts, or objects with a text and an `id`.", wire.DOCUMENTS)]
    rank_fields: wire.RankFields = None
    max_tokens_per_doc: Annotated[
        wire.NotNegative | None, about("Most tokens of a document; 0: no limit of its own. Default: 0.", 512)
    ] = None
    window_overlap: Annotated[
        wire.NotNegative | None,
        about("Tokens that two windows of a long document share. Default: the server's.", 64),
    ] = None


class Added(msgspec.Struct):
    index: wire.Index
    digest: wire.Digest
    kept: Annotated[bool, about("Whether requests may give the digest in its place.", True)]
    id: wire.DocumentId | UnsetType = UNSET


class AddResponse(wire.Warned, kw_only=True):
    object: wire.AlwaysList = "list"
    model: wire.Model
    data: Annotated[list[Added], about("The documents, in the order of the request.")]
    usage: wire.UsageField


def texts_to_add(request: AddRequest, most: int) -> list[str]:
    reading.check_count(request.documents, "documents", most)
    items = reading.as_items(request.documents, "documents", request.rank_fields)
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items):
        other = next(i for i, item in enumerate(items) if not isinstance(item, str))
        message = f"documents[{other}] is not a text, and only texts have digests; send it with each request"
        raise InvalidRequestError(message, "documents")
    return texts


async def add(state: ServerState, body: AddRequest, texts: list[str]) -> Answer:
    state.check_owner_of_digests()
    added: AddedDocuments = await state.engine.add_documents(
        texts,
        truncation=reading.truncation_of(body, state.config.long_documents),
        priority=body.priority or 0,
        tenant=state.tenant,
        timeout=body.timeout,
    )
    model = state.model_name

    def build(warnings: wire.Warnings) -> AddResponse:
        not_kept = {*added.not_kept}
        ids = body.documents if isinstance(body.documents, list) else [body.documents]
        data = [
            Added(i, str(digest), i not in not_kept, reading.id_of(content))
            for i, (digest, content) in enumerate(zip(added.digests, ids, strict=True))
        ]
        return AddResponse(model=model, data=data, usage=usage_of(added.usage), warnings=warnings)

    more = []
    if added.not_kept:
        more = [
            f"{len(added.not_kept)} documents are not kept, and must be sent as texts: the cache "
            "(--cache-mb, --limit document_store_mb) has no room for them"
        ]
    return await answer_of(state, body, added, build, len(texts), more_warnings=more)


ROUTES = (
    *post(
        ("/documents", "/v1/documents"),
        Form(AddRequest, texts_to_add, add, Wanted.RANKING),
        Shown(Group.RANK, "Add documents, to rank them by their digests", {"documents": wire.DOCUMENTS}),
        AddResponse,
    ),
)
