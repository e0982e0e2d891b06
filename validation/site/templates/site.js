"use strict";
// The menu of pages on narrow screens, and the search, whose words are loaded when they are first asked for.
(() => {
  const root = document.documentElement.dataset.root;
  const menu = document.getElementById("site-menu");
  menu.addEventListener("click", () => {
    const open = document.body.classList.toggle("menu-open");
    menu.setAttribute("aria-expanded", open);
  });
  const current = document.querySelector("#site-pages [aria-current]");
  if (current) document.getElementById("site-pages").scrollTop = current.offsetTop - 200;

  const input = document.getElementById("site-search");
  const list = document.getElementById("site-found");
  let loading = null;
  const load = () => loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = root + "search-index.js";
    script.onload = () => done(window.searchIndex.map(
      ([title, kind, url, text]) => ({ title, kind, url, text, name: title.toLowerCase(), low: text.toLowerCase() })));
    script.onerror = failed;
    document.head.append(script);
  });

  // Every word must be there. Those of a title count most, above all if it ends with them.
  const score = (page, words) => {
    let sum = page.kind === "guide" ? 1 : 0;
    for (const word of words) {
      const at = page.name.indexOf(word), in_text = page.low.split(word).length - 1;
      if (at < 0 && !in_text) return 0;
      if (at >= 0) sum += 10 + 20 * (word.length / page.name.length)
        + (page.name === word || page.name.endsWith("." + word) ? 30 : 0)
        + (at === 0 || /[^a-z0-9]/.test(page.name[at - 1]) ? 5 : 0);
      sum += Math.min(in_text, 4);
    }
    return sum;
  };

  const excerpt = (page, words) => {
    const at = Math.max(0, ...words.map((word) => page.low.indexOf(word)));
    const start = at > 50 ? page.text.indexOf(" ", at - 50) + 1 : 0;
    return (start ? "… " : "") + page.text.slice(start, start + 130) + (page.text.length > start + 130 ? " …" : "");
  };

  const show = async () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return hide();
    const pages = await load();
    const found = pages.map((page) => [score(page, words), page]).filter(([sum]) => sum)
      .sort((a, b) => b[0] - a[0]).slice(0, 12);
    list.replaceChildren(...found.map(([, page]) => {
      const item = document.createElement("li"), link = document.createElement("a");
      const title = document.createElement("b"), kind = document.createElement("i"), text = document.createElement("span");
      link.href = root + page.url;
      title.textContent = page.title;
      kind.textContent = page.kind;
      text.textContent = excerpt(page, words);
      link.append(kind, title, text);
      item.append(link);
      item.setAttribute("role", "option");
      return item;
    }));
    if (!found.length) {
      const item = document.createElement("li");
      item.className = "nothing";
      item.textContent = "Nothing found";
      list.append(item);
    }
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
  };
  const hide = () => { list.hidden = true; input.setAttribute("aria-expanded", "false"); };

  input.addEventListener("focus", load);
  input.addEventListener("input", show);
  document.addEventListener("click", (event) => { if (!event.target.closest(".search")) hide(); });
  document.addEventListener("keydown", (event) => {
    const links = [...list.querySelectorAll("a")], at = links.indexOf(document.activeElement);
    if (event.key === "/" && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      input.focus();
      event.preventDefault();
    } else if (event.key === "Escape") {
      hide();
    } else if (event.key === "Enter" && document.activeElement === input && links.length) {
      links[0].click();
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && !list.hidden && links.length) {
      const next = at + (event.key === "ArrowDown" ? 1 : -1);
      (links[next] ?? (next < 0 ? input : links[0])).focus();
      event.preventDefault();
    }
  });
})();
