// An answer on the page: its tokens as they are committed, coloured by origin, and its speed.

import { byId, el, formatNumber, plural } from "./dom.js";

export class Answer {
  constructor(title) {
    this.ids = [];
    this.spans = [];
    this.numDrafted = 0;
    // The first span, from which on the speed counts: its time, and the number of its tokens.
    this.first = null;
    this.ms = 0;
    this.end = null;
    this.text = el("div", { class: "answer-text", role: "group", "aria-label": `Tokens, ${title}` });
    this.stats = el("p", { class: "stats" });
    this.card = el("article", { class: "card answer" }, el("h3", {}, title), this.text, this.stats);
    this.text.addEventListener("keydown", (event) => this.#moveFocus(event));
  }

  /** Marks the answer as one that is being generated. */
  begin() {
    this.card.classList.add("running");
  }

  /** Adds a line of the router's response. */
  addLine(line) {
    if (line.start) this.start = line.start;
    if (line.span?.tokens.length) {
      this.first ??= { ms: line.span.ms, count: line.span.tokens.length };
      this.ms = line.span.ms;
      for (const token of line.span.tokens) this.#append(token, line.span.ms);
    }
    if (line.end) this.end = line.end;
    this.#show();
  }

  /** Marks the answer as complete. */
  finish() {
    this.card.classList.remove("running");
    this.#show();
  }

  /** Tokens per second after the first committed span, which may have several tokens; NaN before the second one. */
  tokensPerSecond() {
    return this.first ? (1e3 * (this.ids.length - this.first.count)) / (this.ms - this.first.ms) : NaN;
  }

  markDifference(position) {
    this.spans[position]?.classList.add("differs");
  }

  #append(token, ms) {
    const position = this.ids.push(token.id) - 1;
    if (token.drafted) this.numDrafted += 1;
    const origin = token.drafted ? "drafted and accepted" : "drawn by the target";
    const probability = token.logprob === undefined ? "" : `, probability ${formatNumber(100 * Math.exp(token.logprob))}%`;
    const alternatives = (token.top ?? []).map(([text, logprob]) => `${JSON.stringify(text)} ${formatNumber(100 * Math.exp(logprob))}%`);
    const mostLikely = alternatives.length ? `; most likely: ${alternatives.join(", ")}` : "";
    const description = `Position ${position}: ${JSON.stringify(token.text)}, id ${token.id}, ${origin}, after ${formatNumber(ms, 0)} ms${probability}${mostLikely}`;
    const showDetails = () => { byId("token-details").textContent = description; };
    const span = el("span", {
      class: `token ${token.drafted ? "drafted" : "drawn"}`, title: description, "data-id": token.id,
      tabindex: position === 0 ? 0 : -1, mouseenter: showDetails, focus: showDetails,
    }, token.text);
    this.spans.push(span);
    this.text.append(span);
  }

  #moveFocus(event) {
    const current = this.spans.indexOf(document.activeElement);
    const position = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: this.spans.length - 1 }[event.key];
    const next = this.spans[position];
    if (current < 0 || !next) return;
    event.preventDefault();
    this.spans[current].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #show() {
    const share = this.ids.length ? (100 * this.numDrafted) / this.ids.length : 0;
    const rounds = this.end ? ` · ${plural(this.end.rounds, "round")}` : "";
    const reason = this.end?.disabled_reason ? ` · no drafting: ${this.end.disabled_reason.replaceAll("_", " ")}` : "";
    this.stats.replaceChildren(
      el("strong", {}, `${formatNumber(this.tokensPerSecond())} tokens/s`),
      ` · ${plural(this.ids.length, "token")} · ${formatNumber(share, 0)}% drafted${rounds}${reason}`);
  }
}
