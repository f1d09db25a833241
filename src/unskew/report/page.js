// What a reader may do with a page: choose its colours, sort a table, go through a choice, point at a mark, keep a figure.
// Everything here only adds to what is there to be read; nothing is fetched.

"use strict";

(() => {
  const root = document.documentElement;
  root.classList.add("js");

  function make(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  // Colours: before anything is drawn. A page from a disk may be refused a memory; then a choice lasts as long as it.
  const THEMES = ["auto", "light", "dark"];

  function remembered() {
    try {
      const theme = localStorage.getItem("unskew-theme");
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto";
    }
  }

  function wear(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  function themes() {
    const group = make("fieldset", { class: "theme" }, make("legend", { class: "unseen" }, "Colours"));
    for (const theme of THEMES) {
      const radio = make("input", { type: "radio", name: "theme", value: theme, class: "unseen", autocomplete: "off" });
      radio.checked = theme === remembered();
      group.append(make("label", {}, radio, theme[0].toUpperCase() + theme.slice(1)));
    }
    group.addEventListener("change", (event) => {
      wear(event.target.value);
      try {
        localStorage.setItem("unskew-theme", event.target.value);
      } catch {
        // it is worn all the same
      }
    });
    document.querySelector("header").prepend(group);
  }

  // Sections: the link of the one that is being read is marked, and in sight.
  function sections() {
    const links = new Map([...document.querySelectorAll("nav a")].map((link) => [decodeURIComponent(link.hash.slice(1)), link]));
    const read = (link) => {
      for (const other of links.values()) other.removeAttribute("aria-current");
      link.setAttribute("aria-current", "true");
      const strip = link.closest("ul");
      strip.scrollLeft = link.offsetLeft - (strip.clientWidth - link.offsetWidth) / 2;
    };
    const watcher = new IntersectionObserver(
      (seen) => seen.filter((entry) => entry.isIntersecting).forEach((entry) => read(links.get(entry.target.id))),
      { rootMargin: "-15% 0px -75% 0px" },
    );
    for (const name of links.keys()) watcher.observe(document.getElementById(name));
  }

  // Choices: those with one label go together, as far as each has what was chosen.
  function choices() {
    const all = [...document.querySelectorAll(".choice")];
    const show = (choice, name) => {
      const select = choice.querySelector("select");
      const place = [...select.options].findIndex((option) => option.value === name);
      if (place < 0) return;
      select.selectedIndex = place;
      choice.querySelectorAll(".option").forEach((option, at) => option.classList.toggle("shown", at === place));
    };
    const choose = (label, name) => all.filter((choice) => choice.dataset.label === label).forEach((choice) => show(choice, name));
    for (const choice of all) {
      const select = choice.querySelector("select");
      const step = (by) => {
        const count = select.options.length;
        choose(choice.dataset.label, select.options[(select.selectedIndex + by + count) % count].value);
      };
      select.addEventListener("change", () => choose(choice.dataset.label, select.value));
      for (const button of choice.querySelectorAll("[data-step]")) {
        button.addEventListener("click", () => step(Number(button.dataset.step)));
      }
      choice.querySelector(".chooser").addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
        if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        step(by);
      });
    }
  }

  // Tables: numbers as numbers, before words, and empty cells last whichever way; equals stay in their order.
  const WORDS = new Intl.Collator("en", { numeric: true });

  function key(cell) {
    const number = cell.dataset.value === undefined ? NaN : Number(cell.dataset.value);
    if (!Number.isNaN(number)) return [0, number];
    return [cell.textContent === "" ? 2 : 1, cell.textContent];
  }

  function order(one, other, sign) {
    if (one[0] !== other[0]) return one[0] - other[0];
    if (one[0] === 2) return 0;
    return sign * (one[0] === 1 ? WORDS.compare(one[1], other[1]) : one[1] < other[1] ? -1 : Number(one[1] > other[1]));
  }

  function sort(table, place, sign) {
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => [key(row.cells[place]), row]);
    keyed.sort((one, other) => order(one[0], other[0], sign));
    body.append(...keyed.map(([, row]) => row));
  }

  function tables() {
    for (const table of document.querySelectorAll("table")) {
      const heads = [...table.tHead.rows[0].cells];
      heads.forEach((head, place) => {
        const button = make("button", { type: "button" }, ...head.childNodes);
        head.append(button);
        button.addEventListener("click", () => {
          const up = head.getAttribute("aria-sort") !== "ascending";
          for (const other of heads) other.removeAttribute("aria-sort");
          head.setAttribute("aria-sort", up ? "ascending" : "descending");
          sort(table, place, up ? 1 : -1);
        });
      });
      if (table.classList.contains("folded")) unfolding(table);
    }
  }

  function unfolding(table) {
    const all = `Show all ${table.tBodies[0].rows.length.toLocaleString("en")} rows`;
    const button = make("button", { type: "button", class: "unfold", "aria-expanded": "false" }, all);
    button.addEventListener("click", () => {
      const folded = table.classList.toggle("folded");
      button.textContent = folded ? all : "Show fewer rows";
      button.setAttribute("aria-expanded", String(!folded));
    });
    table.closest(".box").after(button);
  }

  // Tips: what a mark is, in words, where a mouse, a finger or the arrow keys point.
  const REACH = 24; // pixels between a finger and the mark it means

  function distance(mark, x, y) {
    const { left, right, top, bottom } = mark.getBoundingClientRect();
    return Math.hypot(Math.max(left - x, 0, x - right), Math.max(top - y, 0, y - bottom));
  }

  function nearest(plot, x, y) {
    const marks = [...plot.querySelectorAll("[data-tip]")].map((mark) => [distance(mark, x, y), mark]);
    const [far, mark] = marks.reduce((best, next) => (next[0] < best[0] ? next : best), [Infinity, null]);
    return far <= REACH ? mark : null;
  }

  function tips() {
    const bubble = make("div", { class: "tip", role: "status" });
    document.body.append(bubble);
    let marked = null;
    let byKeys = false;

    const place = (x, y) => {
      const { width, height } = bubble.getBoundingClientRect();
      const left = Math.max(8, Math.min(x - width / 2, root.clientWidth - width - 8));
      const top = y - height - 12 < 4 ? y + 20 : y - height - 12;
      bubble.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    };
    const beside = () => {
      const { left, top, width } = marked.getBoundingClientRect();
      place(left + width / 2, top);
    };
    const hide = () => {
      marked?.classList.remove("marked");
      marked = null;
      byKeys = false;
      bubble.textContent = "";
    };
    const show = (mark, keys = false) => {
      byKeys = keys;
      if (mark === marked) return;
      marked?.classList.remove("marked");
      marked = mark;
      mark.classList.add("marked");
      mark.querySelector(":scope > title")?.remove(); // or the browser would say it a second time
      bubble.textContent = mark.dataset.tip;
    };

    document.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return;
      const mark = event.target.closest?.("[data-tip]");
      if (mark) {
        show(mark);
        place(event.clientX, event.clientY);
      } else if (marked && !byKeys) hide();
    });
    document.addEventListener("pointerup", (event) => {
      if (event.pointerType !== "touch") return;
      const plot = event.target.closest?.(".plot");
      const mark = event.target.closest?.("[data-tip]") ?? (plot && nearest(plot, event.clientX, event.clientY));
      if (!mark) return hide();
      show(mark);
      beside();
    });
    document.addEventListener("scroll", () => marked && (byKeys ? beside() : hide()), { capture: true, passive: true });
    document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
    root.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && !byKeys && hide());

    for (const plot of document.querySelectorAll(".plot")) {
      if (!plot.querySelector("[data-tip]")) continue;
      const title = plot.closest("figure").querySelector("h3").textContent;
      plot.tabIndex = 0;
      plot.setAttribute("role", "group");
      plot.setAttribute("aria-label", `${title}: the arrow keys go from value to value`);
      plot.addEventListener("blur", hide);
      plot.addEventListener("keydown", (event) => {
        const marks = [...plot.querySelectorAll("[data-tip]")];
        const at = marks.indexOf(marked);
        const last = marks.length - 1;
        const next = {
          ArrowRight: Math.min(at + 1, last), ArrowDown: Math.min(at + 1, last),
          ArrowLeft: Math.max(at - 1, 0), ArrowUp: Math.max(at - 1, 0), Home: 0, End: last,
        }[event.key];
        if (next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        show(marks[next], true);
        marked.scrollIntoView({ block: "nearest", inline: "nearest" });
        beside();
      });
    }
  }

  // A figure as a file of its own: with the colours of charts inside, and what its marks say.
  function standalone(drawn, title) {
    const copy = drawn.cloneNode(true);
    const inside = (tag, text) => Object.assign(document.createElementNS(drawn.namespaceURI, tag), { textContent: text });
    for (const mark of copy.querySelectorAll("[data-tip]")) {
      if (!mark.querySelector(":scope > title")) mark.prepend(inside("title", mark.dataset.tip));
    }
    copy.prepend(inside("title", title), inside("style", document.getElementById("chart-style").textContent));
    return new XMLSerializer().serializeToString(copy);
  }

  function downloads() {
    for (const figure of document.querySelectorAll("figure")) {
      const title = figure.querySelector("h3").textContent;
      const button = make("button", { type: "button", class: "download", "aria-label": `Keep “${title}” as an SVG file` }, "SVG");
      button.addEventListener("click", () => {
        const text = standalone(figure.querySelector(".plot > svg"), title);
        const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
        make("a", { href: address, download: `${figure.dataset.name}.svg` }).click();
        setTimeout(() => URL.revokeObjectURL(address), 60000);
      });
      figure.querySelector("figcaption").append(button);
    }
  }

  wear(remembered());
  document.addEventListener("DOMContentLoaded", () => [themes, sections, choices, tables, tips, downloads].forEach((part) => part()));
})();
