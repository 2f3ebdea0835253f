"""The meaning of each parameter of the engines' methods. Docstrings are completed from here."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from textwrap import wrap
from typing import Any

# By name, or by method and name where a method differs.
MEANINGS = {
    "queries": "One query, or one for each document. A query is a text, a picture, or, for late "
    "interaction and bi-encoders, an embedding: `Vectors`, `QueryRows`, or an array [tokens, dim] or "
    "[dim].",
    "query": "The query: a text, a picture, or, for late interaction and bi-encoders, an embedding: "
    "`Vectors`, `QueryRows`, or an array [tokens, dim] or [dim].",
    "encode_query.query": "A text or a picture.",
    "documents": "One document or a list of them: texts, pictures or embeddings, as for queries, or a "
    "`DocumentDigest` for each text that the engine has.",
    "add_documents.documents": "A text, or a list of texts.",
    "texts": "A text, or a list of texts. Token ids, special tokens included, or a picture may stand in "
    "place of a text.",
    "classify.texts": "A text, or a list of texts. Token ids may stand in place of a text, but not with "
    "`text_pairs`.",
    "tokenize.texts": "A text, or a list of texts.",
    "token_classify.texts": "A text, or a list of texts.",
    "text_pairs": "The second texts of pairs, one for each text, or any number for one text.",
    "label_scores.query": "The first part of each prompt: a text, or token ids.",
    "label_scores.documents": "The second parts: one text or a list of them, or a list of token ids for each "
    "if the query is token ids.",
    "labels": "The labels to score: token ids, or texts of one token each.",
    "apply_softmax": "Whether the probabilities of the labels are made to sum to 1.",
    "document_first": "Whether a document stands before the query in its prompt.",
    "tokenize_apart": "Whether the query and each document are tokenized apart. False joins the texts first.",
    "label_scores.add_special_tokens": "Whether the tokenizer's special tokens stand around each prompt, or "
    "around the query if it is tokenized apart. Token ids get none.",
    "top_n": "The most documents to return. None or 0 returns all. InvalidRequestError if it is negative.",
    "score_threshold": "Leaves out documents with a lower score. None leaves out none.",
    "truncation": '"cut" truncates texts that are too long for the model, and counts them in '
    '`truncated`. "error" raises InvalidRequestError. "window" reads long documents through overlapping '
    "windows, and truncates other texts. A `Truncation` says it in full, with lengths in tokens.",
    "use_activation": "Whether a classifier's activation, such as sigmoid, is applied. False returns "
    "logits. Other models have none.",
    "normalize": "Whether scores are from 0 to 1: classifiers' probabilities, cosines cut off at 0, and "
    "for MaxSim the mean over the query's tokens, cut off at 0. InvalidRequestError if the model has no "
    "such scale.",
    "instruction": "The task in words, for models that take it. None uses the checkpoint's own. "
    "InvalidRequestError for other models.",
    "cache": '"use" reads embeddings of documents, or scores of cross-encoders and listwise models, from '
    'the cache, and adds new ones. "bypass" does neither. "refresh" runs all documents and replaces their '
    "entries.",
    "priority": '"interactive" (0), "batch" (4) or an integer. Lower values get a larger share of the '
    "device.",
    "tenant": "The tenant that the call is for. Tenants share the device by weight (`set_tenants`).",
    "timeout": "Seconds for the whole call, waiting included; then RequestTimeoutError. None sets no limit.",
    "on_timeout": '"error" raises RequestTimeoutError. "partial" returns the scores so far, and the '
    "other documents in `unscored`; listwise models refuse it.",
    "on_error": '"fail" raises the error of a document that cannot be read or run. "report" puts it into '
    "`errors`, and scores the others; listwise models refuse it.",
    "progress": "Called with how many of the call's values are there, and how many there will be. It "
    "must not block. If it raises, the call fails.",
    "explain": "Whether each score has an `Explanation`: matching tokens for late interaction, scores of "
    'windows, token counts, cache hits. "maps" adds the similarity of each query token to each token of '
    "a document, or to each patch of a picture.",
    "input_type": '"query" or "document": reads texts as the checkpoint reads these, with its prompt and '
    "lengths. None uses its default prompt, if it has one.",
    "prompt_name": "The name of one of the checkpoint's prompts, which is put before the texts. "
    "InvalidRequestError for an unknown one.",
    "dimensions": "The columns to return, the first ones (matryoshka): from 1 to the model's dim. None "
    "returns all.",
    "late_chunking": "Whether the texts are the consecutive chunks of one document. It is read as a "
    "whole, never truncated, and each chunk's vector is the mean of its tokens. InvalidRequestError for "
    "models that do not pool by the mean.",
    "chunks": "With `late_chunking` and one text, the start and end of each chunk in characters.",
    "encoding": '"muvera" or a `Muvera`: a late-interaction model returns one vector per text, made of '
    "its token vectors. The inner product of two approximates MaxSim. Needs `input_type`.",
    "aggregation_strategy": '"none" gives an entry for each token. "simple" joins neighbors of the same tag. '
    '"first", "average" and "max" also give all tokens of a word one label: that of its first token, that of '
    "their mean probabilities, or that of its likeliest token.",
    "ignore_labels": "Labels to leave out. With groups, these are tags, without B- and I-.",
    "stride": "Reads texts that are too long in windows, which share this many tokens, and joins their "
    "entities. None truncates texts. At most half of a window; not with `aggregation_strategy` "
    '"none".',
    "return_logits": "Whether the result has the logits of all tokens in place of entities.",
    "max_tokens": "Refuses texts that have more tokens together, with RequestTooLargeError before they "
    "run. None sets no limit.",
    "return_tokens": "Whether the result has the string of each token.",
    "add_special_tokens": "Whether the model's special tokens stand around each text.",
    "stages": "The models, first to last: `Stage(model, keep, instruction)`. At least one.",
    "deadline": "Seconds for all stages together; then RequestTimeoutError. None sets no limit.",
    "grace": "Seconds for calls that are open. None waits for as long as they take.",
    "messages": 'Messages, each with "role" and "content".',
    "add_generation_prompt": "Whether the text ends with what begins an answer.",
    "continue_final_message": "Whether the last message is left open.",
    "tenants": "A `Tenant` by each name. Others have a weight of 1 and no limits of their own.",
    "request": "The request, with its options.",
    "function": "A function without arguments.",
    "size": "About how many characters it reads or writes. Small work goes first.",
}
# The errors of calls that run the model.
_ERRORS = {
    "InvalidRequestError": "An argument is invalid. Its `param` names the argument.",
    "RequestTooLargeError": "The call has more tokens than one may have (`max_request_tokens`).",
    "RequestTimeoutError": "`timeout` has passed.",
    "RequestFailedError": "The model failed on the inputs.",
    "QueueFullError": "The queue is full and `max_wait_seconds` is set, or the tenant has used up its rate.",
    "EngineNotReadyError": "The engine has not started, or has been stopped.",
    "EngineDeadError": "The engine has died.",
}
_WIDTH = 100
_KINDS_WITHOUT_NAMES = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def complete_docstring(method: Callable[..., Any], more: Iterable[str] = ()) -> None:
    """Adds the meaning of each parameter to a method's docstring, with its default, and the errors of calls.
    `more` are options that the signature does not name."""
    parameters = [
        each
        for each in inspect.signature(method).parameters.values()
        if each.name != "self" and each.kind not in _KINDS_WITHOUT_NAMES
    ]
    described = {each.name: _described(method.__name__, each) for each in parameters}
    described |= {name: MEANINGS[name] for name in more}
    sections = {"Args": described}
    if described.keys() & {"timeout", "deadline"}:
        sections["Raises"] = _ERRORS
    method.__doc__ = with_sections(method.__doc__ or "", sections)


def with_sections(docstring: str, sections: Mapping[str, Mapping[str, str]]) -> str:
    """Adds sections, such as Args, to a docstring. Each has meanings by name."""
    written = ["\n".join([f"{title}:", *_lines(each)]) for title, each in sections.items() if each]
    return "\n\n".join([inspect.cleandoc(docstring), *written])


def _described(method: str, parameter: inspect.Parameter) -> str:
    meaning = MEANINGS.get(f"{method}.{parameter.name}") or MEANINGS[parameter.name]
    return meaning if parameter.default is parameter.empty else f"{meaning} Default: {parameter.default!r}."


def _lines(described: Mapping[str, str]) -> Iterator[str]:
    for name, meaning in described.items():
        yield from wrap(f"{name}: {meaning}", _WIDTH, initial_indent="    ", subsequent_indent="        ")
