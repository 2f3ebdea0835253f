"use strict";
// Ranks as one types, shows why, and what the server is doing. Spans count code points, JavaScript counts
// UTF-16 units: texts are taken apart with Array.from before they are cut.

const $ = (id) => document.getElementById(id);
const LIVE_DOCUMENTS = 300; // more are ranked only when one asks for it
const MARKERS = "markers";
const EXAMPLE = {
  query: "How do I read a file line by line?",
  documents: [
    "Open the file and iterate over it: each step gives one line.",
    "pathlib.Path.read_text returns the whole content of a file as one string.",
    "A list can be sorted in place with list.sort.",
    "csv.reader walks through the rows of a table.",
    "Les fichiers s'ouvrent avec open(), puis on lit chaque ligne.",
    "Cats sleep for most of the day.",
  ],
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name === "width") made.style.width = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

const address = (path) => new URL(path, document.baseURI);

// ---- what to rank

let dropped = null; // texts of a file, where they are more than lines

function documentsNow() {
  return dropped ?? $("documents").value.split("\n").map((line) => line.trim()).filter(Boolean);
}

function setDocuments(texts) {
  const fitsLines = texts.every((text) => !text.includes("\n")) && texts.length <= 2000;
  dropped = fitsLines ? null : texts;
  $("unread").textContent = "";
  $("documents").value = fitsLines ? texts.join("\n") : `${texts.length} documents from a file; type here to drop them`;
  changed();
}

const TEXT_FIELDS = ["text", "content", "document", "passage", "body", "abstract", "title"];

function textOf(value) {
  if (typeof value === "string") return value;
  if (value && typeof value === "object") {
    const name = TEXT_FIELDS.find((field) => typeof value[field] === "string");
    return name ? value[name] : JSON.stringify(value);
  }
  return String(value);
}

function parseTable(text, separator) {
  const rows = [[]];
  let cell = "", quoted = false;
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (quoted) {
      if (c === '"' && text[i + 1] === '"') { cell += '"'; i++; }
      else if (c === '"') quoted = false;
      else cell += c;
    } else if (c === '"' && cell === "") quoted = true;
    else if (c === separator) { rows.at(-1).push(cell); cell = ""; }
    else if (c === "\n" || c === "\r") {
      if (c === "\r" && text[i + 1] === "\n") i++;
      rows.at(-1).push(cell); cell = ""; rows.push([]);
    } else cell += c;
  }
  rows.at(-1).push(cell);
  return rows.filter((row) => row.some((each) => each.trim()));
}

function textsOfTable(rows) {
  const names = rows[0].map((name) => name.trim().toLowerCase());
  const found = TEXT_FIELDS.map((field) => names.indexOf(field)).find((column) => column >= 0);
  if (found !== undefined) return rows.slice(1).map((row) => row[found] ?? "").filter(Boolean);
  const width = (column) => rows.reduce((sum, row) => sum + (row[column] ?? "").length, 0);
  const widest = names.map((_, column) => column).sort((a, b) => width(b) - width(a))[0];
  return rows.map((row) => row[widest] ?? "").filter(Boolean);
}

function textsOfFile(name, text) {
  const ending = name.toLowerCase().split(".").pop();
  if (ending === "csv" || ending === "tsv") return textsOfTable(parseTable(text, ending === "csv" ? "," : "\t"));
  const lines = text.split(/\r?\n/).filter((line) => line.trim());
  if (ending === "json") {
    const value = JSON.parse(text);
    return (Array.isArray(value) ? value : [value]).map(textOf);
  }
  if (ending === "jsonl" || ending === "ndjson") return lines.map((line) => textOf(JSON.parse(line)));
  return lines.map((line) => line.trim());
}

async function take(file) {
  try {
    const texts = textsOfFile(file.name, await file.text());
    if (!texts.length) throw new Error("there is no text in it");
    setDocuments(texts);
  } catch (error) {
    // Not in #status: the answer to an earlier request would replace it there.
    $("unread").textContent = `${file.name} cannot be read: ${error.message}`;
  }
}

// ---- asking the server

let card = null; // of the model
let explains = true;
let pending = null;
let timer = 0;

async function findModel() {
  try {
    const answer = await fetch(address("v1/models"), { headers: headers() });
    if (answer.status === 401) {
      $("model").textContent = "this server asks for an API key";
      return;
    }
    card = (await answer.json()).data[0];
    $("model").textContent = `${card.id}, ${card.score_type ?? "scores"}, reads ${card.max_model_len} tokens`;
    changed();
  } catch {
    $("model").textContent = "the server does not answer";
    setTimeout(findModel, 2000);
  }
}

function body() {
  return { query: $("query").value, documents: documentsNow(), top_n: Math.max(1, Number($("top").value) || 20) };
}

function changed() {
  const documents = documentsNow();
  $("count").textContent = documents.length === 1 ? "1 document" : `${documents.length} documents`;
  clearTimeout(timer);
  if (documents.length <= LIVE_DOCUMENTS) timer = setTimeout(ask, 250);
}

async function ask() {
  clearTimeout(timer);
  pending?.abort();
  const asked = body();
  if (!asked.query.trim() || !asked.documents.length) {
    say("Type a query and some documents.");
    show({ results: [] }, asked);
    return;
  }
  const mine = (pending = new AbortController());
  const started = performance.now();
  try {
    const answer = await fetch(address("rerank"), {
      method: "POST",
      headers: headers(),
      signal: mine.signal,
      body: JSON.stringify({ ...asked, explain: explains, return_documents: false }),
    });
    const found = await answer.json();
    if (answer.status === 400 && found.error?.param === "explain" && explains) {
      explains = false; // not with this model
      ask();
      return;
    }
    if (!answer.ok) throw new Error(found.error?.message ?? `status ${answer.status}`);
    const took = performance.now() - started;
    const server = /total;dur=([\d.]+)/.exec(answer.headers.get("server-timing") ?? "")?.[1];
    show(found, asked);
    const cached = found.usage.prompt_tokens_details?.cached_tokens ?? 0;
    say(
      `${asked.documents.length} ranked in ${Math.round(server ?? took)} ms (${Math.round(took)} ms until it was here), ` +
        `${found.usage.prompt_tokens} tokens${cached ? `, ${cached} of them cached` : ""}` +
        `${found.warnings ? `. ${found.warnings.join(" ")}` : ""}`,
    );
    if (!card) findModel();
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  }
}

function say(text, failed = false) {
  $("status").textContent = text;
  $("status").classList.toggle("failed", failed);
}

// ---- words of the query, and what answers them

const LETTER = /[\p{L}\p{N}\p{M}]/u;
const STANDS_ALONE = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]/u;

function sameWord(characters, end, start) {
  if (end !== start || !end) return end > start;
  const [before, after] = [characters[end - 1], characters[start]];
  if (STANDS_ALONE.test(before) || STANDS_ALONE.test(after)) return false;
  return LETTER.test(before) && LETTER.test(after);
}

// The words that a query's matches belong to: each with the numbers of its matches.
function wordsOf(query, matches) {
  const characters = Array.from(query);
  const words = [];
  const rest = { name: MARKERS, numbers: [] };
  matches.forEach((match, number) => {
    const span = match.query_span;
    if (!span) { rest.numbers.push(number); return; }
    const last = words.at(-1);
    if (last && sameWord(characters, last.span[1], span[0])) {
      last.span[1] = Math.max(last.span[1], span[1]);
      last.numbers.push(number);
    } else words.push({ span: [...span], numbers: [number] });
  });
  for (const word of words) word.name = characters.slice(...word.span).join("");
  return rest.numbers.length ? [...words, rest] : words;
}

const shareOf = (word, matches) => word.numbers.reduce((sum, number) => sum + (matches[number]?.share ?? 0), 0);

let shown = [];
let words = [];
let chosen = null; // the word that was pressed

function show(found, asked) {
  shown = found.results.map((result) => ({ ...result, text: asked.documents[result.index] }));
  const explained = shown.find((result) => result.explanation?.matches?.length);
  words = explained ? wordsOf(asked.query, explained.explanation.matches) : [];
  chosen = null;
  showWords();
  const scores = shown.map((result) => result.relevance_score);
  const [most, least] = [Math.max(...scores, 0), Math.min(...scores, 0)];
  $("results").replaceChildren(...shown.map((result, rank) => resultOf(result, rank, most, least)));
  heat(null);
}

function showWords() {
  const box = $("words");
  box.hidden = !words.length;
  const real = words.filter((word) => word.name !== MARKERS);
  const shares = real.map((word) => shareOf(word, shown[0]?.explanation?.matches ?? []));
  const most = Math.max(...shares, 1e-9);
  box.replaceChildren(
    ...real.map((word, i) => {
      const bar = element("i", { "aria-hidden": "true" }, element("b", { width: `${Math.max(0, (shares[i] / most) * 100)}%` }));
      const button = element("button", { type: "button", class: "word", "aria-pressed": "false" }, word.name, bar);
      button.title = `${(shares[i] * 100).toFixed(1)} % of the best document's score`;
      button.addEventListener("pointerenter", () => heat(word));
      button.addEventListener("pointerleave", () => heat(chosen));
      button.addEventListener("focus", () => heat(word));
      button.addEventListener("blur", () => heat(chosen));
      button.addEventListener("click", () => press(word, button));
      return button;
    }),
  );
}

function press(word, button) {
  chosen = chosen === word ? null : word;
  for (const other of $("words").children) other.setAttribute("aria-pressed", String(other === button && chosen === word));
  heat(chosen ?? word);
}

function resultOf(result, rank, most, least) {
  const score = result.relevance_score;
  const width = most > least ? ((score - least) / (most - least)) * 100 : 100;
  const facts = result.explanation;
  const told = facts ? `${facts.tokens} tokens${facts.cached ? ", cached" : ""}${facts.truncated ? ", cut" : ""}` : "";
  const item = element(
    "li",
    {},
    element(
      "div",
      { class: "head" },
      element("strong", {}, score.toFixed(4)),
      element("span", { class: "scale", "aria-hidden": "true" }, element("b", { width: `${width}%` })),
      element("span", { class: "quiet" }, `rank ${rank + 1}, document ${result.index + 1}${told ? `, ${told}` : ""}`),
    ),
    element("p", { class: "text" }),
  );
  if (facts?.matches?.length) item.append(detailsOfMatches(facts.matches));
  if (facts?.windows?.length) item.append(detailsOfWindows(facts));
  return item;
}

function row(name, share, of, answer, number) {
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, name),
    element("td", { class: "bar" }, element("b", { width: `${Math.max(0, (share / of) * 100)}%`, "aria-hidden": "true" })),
    element("td", { class: "number" }, `${(share * 100).toFixed(1)} %`),
    element("td", {}, answer),
    element("td", { class: "number" }, number),
  );
}

function detailsOfMatches(matches) {
  const shares = words.map((word) => shareOf(word, matches));
  const most = Math.max(...shares, 1e-9);
  const rows = words.map((word, i) => {
    const there = word.numbers.map((number) => matches[number]).filter(Boolean);
    const answers = [...new Set(there.filter((match) => match.document_span).map((match) => match.document_token))];
    const sum = there.reduce((total, match) => total + match.similarity, 0);
    return row(word.name, shares[i], most, answers.join(" ") || "none", sum.toFixed(3));
  });
  const head = element("tr", {}, ...["Query", "Share", "", "Answered by", "Similarity"].map((name) => element("th", { scope: "col" }, name || element("span", { class: "visually-hidden" }, "Share in per cent"))));
  return element("details", {}, element("summary", {}, "Why: each word's share of the score"), element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function detailsOfWindows(facts) {
  const list = facts.windows.map((window) => element("li", {}, `characters ${window.span[0]} to ${window.span[1]}: ${window.score.toFixed(4)}`));
  return element("details", {}, element("summary", {}, `Read through ${facts.windows.length} windows; the best is underlined`), element("ol", {}, ...list));
}

// Colours each document's characters: by the shares that they answer, or by what answers one word.
function heat(word) {
  shown.forEach((result, i) => {
    const text = $("results").children[i]?.querySelector(".text");
    if (text) text.replaceChildren(...coloured(result, word));
  });
}

function coloured(result, word) {
  const characters = Array.from(result.text);
  const weight = new Float32Array(characters.length);
  const answers = new Array(characters.length);
  const matches = result.explanation?.matches ?? [];
  matches.forEach((match, number) => {
    const span = match.document_span;
    const isMeant = word ? word.numbers.includes(number) : match.query_span;
    if (!span || !isMeant) return;
    for (let c = span[0]; c < span[1]; c++) {
      weight[c] = word ? Math.max(weight[c], match.similarity) : weight[c] + Math.max(0, match.share);
      (answers[c] ??= new Set()).add(match.query_token);
    }
  });
  const most = word ? 1 : weight.reduce((largest, each) => Math.max(largest, each), 1e-9);
  const passage = result.explanation?.passage?.span;
  const pieces = [];
  let start = 0;
  const inside = (c) => passage && c >= passage[0] && c < passage[1];
  for (let c = 1; c <= characters.length; c++) {
    if (c < characters.length && weight[c] === weight[start] && answers[c]?.size === answers[start]?.size && inside(c) === inside(start)) continue;
    const piece = element("span", {}, characters.slice(start, c).join(""));
    if (weight[start] > 0) {
      const strength = Math.min(1, weight[start] / most);
      piece.style.setProperty("--strength", strength.toFixed(3));
      piece.dataset.heat = weight[start].toFixed(4);
      piece.title = `answers ${[...answers[start]].join(" ")}`;
    }
    if (inside(start)) piece.classList.add("passage");
    pieces.push(piece);
    start = c;
  }
  return pieces;
}

// ---- taking it away

function asCurl() {
  const json = JSON.stringify(body(), null, 1).replaceAll("'", "'\\''");
  const key = $("key").value ? " \\\n  -H 'Authorization: Bearer YOUR_KEY'" : "";
  return `curl ${address("rerank")} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${json}'\n`;
}

function asPython() {
  const { query, documents, top_n } = body();
  const list = documents.map((text) => `    ${JSON.stringify(text)},`).join("\n");
  const key = $("key").value ? ', headers={"Authorization": "Bearer YOUR_KEY"}' : "";
  return `import httpx

documents = [
${list}
]
answer = httpx.post(
    ${JSON.stringify(String(address("rerank")))},
    json={"query": ${JSON.stringify(query)}, "documents": documents, "top_n": ${top_n}}${key},
)
answer.raise_for_status()
for result in answer.json()["results"]:
    print(f"{result['relevance_score']:.4f}", documents[result["index"]])
`;
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not served by https or from this machine may not.
    const box = element("textarea", {}, text);
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  $("copied").textContent = `Copied as ${what}.`;
  setTimeout(() => ($("copied").textContent = ""), 3000);
}

// ---- live figures

const history = new Map();
let before = null;

function parseMetrics(text) {
  const values = [];
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (found) values.push({ name: found[1], labels: found[2] ?? "", value: Number(found[3]) });
  }
  return values;
}

const sum = (values, name, labels = "") =>
  values.reduce((total, each) => total + (each.name === name && each.labels.includes(labels) ? each.value : 0), 0);

// The quantile of what came between two readings, from the buckets of a histogram.
function quantile(now, then, name, q) {
  const buckets = new Map();
  for (const [values, sign] of [[now, 1], [then, -1]]) {
    for (const each of values) {
      const le = each.name === `${name}_bucket` && /le="([^"]+)"/.exec(each.labels)?.[1];
      if (le) buckets.set(le, (buckets.get(le) ?? 0) + sign * each.value);
    }
  }
  const ordered = [...buckets].map(([le, count]) => [le === "+Inf" ? Infinity : Number(le), count]).sort((a, b) => a[0] - b[0]);
  const total = ordered.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let [low, passed] = [0, 0];
  for (const [le, count] of ordered) {
    if (count >= q * total) {
      if (le === Infinity) return low;
      return low + ((le - low) * (q * total - passed)) / Math.max(1e-9, count - passed);
    }
    [low, passed] = [le, count];
  }
  return low;
}

function figuresOf(now, then, seconds) {
  const rate = (name, labels) => (sum(now, name, labels) - sum(then, name, labels)) / seconds;
  const milliseconds = (q) => {
    const value = quantile(now, then, "maxsimd_http_request_seconds", q);
    return value === null ? null : value * 1000;
  };
  const hits = rate("maxsimd_cache_hits_total"), misses = rate("maxsimd_cache_misses_total");
  return [
    ["Requests a second", rate("maxsimd_http_requests_total"), 1],
    ["Half are answered within, ms", milliseconds(0.5), 1],
    ["99 of 100 within, ms", milliseconds(0.99), 1],
    ["Tokens a second", rate("maxsimd_tokens_total"), 0],
    ["Tokens waiting", sum(now, "maxsimd_queue_tokens"), 0],
    ["Requests in flight", sum(now, "maxsimd_http_in_flight"), 0],
    ["Found in the cache, %", hits + misses ? (100 * hits) / (hits + misses) : null, 1],
    ["Refused a second", rate("maxsimd_refused_requests_total"), 1],
    ["Memory, MiB", sum(now, "process_resident_memory_bytes") / 1048576, 0],
  ];
}

async function readMetrics() {
  if ($("view-live").hidden || document.hidden) return;
  try {
    const answer = await fetch(address("metrics"), { headers: headers() });
    if (!answer.ok) throw new Error(answer.status === 401 ? "give the API key on the other view" : `status ${answer.status}`);
    const now = { values: parseMetrics(await answer.text()), at: performance.now() };
    if (before) {
      const figures = figuresOf(now.values, before.values, Math.max(0.1, (now.at - before.at) / 1000));
      $("figures").replaceChildren(...figures.map(([name, value, digits]) => figureOf(name, value, digits)));
    }
    before = now;
    $("live-status").textContent = "";
  } catch (error) {
    $("live-status").textContent = `no figures: ${error.message}`;
  }
}

function figureOf(name, value, digits) {
  const past = [...(history.get(name) ?? []), value ?? 0].slice(-60);
  history.set(name, past);
  const most = Math.max(...past, 1e-9);
  const points = past.map((each, i) => `${(i / 59) * 100},${30 - (each / most) * 28}`).join(" ");
  const told = value === null ? "none" : value.toLocaleString("en", { maximumFractionDigits: digits });
  const figure = element("div", { class: "figure" }, element("h3", {}, name), element("p", {}, told));
  figure.insertAdjacentHTML("beforeend", `<svg viewBox="0 0 100 32" preserveAspectRatio="none" aria-hidden="true"><polyline points="${points}"/></svg>`);
  return figure;
}

// ---- the page

function select(tab) {
  for (const each of document.querySelectorAll('[role="tab"]')) {
    const is = each === tab;
    each.setAttribute("aria-selected", String(is));
    each.tabIndex = is ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !is;
  }
  readMetrics();
}

for (const tab of document.querySelectorAll('[role="tab"]')) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tab.nextElementSibling ?? tab.previousElementSibling;
    select(other);
    other.focus();
  });
}
$("query").value = EXAMPLE.query;
$("documents").value = EXAMPLE.documents.join("\n");
$("query").addEventListener("input", changed);
$("top").addEventListener("input", changed);
$("documents").addEventListener("input", () => { dropped = null; $("unread").textContent = ""; changed(); });
$("key").addEventListener("change", () => findModel());
$("input").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("file").addEventListener("change", (event) => { if (event.target.files[0]) take(event.target.files[0]); event.target.value = ""; });
$("curl").addEventListener("click", () => copy(asCurl(), "curl"));
$("python").addEventListener("click", () => copy(asPython(), "Python"));
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("documents").addEventListener(kind, (event) => {
    event.preventDefault();
    $("documents").classList.toggle("over", kind === "dragover");
    if (kind === "drop") {
      if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
      else setDocuments(event.dataTransfer.getData("text").split("\n").map((line) => line.trim()).filter(Boolean));
    }
  });
}
setInterval(readMetrics, 2000);
findModel();
