// Small builders of elements. Text is always set as text, never as markup: prompts and answers are anybody's.

const SVG = "http://www.w3.org/2000/svg";

/** The element of an id; a page that lacks it is broken. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found;
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(node));
  return element;
}

function node(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** An HTML element. Attributes that are functions are listeners. */
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** An SVG element. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** A table with a caption; cells that are numbers stand to the right. */
export function table(caption, head, rows) {
  const kind = (cell) => (typeof cell === "number" ? "number" : undefined);
  const first = rows[0] ?? [];
  return el("div", { class: "scroll" }, el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, head.map((text, i) => el("th", { scope: "col", class: kind(first[i]) }, text)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", { class: kind(cell) }, cell)))))));
}

/** A number for reading. */
export function figure(value, digits = 1) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}
