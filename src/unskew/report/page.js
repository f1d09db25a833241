// Interaction: choose a theme, sort tables, step through choices, show tooltips, download figures.
// The page is complete without scripts, and nothing is fetched.

"use strict";

(() => {
  const root = document.documentElement;
  root.classList.add("js");

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // Themes, set before anything is drawn. If a local file has no storage, the choice lasts until the page is closed.
  const THEMES = ["auto", "light", "dark"];

  function storedTheme() {
    try {
      const theme = localStorage.getItem("unskew-theme");
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto";
    }
  }

  function applyTheme(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  function themes() {
    const group = make("fieldset", { class: "theme" }, make("legend", { class: "unseen" }, "Theme"));
    for (const theme of THEMES) {
      const radio = make("input", { type: "radio", name: "theme", value: theme, class: "unseen", autocomplete: "off" });
      radio.checked = theme === storedTheme();
      group.append(make("label", {}, radio, theme[0].toUpperCase() + theme.slice(1)));
    }
    group.addEventListener("change", (event) => {
      applyTheme(event.target.value);
      try {
        localStorage.setItem("unskew-theme", event.target.value);
      } catch {
        // applied without being stored
      }
    });
    document.querySelector("header").prepend(group);
  }

  // Sections: the link of the section being read is marked and scrolled into view.
  function sections() {
    const links = new Map([...document.querySelectorAll("nav a")].map((link) => [decodeURIComponent(link.hash.slice(1)), link]));
    const mark = (link) => {
      for (const other of links.values()) other.removeAttribute("aria-current");
      link.setAttribute("aria-current", "true");
      const strip = link.closest("ul");
      strip.scrollLeft = link.offsetLeft - (strip.clientWidth - link.offsetWidth) / 2;
    };
    const watcher = new IntersectionObserver(
      (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => mark(links.get(entry.target.id))),
      { rootMargin: "-15% 0px -75% 0px" },
    );
    for (const name of links.keys()) watcher.observe(document.getElementById(name));
  }

  // Choices: those with the same label change together, if they have the chosen option.
  function choices() {
    const all = [...document.querySelectorAll(".choice")];
    const show = (choice, name) => {
      const select = choice.querySelector("select");
      const index = [...select.options].findIndex((option) => option.value === name);
      if (index < 0) return;
      select.selectedIndex = index;
      choice.querySelectorAll(".option").forEach((option, at) => option.classList.toggle("shown", at === index));
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

  // Tables: numbers sort numerically and before text, empty cells always last; the sort is stable.
  const TEXT = new Intl.Collator("en", { numeric: true });

  function key(cell) {
    const number = cell.dataset.value === undefined ? NaN : Number(cell.dataset.value);
    if (!Number.isNaN(number)) return [0, number];
    return [cell.textContent === "" ? 2 : 1, cell.textContent];
  }

  function order(one, other, sign) {
    if (one[0] !== other[0]) return one[0] - other[0];
    if (one[0] === 2) return 0;
    return sign * (one[0] === 1 ? TEXT.compare(one[1], other[1]) : one[1] < other[1] ? -1 : Number(one[1] > other[1]));
  }

  function sort(table, column, sign) {
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => [key(row.cells[column]), row]);
    keyed.sort((one, other) => order(one[0], other[0], sign));
    body.append(...keyed.map(([, row]) => row));
  }

  function tables() {
    for (const table of document.querySelectorAll("table")) {
      const heads = [...table.tHead.rows[0].cells];
      heads.forEach((head, column) => {
        const button = make("button", { type: "button" }, ...head.childNodes);
        head.append(button);
        button.addEventListener("click", () => {
          const up = head.getAttribute("aria-sort") !== "ascending";
          for (const other of heads) other.removeAttribute("aria-sort");
          head.setAttribute("aria-sort", up ? "ascending" : "descending");
          sort(table, column, up ? 1 : -1);
        });
      });
      if (table.classList.contains("folded")) addUnfold(table);
    }
  }

  function addUnfold(table) {
    const all = `Show all ${table.tBodies[0].rows.length.toLocaleString("en")} rows`;
    const button = make("button", { type: "button", class: "unfold", "aria-expanded": "false" }, all);
    button.addEventListener("click", () => {
      const folded = table.classList.toggle("folded");
      button.textContent = folded ? all : "Show fewer rows";
      button.setAttribute("aria-expanded", String(!folded));
    });
    table.closest(".box").after(button);
  }

  // Tooltips: for the mark under the mouse, a finger or the arrow keys.
  const REACH = 24; // pixels between a finger and its mark

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
      mark.querySelector(":scope > title")?.remove(); // otherwise the browser would show it too
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
      plot.setAttribute("aria-label", `${title}: use the arrow keys to move between values`);
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

  // A figure as a standalone file, with its style and tooltips.
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
      const button = make("button", { type: "button", class: "download", "aria-label": `Download “${title}” as SVG` }, "SVG");
      button.addEventListener("click", () => {
        const text = standalone(figure.querySelector(".plot > svg"), title);
        const address = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
        make("a", { href: address, download: `${figure.dataset.name}.svg` }).click();
        setTimeout(() => URL.revokeObjectURL(address), 60000);
      });
      figure.querySelector("figcaption").append(button);
    }
  }

  applyTheme(storedTheme());
  document.addEventListener("DOMContentLoaded", () => [themes, sections, choices, tables, tips, downloads].forEach((part) => part()));
})();
