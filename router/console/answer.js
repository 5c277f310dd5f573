// One answer on the page: tokens as they are committed, coloured by origin, and what they cost.

import { byId, el, figure } from "/console/dom.js";

export class Answer {
  constructor(title) {
    this.ids = [];
    this.spans = [];
    this.numDrafted = 0;
    this.firstMs = null;
    this.ms = 0;
    this.end = null;
    this.text = el("div", { class: "answer-text", role: "group", "aria-label": `Tokens, ${title}` });
    this.figures = el("p", { class: "figures" });
    this.card = el("article", { class: "card answer running" }, el("h3", {}, title), this.text, this.figures);
    this.text.addEventListener("keydown", (event) => this.#move(event));
  }

  /** A line of the router's answer. */
  take(line) {
    if (line.start) this.start = line.start;
    if (line.span) {
      this.firstMs ??= line.span.ms;
      this.ms = line.span.ms;
      for (const token of line.span.tokens) this.#append(token, line.span.ms);
    }
    if (line.end) this.end = line.end;
    this.#show();
  }

  /** Nothing follows. */
  finished() {
    this.card.classList.remove("running");
    this.#show();
  }

  /** Tokens a second from the first committed span to the last. */
  pace() {
    return (1e3 * (this.ids.length - 1)) / (this.ms - this.firstMs);
  }

  mark(position) {
    this.spans[position]?.classList.add("differs");
  }

  #append(token, ms) {
    const position = this.ids.push(token.id) - 1;
    if (token.drafted) this.numDrafted += 1;
    const origin = token.drafted ? "drafted and accepted" : "the target's own";
    const scored = token.logprob === undefined ? "" : `, probability ${figure(100 * Math.exp(token.logprob))}%`;
    const top = (token.top ?? []).map(([text, p]) => `${JSON.stringify(text)} ${figure(100 * Math.exp(p))}%`);
    const likely = top.length ? `; likeliest: ${top.join(", ")}` : "";
    const says = `Position ${position}: ${JSON.stringify(token.text)}, id ${token.id}, ${origin}, after ${figure(ms, 0)} ms${scored}${likely}`;
    const tell = () => { byId("token-details").textContent = says; };
    const span = el("span", {
      class: `token ${token.drafted ? "drafted" : "own"}`, title: says, "data-id": token.id,
      tabindex: position === 0 ? 0 : -1, mouseenter: tell, focus: tell,
    }, token.text);
    this.spans.push(span);
    this.text.append(span);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = this.spans.indexOf(document.activeElement);
    const next = step && this.spans[at + step];
    if (!next) return;
    event.preventDefault();
    this.spans[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #show() {
    const share = this.ids.length ? (100 * this.numDrafted) / this.ids.length : 0;
    const rounds = this.end ? ` · ${this.end.rounds} rounds` : "";
    const why = this.end?.disabled_reason ? ` · no drafting: ${this.end.disabled_reason.replaceAll("_", " ")}` : "";
    this.figures.replaceChildren(
      el("strong", {}, `${figure(this.pace())} tokens/s`),
      ` · ${this.ids.length} tokens · ${figure(share, 0)}% drafted${rounds}${why}`);
  }
}
