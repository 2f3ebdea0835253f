// Words of the query and of documents, and the matches between them. Spans count code points and JavaScript
// counts UTF-16 units, so texts are taken apart with Array.from before they are sliced.

const LETTER = /[\p{L}\p{N}\p{M}]/u;
// Scripts that write no spaces between words.
const STANDS_ALONE = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]/u;
const STOP_WORDS = new Set(
  ("a an the and or of to in on at by for from with as is are was were be been do does did i you he she it we they " +
    "this that these those my your his her its our their what which who how when where why not no can will would " +
    "der die das den dem des ein eine einer eines einem einen und oder von zu in im am an auf bei für mit als ist sind " +
    "war es er sie wir ihr ich du wie was wer wo nicht " +
    "le la les un une des du de et ou à au aux en dans sur par pour avec est sont il elle on nous vous ils que qui " +
    "el los las una unos y o en con por para es son se lo su il gli uno e di da che").split(" "),
);

const isDim = (word) => !LETTER.test(word) || STOP_WORDS.has(word.toLowerCase());
const goTogether = (before, after) =>
  LETTER.test(before) && LETTER.test(after) && !STANDS_ALONE.test(before) && !STANDS_ALONE.test(after);

// The span of the word, or words, that a token is a part of.
function wholeWord(characters, [start, end]) {
  while (start > 0 && start < end && goTogether(characters[start - 1], characters[start])) start--;
  while (end > start && end < characters.length && goTogether(characters[end - 1], characters[end])) end++;
  return [start, end];
}

// Tokens by the words of their text: each with its name and its tokens' numbers. Markers, which have no span,
// are together at the end.
function wordsOf(text, spans) {
  const characters = Array.from(text);
  const words = [];
  const markers = [];
  spans.forEach((span, token) => {
    if (!span) { markers.push(token); return; }
    const whole = wholeWord(characters, span);
    const last = words.at(-1);
    const isSpace = !characters.slice(...span).join("").trim();
    if (isSpace) (last?.numbers ?? markers).push(token);
    else if (last && whole[0] < last.span[1] && whole[1] > whole[0]) {
      last.span[1] = Math.max(last.span[1], whole[1]);
      last.numbers.push(token);
    } else words.push({ span: [...whole], numbers: [token] });
  });
  for (const word of words) {
    word.name = characters.slice(...word.span).join("");
    word.isDim = isDim(word.name);
  }
  return markers.length ? [...words, { name: "markers", numbers: markers, isMarkers: true, isDim: true }] : words;
}

const shareOf = (word, matches) => word.numbers.reduce((sum, token) => sum + (matches[token]?.share ?? 0), 0);

// A document's text in pieces, colored by what answers one word of the query, or all of them. Stop words and
// punctuation count a quarter there.
function colored(result, words, word) {
  const characters = Array.from(result.text);
  const weight = new Float32Array(characters.length);
  const answers = new Array(characters.length);
  const { matches = [], windows, passage, read_span: read } = result.explanation ?? {};
  for (const asked of word ? [word] : words.filter((each) => !each.isMarkers)) {
    for (const token of asked.numbers) {
      const match = matches[token];
      if (!match?.document_span) continue;
      const [start, end] = wholeWord(characters, match.document_span);
      const isQuiet = asked.isDim || isDim(characters.slice(start, end).join(""));
      for (let c = start; c < end; c++) {
        const share = Math.max(0, match.share) * (isQuiet ? 0.25 : 1);
        weight[c] = word ? Math.max(weight[c], match.similarity) : weight[c] + share;
        (answers[c] ??= new Set()).add(asked.name);
      }
    }
  }
  const most = word ? 1 : weight.reduce((largest, each) => Math.max(largest, each), 1e-9);
  const title = result.document.title ? Array.from(result.document.title).length : 0;
  const isWithin = (span, c) => Boolean(span) && c >= span[0] && c < span[1];
  const borders = (windows ?? []).map((window) => window.span[0]).filter((c) => c > 0);
  const kindOf = (c) =>
    [
      c < title && "title",
      isWithin(passage?.span, c) && "passage",
      read && !isWithin(read, c) && "unread",
    ].filter(Boolean).join(" ");
  const pieces = [];
  for (let start = 0, c = 1; c <= characters.length; c++) {
    const isSame = c < characters.length && weight[c] === weight[start] && kindOf(c) === kindOf(start) &&
      answers[c]?.size === answers[start]?.size && !borders.includes(c);
    if (isSame) continue;
    const piece = element("span", { class: kindOf(start) }, characters.slice(start, c).join(""));
    if (weight[start] > 0) {
      piece.style.setProperty("--strength", Math.min(1, weight[start] / most).toFixed(3));
      piece.dataset.heat = weight[start].toFixed(4);
      piece.title = `Matches ${[...answers[start]].join(", ")}`;
    }
    if (borders.includes(start)) piece.classList.add("border");
    if (piece.classList.contains("unread")) {
      if (!pieces.at(-1)?.classList.contains("unread")) piece.classList.add("first");
      piece.title = "Not read: the document is longer than the model reads";
    }
    pieces.push(piece);
    start = c;
  }
  return pieces;
}
