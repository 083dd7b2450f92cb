// Keys, folds and slides. The chosen row is the one in the address.
const root = document.documentElement, all = (what) => [...document.querySelectorAll(what)];
root.classList.add("js");
// What is kept from page to page. Some browsers refuse that for files.
const kept = { size: 1, turned: false, slides: false, open: false };
try { Object.assign(kept, JSON.parse(localStorage.pages || "{}")); } catch { /* as new */ }
const rows = all(".row"), [stacked] = all("#stacked"), [place] = all("#place"), [main] = all("main");
const narrow = stacked?.media, dark = matchMedia("(prefers-color-scheme: dark)").matches;
const chosen = () => rows.findIndex((row) => "#" + row.id === location.hash);
let shown = "";

function show() {
  try { localStorage.pages = JSON.stringify(kept); } catch { /* this page alone */ }
  root.style.colorScheme = kept.turned ? (dark ? "light" : "dark") : "";
  root.style.setProperty("--size", kept.size);
  if (!stacked) return;
  const slides = kept.slides && rows.length > 0;
  if (slides && chosen() < 0) choose(0);
  const body = rows[chosen()]?.parentElement, [target] = all(":target");
  const near = [body?.previousElementSibling, body, body?.nextElementSibling];
  all("tbody").forEach((one) => one.classList.toggle("now", near.includes(one)));
  root.classList.toggle("slides", slides);
  stacked.media = slides ? "all" : narrow;
  if (document.body.scrollWidth > root.clientWidth) stacked.media = "all";
  place.textContent = body ? `change ${chosen() + 1} of ${rows.length}${slides ? " (arrow keys, Esc)" : ""}` : "";
  target?.closest(".fold:not(.open)")?.previousElementSibling.querySelector("button").click();
  if (slides) fit();
  else if (shown !== location.hash) target?.scrollIntoView({ block: "center" });
  shown = target ? location.hash : "";
}

// The largest type with which the change fits the window, then that of its explanation.
function fit(limits = { "--slide": Math.min(64, root.clientWidth / 28), "--words": 40 }) {
  for (const name in limits) root.style.setProperty(name, "8px");
  for (let [name, high] of Object.entries(limits)) {
    let low = 8;
    while (high - low > 0.5) {
      const size = (low + high) / 2;
      root.style.setProperty(name, size + "px");
      const fits = main.scrollHeight <= main.clientHeight && main.scrollWidth <= root.clientWidth;
      [low, high] = fits ? [size, high] : [low, size];
    }
    root.style.setProperty(name, low + "px");
  }
}

function choose(number) {
  const row = rows[Math.max(0, Math.min(number, rows.length - 1))];
  if (row) location.replace("#" + row.id);
}

function fold(button, open) {
  button.closest("tbody").nextElementSibling.classList.toggle("open", open);
  button.setAttribute("aria-expanded", open);
}

function foldAll(open) {
  all(".opens button").forEach((button) => fold(button, open));
  all("[data-key=f]").forEach((button) => button.setAttribute("aria-pressed", open));
}

const actions = {
  n: () => choose(chosen() + 1),
  p: () => choose(chosen() - 1),
  ",": () => all("[rel=prev]")[0]?.click(),
  ".": () => all("[rel=next]")[0]?.click(),
  f: () => foldAll(kept.open = !kept.open),
  s: () => { kept.slides = !kept.slides; },
  Escape: () => { kept.slides = false; },
  "+": () => { kept.size = Math.min(3, kept.size * 1.1); },
  "-": () => { kept.size = Math.max(0.5, kept.size / 1.1); },
  d: () => { kept.turned = !kept.turned; },
};
const onSlides = { ArrowRight: "n", ArrowDown: "n", PageDown: "n", " ": "n", ArrowLeft: "p", ArrowUp: "p", PageUp: "p" };

function act(key) {
  actions[key]();
  if (key !== "d") shown = ""; // the chosen line stays in view
  show();
  if ("np".includes(key)) rows[chosen()]?.querySelector("a").focus({ preventScroll: true });
}

addEventListener("keydown", (event) => {
  const key = kept.slides && onSlides[event.key] || event.key.replace("=", "+");
  if (event.ctrlKey || event.altKey || event.metaKey || !(key in actions)) return;
  event.preventDefault();
  act(key);
});
addEventListener("click", (event) => {
  const [key, button, row] = ["[data-key]", ".opens button", ".row"].map((what) => event.target.closest(what));
  if (key?.matches("button")) act(key.dataset.key);
  else if (button) fold(button, button.getAttribute("aria-expanded") === "false");
  else if (row && !String(getSelection())) {
    const top = scrollY;
    event.preventDefault();
    choose(rows.indexOf(row));
    shown = location.hash; // it stays where it was clicked
    scrollTo(0, top);
    show();
  }
});
// Only the script where the mouse goes down is copied.
addEventListener("mousedown", (event) => {
  const cell = event.target.closest(".pair td");
  if (cell) cell.closest("table").className = cell.cellIndex > 2 ? "pair right" : "pair left";
});
["hashchange", "resize", "load"].forEach((event) => addEventListener(event, show));
foldAll(kept.open);
// The questions are beside the head of a wide window, and folded where that is narrow.
all(".questions").forEach((one) => { one.open = innerWidth >= 1200; });
show();
