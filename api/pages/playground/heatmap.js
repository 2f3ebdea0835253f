// The heat map of late interaction: the similarity of each query token to each document token.

const MOST_CELLS = 200_000;
const MOST_BETWEEN = 40; // code units from one token to the next, as of spaces and punctuation
const map = { full: null, rows: [], columns: [], values: [], row: 0, column: 0, opened: 0 };

// Tokens with their spans in the text, in code points. Each is looked for behind the one before it; markers are
// not there. Parts of one character have its span.
function placed(text, names) {
  let [end, characters, last] = [0, 0, null];
  return names.map((name) => {
    const at = name ? text.indexOf(name, end) : -1;
    if (at >= 0 && at - end <= MOST_BETWEEN) {
      const start = characters + Array.from(text.slice(end, at)).length;
      characters = start + Array.from(name).length;
      end = at + name.length;
      last = { name, span: [start, characters] };
      return last;
    }
    return last?.name === name ? last : { name, span: null };
  });
}

async function openMap(column, result) {
  const opened = ++map.opened;
  const { model, asked } = column;
  const passage = result.explanation.passage?.span;
  const text = passage ? Array.from(result.text).slice(...passage).join("") : result.text;
  $("map-title").textContent = ["Heat map", passage && "the best window", model].filter(Boolean).join(" · ");
  $("map-document").textContent = text.length > 160 ? `${text.slice(0, 160)}…` : text;
  $("map-cell").textContent = "Comparing the tokens of the query and the document";
  map.full = null;
  drawMap();
  $("map").showModal();
  try {
    const body = {
      queries: [asked.query], documents: [text], explain: "maps",
      ...(model === null ? {} : { model }), ...(asked.long_documents && !passage ? { long_documents: asked.long_documents } : {}),
    };
    const { matches, similarities, document_tokens } = (await request("score", body)).found.data[0].explanation;
    if (opened !== map.opened) return;
    if (similarities.length * document_tokens.length > MOST_CELLS) throw new Problem("This document is too long for a heat map");
    const rows = matches.map((match) => ({ name: match.query_token, span: match.query_span }));
    map.full = { query: asked.query, text, rows, columns: placed(text, document_tokens), values: similarities };
    $("map-cell").textContent = "Point at a cell, or move with the arrow keys.";
    layMap();
  } catch (error) {
    if (opened === map.opened) $("map-cell").textContent = [error.message, error.detail].filter(Boolean).join(". ");
  }
}

// The names of tokens, or of words with the numbers of their tokens. Markers are those without a place.
function grouped(text, tokens) {
  const { merge, markers } = { merge: $("merge").checked, markers: $("markers").checked };
  const alone = tokens.map(({ name, span }, i) => ({ name: name ?? "…", numbers: [i], isMarker: !span }));
  const known = merge
    ? wordsOf(text, tokens.map((token) => token.span)).filter((word) => !word.isMarkers)
    : alone.filter((token) => !token.isMarker);
  return markers ? [...known, ...alone.filter((token) => token.isMarker)].sort((a, b) => a.numbers[0] - b.numbers[0]) : known;
}

// A word has the highest similarity of its tokens.
function layMap() {
  const { query, text, rows, columns, values } = map.full;
  map.rows = grouped(query, rows);
  map.columns = grouped(text, columns);
  map.values = map.rows.map((row) =>
    map.columns.map((column) => Math.max(...row.numbers.flatMap((i) => column.numbers.map((j) => values[i][j])))),
  );
  // -1 where a hidden marker is the best match.
  map.best = map.rows.map((row) => {
    const bests = row.numbers.map((i) => values[i].indexOf(Math.max(...values[i])));
    const most = Math.max(...row.numbers.map((i, k) => values[i][bests[k]]));
    const best = bests.find((j, k) => values[row.numbers[k]][j] === most);
    return map.columns.findIndex((column) => column.numbers.includes(best));
  });
  [map.row, map.column] = [0, Math.max(0, map.best[0] ?? 0)];
  const named = counted(map.rows.length, "query row");
  $("map-canvas").setAttribute("aria-label", `Similarities of ${named} and ${counted(map.columns.length, "document column")}; arrow keys move from cell to cell`);
  drawMap();
}

const shortened = (name) => (name.length > 14 ? `${name.slice(0, 13)}…` : name);

function sized(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 16000 / Math.max(width, height));
  Object.assign(canvas, { width: Math.ceil(width * ratio), height: Math.ceil(height * ratio) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  canvas.getContext("2d").scale(ratio, ratio);
}

// The names of rows and columns stay where they are when the map is scrolled.
function drawRowNames(canvas, width, height, font, ink) {
  sized(canvas, width, height);
  const pen = canvas.getContext("2d");
  Object.assign(pen, { font, fillStyle: ink, textBaseline: "middle", textAlign: "right" });
  map.rows.forEach(({ name }, i) => pen.fillText(shortened(name), width - 6, map.top + (i + 0.5) * map.size));
}

function drawColumnNames(canvas, width, height, font, ink) {
  sized(canvas, width, height);
  const pen = canvas.getContext("2d");
  Object.assign(pen, { font, fillStyle: ink, textBaseline: "middle" });
  map.columns.forEach(({ name }, j) => {
    pen.save();
    pen.translate(map.left + (j + 0.5) * map.size, height - 5);
    pen.rotate(-Math.PI / 2);
    pen.fillText(shortened(name), 0, 0);
    pen.restore();
  });
}

function drawMap() {
  const canvas = $("map-canvas");
  $("map-scroll").hidden = !map.full;
  if (!map.full) return;
  const style = getComputedStyle(document.documentElement);
  const [ink, line, main, onMain, panel, heat] = ["--ink", "--line", "--main", "--on-main", "--panel", "--heat"].map((name) => style.getPropertyValue(name).trim());
  const size = Number($("zoom").value);
  const font = `${Math.min(14, Math.max(9, size * 0.6))}px system-ui, sans-serif`;
  const pen = canvas.getContext("2d");
  pen.font = font;
  const widest = (names) => Math.ceil(Math.max(20, ...names.map(({ name }) => pen.measureText(shortened(name)).width))) + 14;
  const [left, top] = [2, 2];
  const height = top + map.rows.length * size + 4;
  const width = left + map.columns.length * size + 4;
  Object.assign(map, { left, top, size });
  drawRowNames($("map-rows"), widest(map.rows), height, font, ink);
  drawColumnNames($("map-columns"), width, widest(map.columns), font, ink);
  sized(canvas, width, height);
  pen.font = font;
  pen.textBaseline = "middle";
  pen.fillStyle = panel;
  pen.fillRect(0, 0, width, height);
  const all = map.values.flat();
  const [least, most] = [all.reduce((a, b) => Math.min(a, b), 1), all.reduce((a, b) => Math.max(a, b), 0)];
  map.values.forEach((row, i) => {
    row.forEach((value, j) => {
      const strength = ((value - least) / Math.max(1e-9, most - least)) ** 1.5;
      pen.fillStyle = `rgb(${heat} / ${strength.toFixed(3)})`;
      pen.fillRect(left + j * size, top + i * size, size - 1, size - 1);
      if (size < 34) return;
      pen.fillStyle = strength > 0.6 ? onMain : ink;
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillText(value.toFixed(2), left + (j + 0.5) * size, top + (i + 0.5) * size);
    });
    if (map.best[i] < 0) return;
    pen.strokeStyle = ink;
    pen.lineWidth = 1.5;
    pen.strokeRect(left + map.best[i] * size + 0.5, top + i * size + 0.5, size - 2, size - 2);
  });
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  pen.strokeRect(left - 1, top - 1, width - left - 3, height - top - 3);
  if (document.activeElement !== canvas || !map.values.length) return;
  for (const [color, wide] of [[panel, 6], [main, 3]]) {
    Object.assign(pen, { strokeStyle: color, lineWidth: wide });
    pen.strokeRect(left + map.column * size, top + map.row * size, size - 1, size - 1);
  }
}

function tellCell(row, column) {
  const value = map.values[row]?.[column];
  if (value === undefined) return;
  const isBest = map.best[row] === column;
  $("map-cell").textContent = `${map.rows[row].name} × ${map.columns[column].name}: ${value.toFixed(3)}${isBest ? ", the best match" : ""}`;
}

function moveInMap(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step || !map.full) return;
  event.preventDefault();
  const within = (value, count) => Math.min(count - 1, Math.max(0, value));
  map.row = within(map.row + step[0], map.rows.length);
  map.column = within(map.column + step[1], map.columns.length);
  tellCell(map.row, map.column);
  drawMap();
  const [box, x, y] = [$("map-scroll"), map.left + map.column * map.size, map.top + map.row * map.size];
  const seen = (place, start, size) => (place < start ? place - map.size : place + 2 * map.size > start + size ? place + 2 * map.size - size : start);
  const [width, height] = [box.clientWidth - $("map-rows").offsetWidth, box.clientHeight - $("map-columns").offsetHeight];
  box.scrollTo(map.column ? seen(x, box.scrollLeft, width) : 0, map.row ? seen(y, box.scrollTop, height) : 0);
}

function prepareMap() {
  for (const name of ["merge", "markers"]) $(name).addEventListener("change", () => map.full && layMap());
  $("zoom").addEventListener("input", drawMap);
  $("map-canvas").addEventListener("keydown", moveInMap);
  for (const kind of ["focus", "blur"]) $("map-canvas").addEventListener(kind, drawMap);
  $("map-canvas").addEventListener("pointermove", (event) => {
    if (map.full) tellCell(Math.floor((event.offsetY - map.top) / map.size), Math.floor((event.offsetX - map.left) / map.size));
  });
  $("map-close").addEventListener("click", () => $("map").close());
  $("map").addEventListener("close", () => map.opened++);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
}
