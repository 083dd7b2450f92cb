"use strict";
// Keys, folds and slides. The chosen row is the one in the address.
const root = document.documentElement, all = (what) => [...document.querySelectorAll(what)];
root.classList.add("js");

// What is kept from page to page; some browsers refuse that to files.
let kept = { size: 1, theme: "", slides: false, open: false };
try { Object.assign(kept, JSON.parse(localStorage.pages || "{}")); } catch { /* as new */ }

const rows = all(".row"), stacked = document.querySelector("#stacked");
const stackedWhen = stacked?.media, place = document.querySelector("#place");
const chosen = () => rows.findIndex((row) => "#" + row.id === decodeURIComponent(location.hash));

function show() {
  try { localStorage.pages = JSON.stringify(kept); } catch { /* this page alone */ }
  root.style.colorScheme = kept.theme;
  root.style.setProperty("--size", kept.size);
  if (!stacked) return;
  const slides = kept.slides && rows.length > 0;
  root.classList.toggle("slides", slides);
  stacked.media = slides ? "all" : stackedWhen;
  if (slides && chosen() < 0) return choose(0);
  const row = rows[chosen()], target = document.querySelector(":target");
  for (const body of all("tbody.now")) body.classList.remove("now");
  const body = row?.parentElement;
  for (const near of [body?.previousElementSibling, body, body?.nextElementSibling])
    if (near?.matches(".near, .change")) near.classList.add("now");
  place.textContent = row ? `change ${chosen() + 1} of ${rows.length}` : "";
  target?.closest(".fold:not(.open)")?.previousElementSibling.querySelector("button").click();
  if (slides) fit();
  else target?.scrollIntoView({ block: "center" });
}

// The largest type with which the change fits the window, then that of its explanation.
function fit(names = ["--slide", "--words"]) {
  const main = document.querySelector("main");
  names.forEach((name) => root.style.setProperty(name, "8px"));
  for (const name of names) {
    let low = 8, high = name === "--words" ? 40 : 64;
    while (high - low > 0.5) {
      const size = (low + high) / 2;
      root.style.setProperty(name, size + "px");
      const fits = main.scrollHeight <= main.clientHeight && main.scrollWidth <= innerWidth;
      [low, high] = fits ? [size, high] : [low, size];
    }
    root.style.setProperty(name, low + "px");
  }
}

function choose(number) {
  const row = rows[Math.max(0, Math.min(number, rows.length - 1))];
  if (!row) return;
  location.replace("#" + row.id);
  row.querySelector("a").focus({ preventScroll: true });
}

function fold(button, open) {
  button.closest("tbody").nextElementSibling.classList.toggle("open", open);
  button.setAttribute("aria-expanded", open);
}

const actions = {
  n: () => choose(chosen() + 1),
  p: () => choose(chosen() - 1),
  ",": () => document.querySelector("[rel=prev]")?.click(),
  ".": () => document.querySelector("[rel=next]")?.click(),
  f: () => { kept.open = !kept.open; all(".opens button").forEach((b) => fold(b, kept.open)); },
  s: () => { kept.slides = !kept.slides; },
  Escape: () => { kept.slides = false; },
  "+": () => { kept.size = Math.min(3, kept.size * 1.1); },
  "-": () => { kept.size = Math.max(0.5, kept.size / 1.1); },
  d: () => {
    const dark = kept.theme ? kept.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    kept.theme = dark ? "light" : "dark";
  },
};
const onSlides = { ArrowRight: "n", ArrowDown: "n", PageDown: "n", " ": "n",
  ArrowLeft: "p", ArrowUp: "p", PageUp: "p" };

function act(key) {
  actions[key]();
  show();
}

addEventListener("keydown", (event) => {
  const key = kept.slides && onSlides[event.key] || event.key.replace("=", "+");
  if (event.ctrlKey || event.altKey || event.metaKey || !(key in actions)) return;
  event.preventDefault();
  act(key);
});
addEventListener("click", (event) => {
  const key = event.target.closest("button[data-key]")?.dataset.key;
  const button = event.target.closest(".opens button"), row = event.target.closest(".row");
  if (key) act(key);
  else if (button) fold(button, button.getAttribute("aria-expanded") === "false");
  else if (row && !String(getSelection())) choose(rows.indexOf(row));
});
addEventListener("hashchange", show);
addEventListener("resize", () => kept.slides && show());
if (kept.open) all(".opens button").forEach((button) => fold(button, true));
show();
