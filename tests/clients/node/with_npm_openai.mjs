// OpenAI's client for Node.

import OpenAI from "openai";
import { BI_ENCODER, DOCUMENTS, QUERY, checkVectors } from "./plain.mjs";

const client = new OpenAI({ baseURL: BI_ENCODER + "/v1", apiKey: "none" });
const model = "text-embedding-3-small";

export async function embeds() {
  const { data } = await client.embeddings.create({ model, input: DOCUMENTS });
  await checkVectors(
    data.map(({ embedding }) => embedding),
    DOCUMENTS,
  );
}

export async function embedsInFloatsAndFewerDimensions() {
  const asked = { model, input: QUERY, encoding_format: "float", dimensions: 64 };
  const { data } = await client.embeddings.create(asked);
  await checkVectors([data[0].embedding], [QUERY], { dimensions: 64 });
}
