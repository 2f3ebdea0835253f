// Live figures of the server, from /metrics.

const HISTORY = 60; // readings, one every two seconds
const readings = new Map();
let lastReading = null;
let isReading = false;

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
  if (total <= 0) return null;
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

// Each with its name, what it says, its unit, the value (null: nothing to tell) and the digits shown.
function figuresOf(now, then, seconds) {
  const rate = (name, labels) => (sum(now, name, labels) - sum(then, name, labels)) / seconds;
  const milliseconds = (q) => {
    const value = quantile(now, then, "maxsimd_http_request_seconds", q);
    return value === null ? null : value * 1000;
  };
  const hits = rate("maxsimd_cache_hits_total"), misses = rate("maxsimd_cache_misses_total");
  return [
    ["Requests", "answered, on all routes", "per second", rate("maxsimd_http_requests_total"), 1],
    ["Median latency", "half of the requests are faster", "ms", milliseconds(0.5), 1],
    ["99th percentile latency", "1 request of 100 is slower", "ms", milliseconds(0.99), 1],
    ["Throughput", "tokens that the model ran", "tokens per second", rate("maxsimd_tokens_total"), 0],
    ["Queue", "tokens that wait for the model", "tokens", sum(now, "maxsimd_queue_tokens"), 0],
    ["In flight", "requests that are being worked on", "", sum(now, "maxsimd_http_in_flight"), 0],
    ["Cache hits", "documents found in the cache", "%", hits + misses ? (100 * hits) / (hits + misses) : null, 1],
    ["Refused", "requests turned away because of load or limits", "per second", rate("maxsimd_refused_requests_total"), 1],
    ["Memory", "of the server's processes", "MiB", sum(now, "process_resident_memory_bytes") / 1048576, 0],
  ];
}

// Starts anew after a pause, as while another tab was shown, and where a server has started again at zero.
async function readMetrics() {
  if (isReading || $("view-live").hidden || document.hidden) return;
  if (lastReading && performance.now() - lastReading.at < 1000) return;
  isReading = true;
  try {
    const answer = await fetch(address("metrics"), { headers: headers(), signal: AbortSignal.timeout(10_000) });
    if (!answer.ok) throw problemOf(answer, null);
    const now = { values: parseMetrics(await answer.text()), at: performance.now() };
    const requests = (reading) => sum(reading.values, "maxsimd_http_requests_total");
    if (lastReading && now.at - lastReading.at < 15_000 && requests(now) >= requests(lastReading)) {
      const figures = figuresOf(now.values, lastReading.values, (now.at - lastReading.at) / 1000);
      $("figures").replaceChildren(...figures.map((figure) => figureOf(...figure)));
      $("live-status").textContent = "";
    } else {
      readings.clear();
      $("live-status").textContent = "Measuring for two seconds";
    }
    lastReading = now;
  } catch (error) {
    const told = error instanceof Problem ? [error.message, error.detail].filter(Boolean).join(". ") : "The server does not answer";
    $("live-status").textContent = told;
  } finally {
    isReading = false;
  }
}

function figureOf(name, meaning, unit, value, digits) {
  const past = [...(readings.get(name) ?? []), value].slice(-HISTORY);
  readings.set(name, past);
  const most = Math.max(...past, 10 ** -digits);
  const place = (each, i) => `${((i + HISTORY - past.length) / (HISTORY - 1)) * 100},${30 - (each / most) * 28}`;
  const points = past.flatMap((each, i) => (each === null ? [] : [place(each, i)])).join(" ");
  const chart = drawn("svg", { viewBox: "0 0 100 32", preserveAspectRatio: "none", "aria-hidden": "true" });
  chart.append(drawn("path", { d: "M0 2H100M0 16H100M0 30H100", class: "grid" }), drawn("polyline", { points }));
  const told = value === null ? "none" : number(value, digits);
  return element(
    "div",
    { class: "figure" },
    element("h3", {}, name),
    element("p", { class: "value" }, element("b", {}, told), value === null ? "" : unit === "%" ? "%" : ` ${unit}`),
    element("p", { class: "quiet" }, meaning),
    element(
      "div",
      { class: "chart" },
      element("span", { class: "axis top" }, number(most, digits)),
      element("span", { class: "axis bottom" }, "0"),
      chart,
      element("span", { class: "axis start" }, "2 min ago"),
      element("span", { class: "axis now" }, "now"),
    ),
  );
}
