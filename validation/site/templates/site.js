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

  const stop = new Set(("a an and are as at be by can do does for from have how i in into is it its me my of on or "
    + "should that the their there this to use was we what when where which who why will with you your").split(" "));

  // What is looked for: words by their stems (a plural, -ing or a last e is cut off), and the name of all of it.
  const asked = (text) => {
    const all = text.toLowerCase().split(/[^\p{L}\p{N}_.]+/u).map((word) => word.replace(/^\.+|\.+$/g, "")).filter(Boolean);
    const telling = all.filter((word) => !stop.has(word));
    const words = (telling.length ? telling : all).map((word) => {
      const stem = word.replace(/(?<=..[^s])s$/, "").replace(/(?<=.{4})ing$|(?<=.{5})e$/, "");
      const start = "(?<![\\p{L}\\p{N}])", end = "(?![\\p{L}\\p{N}])", exact = (x) => x.replaceAll(".", "\\.");
      return { stem, start: new RegExp(start + exact(stem), "gu"), whole: new RegExp(start + exact(word) + end, "u") };
    });
    return { words, name: all.length === 1 ? all[0] : "" };
  };

  // How many of the words a page has, and how well. A title of the guide counts most, then other titles and names of
  // the API, then text; but the name of a function, or what is written like a name (with _ or a dot), is first of all
  // that name. Words of one or two letters begin too many others: in titles they must be whole.
  const rate = (page, { words, name }) => {
    const guide = page.kind === "guide";
    const named = name && page.url.startsWith("api/") && (page.name === name || page.name.endsWith("." + name));
    let has = 0, sum = !named ? 0 : page.kind === "function" || /[_.]/.test(name) ? 1000 - page.name.length : 10;
    for (const { stem, start, whole } of words) {
      const all = whole.test(page.name), in_text = page.low.match(start)?.length ?? 0;
      const in_title = all || (stem.length > 2 && page.name.includes(stem));
      if (!in_title && !in_text) continue;
      has += 1;
      sum += Math.min(in_text, 4) + (whole.test(page.low) ? 4 : 0) + (guide ? 4 : 0);
      if (in_title) sum += (guide ? 60 : 20) + 20 * (stem.length / page.name.length)
        + (all ? 10 : page.name.search(start) >= 0 ? 5 : 0);
    }
    return { page, has, sum };
  };

  // Pages with all words; where these are few, also those with half of them or more.
  const find = (pages, query) => {
    const rated = pages.map((page) => rate(page, query)).filter(({ has }) => has && has >= query.words.length / 2);
    const full = rated.filter(({ has }) => has === query.words.length);
    return (full.length < 3 ? rated : full).sort((a, b) => b.has - a.has || b.sum - a.sum)
      .slice(0, 12).map(({ page }) => page);
  };

  const excerpt = (page, words) => {
    const found = words.map(({ start }) => page.low.search(start)).filter((at) => at >= 0), at = Math.min(...found);
    const start = found.length && at > 50 ? page.text.indexOf(" ", at - 50) + 1 : 0, end = start + 130;
    const rest = page.text.length > end;
    return (start ? "… " : "") + (rest ? page.text.slice(start, end).replace(/\S*$/, "…") : page.text.slice(start));
  };

  const show = async () => {
    const query = asked(input.value);
    if (!query.words.length) return hide();
    const found = find(await load(), query);
    list.replaceChildren(...found.map((page) => {
      const item = document.createElement("li"), link = document.createElement("a");
      const title = document.createElement("b"), kind = document.createElement("i"), text = document.createElement("span");
      link.href = root + page.url;
      title.textContent = page.title;
      kind.textContent = page.kind;
      text.textContent = excerpt(page, query.words);
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
