// Keys, folds and slides of a pair's page. The chosen change is the one in the address.
const root = document.documentElement, all = (what) => [...document.querySelectorAll(what)];
// What is kept from page to page. Some browsers refuse that for files.
const kept = { size: 1, slides: false, open: false };
try { Object.assign(kept, JSON.parse(sessionStorage.pair || "{}")); } catch { /* as new */ }
const changes = all(".change"), lines = all(".pair tbody:not(.opens) tr:not(.why)");
const [stacked] = all("#stacked"), [place] = all("#place"), [keys] = all("dialog");
const narrow = stacked.media;
const chosen = () => changes.findIndex((change) => "#" + change.id === location.hash);
let shown = "";

function show() {
  try { sessionStorage.pair = JSON.stringify(kept); } catch { /* this page alone */ }
  document.body.style.setProperty("--size", kept.size);
  if (kept.slides && chosen() < 0) choose(0);
  const change = changes[chosen()], [target] = all(":target");
  root.classList.toggle("slides", kept.slides);
  stacked.media = kept.slides ? "all" : narrow;
  const of = `change ${chosen() + 1} of ${changes.length}`;
  place.textContent = change ? of + (kept.slides ? " (arrow keys, Home, End, Esc)" : "") : "";
  target?.closest(".fold:not(.open)")?.previousElementSibling.querySelector("button").click();
  if (kept.slides) fit(change);
  else if (shown !== location.hash) target?.scrollIntoView({ block: target.offsetHeight < innerHeight / 2 ? "center" : "start" });
  shown = target ? location.hash : "";
}

// The change and some lines beside it, in the largest type that fits the window.
function fit(change) {
  const own = [...change.children], [first, last] = [own[0], own.at(-2)].map((row) => lines.indexOf(row));
  const now = [...lines.slice(Math.max(0, first - 2), last + 3), own.at(-1)];
  scrollTo(0, 0);
  all(".pair tr").forEach((row) => row.classList.toggle("now", now.includes(row)));
  let size = Math.max(16, Math.min(48, root.clientWidth / 43)); // longer lines than 64 columns wrap
  do document.body.style.setProperty("--slide", `${size--}px`);
  while (size > 10 && place.parentElement.getBoundingClientRect().bottom > innerHeight);
}

function choose(number) {
  const change = changes.at(Math.min(Math.max(number, 0), changes.length - 1));
  if (change) location.replace("#" + change.id);
}

function slides(on) {
  kept.slides = on;
  if (!on && document.fullscreenElement) document.exitFullscreen();
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
  Home: () => choose(0),
  End: () => choose(changes.length - 1),
  ",": () => all("a[rel=prev]")[0].click(),
  ".": () => all("a[rel=next]")[0].click(),
  f: () => foldAll(kept.open = !kept.open),
  s: () => slides(!kept.slides),
  Escape: () => slides(false),
  "+": () => { kept.size = Math.min(3, kept.size * 1.1); },
  "-": () => { kept.size = Math.max(0.5, kept.size / 1.1); },
  d: () => {
    const [button] = all(".theme-toggle");
    button.click();
    if (document.body.dataset.theme === "auto") button.click(); // to the other of the two
  },
  "?": () => keys.open ? keys.close() : keys.showModal(),
};
const onSlides = { ArrowRight: "n", ArrowDown: "n", PageDown: "n", " ": "n", ArrowLeft: "p", ArrowUp: "p", PageUp: "p" };

function act(key) {
  actions[key]();
  if (!"d?".includes(key)) shown = ""; // the chosen change stays in view
  show();
  // Only a key or a click may ask for it, and the next page begins without it.
  if (kept.slides && !document.fullscreenElement) root.requestFullscreen?.().catch(() => { /* in the window */ });
  if ("np".includes(key)) changes[chosen()]?.querySelector("a").focus({ preventScroll: true });
}

function start() {
  root.classList.add("keyed");
  addEventListener("keydown", (event) => {
    const key = kept.slides && onSlides[event.key] || event.key.replace("=", "+");
    const typing = event.target.matches("input") || keys.open && key !== "?";
    const theirs = (kept.slides ? ["+", "-", "f"] : ["Home", "End", "Escape"]).includes(key);
    if (typing || theirs || event.ctrlKey || event.altKey || event.metaKey || !(key in actions)) return;
    event.preventDefault();
    act(key);
  });
  addEventListener("click", (event) => {
    const [key, button, row] = ["[data-key]", ".opens button", ".row"].map((what) => event.target.closest(what));
    if (key) act(key.dataset.key);
    else if (button) fold(button, button.getAttribute("aria-expanded") === "false");
    else if (row && !String(getSelection())) {
      const top = scrollY;
      event.preventDefault();
      choose(changes.indexOf(row.parentElement));
      shown = location.hash; // it stays where it was clicked
      scrollTo(0, top);
      show();
    }
  });
  addEventListener("fullscreenchange", () => { if (!document.fullscreenElement) { kept.slides = false; show(); } });
  // Only the script where the mouse goes down is copied.
  addEventListener("mousedown", (event) => {
    const cell = event.target.closest(".pair td");
    if (cell) cell.closest("table").className = cell.cellIndex > 2 ? "pair right" : "pair left";
  });
  ["hashchange", "resize", "load"].forEach((event) => addEventListener(event, show));
  foldAll(kept.open);
  show();
}
if (changes.length) start();
// What the theme lacks: what scrolls is reached by keys, and parts have names.
const scrolls = new ResizeObserver((found) => found.forEach(({ target: one }) => {
  one.tabIndex = one.scrollWidth > one.clientWidth ? 0 : -1;
}));
all("pre, .table-wrapper").forEach((one) => scrolls.observe(one));
all(".caption[role=heading]").forEach((one) => { one.ariaLevel = 2; });
all("aside").forEach((one) => { one.ariaLabel = one.className.split("-")[0]; });
