// Runs a file's checks: `node run.mjs FILE`. Each exported function is a check, whose name says what is checked;
// what became of it is a line of JSON in the file CHECK_RESULTS.

import { appendFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const checks = await import(pathToFileURL(process.argv[2]).href);
for (const [name, check] of Object.entries(checks)) {
  let error = null;
  try {
    await check();
  } catch (failure) {
    error = String(failure.stack ?? failure).slice(0, 3000);
  }
  const what = name.replace(/([A-Z])/g, " $1").toLowerCase();
  appendFileSync(process.env.CHECK_RESULTS, JSON.stringify({ what, error }) + "\n");
}
