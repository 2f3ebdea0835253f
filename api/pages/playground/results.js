// A column of results: one model's ranking of the documents, and why. Two columns compare two models.

const columns = [];
let inColumns = 0; // names elements of columns apart

class Column {
  constructor() {
    this.model = null; // a name, on a server of several models
    this.explains = true;
    this.results = [];
    this.words = [];
    this.chosen = null; // the word that was pressed
    this.scale = null;
    this.pending = null;
    this.retries = 0;
    const name = `column-${inColumns++}`;
    this.parts = {
      name: element("h3", { id: name, hidden: "" }),
      progress: element("div", { class: "progress", "aria-hidden": "true" }),
      status: element("p", { class: "status", role: "status" }, "Type a query and some documents."),
      problem: element("div", { class: "problem", role: "alert", hidden: "" }),
      scale: element("p", { class: "scale-in-words quiet" }),
      words: element("div", { class: "words", role: "group", "aria-label": "Words of the query: point at one to see what it matches", hidden: "" }),
      list: element("ol", { class: "results" }),
    };
    this.root = element("section", { class: "column", "aria-labelledby": name }, ...Object.values(this.parts));
  }

  say(text) {
    this.parts.status.textContent = text;
  }

  setStale(isStale) {
    this.root.classList.toggle("stale", isStale && this.results.length > 0);
  }

  stop() {
    this.pending?.abort();
    this.pending = null;
    clearTimeout(this.timer);
    this.parts.problem.hidden = true;
    this.setBusy(false);
  }

  setBusy(isBusy) {
    this.root.classList.toggle("busy", isBusy);
    this.root.setAttribute("aria-busy", String(isBusy));
  }

  // Ranks what is asked for, and gives whether there are new results.
  async rank(asked) {
    this.stop();
    if (!asked.query.trim() || !asked.documents.length) {
      this.say("Type a query and some documents.");
      this.show([], asked);
      return true;
    }
    const mine = (this.pending = new AbortController());
    this.setStale(true);
    this.setBusy(true);
    this.say(`Ranking ${counted(asked.documents.length, "document")}`);
    try {
      const { found, server, inAll } = await this.request(asked, mine.signal);
      this.retries = 0;
      this.show(found.results, asked, found.score_scale);
      const { prompt_tokens: tokens, prompt_tokens_details: details } = found.usage;
      const took = server === null ? `${number(inAll)} ms` : `${number(server)} ms on the server, ${number(inAll)} ms in all`;
      const cached = details?.cached_tokens ? `, ${number(details.cached_tokens)} of them cached` : "";
      this.say(`${counted(asked.documents.length, "document")} ranked: ${took}. ${counted(tokens, "token")}${cached}.`);
      if (found.warnings) this.parts.status.append(element("span", { class: "warning" }, found.warnings.join(" ")));
      return true;
    } catch (error) {
      if (error.name === "AbortError") return false;
      this.showProblem(error, asked);
      return false;
    } finally {
      if (this.pending === mine) {
        this.pending = null;
        this.setBusy(false);
      }
    }
  }

  async request(asked, signal) {
    const { query, documents, top_n, normalize, long_documents } = asked;
    const body = {
      ...(this.model === null ? {} : { model: this.model }),
      ...(long_documents ? { long_documents } : {}),
      ...(normalize ? { normalize } : {}),
      query, documents: documents.map(onWire), top_n, return_documents: false,
    };
    try {
      return await request("rerank", this.explains ? { ...body, explain: true } : body, signal);
    } catch (error) {
      const isLack = error.status === 400 && error.param === "explain"; // of the model
      const isLarge = error.status === 413 && error.detail.startsWith("explain");
      if (!this.explains || !(isLack || isLarge)) throw error;
      this.explains = !isLack;
      return request("rerank", body, signal);
    }
  }

  showProblem(problem, asked) {
    const [box, wait] = [this.parts.problem, problem.retryAfter];
    this.say("");
    box.replaceChildren(element("strong", {}, problem.message), element("p", {}, problem.detail ?? ""));
    box.hidden = false;
    if (wait === null || wait === undefined) return;
    // Read out once: the seconds change in a part that is no alert.
    const left = element("span", { "aria-live": "off" });
    const now = element("button", { type: "button" }, "Try now");
    now.addEventListener("click", () => this.again(asked));
    box.append(element("p", {}, left, " ", now));
    let seconds = wait;
    const count = () => {
      left.textContent = this.retries < 20 ? `Next try in ${Math.ceil(seconds)} s.` : "";
      if (this.retries >= 20) return;
      if (seconds <= 0) { this.retries++; this.again(asked); return; }
      const step = Math.min(1, seconds);
      seconds -= step;
      this.timer = setTimeout(count, step * 1000);
    };
    count();
  }

  async again(asked) {
    await this.rank(asked);
    arranged();
  }

  show(results, asked, scale = null) {
    this.results = results.map((result) => {
      const one = asked.documents[result.index];
      return { ...result, document: one, text: one.image ? "" : scoredText(one) };
    });
    const matches = this.results.find((result) => result.explanation?.matches?.length)?.explanation.matches ?? [];
    this.words = wordsOf(asked.query, matches.map((match) => match.query_span));
    this.asked = asked;
    this.scale = scale;
    this.chosen = null;
    this.parts.problem.hidden = true;
    this.setStale(false);
    this.parts.scale.textContent = scale ? `Scores: ${scaleInWords(scale)}` : "";
    this.showWords();
    const scores = this.results.map((result) => result.relevance_score);
    const [most, least] = [scale?.max ?? Math.max(...scores, 0), scale?.min ?? Math.min(...scores, 0)];
    this.parts.list.replaceChildren(...this.results.map((result, rank) => this.item(result, rank, most, least)));
    this.heat(null);
  }

  showWords() {
    const box = this.parts.words;
    const real = this.words.filter((word) => !word.isMarkers);
    box.hidden = !real.length;
    const shares = real.map((word) => shareOf(word, this.results[0]?.explanation?.matches ?? []));
    const most = Math.max(...shares, 1e-9);
    box.replaceChildren(
      ...real.map((word, i) => {
        const bar = element("i", { "aria-hidden": "true" }, element("b", { width: `${Math.max(0, (shares[i] / most) * 100)}%` }));
        const button = element("button", { type: "button", class: word.isDim ? "word dim" : "word", "aria-pressed": "false" }, word.name, bar);
        button.title = `${percent(shares[i])} of the best document's score`;
        for (const kind of ["pointerenter", "focus"]) button.addEventListener(kind, () => this.heat(word));
        for (const kind of ["pointerleave", "blur"]) button.addEventListener(kind, () => this.heat(this.chosen));
        button.addEventListener("click", () => this.press(word, button));
        return button;
      }),
    );
  }

  press(word, button) {
    this.chosen = this.chosen === word ? null : word;
    for (const other of this.parts.words.children) {
      other.setAttribute("aria-pressed", String(other === button && this.chosen === word));
    }
    this.heat(this.chosen ?? word);
  }

  item(result, rank, most, least) {
    const { relevance_score: score, explanation: facts, document: one } = result;
    const width = most > least ? Math.min(1, Math.max(0, (score - least) / (most - least))) * 100 : 100;
    const told = [
      `#${rank + 1}`,
      one.id === undefined ? `document ${result.index + 1}` : one.id,
      facts && counted(facts.tokens, "token"),
      facts?.cached && "cached",
      facts?.truncated && "truncated",
    ].filter(Boolean).join(" · ");
    const item = element(
      "li",
      { "data-index": result.index },
      element(
        "div",
        { class: "head" },
        element("strong", {}, score.toFixed(4)),
        element("span", { class: "scale", "aria-hidden": "true" }, element("b", { width: `${width}%` })),
        element("span", { class: "quiet facts" }, told),
        element("span", { class: "moved" }),
      ),
      one.image ? pictureOf(one, result.index) : element("p", { class: "text" }),
    );
    for (const [kind, isOn] of [["pointerenter", true], ["pointerleave", false]]) {
      item.addEventListener(kind, () => markSame(result.index, isOn));
    }
    if (facts?.matches?.length) {
      const more = one.image ? [] : [this.mapButton(result)];
      item.append(element("div", { class: "why" }, this.detailsOfMatches(facts.matches, result), ...more));
    }
    if (facts?.windows?.length) item.append(detailsOfWindows(facts));
    return item;
  }

  mapButton(result) {
    const button = element("button", { type: "button", class: "small" }, "Heat map");
    button.addEventListener("click", () => openMap(this, result));
    return button;
  }

  detailsOfMatches(matches, result) {
    const characters = Array.from(result.text);
    const shares = this.words.map((word) => shareOf(word, matches));
    const most = Math.max(...shares, 1e-9);
    const rows = this.words.map((word, i) => {
      const there = word.numbers.map((token) => matches[token]).filter(Boolean);
      const spans = there.map((match) => match.document_span).filter(Boolean);
      const found = [...new Set(spans.map((span) => characters.slice(...wholeWord(characters, span)).join("")))];
      const patches = there.filter((match) => match.patch).length;
      const best = word.isMarkers ? "" : found.join(", ") || (patches ? "part of the picture" : "a marker");
      const sum = there.reduce((total, match) => total + match.similarity, 0);
      return element(
        "tr",
        { class: word.isDim ? "dim" : "" },
        element("th", { scope: "row" }, word.isMarkers ? `${counted(word.numbers.length, "marker")} that the model adds` : word.name),
        element("td", { class: "bar" }, element("b", { width: `${Math.max(0, (shares[i] / most) * 100)}%`, "aria-hidden": "true" })),
        element("td", { class: "number" }, percent(shares[i])),
        element("td", {}, best),
        element("td", { class: "number" }, sum.toFixed(3)),
      );
    });
    const hidden = element("span", { class: "visually-hidden" }, "Share in percent");
    const head = ["Query word", "Share of score", hidden, "Best match", "Similarity"].map((name) => element("th", { scope: "col" }, name));
    return element(
      "details",
      {},
      element("summary", {}, "Why this score"),
      element("div", { class: "wide" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))),
    );
  }

  // Colors each document's text, and frames parts of pictures, by what answers one word, or by all shares.
  heat(word) {
    this.results.forEach((result, i) => {
      const item = this.parts.list.children[i];
      item.querySelector(".text")?.replaceChildren(...colored(result, this.words, word));
      const picture = item.querySelector(".picture");
      if (picture) framePatches(picture, result.explanation?.matches ?? [], this.words, word);
    });
  }
}

const onWire = (one) => (one.image ? { image: one.image } : scoredText(one));

function detailsOfWindows({ windows, passage }) {
  const list = windows.map(({ span, score }) => {
    const isBest = passage && span[0] === passage.span[0] && span[1] === passage.span[1];
    return element("li", {}, `Characters ${number(span[0])} to ${number(span[1])}: ${score.toFixed(4)}${isBest ? " (best)" : ""}`);
  });
  const told = `Read in ${windows.length} windows; the best is underlined`;
  return element("details", {}, element("summary", {}, told), element("ol", {}, ...list));
}

function pictureOf(one, index) {
  const picture = element("img", { alt: `Picture, document ${index + 1}` });
  picture.src = one.image;
  return element("div", { class: "picture" }, picture);
}

// Boxes over the parts of a picture that answer one word, or all words. Their places are in pixels.
function framePatches(holder, matches, words, word) {
  const picture = holder.querySelector("img");
  const draw = () => {
    const found = new Map();
    for (const asked of word ? [word] : words.filter((each) => !each.isDim)) {
      for (const token of asked.numbers) {
        const { patch, similarity } = matches[token] ?? {};
        if (!patch) continue;
        const key = patch.box.join(" ");
        const known = found.get(key) ?? { box: patch.box, names: new Set(), most: 0 };
        known.names.add(asked.name);
        known.most = Math.max(known.most, similarity);
        found.set(key, known);
      }
    }
    const boxes = [...found.values()].map(({ box, names, most }) => {
      const [width, height] = [picture.naturalWidth, picture.naturalHeight];
      const frame = element("span", { class: "patch" });
      frame.title = `Matches ${[...names].join(", ")}: ${most.toFixed(2)}`;
      Object.assign(frame.style, {
        left: `${(box[0] / width) * 100}%`, top: `${(box[1] / height) * 100}%`,
        width: `${((box[2] - box[0]) / width) * 100}%`, height: `${((box[3] - box[1]) / height) * 100}%`,
      });
      return frame;
    });
    holder.replaceChildren(picture, ...boxes);
  };
  if (picture.naturalWidth) draw();
  else picture.addEventListener("load", draw, { once: true });
}

// ---- two columns

function markSame(index, isOn) {
  if (columns.length < 2) return;
  for (const column of columns) {
    for (const item of column.parts.list.children) item.classList.toggle("same", isOn && item.dataset.index === String(index));
  }
}

// Kendall's tau of two rankings of the same things.
function kendall(first, second) {
  const place = new Map(second.map((each, i) => [each, i]));
  let agreeing = 0, pairs = 0;
  for (let i = 0; i < first.length; i++) {
    for (let j = i + 1; j < first.length; j++, pairs++) agreeing += place.get(first[i]) < place.get(first[j]) ? 1 : -1;
  }
  return pairs ? agreeing / pairs : null;
}

// Tells how the two columns' rankings differ, once both are there.
function compareColumns() {
  const told = $("agreement");
  const [a, b] = columns;
  const isDone = b && [a, b].every((column) => column.results.length && !column.pending && column.asked === a.asked);
  told.hidden = !isDone;
  if (!isDone) return;
  const [first, second] = [a, b].map((column) => column.results.map((result) => result.index));
  second.forEach((index, rank) => {
    const before = first.indexOf(index);
    const moved = b.parts.list.children[rank].querySelector(".moved");
    const up = before - rank;
    moved.textContent = before < 0 ? "new" : up > 0 ? `▲ ${up}` : up < 0 ? `▼ ${-up}` : "";
    moved.title = before < 0 ? `Not in ${a.model}'s results` : up ? `#${before + 1} with ${a.model}` : "";
  });
  const both = first.filter((index) => second.includes(index));
  const tau = kendall(both, second.filter((index) => first.includes(index)));
  const head = Math.min(5, first.length);
  const shared = first.slice(0, head).filter((index) => second.slice(0, head).includes(index)).length;
  const distance = tau === null ? "" : ` Kendall's tau: ${tau.toFixed(2)} over ${counted(both.length, "document")}.`;
  told.textContent = `Top ${head}: ${counted(shared, "document")} in common.${distance}`;
}
