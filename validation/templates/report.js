"use strict";
const form = document.querySelector(".filters");
const claims = [...document.querySelectorAll(".claim")];

/* Show what has the chosen source and verdict: claims, and statements within them. */
function filter() {
  const source = form.elements.source.value, verdict = form.elements.verdict.value;
  let shown = 0, statements = 0;
  for (const claim of claims) {
    let any = !verdict;
    for (const part of claim.querySelectorAll("[data-state]")) {
      const fits = !verdict || part.dataset.state === verdict;
      (part.closest("li") ?? part).hidden = !fits;
      any ||= fits;
    }
    claim.hidden = !any || (source && !claim.dataset.source.split("|").includes(source));
    if (claim.hidden) continue;
    shown += 1;
    statements += claim.querySelectorAll("li:not([hidden]) > :not(.error)").length;
  }
  const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  form.querySelector("output").value = `${count(statements, "statement")} of ${count(shown, "claim")}`;
}

/* Open what an address on the page leads to, whatever the filters hide. */
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const claim = target?.closest(".claim");
  if (!claim) return;
  if (target.closest("[hidden]")) {
    form.reset();
    filter();
  }
  claim.querySelector("details").open = true;
  target.scrollIntoView();
}

form.hidden = false;
form.addEventListener("change", filter);
form.addEventListener("submit", event => event.preventDefault());
addEventListener("hashchange", reveal);
/* A link to where the page already is changes no address. */
document.addEventListener("click", event => {
  if (event.target.closest?.("a[href^='#']")?.hash === location.hash) reveal();
});
filter();
reveal();
