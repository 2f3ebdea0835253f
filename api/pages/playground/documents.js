// Documents from text that was typed, pasted, dropped or opened: lines, JSON lines, JSON, or a table with a
// header. A document has a text or an image, and perhaps an id and a title.

const TEXT_FIELDS = ["text", "content", "document", "passage", "body", "abstract"];
const ID_FIELDS = ["_id", "id", "docid", "doc_id", "document_id"];
const MOST_TYPED = 400_000; // characters; longer files are not put into the text field

// The text that is scored. BEIR's corpora are ranked by title and text, too.
const scoredText = (one) => [one.title, one.text].filter(Boolean).join(" ");

function documentOf(value) {
  if (typeof value === "string") return { text: value };
  if (!value || typeof value !== "object" || Array.isArray(value)) return { text: JSON.stringify(value) };
  const isText = (name) => typeof value[name] === "string" && value[name];
  const id = ID_FIELDS.map((name) => value[name]).find((each) => ["string", "number"].includes(typeof each));
  const name = TEXT_FIELDS.find(isText);
  const title = isText("title") ? value.title : undefined;
  const known = { ...(id === undefined ? {} : { id: String(id) }), ...(name && title ? { title } : {}) };
  if (!name && !title && isText("image") && value.image.startsWith("data:image/")) return { ...known, image: value.image };
  const isEmpty = [...TEXT_FIELDS, "title"].some((field) => value[field] === "");
  return { ...known, text: name ? value[name] : title ?? (isEmpty ? "" : JSON.stringify(value)) };
}

// Rows of cells, or null where a quote is never closed. In TSV, whose texts may hold quotes, the closing quote also
// has to end its cell.
function parseTable(text, separator, hasQuotes = true) {
  const rows = [[]];
  let cell = "", quoted = false, closed = false;
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (quoted) {
      if (c === '"' && text[i + 1] === '"') { cell += '"'; i++; }
      else if (c === '"') { quoted = false; closed = true; }
      else cell += c;
    } else if (c === separator || c === "\n" || c === "\r") {
      if (c === "\r" && text[i + 1] === "\n") i++;
      rows.at(-1).push(cell);
      cell = "";
      closed = false;
      if (c !== separator) rows.push([]);
    } else if (closed && separator === "\t") return null;
    else if (c === '"' && cell === "" && hasQuotes) quoted = true;
    else cell += c;
  }
  if (quoted) return null;
  rows.at(-1).push(cell);
  return rows.filter((row) => row.some((each) => each.trim()));
}

// Where quotes in TSV do not enclose cells, they are part of the texts, as in MS MARCO.
const tableOf = (text, separator) => parseTable(text, separator) ?? (separator === "\t" ? parseTable(text, separator, false) : null);

const headerOf = (row) => row.map((name) => name.trim().toLowerCase());
const namesText = (names) => [...TEXT_FIELDS, "title"].some((field) => names.includes(field));

function documentsOfTable(rows) {
  const names = headerOf(rows[0] ?? []);
  if (namesText(names)) {
    const records = rows.slice(1).map((row) => Object.fromEntries(names.map((name, i) => [name, row[i] ?? ""])));
    return records.filter((record) => [...TEXT_FIELDS, "title"].some((field) => record[field])).map(documentOf);
  }
  const width = (column) => rows.reduce((sum, row) => sum + (row[column] ?? "").length, 0);
  const widest = names.map((_, column) => column).sort((a, b) => width(b) - width(a))[0];
  return rows.map((row) => row[widest] ?? "").filter(Boolean).map(documentOf);
}

function parsed(json) {
  try {
    return { value: JSON.parse(json) };
  } catch {
    return null;
  }
}

const isRecord = (value) => Boolean(value) && typeof value === "object";

// What is in the text field, in the format that it looks like.
function documentsOfText(text) {
  const lines = text.split(/\r?\n/).map((line) => line.trim()).filter(Boolean);
  const start = text.trimStart()[0];
  if (start === "[") {
    const list = parsed(text)?.value;
    if (Array.isArray(list) && list.every((each) => typeof each === "string" || isRecord(each))) {
      return { format: "JSON", documents: list.map(documentOf) };
    }
  }
  if (start === "{" || start === '"') {
    const values = lines.map(parsed);
    const bad = values.indexOf(null);
    if (bad < 0 && values.some(({ value }) => isRecord(value))) {
      return { format: "JSON lines", documents: values.map(({ value }) => documentOf(value)) };
    }
    if (bad > 0 && isRecord(values[0]?.value)) {
      const number = text.split(/\r?\n/).findIndex((line) => line.trim() === lines[bad]) + 1;
      return { problem: `Line ${number} is not JSON, so each line is read as text.`, documents: lines.map(documentOf) };
    }
  }
  for (const [separator, format] of [[",", "CSV"], ["\t", "TSV"]]) {
    const [first] = parseTable(lines[0] ?? "", separator) ?? [];
    if (lines.length > 1 && first?.length > 1 && namesText(headerOf(first))) {
      const rows = tableOf(text, separator);
      if (rows) return { format, documents: documentsOfTable(rows) };
      return { problem: "A quote is never closed, so each line is read as text.", documents: lines.map(documentOf) };
    }
  }
  return { documents: lines.map(documentOf) };
}

// A file's documents, by its name's ending.
function documentsOfFile(name, text) {
  const ending = name.toLowerCase().split(".").pop();
  if (ending === "csv" || ending === "tsv") {
    const rows = tableOf(text, ending === "csv" ? "," : "\t");
    if (!rows) throw new Error("a quote is never closed");
    return documentsOfTable(rows);
  }
  const lines = text.split(/\r?\n/).map((line) => line.trim()).filter(Boolean);
  if (ending === "json") {
    const value = JSON.parse(text);
    return (Array.isArray(value) ? value : [value]).map(documentOf);
  }
  if (ending === "jsonl" || ending === "ndjson") return lines.map((line) => documentOf(JSON.parse(line)));
  return lines.map(documentOf);
}

// Text that the text field reads as these documents.
function textOfDocuments(documents) {
  const isPlain = (one) => Object.keys(one).length === 1 && "text" in one && !/[\r\n]/.test(one.text);
  const lines = documents.map((one) => one.text).join("\n");
  const again = documents.every(isPlain) ? documentsOfText(lines) : { format: "other" };
  const isSame = !again.format && again.documents.length === documents.length &&
    again.documents.every((one, i) => one.text === documents[i].text);
  if (isSame) return lines;
  return documents.map((one) => JSON.stringify(one)).join("\n");
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function csvOf(rows) {
  // Spreadsheets compute what begins like a formula, and not what begins with an apostrophe.
  const cell = (value) => {
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value ?? "");
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}
