"use strict";
// Shows /openapi.json in Swagger UI. `/docs#/rerank` opens that route. The key stays in memory. The documentation's
// site has the description inside the page, and no server to try it with.

const dark = matchMedia("(prefers-color-scheme: dark)");
const followColors = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", followColors);
followColors();

// The fragment that Swagger UI opens an operation by.
function fragmentOf(description, path) {
  const operation = Object.values(description.paths[path])[0];
  return `#/${encodeURIComponent(operation.tags[0])}/${operation.operationId}`;
}

// A link inside a button is of no use to a keyboard. Opening an operation changes the fragment anyway.
const withoutLinks = ({ React }) => ({
  components: { DeepLink: ({ text }) => React.createElement("span", null, text) },
});

// Lets keyboards scroll examples, and names the field of a body for screen readers.
new MutationObserver(() => {
  for (const each of document.querySelectorAll("pre.microlight:not([tabindex])")) each.tabIndex = 0;
  for (const each of document.querySelectorAll("textarea.body-param__text")) each.ariaLabel = "Request body";
}).observe(document.getElementById("routes"), { childList: true, subtree: true });

// fetch refuses an address with a password.
const base = Object.assign(new URL(".", document.baseURI), { username: "", password: "" });
const inside = document.getElementById("description");

async function read(key) {
  if (inside) {
    const description = JSON.parse(inside.textContent);
    delete description.components.securitySchemes;
    return description;
  }
  const answer = await fetch(new URL("openapi.json", base), { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  document.getElementById("ask").hidden = answer.status !== 401;
  if (answer.status === 401) throw new Error(key ? "The server does not know this key." : "This server asks for an API key.");
  if (!answer.ok) throw new Error(`The server answered with status ${answer.status}. Reload the page later.`);
  return answer.json();
}

async function show() {
  const status = document.getElementById("status"), key = document.getElementById("key").value.trim();
  try {
    const spec = await read(key);
    const path = Object.keys(spec.paths).find((each) => [`#${each}`, `#${encodeURI(each)}`, `#${encodeURIComponent(each)}`].includes(location.hash));
    if (path) history.replaceState(null, "", fragmentOf(spec, path));
    if (!inside && base.pathname !== "/") spec.servers = [{ url: base.pathname.replace(/\/$/, "") }];
    const ui = SwaggerUIBundle({
      spec, dom_id: "#routes", deepLinking: true, filter: true, docExpansion: "list",
      defaultModelExpandDepth: 2, defaultModelsExpandDepth: 0, displayRequestDuration: true,
      validatorUrl: null, persistAuthorization: false, supportedSubmitMethods: inside ? [] : undefined,
      syntaxHighlight: { theme: "obsidian" }, plugins: [withoutLinks],
    });
    if (key) ui.preauthorizeApiKey("key", key);
    status.textContent = "";
  } catch (error) {
    status.textContent = error.message;
  }
}

document.getElementById("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  show();
});
addEventListener("hashchange", () => {
  // Swagger UI's own fragments name a group and an operation.
  if (/^#\/.*\/(get|post|delete)-/.test(location.hash) === false) show();
});
show();
