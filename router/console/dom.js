// Builders of elements. Text is always inserted as text, never as markup, because prompts and answers are untrusted.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id; throws if the page has none. */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`no element ${id}`);
  return element;
}

function populate(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(toNode));
  return element;
}

function toNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** An HTML element. Attributes that are functions are listeners. */
export function el(name, attributes = {}, ...children) {
  return populate(document.createElement(name), attributes, children);
}

/** An SVG element. */
export function svg(name, attributes = {}, ...children) {
  return populate(document.createElementNS(SVG, name), attributes, children);
}

/** A table with a caption; numeric cells are right-aligned. */
export function table(caption, columns, rows) {
  const cellClass = (cell) => (typeof cell === "number" ? "number" : undefined);
  const first = rows[0] ?? [];
  return el("div", { class: "scroll" }, el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, columns.map((text, i) => el("th", { scope: "col", class: cellClass(first[i]) }, text)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", { class: cellClass(cell) }, cell)))))));
}

/** A number with a fixed number of decimals; a dash if it is not finite. */
export function formatNumber(value, digits = 1) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}
