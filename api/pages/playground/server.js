// Requests to the server, and its errors in words for people.

const address = (path) => new URL(path, document.baseURI);

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// An error with a title, what the server says of it, and in how many seconds it may be tried again.
class Problem extends Error {
  constructor(title, detail = "", retryAfter = null) {
    super(title);
    Object.assign(this, { detail, retryAfter });
  }
}

const TITLES = {
  400: "The server cannot read this request",
  403: "This key may not do that",
  404: "The server does not have this model",
  413: "This is too much for one request",
  429: "The server is busy",
  500: "The model failed on this request",
  503: "The server is not ready",
  504: "The server ran out of time",
};

function problemOf(answer, found) {
  const said = found?.error?.message ?? "";
  if (answer.status === 401) {
    return $("key").value.trim()
      ? new Problem("The server does not accept this key", "Check the API key.")
      : new Problem("This server asks for a key", "Enter it under API key.");
  }
  const waits = answer.status === 429 || answer.status === 503;
  const after = waits ? Math.max(1, Number(answer.headers.get("retry-after")) || 5) : null;
  const detail = answer.status === 500 ? `${said} (request ${answer.headers.get("x-request-id") ?? "unknown"})` : said;
  return new Problem(TITLES[answer.status] ?? `The server answered with status ${answer.status}`, detail, after);
}

// The answer to a request, and the milliseconds that it took on the server and in all.
async function request(path, body, signal) {
  const started = performance.now();
  let answer, found;
  try {
    answer = await fetch(address(path), {
      method: body ? "POST" : "GET", headers: headers(), signal, ...(body ? { body: JSON.stringify(body) } : {}),
    });
    found = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw answer
      ? new Problem(TITLES[answer.status] ?? "The answer cannot be read", error.message)
      : new Problem("The server does not answer", "Check that it runs, and the network.", 5);
  }
  if (!answer.ok) throw Object.assign(problemOf(answer, found), { status: answer.status, param: found.error?.param });
  const server = /total;dur=([\d.]+)/.exec(answer.headers.get("server-timing") ?? "")?.[1];
  return { found, server: server === undefined ? null : Number(server), inAll: performance.now() - started };
}

const TRANSFORMS = {
  maxsim: "MaxSim: the sum over query tokens of their best similarity",
  meanmaxsim: "Mean MaxSim: the mean over query tokens of their best similarity",
  sigmoid: "Probability of relevance",
  logit: "Logit of relevance",
  softmax: "Probability of relevance",
  cosine: "Cosine similarity",
  dot: "Dot product",
  hybrid: "Mean of dense, sparse and late-interaction scores",
  sparse: "Dot product of word weights",
  euclidean: "Negative distance",
  manhattan: "Negative distance",
};

function scaleInWords({ transform, min, max }) {
  const [name, clipped] = [transform.replace("clipped ", ""), transform.startsWith("clipped ")];
  const meaning = TRANSFORMS[name] ?? name[0].toUpperCase() + name.slice(1);
  const bounds = min === null && max === null ? "no fixed range" : min === null ? `at most ${max}` : max === null ? `at least ${min}` : `${min} to ${max}`;
  return `${meaning}, ${bounds.replace("-", "−")}${clipped ? ", negative scores become 0" : ""}. Higher is better.`;
}
