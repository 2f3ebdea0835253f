// The page: what is ranked, by which models, and when.

const LIVE_DOCUMENTS = 300; // more are ranked only by the button
const LIVE_CHARACTERS = 200_000;
const EXAMPLE = {
  query: "How do I read a file line by line?",
  documents: [
    "Open the file and iterate over it: each step gives one line.",
    "pathlib.Path.read_text returns the whole content of a file as one string.",
    "A list can be sorted in place with list.sort.",
    "csv.reader walks through the rows of a table.",
    "Les fichiers s'ouvrent avec open(), puis on lit chaque ligne.",
    "Cats sleep for most of the day.",
  ].join("\n"),
};

let cards = []; // of the models
let wanted = {}; // models that a link or the last visit names, until the server has told its models
let held = null; // {name, documents} of a file that is too long for the text field
let pictures = []; // documents
let isFromLink = false; // then nothing is sent until the user asks for it
let timer = 0;
let modelsAsked = 0; // how often: only the last answer counts
let modelsTimer = 0;

// ---- documents

function hold(file) {
  held = file;
  $("held").hidden = !held;
  $("documents").hidden = Boolean(held);
  if (held) $("held").firstElementChild.textContent = `${held.name}: ${counted(held.documents.length, "document")}`;
}

function setPictures(list) {
  pictures = list.filter((one) => typeof one.image === "string" && one.image.startsWith("data:image/"));
  $("pictures").hidden = !pictures.length;
  $("pictures").replaceChildren(
    ...pictures.map((one, i) => {
      const small = element("img", { alt: one.id ?? `Picture ${i + 1}` });
      small.src = one.image;
      const remove = element("button", { type: "button", "aria-label": `Remove ${one.id ?? `picture ${i + 1}`}` }, "×");
      remove.addEventListener("click", () => { setPictures(pictures.filter((other) => other !== one)); changed(); });
      return element("li", {}, small, remove);
    }),
  );
}

function documentsNow() {
  const { documents, format, problem } = held ?? documentsOfText($("documents").value);
  return { documents: [...documents, ...pictures], format, problem };
}

function setDocuments(name, documents) {
  const text = textOfDocuments(documents);
  const isShort = text.length <= MOST_TYPED;
  hold(isShort ? null : { name, documents });
  $("documents").value = isShort ? text : "";
}

async function take(files) {
  const problems = [];
  let texts = [], name = "";
  for (const file of files) {
    try {
      if (file.type.startsWith("image/")) {
        const image = await dataUrlOf(file); // others may be added or removed meanwhile
        setPictures([...pictures, { id: file.name, image }]);
        continue;
      }
      const documents = documentsOfFile(file.name, await file.text());
      if (!documents.length) throw new Error("it has no text");
      texts = texts.concat(documents);
      name ||= file.name;
    } catch (error) {
      problems.push(`${file.name} cannot be read: ${error.message}`);
    }
  }
  // Not in a column's status: the answer to an earlier request would replace it there.
  $("unread").textContent = problems.join("; ");
  if (texts.length) setDocuments(name, texts);
  // Pictures in place of the example, not beside it.
  else if (pictures.length && $("documents").value === EXAMPLE.documents) $("documents").value = "";
  changed();
}

// ---- models

// With `again`, the documents are only ranked again if other models can rank them.
async function findModels({ again = false } = {}) {
  const asked = ++modelsAsked;
  clearTimeout(modelsTimer);
  try {
    const { found } = await request("v1/models");
    if (asked !== modelsAsked) return;
    const before = columns.map((column) => column.model).join();
    cards = found.data;
    showModels();
    if (cards.some((card) => card.state === "loading")) modelsTimer = setTimeout(() => findModels({ again: true }), 2000);
    if (!again || before !== columns.map((column) => column.model).join()) changed();
  } catch (error) {
    if (asked !== modelsAsked) return;
    $("model").textContent = error.retryAfter ? error.message : "";
    if (error.retryAfter) modelsTimer = setTimeout(findModels, 2000);
    else columns[0].showProblem(error);
  }
}

const factsOf = (card) =>
  [card.id, card.score_type, card.max_model_len && `reads ${number(card.max_model_len)} tokens`, card.device].filter(Boolean).join(" · ");

function showModels() {
  $("models").hidden = cards.length < 2;
  const options = () =>
    cards.map((card) => {
      const option = element("option", { value: card.id }, card.state === "ok" ? card.id : `${card.id} (${card.state})`);
      option.disabled = card.state !== "ok";
      return option;
    });
  for (const [name, more] of [["choice", []], ["rival", [element("option", { value: "" }, "no other")]]]) {
    const before = wanted[name] ?? $(name).value;
    $(name).replaceChildren(...more, ...options());
    if (cards.some((card) => card.id === before)) $(name).value = before;
    if (cards.length) delete wanted[name];
  }
  arrangeColumns();
}

// One column for the model, and one for the model that it is compared with.
function arrangeColumns() {
  const several = cards.length > 1;
  const names = several ? [$("choice").value, $("rival").value].filter(Boolean) : [null];
  while (columns.length < Math.max(1, names.length)) columns.push(new Column());
  columns.splice(Math.max(1, names.length)).forEach((column) => { column.stop(); column.root.remove(); });
  columns.forEach((column, i) => {
    if (column.model !== (names[i] ?? null)) Object.assign(column, { model: names[i] ?? null, explains: true });
    column.parts.name.textContent = column.model ?? "Results";
    column.parts.name.hidden = columns.length < 2;
    if (!column.root.isConnected) $("columns").append(column.root);
  });
  document.body.classList.toggle("compares", columns.length > 1);
  const shown = cards.find((card) => card.id === columns[0].model) ?? cards[0];
  if (shown) $("model").textContent = columns.length > 1 ? counted(cards.length, "model") : factsOf(shown);
  const normalizes = shown?.normalized_score_scale !== null;
  $("normalize").disabled = !normalizes;
  if (!normalizes) $("normalize").checked = false;
}

// ---- ranking

function body() {
  return {
    query: $("query").value,
    documents: documentsNow().documents,
    top_n: Math.max(1, Number($("top").value) || 20),
    normalize: $("normalize").checked,
    long_documents: $("long").value,
  };
}

function changed() {
  const { documents, format, problem } = documentsNow();
  const isLong = documents.length > LIVE_DOCUMENTS || pictures.length ||
    documents.reduce((total, one) => total + (one.text?.length ?? 0), 0) > LIVE_CHARACTERS;
  const which = pictures.length ? "pictures" : "so many";
  const hint = isLong && !isFromLink ? `. Press Rank: ${which} are not ranked while you type` : "";
  $("count").textContent = `${counted(documents.length, "document")}${format ? ` from ${format}` : ""}${hint}`;
  if (problem) $("count").append(". ", element("span", { class: "failed" }, problem));
  const notice = $("notice");
  notice.hidden = !isFromLink;
  notice.textContent = isFromLink ? "Opened from a link. Nothing has been sent yet: look at the documents, then press Rank." : "";
  for (const column of columns) {
    if (column.pending) column.say("");
    column.stop();
    column.setStale(true);
  }
  arranged();
  clearTimeout(timer);
  if (!isLong && !isFromLink) timer = setTimeout(ask, 250);
}

async function ask() {
  clearTimeout(timer);
  if (!cards.length) { findModels(); return; }
  const asked = body();
  $("agreement").hidden = true;
  const asking = columns.map((column) => column.rank(asked));
  arranged();
  await Promise.all(asking);
  arranged();
}

// What depends on all columns.
function arranged() {
  const isBusy = columns.some((column) => column.pending);
  $("stop").hidden = !isBusy;
  $("csv").disabled = isBusy || !columns.some((column) => column.results.length);
  compareColumns();
}

function stop() {
  for (const column of columns) {
    if (column.pending) column.say("Stopped.");
    column.stop();
  }
  arranged();
}

// ---- events

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
for (const name of ["query", "top"]) $(name).addEventListener("input", changed);
for (const name of ["normalize", "long"]) $(name).addEventListener("change", changed);
for (const name of ["choice", "rival"]) $(name).addEventListener("change", () => { arrangeColumns(); changed(); });
$("documents").addEventListener("input", () => { $("unread").textContent = ""; changed(); });
$("held").querySelector("button").addEventListener("click", () => { hold(null); changed(); });
$("key").addEventListener("change", () => findModels());
$("input").addEventListener("submit", (event) => {
  event.preventDefault();
  isFromLink = false;
  changed();
  ask();
});
$("stop").addEventListener("click", stop);
$("file").addEventListener("change", (event) => { take([...event.target.files]); event.target.value = ""; });
$("link").addEventListener("click", copyLink);
$("curl").addEventListener("click", () => copy(asCurl(), "Copied as curl."));
$("python").addEventListener("click", () => copy(asPython(), "Copied as Python."));
$("csv").addEventListener("click", downloadCsv);
for (const kind of ["dragover", "dragleave", "drop"]) {
  $("documents").addEventListener(kind, (event) => {
    event.preventDefault();
    $("documents").classList.toggle("over", kind === "dragover");
    if (kind !== "drop") return;
    if (event.dataTransfer.files[0]) take([...event.dataTransfer.files]);
    else { $("documents").value = event.dataTransfer.getData("text"); changed(); }
  });
}
window.addEventListener("hashchange", () => { if (openLink()) changed(); });
// Not with each letter: files may be large.
window.addEventListener("pagehide", keep);
document.addEventListener("visibilitychange", keep);
prepareMap();
arrangeColumns();
if (!openLink() && !openKept()) restore(EXAMPLE);
setInterval(readMetrics, 2000);
findModels();
