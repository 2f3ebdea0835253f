"""Loads cross-encoders: `*ForSequenceClassification` checkpoints, as CrossEncoder saves them or plain, and
encoders whose pooled vector a Dense module scores. Beside them, rerankers that answer with a word: language
models, and encoder-decoders such as monoT5 and mT5 (Nogueira et al. 2020, arXiv 2003.06713)."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutput

from maxsimd.engine.checkpoint.detect import ENCODER_DECODERS, answers_in_words, is_language_model
from maxsimd.engine.checkpoint.encoders import SCORES, pooling_of, split_modules
from maxsimd.engine.checkpoint.files import CheckpointFiles, names_of
from maxsimd.engine.checkpoint.heads import ClassifierHead, ModuleHead, TokenLogitsHead
from maxsimd.engine.checkpoint.model import PairRules, RoleRules, Task, is_causal
from maxsimd.engine.checkpoint.reading import LibraryReader, TemplateReader
from maxsimd.engine.checkpoint.reference import (
    ClassifierReference,
    ModulesReference,
    WordLogitsReference,
)
from maxsimd.engine.checkpoint.settings import (
    read_text_settings,
    set_activations,
    stated_activation,
)
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.checkpoint.visual_loaders import with_pictures
from maxsimd.engine.checkpoint.weights import refuse_modules_not_finite
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.ops.qkv import QKV
from maxsimd.pooling.methods import METHODS

log = logging.getLogger(__name__)
_RELEVANT = ("Query: {{ query }} Document: {{ document }} Relevant:",)
_NEWLINE = "{{ '\\n' }}"


def load_cross_encoder(
    path: str, files: CheckpointFiles, given: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers, which finds the activation that its authors meant."""
    activation = None if options["trust_remote_code"] else stated_activation(path, files)
    encoder = CrossEncoder(path, **options).eval()
    if activation is not None:
        encoder.activation_fn = activation
    if any(isinstance(module, Pooling) for module in encoder):
        return _scored_by_modules(path, files, encoder, given, options)
    if is_language_model(files) or answers_in_words(files):
        return _answering_in_words(path, encoder, given)
    model: Any = encoder.model
    if len(list(encoder)) > 1:
        names = ", ".join(type(module).__name__ for module in list(encoder)[1:])
        raise ModelLoadError(f"{path!r} has modules after its classifier that are not supported: {names}")
    causal = is_causal(model.base_model)
    # Classifiers of language models look at the last token, in whichever directions they read.
    is_last = causal or isinstance(model, GenericForSequenceClassification)
    pooling = "last" if is_last else getattr(model.config, "classifier_pooling", "cls")
    if pooling not in METHODS:  # a method of the model's own
        pooling = "cls"
    labels = labels_of(model.config)
    head = ClassifierHead(model)
    task = Task(pooling, head, len(labels), False, ClassifierReference(model, encoder.tokenizer))
    return _parts(path, encoder, given, model.base_model, task, labels) | {
        "causal": causal,
        "ending_pad_id": head.pad_id if head.passes_over_padding() else None,
    }


def labels_of(config: Any) -> tuple[str, ...]:
    """The names of a classifier's labels, in the order of its logits."""
    return tuple(str(config.id2label.get(i, f"LABEL_{i}")) for i in range(config.num_labels))


def _parts(
    path: str,
    encoder: CrossEncoder,
    given: ScoreTemplate | None,
    backbone: Any,
    task: Task,
    labels: tuple[str, ...],
) -> dict[str, Any]:
    """The parts of a CrossEncoder save. Its default prompt is the instruction of the template where
    sentence-transformers makes messages of a pair; else it stands before the query."""
    transformer: Any = encoder[0]
    template = given or _template_of(transformer)
    prompt = encoder.prompts.get(encoder.default_prompt_name or "") or ""
    if template is not None and "message" in transformer.modality_config:
        template, prompt = replace(template, instruction=prompt or template.instruction), ""
    sigmoid = len(labels) == 1 or transformer.config.problem_type == "multi_label_classification"
    truncation = read_text_settings(path, transformer, in_pairs=True).truncation or "longest_first"
    return {
        "backbone": backbone,
        "tokenizer": encoder.tokenizer,
        "tasks": {"classify": task},
        "score_task": "classify",
        "query": RoleRules(prompt),
        "text": RoleRules(prompt),
        "prompts": {name: each for name, each in encoder.prompts.items() if each},
        "activation": encoder.activation_fn,
        "probabilities": torch.sigmoid if sigmoid else torch.nn.Softmax(dim=-1),
        "labels": labels,
        "pairs": PairRules(truncation, template),
        # A language model's output layer has been cut down to the rows of its answers.
        "reader": LibraryReader(encoder, can_score=not isinstance(task.reference, WordLogitsReference))
        if given is None or template is None
        else TemplateReader(encoder.tokenizer, template),
    }


def _scored_by_modules(
    path: str,
    files: CheckpointFiles,
    encoder: CrossEncoder,
    given: ScoreTemplate | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The parts of an encoder whose modules, the last a Dense, score the pooled vector of a pair."""
    modules = list(encoder)
    set_activations(path, files, modules, options)
    transformer, pooling, after = split_modules(path, modules)
    if not (after and isinstance(after[-1], Dense) and after[-1].module_output_name == SCORES):
        raise ModelLoadError(
            f"{path!r} is a CrossEncoder whose last module gives no {SCORES}; make it a Dense "
            f'with module_output_name "{SCORES}"'
        )
    refuse_modules_not_finite(path, modules[1:])
    named = transformer.config.id2label
    columns = after[-1].out_features
    labels = tuple(str(named[i]) if len(named) == columns else f"LABEL_{i}" for i in range(columns))
    reference = ModulesReference(modules, transformer.tokenizer, SCORES)
    head = ModuleHead(after, "sentence_embedding", SCORES)
    task = Task(pooling_of(pooling), head, columns, False, reference)
    return _parts(path, encoder, given, transformer.auto_model, task, labels)


def _answering_in_words(path: str, encoder: CrossEncoder, given: ScoreTemplate | None) -> dict[str, Any]:
    """The parts of a language model whose answer a LogitScore scores."""
    transformer, *after = list(encoder)
    if len(after) != 1 or not isinstance(after[0], LogitScore):
        names = ", ".join(type(module).__name__ for module in after) or "nothing"
        raise ModelLoadError(f"{path!r} has {names} after its language model; a LogitScore is supported")
    read, made = after[0].module_input_name, transformer.module_output_name
    if read != made:
        raise ModelLoadError(
            f"the LogitScore of {path!r} sets module_input_name to {read!r}, and module_output_name in its "
            f"sentence_bert_config.json is {made!r}; they must be the same"
        )
    words = [after[0].true_token_id]
    if after[0].false_token_id is not None:
        words.append(after[0].false_token_id)
    if not all(type(each) is int and each >= 0 for each in words):
        raise ModelLoadError(
            f"the LogitScore of {path!r} has {words} as true_token_id and false_token_id; give token ids"
        )
    model = transformer.auto_model
    task, label = _answer(model, transformer.tokenizer, words, "last")
    parts = _parts(path, encoder, given, model.base_model, task, (label,))
    if parts["pairs"].template is None:
        raise ModelLoadError(f"{path!r} has no chat template for query and document; give score_template")
    return with_pictures(path, transformer, parts)


def _answer(model: Any, tokenizer: Any, words: list[int], pooling: str) -> tuple[Task, str]:
    """The task of a language model whose answer is scored by one or two words, as token ids; and the first
    word."""
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(words)]
    head = TokenLogitsHead(model, words, names)
    # Last, because it leaves only the rows of the words in the model's output layer.
    reference = WordLogitsReference(model, tokenizer, head.output)
    return Task(pooling, head, 1, False, reference), names[0]


def _template_of(transformer: Any) -> ScoreTemplate | None:
    settings = dict((transformer.processing_kwargs or {}).get("chat_template") or {})
    restores_end = settings.pop("restore_suffix", True) is not False
    name = settings.pop("chat_template", None)
    template = getattr(transformer.processor, "chat_template", None) or transformer.tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get(name or "default")
    elif name is not None:
        template = name
    if "message" not in transformer.modality_config or not template:
        return None
    variables = special_tokens(transformer.tokenizer) | settings
    in_parts = transformer.input_formatter.message_format == "structured"
    others: dict[str, Any] = {"in_parts": in_parts, "restores_end": restores_end, "by_messages": True}
    found = ScoreTemplate((template,), variables=variables, **others)
    try:
        found.check()
    except ModelLoadError as error:
        log.warning("the tokenizer joins pairs without its chat template: %s", error)
        return None
    return found


def special_tokens(tokenizer: Any) -> dict[str, str]:
    return {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """The question of a published reranker and the score of its answer, from its model card.

    The score is logit(`true`) - logit(`false`), or logit(`true`) alone, with `activation` on it. `named`
    is in the names of checkpoints of the family. Models with wider states than `widest` answer otherwise."""

    example: str
    named: str
    segments: tuple[str, ...]
    true: str
    false: str | None
    activation: torch.nn.Module
    instruction: str | None = None
    widest: int | None = None

    @property
    def words(self) -> list[str]:
        return [self.true] if self.false is None else [self.true, self.false]

    @property
    def answers(self) -> str:
        return " or ".join(self.words)


# By architecture, because a bare checkpoint says no more about itself. The wording is that of the model
# cards: with another one, scores would differ.
FAMILIES = {
    "Qwen3ForCausalLM": Family(
        example="Qwen/Qwen3-Reranker-0.6B",
        named="qwen3reranker",
        segments=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
            'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user" + _NEWLINE,
            "<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n<Document>: {{ document }}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n" + _NEWLINE,
        ),
        true="yes",
        false="no",
        activation=torch.nn.Sigmoid(),
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
    "Qwen2ForCausalLM": Family(
        example="mixedbread-ai/mxbai-rerank-base-v2",
        named="mxbairerank",
        segments=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
            "<|im_end|>\n<|im_start|>user" + _NEWLINE,
            "{% if instruction %}instruction: {{ instruction }}{{ '\\n' }}{% endif %}query: {{ query }}",
            _NEWLINE,
            "document: {{ document }}",
            _NEWLINE,
            "You are a search relevance expert who evaluates how well documents match search queries. For "
            "each query-document pair, carefully analyze the semantic relationship between them, then "
            "provide your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant" + _NEWLINE,
        ),
        true="1",
        false="0",
        activation=torch.nn.Identity(),
    ),
    "GemmaForCausalLM": Family(
        example="BAAI/bge-reranker-v2-gemma",
        named="bgererankerv2gemma",
        segments=(
            "{{ bos_token }}",
            "A: {{ query }}",
            _NEWLINE,
            "B: {{ document }}",
            _NEWLINE,
            "{{ instruction }}",
        ),
        true="Yes",
        false=None,
        activation=torch.nn.Identity(),
        instruction="Given a query A and a passage B, determine whether the passage contains an answer to "
        "the query by providing a prediction of either 'Yes' or 'No'.",
    ),
    # The words are pygaggle's (pygaggle/rerank/transformer.py), where larger mT5s have others.
    # The score is the logarithm of the probability of the true word, of the two.
    "T5ForConditionalGeneration": Family(
        example="castorini/monot5-base-msmarco",
        named="monot5",
        segments=_RELEVANT,
        true="\u2581true",
        false="\u2581false",
        activation=torch.nn.LogSigmoid(),
    ),
    "MT5ForConditionalGeneration": Family(
        example="unicamp-dl/mt5-base-mmarco-v2",
        named="marco",
        segments=_RELEVANT,
        true="\u2581yes",
        false="\u2581no",
        activation=torch.nn.LogSigmoid(),
        widest=1024,
    ),
}


def load_answering(
    name: str, path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads a bare `*ForCausalLM`, or an encoder-decoder to be scored as pygaggle's `MonoT5`. It is served as
    `name`, and asked as the model card of its family says."""
    family = FAMILIES.get(files.architecture)
    has_decoder = files.architecture in ENCODER_DECODERS
    if template is None and family is None:
        raise ModelLoadError(
            f"{path!r} is a {files.architecture} and says neither how it is asked nor how it answers: "
            "give score_template, whose answers are taken to be yes and no, set "
            'score_type="language-model" to score labels that requests name, or name a model of a known '
            "family: " + ", ".join(family.example for family in FAMILIES.values())
        )
    if template is None and family is not None and files.config.get("auto_map") and not has_decoder:
        raise ModelLoadError(
            f"{path!r} comes with code of its own, which may ask and score otherwise than that of "
            f"{family.example}; name a version with sentence-transformers' modules, or give "
            f"score_template if it answers {family.answers}"
        )
    kind = AutoModelForSeq2SeqLM if has_decoder else AutoModelForCausalLM
    model, tokenizer = read_bare(path, kind, options, options["trust_remote_code"])
    if has_decoder and model.config.decoder_start_token_id is None:
        raise ModelLoadError(f"{path!r} has no decoder_start_token_id in its config; set it (T5's is 0)")
    if family is not None and family.widest is not None and model.config.d_model > family.widest:
        raise ModelLoadError(
            f"{path!r} is wider than the rerankers that answer {family.answers}, such as {family.example}; "
            "published ones of its size answer with other words, which are not served"
        )
    words = ["yes", "no"] if family is None else family.words
    task, label = _answer(
        model,
        tokenizer,
        [_token_id(tokenizer, word, path) for word in words],
        "cls" if has_decoder else "last",
    )
    if template is None and family is not None:
        _say_family(name, files, family)
        leading, trailing = ids_around(tokenizer) if has_decoder else ((), ())
        if leading:
            raise ModelLoadError(f"the tokenizer of {path!r} puts tokens before a text; T5's do not")
        said: dict[str, Any] = {"variables": special_tokens(tokenizer), "trailing_ids": trailing}
        template = ScoreTemplate(family.segments, family.instruction, source=family.example, **said)
    assert template is not None
    backbone = AnsweringDecoder(model) if has_decoder else model.base_model
    return parts_by_template(backbone, tokenizer, task, (label,), template) | {
        "activation": torch.nn.Sigmoid() if family is None else family.activation
    }


def read_bare(path: str, kind: Any, options: dict[str, Any], trusts_code: bool = False) -> tuple[Any, Any]:
    """A model of transformers, on its device, and its tokenizer."""
    common = {"revision": options["revision"], "trust_remote_code": trusts_code}
    tokenizer = AutoTokenizer.from_pretrained(path, **common)
    model = kind.from_pretrained(path, **common, **options["model_kwargs"])
    return model.to(options["device"]).eval(), tokenizer


def parts_by_template(
    backbone: Any, tokenizer: Any, task: Task, labels: tuple[str, ...], template: ScoreTemplate
) -> dict[str, Any]:
    """The parts of a model that reads pairs as the template of its model card writes them."""
    return {
        "backbone": backbone,
        "tokenizer": tokenizer,
        "tasks": {"classify": task},
        "score_task": "classify",
        "labels": labels,
        "pairs": PairRules("only_second", template),
        "reader": TemplateReader(tokenizer, template),
    }


def _say_family(name: str, files: CheckpointFiles, family: Family) -> None:
    """Logs which published reranker a checkpoint is taken for, as a warning if neither its name says so, nor
    that of its base, nor the title of its README.md. Nothing else tells such rerankers from others."""
    if family.named in names_of(name, files.config.get("_name_or_path")):
        log.info("%s is asked as %s is, and answers %s", name, family.example, family.answers)
        return
    log.warning(
        "%s is taken for %s by its architecture. If it is asked otherwise, give score_template; if it "
        "answers otherwise than by %s, its scores are wrong",
        *(name, family.example, family.answers),
    )


def _token_id(tokenizer: Any, word: str, path: str) -> int:
    """The id of a word of an answer. Raises ModelLoadError where it is no token."""
    found = tokenizer.convert_tokens_to_ids(word)
    if found is None or found == tokenizer.unk_token_id:
        raise ModelLoadError(f"the tokenizer of {path!r} has no token {word!r} to take the score from")
    return int(found)


class AnsweringDecoder(torch.nn.Module):
    """A T5 with its decoder's first step, whose state gives the logits of an answer's first word. That state
    replaces the encoder's in the first row of each sequence, where it is pooled as a first token.

    In a packed step, all sequences' decoders run together, one row per sequence. Each attends to the
    encoder's rows of its own sequence, as the first of them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.encoder
        self.decoder = model.decoder
        self.config = model.encoder.config
        self._start = int(model.config.decoder_start_token_id)
        scaled = getattr(model.config, "scale_decoder_outputs", False)
        self._scale = model.config.d_model**-0.5 if scaled else 1.0

    def get_input_embeddings(self) -> Any:
        return self.encoder.get_input_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        """Sets it for the encoder; the decoder has its own way for packed steps."""
        self.encoder.set_attn_implementation(name)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        step_attention: Any = None,
        **others: Any,
    ) -> BaseModelOutput:
        """The states [n, tokens, hidden] of token ids [n, tokens], or [1, rows, hidden] of a packed step."""
        options = {} if step_attention is None else {"step_attention": step_attention}
        encoded = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, **options
        ).last_hidden_state
        states = encoded.clone()
        if step_attention is None:
            starts = torch.full((len(input_ids), 1), self._start, device=input_ids.device)
            given = {"encoder_hidden_states": encoded, "encoder_attention_mask": attention_mask}
            decoded = self.decoder(input_ids=starts, **given, use_cache=False)
            states[:, 0] = decoded.last_hidden_state[:, 0] * self._scale
        else:
            first = step_attention.metadata.first_of_each
            states[0, first] = self._decoded(encoded, first, step_attention) * self._scale
        return BaseModelOutput(last_hidden_state=states)

    def _decoded(self, encoded: torch.Tensor, first: torch.Tensor, step_attention: Any) -> torch.Tensor:
        """The decoder's states [sequences, hidden] behind its start, for packed rows [1, rows, hidden] of
        which those in `first` are the first of a sequence."""
        start = torch.full_like(first, self._start)
        states = self.decoder.embed_tokens(start)[None]  # [1, sequences, hidden]
        for block in self.decoder.block:
            alone, cross, feed_forward = block.layer
            # A token that sees itself alone gives its own value, whatever its position.
            states = states + alone.SelfAttention.o(alone.SelfAttention.v(alone.layer_norm(states)))
            attention = cross.EncDecAttention
            queries = encoded.new_zeros(encoded.shape[1], attention.inner_dim)
            queries[first] = attention.q(cross.layer_norm(states))[0]
            query, key, value = (
                rows.unflatten(-1, (attention.n_heads, -1)).transpose(0, 1)
                for rows in (queries, attention.k(encoded)[0], attention.v(encoded)[0])
            )
            qkv = QKV(query, key, value, attention.scaling)
            attended = step_attention.backend.first_rows(qkv, step_attention.metadata)[first]
            states = feed_forward(states + attention.o(attended.flatten(1)[None]))
        decoded: torch.Tensor = self.decoder.final_layer_norm(states)[0]
        return decoded


def ids_around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that a tokenizer puts before and behind every text."""
    bare, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    first = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return tuple(whole[:first]), tuple(whole[first + len(bare) :])
