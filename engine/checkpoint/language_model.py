"""Loads rerankers that answer with a word: language models, and encoder-decoders such as monoT5 and mT5
(Nogueira et al. 2020, arXiv 2003.06713)."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.modules import LogitScore
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from maxsimd.engine.checkpoint.cross_encoder import prompted, special_tokens, template_of, truncation_of
from maxsimd.engine.checkpoint.files import CheckpointFiles, names_of
from maxsimd.engine.checkpoint.heads import TokenLogitsHead
from maxsimd.engine.checkpoint.model import PairRules, RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader, Reader, TemplateReader
from maxsimd.engine.checkpoint.reference import FirstWordReference, WordLogitsReference
from maxsimd.engine.checkpoint.settings import stated_activation
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.checkpoint.visual_loaders import with_pictures
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.ops.qkv import QKV

log = logging.getLogger(__name__)
NEWLINE = "{{ '\\n' }}"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """The question of a published reranker and the score of its answer, from its model card.

    The score is logit(`true`) - logit(`false`), or logit(`true`) alone, with `activation` on it. `named`
    is in the names of checkpoints of the family."""

    example: str
    named: str
    segments: tuple[str, ...]
    true: str
    false: str | None
    activation: torch.nn.Module
    instruction: str | None = None


# By architecture, because a bare `*ForCausalLM` checkpoint says no more about itself. The wording is that of
# the model cards: with another one, scores would differ.
FAMILIES = {
    "Qwen3ForCausalLM": Family(
        example="Qwen/Qwen3-Reranker-0.6B",
        named="qwen3reranker",
        segments=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
            'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user" + NEWLINE,
            "<Instruct>: {{ instruction }}\n<Query>: {{ query }}\n<Document>: {{ document }}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n" + NEWLINE,
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
            "<|im_end|>\n<|im_start|>user" + NEWLINE,
            "{% if instruction %}instruction: {{ instruction }}{{ '\\n' }}{% endif %}query: {{ query }}",
            NEWLINE,
            "document: {{ document }}",
            NEWLINE,
            "You are a search relevance expert who evaluates how well documents match search queries. For "
            "each query-document pair, carefully analyze the semantic relationship between them, then "
            "provide your binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant" + NEWLINE,
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
            NEWLINE,
            "B: {{ document }}",
            NEWLINE,
            "{{ instruction }}",
        ),
        true="Yes",
        false=None,
        activation=torch.nn.Identity(),
        instruction="Given a query A and a passage B, determine whether the passage contains an answer to "
        "the query by providing a prediction of either 'Yes' or 'No'.",
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A language model as it was read, and the `words` that its answer is scored by, as token ids. The
    `transformer` is sentence-transformers' module, None for a bare checkpoint. The `prompt` stands before
    queries; `prompts` are all by name."""

    model: Any
    tokenizer: Any
    words: list[int]
    activation: Any
    pairs: PairRules
    reader: Reader
    prompt: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    transformer: Any = None


def load_language_model(
    name: str, path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads a `*ForCausalLM` served as `name`: a `CrossEncoder` save by its own settings, a bare one by its
    family's model card."""
    if files.modules:
        read = _read_saved(path, files, template, options)
    else:
        read = _read_bare(name, path, files, template, options)
    model, tokenizer = read.model, read.tokenizer
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(read.words)]
    head = TokenLogitsHead(model, read.words, names)
    reference = WordLogitsReference(model, tokenizer, head.output)
    parts = {
        "backbone": model.base_model,
        "tokenizer": tokenizer,
        "tasks": {"classify": Task("last", head, 1, False, reference)},
        "score_task": "classify",
        "query": RoleRules(read.prompt),
        "prompts": read.prompts,
        "activation": read.activation,
        "labels": (names[0],),
        "pairs": read.pairs,
        "reader": read.reader,
    }
    return parts if read.transformer is None else with_pictures(path, read.transformer, parts)


def _read_saved(
    path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> _Read:
    activation = stated_activation(path, files, options["trust_remote_code"])
    encoder = CrossEncoder(path, **options)
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
    is_given = template is not None
    template, prompt = prompted(encoder, template or template_of(transformer))
    if template is None:
        raise ModelLoadError(f"{path!r} has no chat template for query and document; give score_template")
    reader: Reader = LibraryReader(encoder, can_score=False)
    if is_given:
        reader = TemplateReader(transformer.tokenizer, template)
    return _Read(
        transformer.auto_model,
        transformer.tokenizer,
        words,
        activation or encoder.activation_fn,
        PairRules(truncation_of(path, transformer), template),
        reader,
        prompt,
        {name: each for name, each in encoder.prompts.items() if each},
        transformer,
    )


def _read_bare(
    name: str, path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> _Read:
    architecture = files.architecture
    family = FAMILIES.get(architecture)
    if family is None and template is None:
        raise ModelLoadError(
            f"{path!r} is a {architecture} and says neither how it wants to be asked nor how it answers: "
            "give score_template, whose answers are taken to be yes and no, or name a model of a known "
            "family: " + ", ".join(family.example for family in FAMILIES.values())
        )
    true, false = (family.true, family.false) if family else ("yes", "no")
    answers = true if false is None else f"{true} or {false}"
    if family is not None and template is None:
        if files.config.get("auto_map"):
            raise ModelLoadError(
                f"{path!r} comes with code of its own, which may ask and score otherwise than that of "
                f"{family.example}; name a version with sentence-transformers' modules, or give "
                f"score_template if it answers {answers}"
            )
        _say_family(name, files, family.example, family.named, answers)
    common = {"revision": options["revision"], "trust_remote_code": options["trust_remote_code"]}
    tokenizer = AutoTokenizer.from_pretrained(path, **common)
    model = AutoModelForCausalLM.from_pretrained(path, **common, **options["model_kwargs"])
    model = model.to(options["device"]).eval()
    if template is None:
        assert family is not None
        variables = special_tokens(tokenizer)
        template = ScoreTemplate(family.segments, family.instruction, variables, source=family.example)
    words = [token_id(tokenizer, word, path) for word in (true, false) if word is not None]
    activation = family.activation if family else torch.nn.Sigmoid()
    pairs = PairRules("only_second", template)
    return _Read(model, tokenizer, words, activation, pairs, TemplateReader(tokenizer, template))


def _say_family(name: str, files: CheckpointFiles, example: str, named: str, answers: str) -> None:
    """Logs which published reranker a checkpoint is taken for, as a warning if neither its name says so, nor
    that of its base, nor the title of its README.md. Nothing else tells such rerankers from others."""
    if named in names_of(name, files.config.get("_name_or_path")):
        log.info("%s is asked as %s is, and answers %s", name, example, answers)
        return
    log.warning(
        "%s is taken for %s by its architecture. If it is asked otherwise, give score_template; if it "
        "answers otherwise than by %s, its scores are wrong",
        *(name, example, answers),
    )


def token_id(tokenizer: Any, word: str, path: str) -> int:
    """The id of a word of an answer. Raises ModelLoadError where it is no token."""
    found = tokenizer.convert_tokens_to_ids(word)
    if found is None or found == tokenizer.unk_token_id:
        raise ModelLoadError(f"the tokenizer of {path!r} has no token {word!r} to take the score from")
    return int(found)


class AnsweringDecoder(torch.nn.Module):
    """A T5 with its decoder's first step: the decoder's state, from which the logits of the first word of an
    answer are made, stands in the first row of each sequence in place of the encoder's, and so is pooled as
    a first token is.

    In a packed step, all sequences' decoders run together, one row per sequence, and attend to the encoder's
    rows of their own sequence as the first row of one."""

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
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **options)
        states = encoded.last_hidden_state.clone()
        if step_attention is None:
            starts = torch.full((len(input_ids), 1), self._start, device=input_ids.device)
            decoded = self.decoder(
                input_ids=starts,
                encoder_hidden_states=encoded.last_hidden_state,
                encoder_attention_mask=attention_mask,
                use_cache=False,
            )
            states[:, 0] = decoded.last_hidden_state[:, 0] * self._scale
        else:
            first = step_attention.metadata.first_of_each
            states[0, first] = self._decoded(encoded.last_hidden_state, first, step_attention) * self._scale
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


@dataclass(frozen=True, slots=True)
class _Family:
    """The words with which published rerankers of an architecture answer, what is in their names, and the
    width from which on they answer with others."""

    example: str
    named: str
    true: str
    false: str
    widest: int | None = None


# By architecture, because a checkpoint says no more about itself. The words are pygaggle's
# (pygaggle/rerank/transformer.py); of mT5 the models of 3B and 13B parameters have other ones there.
_FAMILIES = {
    "T5ForConditionalGeneration": _Family(
        "castorini/monot5-base-msmarco", "monot5", "\u2581true", "\u2581false"
    ),
    "MT5ForConditionalGeneration": _Family(
        "unicamp-dl/mt5-base-mmarco-v2", "marco", "\u2581yes", "\u2581no", widest=1024
    ),
}
_TEMPLATE = "Query: {{ query }} Document: {{ document }} Relevant:"


def load_encoder_decoder(
    name: str, path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads a `T5ForConditionalGeneration` or `MT5ForConditionalGeneration`.

    Its score is what pygaggle's `MonoT5` gives: the logarithm of the probability of the true word, of these
    two words."""
    family = _FAMILIES[files.architecture]
    common = {"revision": options["revision"], "trust_remote_code": options["trust_remote_code"]}
    tokenizer = AutoTokenizer.from_pretrained(path, **common)
    model = AutoModelForSeq2SeqLM.from_pretrained(path, **common, **options["model_kwargs"])
    model = model.to(options["device"]).eval()
    _refuse_other_words(path, family, model.config)
    if template is None:
        _say_family(name, files, family.example, family.named, f"{family.true} or {family.false}")
    words = [token_id(tokenizer, word, path) for word in (family.true, family.false)]
    if template is None:
        trailing_ids = _trailing_ids(path, tokenizer)
        template = ScoreTemplate((_TEMPLATE,), trailing_ids=trailing_ids, source=family.example)
    # Before the reference, which leaves only the rows of the two words in the model's output layer.
    head = TokenLogitsHead(model, words, (family.true, family.false))
    return {
        "backbone": AnsweringDecoder(model),
        "tokenizer": tokenizer,
        "tasks": {"classify": Task("cls", head, 1, False, FirstWordReference(model, tokenizer, head.output))},
        "score_task": "classify",
        "activation": torch.nn.LogSigmoid(),
        "labels": (family.true,),
        "pairs": PairRules("only_second", template),
        "reader": TemplateReader(tokenizer, template),
    }


def _refuse_other_words(path: str, family: _Family, config: Any) -> None:
    if config.decoder_start_token_id is None:
        raise ModelLoadError(f"{path!r} has no decoder_start_token_id in its config; set it (T5's is 0)")
    if family.widest is not None and config.d_model > family.widest:
        raise ModelLoadError(
            f"{path!r} is wider than the rerankers that answer {family.true} or {family.false}, such as "
            f"{family.example}; published ones of its size answer with other words, which are not served"
        )


def _trailing_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that the tokenizer puts behind every text, which is </s>."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    if ids[: len(plain)] != plain:
        raise ModelLoadError(f"the tokenizer of {path!r} puts tokens before a text; T5's do not")
    return tuple(ids[len(plain) :])
