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

/**
 * Replaces the content of an element with children that show newer data. Focus, open details (both of elements with the
 * same data-key) and the horizontal position of tables stay. Nothing is replaced while the user presses a button in it,
 * because the click would be lost, or has selected text in it, to copy it.
 */
export function render(container, ...children) {
  const selection = document.getSelection();
  const isSelected = selection && !selection.isCollapsed && container.contains(selection.anchorNode);
  if (isSelected || container.querySelector("button:active, summary:active")) return;
  const keyed = () => [...container.querySelectorAll("[data-key]")];
  const focused = container.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const open = new Map(keyed().map((element) => [element.dataset.key, element.open]));
  const positions = [...container.querySelectorAll(".scroll")].map((element) => element.scrollLeft);
  container.replaceChildren(...children.flat(Infinity).map(toNode));
  for (const element of keyed()) {
    if (element instanceof HTMLDetailsElement) element.open = open.get(element.dataset.key) ?? element.open;
    if (focused !== undefined && element.dataset.key === focused) element.focus({ preventScroll: true });
  }
  container.querySelectorAll(".scroll").forEach((element, i) => { element.scrollLeft = positions[i] ?? 0; });
}

/** A numeric cell of a table: a fixed number of decimals, so that they are aligned. */
export function number(value, digits) {
  return { numeric: formatNumber(value, digits) };
}

/** A table with a caption; numeric cells are right-aligned. */
export function table(caption, columns, rows) {
  const cellClass = (cell) => (typeof cell === "number" || cell?.numeric !== undefined ? "number" : undefined);
  const first = rows[0] ?? [];
  return el("div", { class: "scroll" }, el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, columns.map((text, i) => el("th", { scope: "col", class: cellClass(first[i]) }, text)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", { class: cellClass(cell) }, cell?.numeric ?? cell)))))));
}

/** A count with its noun, in the plural unless it is one. */
export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** A number with a fixed number of decimals; a dash if it is not finite. */
export function formatNumber(value, digits = 1) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}
