// The AI SDK, with its providers for Cohere and OpenAI.

import { createCohere } from "@ai-sdk/cohere";
import { createOpenAI } from "@ai-sdk/openai";
import { embed, embedMany, rerank } from "ai";
import { BI_ENCODER, DOCUMENTS, URLS, checkRanking, checkVectors, QUERY } from "./plain.mjs";

export async function ranksAsCohereDoes() {
  for (const url of URLS) {
    const provider = createCohere({ baseURL: url + "/v2", apiKey: "none" });
    const model = provider.reranking("rerank-v3.5");
    const { ranking } = await rerank({ model, query: QUERY, documents: DOCUMENTS, topN: 3 });
    await checkRanking(
      url,
      ranking.map(({ originalIndex, score }) => [originalIndex, score]),
      3,
    );
  }
}

export async function embedsAsCohereDoes() {
  const provider = createCohere({ baseURL: BI_ENCODER + "/v2", apiKey: "none" });
  const model = provider.embedding("embed-english-v3.0");
  const { embeddings } = await embedMany({ model, values: DOCUMENTS });
  await checkVectors(embeddings, DOCUMENTS, { input_type: "query" });
}

export async function embedsAsOpenaiDoes() {
  const provider = createOpenAI({ baseURL: BI_ENCODER + "/v1", apiKey: "none" });
  const { embedding } = await embed({ model: provider.embedding("text-embedding-3-small"), value: QUERY });
  await checkVectors([embedding], [QUERY]);
}
