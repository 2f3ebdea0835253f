"use strict";
// Draws /openapi.json: each route with the fields of what it takes and gives.

const $ = (id) => document.getElementById(id);
let description = null;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const resolved = (schema) => (schema?.$ref ? description.components.schemas[schema.$ref.split("/").pop()] : schema);

function typeOf(schema, depth = 0) {
  if (!schema || depth > 4) return "anything";
  if (schema.$ref) {
    const meant = resolved(schema);
    return meant.properties ? schema.$ref.split("/").pop() : typeOf(meant, depth + 1);
  }
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return [...new Set(choices.map((each) => typeOf(each, depth + 1)))].join(" or ");
  if (schema.type === "array") return schema.prefixItems ? "array" : `array of ${typeOf(schema.items, depth + 1)}`;
  const bounds = ["minimum", "maximum", "exclusiveMinimum"].filter((name) => name in schema);
  const said = bounds.map((name) => `${{ minimum: "from", maximum: "to", exclusiveMinimum: "above" }[name]} ${schema[name]}`);
  return [schema.type ?? "anything", ...said].join(" ");
}

// Objects that a schema may be, through its choices and arrays.
function objectsOf(schema, depth = 0) {
  const meant = resolved(schema);
  if (!meant || depth > 3) return [];
  if (meant.properties) return [meant];
  return [...(meant.anyOf ?? meant.oneOf ?? []), meant.items].filter(Boolean).flatMap((each) => objectsOf(each, depth + 1));
}

function fieldsOf(object) {
  const head = element("tr", {}, ...["Field", "Type", "Default"].map((name) => element("th", { scope: "col" }, name)));
  const rows = Object.entries(object.properties).map(([name, schema]) => {
    const usual = object.required?.includes(name) ? "required" : "default" in schema ? JSON.stringify(schema.default) : "left out";
    return element("tr", {}, element("th", { scope: "row" }, element("code", {}, name)), element("td", {}, typeOf(schema)), element("td", {}, usual));
  });
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function partsOf(title, schema) {
  return objectsOf(schema).flatMap((object) => {
    const about = object.description ? [element("p", {}, object.description)] : [];
    return [element("h3", {}, object.title ? `${title}: ${object.title}` : title), ...about, fieldsOf(object)];
  });
}

function routeOf(path, method, operation) {
  const taken = operation.requestBody?.content?.["application/json"]?.schema;
  const answer = Object.entries(operation.responses).find(([status]) => status.startsWith("2"));
  const kinds = Object.keys(answer?.[1].content ?? {});
  const given = answer?.[1].content?.["application/json"]?.schema;
  const inside = [...partsOf("Takes", taken), ...partsOf("Gives", given)];
  if (!inside.length) inside.push(element("p", {}, kinds.length ? `Gives ${kinds.join(", ")}.` : "Gives nothing but its status."));
  const route = element("details", {}, element("summary", {}, element("b", {}, method.toUpperCase()), " ", element("code", {}, path)), ...inside);
  route.dataset.words = `${method} ${path} ${inside.map((each) => each.textContent).join(" ")}`.toLowerCase();
  return route;
}

function find() {
  const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const route of $("routes").children) route.hidden = !words.every((word) => route.dataset.words.includes(word));
}

async function read() {
  const key = $("key").value.trim();
  try {
    const answer = await fetch(new URL("openapi.json", document.baseURI), { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (!answer.ok) throw new Error(answer.status === 401 ? "this server asks for an API key" : `status ${answer.status}`);
    description = await answer.json();
    $("about").textContent = `version ${description.info.version}. ${description.info.description ?? ""}`;
    $("status").textContent = "";
    const routes = Object.entries(description.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => routeOf(path, method, operation)),
    );
    $("routes").replaceChildren(...routes);
    find();
  } catch (error) {
    $("status").textContent = error.message;
  }
}

$("key").addEventListener("change", read);
$("find").addEventListener("input", find);
read();
