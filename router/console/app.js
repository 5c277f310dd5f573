// The pages, one at a time: the one that the address names after its #. What changes is asked for anew every two seconds.

import { apiKey, setApiKey } from "/console/api.js";
import { byId } from "/console/dom.js";
import * as lanes from "/console/lanes.js";
import * as pair from "/console/pair.js";
import * as playground from "/console/playground.js";
import * as pools from "/console/pools.js";
import * as requests from "/console/requests.js";

const PAGES = { playground, lanes, pools, requests, pair };
const REFRESHED = ["lanes", "pools", "requests", "pair"];
const REFRESH_MS = 2000;

function current() {
  const name = location.hash.slice(1);
  return name in PAGES ? name : "playground";
}

async function refresh() {
  const name = current();
  try {
    await PAGES[name].show();
    byId("problem").hidden = true;
  } catch (error) {
    const hint = error.message.startsWith("401") ? " Enter an API key above." : "";
    byId("problem").textContent = `The router did not answer as expected. ${error.message}${hint}`;
    byId("problem").hidden = false;
  }
}

function turn() {
  const name = current();
  for (const page of Object.keys(PAGES)) byId(`page-${page}`).hidden = page !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `Outrider console: ${name}`;
  refresh();
}

byId("key").value = apiKey();
byId("key").addEventListener("change", (event) => {
  setApiKey(event.target.value.trim());
  refresh();
});
playground.setUp();
requests.setUp();
pair.setUp();
window.addEventListener("hashchange", turn);
setInterval(() => {
  if (!document.hidden && REFRESHED.includes(current())) refresh();
}, REFRESH_MS);
turn();
