// Cohere's client for Node, in both versions of its interface.

import { CohereClient, CohereClientV2 } from "cohere-ai";
import { BI_ENCODER, DOCUMENTS, URLS, checkRanking, checkVectors, QUERY } from "./plain.mjs";

const model = "rerank-v3.5";
const embedder = { model: "embed-english-v3.0", texts: DOCUMENTS, inputType: "search_document" };
const pairs = (results) => results.map(({ index, relevanceScore }) => [index, relevanceScore]);

export async function ranksInTheFirstVersion() {
  for (const url of URLS) {
    const client = new CohereClient({ token: "none", environment: url });
    const { results } = await client.rerank({ model, query: QUERY, documents: DOCUMENTS, topN: 3 });
    await checkRanking(url, pairs(results), 3);
  }
}

export async function ranksInTheSecondVersion() {
  for (const url of URLS) {
    const client = new CohereClientV2({ token: "none", environment: url });
    const { results } = await client.rerank({ model, query: QUERY, documents: DOCUMENTS, topN: 3 });
    await checkRanking(url, pairs(results), 3);
  }
}

export async function embedsInTheFirstVersion() {
  const client = new CohereClient({ token: "none", environment: BI_ENCODER });
  const { embeddings } = await client.embed(embedder);
  await checkVectors(embeddings, DOCUMENTS, { input_type: "document" });
}

export async function embedsInTheSecondVersion() {
  const client = new CohereClientV2({ token: "none", environment: BI_ENCODER });
  const { embeddings } = await client.embed({ ...embedder, embeddingTypes: ["float"] });
  await checkVectors(embeddings.float, DOCUMENTS, { input_type: "document" });
}
