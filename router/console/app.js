// Shows one page at a time, selected by the URL's fragment. Pages whose data changes are refreshed every two seconds.

import { apiKey, setApiKey } from "./api.js";
import { byId } from "./dom.js";
import * as lanes from "./lanes.js";
import * as pair from "./pair.js";
import * as playground from "./playground.js";
import * as pools from "./pools.js";
import * as requests from "./requests.js";

const PAGES = { playground, lanes, pools, requests, pair };
const REFRESHED_PAGES = ["lanes", "pools", "requests", "pair"];
const REFRESH_MS = 2000;

// The number of the newest refresh: an older one may end later, and then says nothing about the page that is shown.
let newest = 0;
// Refreshes that have no answer yet: a slow router gets no second one meanwhile.
let unanswered = 0;
// Whether the router rejected the key: the same request would be rejected again.
let isRejected = false;

function currentPage() {
  const name = location.hash.slice(1);
  return Object.hasOwn(PAGES, name) ? name : "playground";
}

async function refresh() {
  const name = currentPage();
  newest += 1;
  const number = newest;
  unanswered += 1;
  let problem = null;
  try {
    await PAGES[name].show();
  } catch (error) {
    problem = error;
  }
  unanswered -= 1;
  if (number === newest) showProblem(name, problem);
}

function showProblem(name, error) {
  isRejected = [401, 403].includes(error?.status);
  const key = name === "playground" ? "an API key" : "an operator's API key (admin=true)";
  const next = isRejected ? `Enter ${key} above.` : "This page tries again every 2 seconds.";
  const text = error ? `${error.message.replace(/\.?$/, ".")} ${next}` : "";
  // A screen reader would read an alert again that is written again.
  if (byId("problem").textContent !== text) byId("problem").textContent = text;
  byId("problem").hidden = !error;
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
// A link to #main would change the fragment, which selects the page.
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
playground.setUp();
requests.setUp();
pair.setUp();
window.addEventListener("hashchange", showPage);
setInterval(() => {
  const mayHaveChanged = REFRESHED_PAGES.includes(currentPage()) || !byId("problem").hidden;
  if (mayHaveChanged && !document.hidden && unanswered === 0 && !isRejected) refresh();
}, REFRESH_MS);
showPage();
