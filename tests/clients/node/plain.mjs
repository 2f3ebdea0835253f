// What checks share: texts with an obvious answer, and what the servers say to plain HTTP.

import assert from "node:assert/strict";

export const LATE_INTERACTION = process.env.LATE_INTERACTION_URL;
export const BI_ENCODER = process.env.BI_ENCODER_URL;
export const CROSS_ENCODER = process.env.CROSS_ENCODER_URL;
export const URLS = [LATE_INTERACTION, BI_ENCODER, CROSS_ENCODER];

export const QUERY = "How is a file opened for reading?";
export const DOCUMENTS = [
  "Return the arc cosine, measured in radians, of x. The result is between 0 and pi.",
  "Sort the list in ascending order and return None. The sort is in place and stable.",
  "Open file and return a stream. The file is opened for reading in text mode by default.",
  "Suspend execution of the calling thread for the given number of seconds.",
  "Return a list of the words in the string, using the separator as the delimiter.",
];
export const BEST = 2;

async function post(url, path, body) {
  const response = await fetch(url + path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  assert.equal(response.status, 200);
  return response.json();
}

// They are those that /v1/embeddings gives of these texts.
export async function checkVectors(vectors, texts, more = {}) {
  const { data } = await post(BI_ENCODER, "/v1/embeddings", { input: texts, ...more });
  assert.equal(vectors.length, data.length);
  data.forEach(({ embedding }, i) => {
    assert.equal(vectors[i].length, embedding.length);
    assert.ok(cosine(vectors[i], embedding) > 0.999, `a cosine of ${cosine(vectors[i], embedding)}`);
  });
}

// Pairs of an index of DOCUMENTS and a score: they are those that /rerank gives, and the best is the obvious one,
// where the model has learned anything.
export async function checkRanking(url, ranking, top) {
  const { results } = await post(url, "/rerank", { query: QUERY, documents: DOCUMENTS, top_n: top });
  assert.deepEqual(
    ranking.map(([index]) => index),
    results.map(({ index }) => index),
  );
  results.forEach(({ relevance_score: score }, i) => {
    assert.ok(Math.abs(ranking[i][1] - score) < 1e-3 * Math.abs(score) + 1e-4, `${ranking[i][1]} is not ${score}`);
  });
  if (url !== CROSS_ENCODER) assert.equal(ranking[0][0], BEST);
}

function cosine(one, other) {
  const product = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  return product(one, other) / Math.sqrt(product(one, one) * product(other, other));
}
