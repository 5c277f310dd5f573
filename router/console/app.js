// Shows one page at a time, selected by the URL's fragment. Pages whose data changes are refreshed every two seconds.

import { apiKey, setApiKey } from "/console/api.js";
import { byId } from "/console/dom.js";
import * as lanes from "/console/lanes.js";
import * as pair from "/console/pair.js";
import * as playground from "/console/playground.js";
import * as pools from "/console/pools.js";
import * as requests from "/console/requests.js";

const PAGES = { playground, lanes, pools, requests, pair };
const REFRESHED_PAGES = ["lanes", "pools", "requests", "pair"];
const REFRESH_MS = 2000;

function currentPage() {
  const name = location.hash.slice(1);
  return name in PAGES ? name : "playground";
}

async function refresh() {
  const name = currentPage();
  try {
    await PAGES[name].show();
    byId("problem").hidden = true;
  } catch (error) {
    const key = name === "playground" ? "an API key" : "an operator's API key (admin=true)";
    const hint = /^40[13]/.test(error.message) ? ` Enter ${key} above.` : "";
    byId("problem").textContent = `The router did not answer as expected. ${error.message}${hint}`;
    byId("problem").hidden = false;
  }
}

function showPage() {
  const name = currentPage();
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
window.addEventListener("hashchange", showPage);
setInterval(() => {
  if (!document.hidden && REFRESHED_PAGES.includes(currentPage())) refresh();
}, REFRESH_MS);
showPage();
