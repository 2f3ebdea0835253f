// Requests to the server, and its errors in words for people.

// Without a password in the page's own address: fetch refuses it, and no link or code may hold it.
function address(path) {
  return Object.assign(new URL(path, document.baseURI), { username: "", password: "" });
}

function headers() {
  const key = $("key").value.trim();
  if (/[^\x20-\x7e]/.test(key)) throw new Problem("This key cannot be sent", "Type it again: it has a character that is not ASCII.");
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
  502: "The server does not answer",
  503: "The server is not ready",
  504: "The server ran out of time",
};

function problemOf(answer, found) {
  const said = String(found?.error?.message ?? "");
  if (answer.status === 401) {
    return $("key").value.trim()
      ? new Problem("The server does not accept this key", "Check the API key.")
      : new Problem("This server asks for a key", "Enter it under API key.");
  }
  const waits = [429, 502, 503].includes(answer.status);
  const after = waits ? Math.max(1, Number(answer.headers.get("retry-after")) || 5) : null;
  const detail = answer.status === 500 ? `${said} (request ${answer.headers.get("x-request-id") ?? "unknown"})` : said;
  return new Problem(TITLES[answer.status] ?? `The server answered with status ${answer.status}`, detail, after);
}

// The answer to a request, and the milliseconds that it took on the server and in all.
async function request(path, body, signal) {
  const started = performance.now();
  const options = { method: body ? "POST" : "GET", headers: headers(), signal, ...(body ? { body: JSON.stringify(body) } : {}) };
  let answer, text;
  try {
    answer = await fetch(address(path), options);
    text = await answer.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer", "Check that it runs, and the network.", 5);
  }
  const found = parsed(text)?.value; // proxies answer with pages
  if (!answer.ok) throw Object.assign(problemOf(answer, found), { status: answer.status, param: found?.error?.param });
  if (!found) throw new Problem("The answer cannot be read", "It is not JSON. Check what stands between this page and the server.");
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
