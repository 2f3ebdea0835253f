"""The shortest sequences that requests can make: what must fit if a model is to be of any use.

Asked at start, so that a budget or a length that is too small is refused there and not by the first request.
"""

from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.preprocess.listwise import listwise_prompt
from maxsimd.engine.preprocess.tokenization import TextTokenizer

# A text of one token, or of hardly more.
_TEXT = "a"


def check_room(model: LoadedModel, tokenizer: TextTokenizer, budget: int, chunked: bool) -> None:
    """Raises ModelLoadError where the shortest sequence of some kind is longer than the model takes, or,
    unless it can be run in chunks, than a step's `budget` of tokens."""
    for kind, tokens in shortest_sequences(model, tokenizer).items():
        shortest = f"{kind} of {model.name!r} has at least {tokens} tokens with all that stands around it"
        if tokens > model.max_tokens:
            raise ModelLoadError(
                f"{shortest}, but the longest input is {model.max_tokens} tokens; leave out --max-model-len "
                "or raise it"
            )
        if not chunked and tokens > budget:
            raise ModelLoadError(
                f"{shortest}, but a step takes no more than {budget}; raise --max-batch-tokens to at least "
                f"{tokens}"
            )


def shortest_sequences(model: LoadedModel, tokenizer: TextTokenizer) -> dict[str, int]:
    """How many tokens the shortest sequence of each kind has, by what errors call it."""
    if model.listwise is not None:
        prompt = listwise_prompt(_TEXT, [_TEXT], model.instruction, model.listwise)
        return {"a query with one document": _count(prompt, tokenizer)}
    text = _of_role(model.text, tokenizer)
    if model.score_task != "classify":
        query, document = (_of_role(rules, tokenizer) for rules in (model.query, model.document))
        return {"a query": query, "a document": document, "a text": text}
    template = model.pairs.template
    if template is None:
        return {"a pair": tokenizer.pair.special_tokens + 2, "a text": text}
    frames = template.frames(_TEXT, model.instruction)
    segments = [
        frame.before if frame.after is None else frame.before + _TEXT + frame.after for frame in frames
    ]
    return {"a pair": sum(_count(segment, tokenizer) for segment in segments), "a text": text}


def _of_role(rules: RoleRules, tokenizer: TextTokenizer) -> int:
    tokens = tokenizer.single.special_tokens + _count(rules.prompt + _TEXT, tokenizer)
    if rules.max_tokens is not None:
        tokens = min(tokens, rules.max_tokens)
    return tokens if rules.expansion is None else max(tokens, rules.expansion.length)


def _count(text: str, tokenizer: TextTokenizer) -> int:
    return len(tokenizer.encode([text], "text")[0])
