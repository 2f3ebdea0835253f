// The page's state in a link, over reloads, as code, and as a table.

const MOST_IN_LINK = 8192; // bytes of the fragment
const KEPT = "maxsimd playground";
const CHOICES = ["top", "long", "choice", "rival"]; // fields whose values are kept

function stateNow() {
  const choices = Object.fromEntries(CHOICES.map((name) => [name, $(name).value || wanted[name] || ""]));
  return { query: $("query").value, documents: $("documents").value, normalize: $("normalize").checked, ...choices };
}

// Values may come from a link of others: they become values of fields, and models only if they exist.
function restore(state) {
  const textOf = (name) => (typeof state[name] === "string" ? state[name] : "");
  for (const name of ["query", "documents"]) $(name).value = textOf(name);
  $("normalize").checked = state.normalize === true;
  $("top").value = Math.min(1000, Math.max(1, Math.trunc(Number(state.top)) || 20));
  $("long").value = ["truncate", "window"].includes(state.long) ? state.long : "";
  for (const name of ["choice", "rival"]) wanted[name] = textOf(name);
  showModels();
}

function linkOf() {
  const { normalize, ...state } = stateNow();
  const entries = Object.entries({ ...state, ...(normalize ? { normalize: "1" } : {}) }).filter(([, value]) => value);
  return `#${new URLSearchParams(entries)}`;
}

function copyLink() {
  if (held || pictures.length) return tell("Opened files and pictures do not fit in a link.");
  const fragment = linkOf();
  if (fragment.length > MOST_IN_LINK) {
    return tell(`These texts are too long for a link: ${number(fragment.length / 1024, 1)} KB of at most 8.`);
  }
  return copy(String(address(`.${fragment}`)), "Copied the link. It holds the query and the documents, but not the key.");
}

// Takes the state out of the address, so that a reload keeps what is typed. Nothing is sent by itself.
function openLink() {
  const fragment = location.hash.slice(1);
  if (!fragment.includes("=")) return false;
  history.replaceState(null, "", location.pathname + location.search);
  if (fragment.length > MOST_IN_LINK) {
    tell("This link is too long, so it was not opened.");
    return false;
  }
  const values = Object.fromEntries(new URLSearchParams(fragment));
  setPictures([]);
  hold(null);
  isFromLink = true;
  restore({ ...values, normalize: values.normalize === "1" });
  return true;
}

function keep() {
  const state = { ...stateNow(), isFromLink };
  for (const more of [{ held, pictures }, {}]) {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify({ ...state, ...more }));
      return;
    } catch {
      // Files and pictures may be larger than a browser keeps.
    }
  }
}

function openKept() {
  try {
    const state = JSON.parse(sessionStorage.getItem(KEPT));
    if (!state) return false;
    isFromLink = state.isFromLink === true;
    setPictures(state.pictures ?? []);
    hold(state.held ?? null);
    restore(state);
    return true;
  } catch {
    return false;
  }
}

// ---- code and tables

// The body that both kinds of code send.
function bodyOfCode() {
  const { query, documents, top_n, normalize, long_documents } = body();
  const model = columns[0].model;
  return {
    query, documents: documents.map(onWire), top_n,
    ...(model === null ? {} : { model }), ...(normalize ? { normalize } : {}), ...(long_documents ? { long_documents } : {}),
  };
}

function asCurl() {
  const quoted = (value) => `'${String(value).replaceAll("'", "'\\''")}'`;
  const key = $("key").value ? " \\\n  -H 'Authorization: Bearer YOUR_KEY'" : "";
  const json = JSON.stringify(bodyOfCode(), null, 1);
  return `curl ${quoted(address("rerank"))} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(json)}\n`;
}

function asPython() {
  const { documents, ...rest } = bodyOfCode();
  const inPython = (value) => (value === true ? "True" : JSON.stringify(value));
  const list = documents.map((one) => `    ${inPython(one)},`).join("\n");
  const options = Object.entries(rest).map(([name, value]) => `"${name}": ${inPython(value)}`).join(", ");
  const key = $("key").value ? ', headers={"Authorization": "Bearer YOUR_KEY"}' : "";
  return `import httpx

documents = [
${list}
]
answer = httpx.post(
    ${JSON.stringify(String(address("rerank")))},
    json={"documents": documents, ${options}}${key},
)
answer.raise_for_status()
for result in answer.json()["results"]:
    print(f"{result['relevance_score']:.4f}", documents[result["index"]])
`;
}

function downloadCsv() {
  const rows = [["model", "rank", "score", "index", "id", "title", "text"]];
  for (const column of columns) {
    column.results.forEach((result, rank) => {
      const { id, title, text, image } = result.document;
      const model = column.model ?? cards[0]?.id;
      rows.push([model, rank + 1, result.relevance_score, result.index, id, title, image ? "(picture)" : text]);
    });
  }
  const link = element("a", { download: "ranking.csv" });
  link.href = URL.createObjectURL(new Blob([csvOf(rows)], { type: "text/csv" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function tell(text) {
  $("copied").textContent = text;
}

async function copy(text, told) {
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
  tell(told);
}
