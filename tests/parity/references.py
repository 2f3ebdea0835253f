"""Expected scores, from the library that each model card uses, or from the card itself, plainly."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Normalize
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from maxsimd.engine.checkpoint.visual_loaders import for_pictures_alone, without_videos
from tests.parity.plain_models import DETERMINE, Scores, Texts

Reference = Callable[..., Scores]


@lru_cache(maxsize=2)
def loaded(kind: type[Any], path: str) -> Any:
    """A model of sentence-transformers, kept for the next test; Pillow reads its pictures."""
    config = Path(path, "config.json")
    if not config.exists() or "vision_config" not in config.read_text(encoding="utf-8"):
        return kind(path, device="cpu")
    with without_videos():
        model = kind(path, device="cpu", processor_kwargs={"backend": "pil"})
    if not hasattr(model[0].processor, "video_processor"):
        for_pictures_alone(model[0].processor)
    return model


def cross_encoder(path: str, queries: Texts, documents: Texts) -> Scores:
    model = loaded(CrossEncoder, path)
    texts = list(zip(queries, documents, strict=True))
    # One by one: padding on the left moves positions, whose float32 angles then round differently.
    return np.asarray(model.predict(texts, show_progress_bar=False, batch_size=1))


def bi_encoder(path: str, queries: Texts, documents: Texts, **prompts: str) -> Scores:
    model = loaded(SentenceTransformer, path)
    if prompts:
        model = SentenceTransformer(path, device="cpu", prompts=prompts)
    return _similarities(model, queries, documents)


def embeddings(model: Any, texts: Texts, role: str, prompt: str | None = None) -> list[Scores]:
    """Vectors of a `SentenceTransformer` or a `MultiVectorEncoder`: [dim] or [tokens, dim] for each text."""
    encode = model.encode_query if role == "query" else model.encode_document
    encoded = encode(list(texts)) if prompt is None else encode(list(texts), prompt=prompt)
    return [np.asarray(item) for item in encoded]


def _similarities(model: Any, queries: Texts, documents: Texts) -> Scores:
    first, second = model.encode_query(list(queries)), model.encode_document(list(documents))
    scores: Scores = model.similarity_pairwise(first, second).numpy()
    return scores


def multi_vector(path: str, queries: Texts, documents: Texts) -> Scores:
    return _similarities(loaded(MultiVectorEncoder, path), queries, documents)


def sparse_encoder(path: str, queries: Texts, documents: Texts) -> Scores:
    return _similarities(loaded(SparseEncoder, path), queries, documents)


def sparse_vectors(path: str, texts: Texts, role: str | None) -> Scores:
    model = loaded(SparseEncoder, path)
    encode = {"query": model.encode_query, "document": model.encode_document, None: model.encode}[role]
    weights: Scores = encode(list(texts)).to_dense().numpy()
    return weights


def plain_encoder(path: str, queries: Texts, documents: Texts) -> Scores:
    """A bi-encoder's token states, normalized, compared by MaxSim."""
    return _similarities(token_states(path), queries, documents)


def token_states(path: str) -> MultiVectorEncoder:
    transformer = loaded(SentenceTransformer, path)[0]
    modules = [transformer, MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device="cpu")


class BgeM3:
    """bge-m3 as its paper and FlagEmbedding have it, one text at a time (arXiv 2402.03216, section 3.2)."""

    def __init__(self, path: str) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._model = transformers.AutoModel.from_pretrained(path).eval()
        self._sparse = torch.load(Path(path) / "sparse_linear.pt", weights_only=True)
        self._colbert = torch.load(Path(path) / "colbert_linear.pt", weights_only=True)

    @torch.inference_mode()
    def read(self, text: str) -> tuple[torch.Tensor, dict[int, float], torch.Tensor]:
        """The dense vector [dim], the weights of tokens, and the vectors of tokens [tokens - 1, dim]."""
        ids = self._tokenizer(text, return_tensors="pt", truncation=True)["input_ids"]
        hidden = self._model(input_ids=ids).last_hidden_state[0]
        weights = torch.relu(hidden @ self._sparse["weight"].T + self._sparse["bias"])[:, 0].tolist()
        tokens: dict[int, float] = {}
        for token, weight in zip(ids[0].tolist(), weights, strict=True):
            if token not in self._tokenizer.all_special_ids:
                tokens[token] = max(weight, tokens.get(token, 0.0))
        vectors = hidden[1:] @ self._colbert["weight"].T + self._colbert["bias"]
        normalize = torch.nn.functional.normalize
        return normalize(hidden[0], dim=0), tokens, normalize(vectors, dim=-1)

    def scores(self, queries: Texts, documents: Texts) -> Scores:
        """The dense, sparse and multi-vector score of each pair, [pairs, 3]."""
        scores = []
        for query, document in zip(queries, documents, strict=True):
            dense, weights, tokens = self.read(query)
            of_document = self.read(document)
            sparse = sum(weight * of_document[1].get(token, 0.0) for token, weight in weights.items())
            best = (tokens @ of_document[2].T).amax(dim=1)
            scores.append([float(dense @ of_document[0]), sparse, float(best.mean())])
        return np.array(scores, dtype=np.float32)


def bge_m3(path: str, queries: Texts, documents: Texts, weights: tuple[float, ...]) -> Scores:
    """The weighted mean of the three scores, by the weights of dense, sparse and multi-vector."""
    scores: Scores = _bge_m3(path).scores(queries, documents) @ np.array(weights) / sum(weights)
    return scores


@lru_cache(maxsize=1)
def _bge_m3(path: str) -> BgeM3:
    return BgeM3(path)


class LanguageModel:
    """A causal language model, run on one prompt at a time."""

    def __init__(self, path: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()

    def ids(self, *parts: str) -> list[int]:
        """The tokens of each part by itself, one behind the other."""
        encoded = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        return [token for ids in encoded for token in ids]

    @torch.inference_mode()
    def odds(self, ids: list[int], yes: str, no: str | None = None) -> float:
        """The logit of one word after the prompt, less that of another."""
        logits, id_of = self._model(input_ids=torch.tensor([ids])).logits[0, -1], self.tokenizer.vocab
        return float(logits[id_of[yes]]) - (0 if no is None else float(logits[id_of[no]]))


def sigmoid(odds: Any) -> Any:
    return 1 / (1 + np.exp(-odds))


QWEN3_ASKS = "Given a web search query, retrieve relevant passages that answer the query"


def qwen3_reranker(path: str, queries: Texts, documents: Texts, instruction: str = QWEN3_ASKS) -> Scores:
    """As the card of Qwen/Qwen3-Reranker-0.6B has it: softmax over the logits of no and yes."""
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    asked = f"<Instruct>: {instruction}\n<Query>: {{query}}\n<Document>: {{document}}"
    return sigmoid(_answers(path, queries, documents, (before, asked, after), "yes", "no"))


def qwen3_template(path: str, queries: Texts, documents: Texts, template: str) -> Scores:
    return sigmoid(_answers(path, queries, documents, (template,), "yes", "no"))


def mxbai_rerank_v2(path: str, queries: Texts, documents: Texts) -> Scores:
    """As the package mxbai-rerank has it: logit of 1 less logit of 0, every part tokenised by itself."""
    parts = (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n",
        *("query: {query}", "\n", "document: {document}", "\n"),
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your "
        "binary relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    return _answers(path, queries, documents, parts, "1", "0")


def bge_reranker_v2_gemma(path: str, queries: Texts, documents: Texts) -> Scores:
    """As its model card has it: the logit of Yes."""
    parts = ("<bos>", "A: {query}", "\n", "B: {document}", "\n", DETERMINE)
    return _answers(path, queries, documents, parts, "Yes")


def _answers(path: str, queries: Texts, documents: Texts, parts: Texts, yes: str, no: Any = None) -> Scores:
    """The answer of a language model to each pair, put into its places in the parts of a prompt."""
    model, odds = LanguageModel(path), []
    for query, document in zip(queries, documents, strict=True):
        written = [part.replace("{query}", query).replace("{document}", document) for part in parts]
        odds.append(model.odds(model.ids(*written), yes, no))
    return np.array(odds, dtype=np.float32)


def monot5(path: str, queries: Texts, documents: Texts, words: Texts = ("▁true", "▁false")) -> Scores:
    """As pygaggle's `MonoT5` has it: the log of the first word's share in the softmax over both. Long pairs
    lose the end of the document, not the question behind it, as with pygaggle."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path).eval()
    ids = [tokenizer.get_vocab()[word] for word in words]
    start = torch.tensor([[model.config.decoder_start_token_id]])
    scores = []
    for query, document in zip(queries, documents, strict=True):
        asked = f"Query: {query} Document: {document}"
        read = tokenizer(f"{asked} Relevant:", return_offsets_mapping=True)
        within = [i for i, (_, end) in enumerate(read["offset_mapping"]) if 0 < end <= len(asked)]
        surplus = max(0, len(read["input_ids"]) - 512)
        left_out = set(within[len(within) - surplus :])
        token_ids = [token for i, token in enumerate(read["input_ids"]) if i not in left_out]
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids]), decoder_input_ids=start).logits[0, -1]
        scores.append(float(torch.log_softmax(logits[ids], dim=0)[0]))
    return np.array(scores, dtype=np.float32)


def jina_reranker_v3(path: str, query: str, documents: Sequence[str]) -> Scores:
    """A plain reading of arXiv 2509.25085 and the model card, for one query and many documents."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.Qwen3Model.from_pretrained(path).eval()
    tensors = load_file(Path(path) / "model.safetensors")
    first, second = tensors["projector.0.weight"], tensors["projector.2.weight"]

    texts, lengths = [], []
    for text in documents:
        ids = tokenizer(text, truncation=True, max_length=2048)["input_ids"]
        texts.append(tokenizer.decode(ids) if len(ids) >= 2048 else text)
        lengths.append(len(ids))
    query_length = len(tokenizer(query)["input_ids"])

    blocks: list[list[str]] = [[]]
    room = tokenizer.model_max_length - 2 * query_length
    for text, length in zip(texts, lengths, strict=True):
        blocks[-1].append(text)
        room -= length
        if len(blocks[-1]) >= 125 or room <= 2048:
            blocks.append([])
            room = tokenizer.model_max_length - 2 * query_length

    document_vectors, query_vectors, weights = [], [], []
    for block in filter(None, blocks):
        ids = tokenizer(_listwise_prompt(query, block))["input_ids"]
        with torch.inference_mode():
            states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
            projected = torch.relu(states @ first.T) @ second.T
        at = [i for i, token in enumerate(ids) if token == tokenizer.convert_tokens_to_ids("<|embed_token|>")]
        asked = ids.index(tokenizer.convert_tokens_to_ids("<|rerank_token|>"))
        cosines = torch.cosine_similarity(projected[at], projected[asked][None], dim=-1)
        document_vectors.append(projected[at].numpy())
        query_vectors.append(projected[asked].numpy())
        weights.append(float(((1 + cosines) / 2).max()))
    merged = np.average(np.array(query_vectors), axis=0, weights=weights)
    vectors = np.concatenate(document_vectors)
    return vectors @ merged / (np.linalg.norm(merged) * np.linalg.norm(vectors, axis=1))


class JinaM0:
    """A plain reading of the card of jina-reranker-m0, whose scores are logits."""

    def __init__(self, path: str) -> None:
        with without_videos():
            processor = transformers.AutoProcessor.from_pretrained(path, backend="pil")
        self.processor = for_pictures_alone(processor)
        self.processor.image_processor.size = {"shortest_edge": 3_136, "longest_edge": 602_112}
        self._model = transformers.Qwen2VLModel.from_pretrained(path).eval()
        tensors = load_file(Path(path) / "model.safetensors")
        self._score = {name[6:]: each for name, each in tensors.items() if name.startswith("score.")}

    def ids(self, query: Any, document: Any) -> Any:
        """The model's inputs for a pair of texts or pictures, the token for the score included."""
        picture = "<|vision_start|><|image_pad|><|vision_end|>"
        written = [item if isinstance(item, str) else picture for item in (document, query)]
        pictures = [item for item in (document, query) if not isinstance(item, str)]
        text = f"**Document**:\n{written[0]}\n**Query**:\n{written[1]}"
        inputs = self.processor(text=[text], images=pictures or None, return_tensors="pt")
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([[100]])], dim=1)
        for name, more in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            inputs[name] = torch.cat([inputs[name], torch.tensor([[more]])], dim=1)
        return inputs

    def tokens(self, query: Any, document: Any) -> tuple[int, int]:
        return 0, self.ids(query, document)["input_ids"].numel()

    @torch.inference_mode()
    def score(self, query: Any, document: Any) -> float:
        state = self._model(**self.ids(query, document)).last_hidden_state[0, -1]
        inner = torch.relu(self._score["0.weight"] @ state + self._score["0.bias"])
        return float(self._score["2.weight"][0] @ inner + self._score["2.bias"][0])


def _listwise_prompt(query: str, documents: list[str]) -> str:
    lines = [
        "<|im_start|>system",
        "You are a search relevance expert who can determine a ranking of the passages based on how relevant "
        "they are to the query. If the query is a question, how relevant a passage is depends on how well it "
        "answers the question. If not, try to analyze the intent of the query and assess how well each "
        "passage satisfies the intent. If an instruction is provided, you should follow the instruction when "
        "determining the ranking.<|im_end|>",
        "<|im_start|>user",
        f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. Rank "
        f"the passages based on their relevance to query: {query}",
    ]
    for i, document in enumerate(documents):
        lines += [f'<passage id="{i}">', f"{document}<|embed_token|>", "</passage>"]
    lines += ["<query>", f"{query}<|rerank_token|>", "</query><|im_end|>", "<|im_start|>assistant"]
    return "\n".join([*lines, "<think>", "", "</think>", "", ""])
