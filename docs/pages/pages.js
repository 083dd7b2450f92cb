// Keys, folds, slides and copies. The chosen change is the one in the address.
const root = document.documentElement, all = (what) => [...document.querySelectorAll(what)];
root.classList.add("js");
// What is kept from page to page. Some browsers refuse that for files.
const kept = { size: 1, turned: false, slides: false, open: false };
try { Object.assign(kept, JSON.parse(localStorage.pages || "{}")); } catch { /* as new */ }
const changes = all(".change"), lines = all(".pair tbody:not(.opens) tr:not(.why)");
const [stacked] = all("#stacked"), [place] = all("#place"), [main] = all("main");
const narrow = stacked?.media, dark = matchMedia("(prefers-color-scheme: dark)").matches;
const chosen = () => changes.findIndex((change) => "#" + change.id === location.hash);
let shown = "";

function show() {
  try { localStorage.pages = JSON.stringify(kept); } catch { /* this page alone */ }
  root.style.colorScheme = kept.turned ? (dark ? "light" : "dark") : "";
  root.style.setProperty("--size", kept.size);
  if (!stacked) return;
  const slides = kept.slides && changes.length > 0;
  if (slides && chosen() < 0) choose(0);
  const change = changes[chosen()], [target] = all(":target");
  root.classList.toggle("slides", slides);
  stacked.media = slides && !wide() ? "all" : narrow;
  const of = `change ${chosen() + 1} of ${changes.length}`;
  place.textContent = change ? of + (slides ? " (arrow keys, Esc)" : "") : "";
  target?.closest(".fold:not(.open)")?.previousElementSibling.querySelector("button").click();
  if (slides) fit(change);
  else if (shown !== location.hash) target?.scrollIntoView({ block: "center" });
  shown = target ? location.hash : "";
}

// How large the type can be for lines of this length, on two sides or below one another.
const size = (columns, sides) => root.clientWidth / (sides * (columns + 7)) / 0.605;
// Two sides if the longest lines of all scripts are legible there.
const wide = () => size(85, 2) >= 16;

// The change and some lines beside it, in the largest type that fits the window.
function fit(change) {
  const own = [...change.children], [first, last] = [own[0], own.at(-2)].map((row) => lines.indexOf(row));
  const shown = [...lines.slice(Math.max(0, first - 2), last + 3), own.at(-1)];
  all("tr").forEach((row) => row.classList.toggle("now", shown.includes(row)));
  const cells = shown.slice(0, -1).flatMap((row) => [row.cells[1], row.cells[4]]);
  const longest = Math.max(...cells.map((cell) => cell.textContent.length));
  const limits = { "--slide": Math.min(64, size(longest, wide() ? 2 : 1)), "--words": 40 };
  root.style.setProperty("--words", "20px");
  for (const [name, most] of Object.entries(limits)) {
    let [low, high] = [10, most];
    while (high - low > 0.5) {
      const middle = (low + high) / 2;
      root.style.setProperty(name, middle + "px");
      [low, high] = place.getBoundingClientRect().bottom < innerHeight ? [middle, high] : [low, middle];
    }
    root.style.setProperty(name, low + "px");
  }
}

function choose(number) {
  const change = changes[Math.max(0, Math.min(number, changes.length - 1))];
  if (change) location.replace("#" + change.id);
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
  if (key !== "d") shown = ""; // the chosen change stays in view
  show();
  if ("np".includes(key)) changes[chosen()]?.querySelector("a").focus({ preventScroll: true });
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
    choose(changes.indexOf(row.parentElement));
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
// Commands are copied with a button. Some browsers refuse that for files.
if (navigator.clipboard) all("pre.bash").forEach((pre) => {
  const box = document.createElement("div"), button = document.createElement("button");
  box.className = "commands";
  button.textContent = "Copy";
  pre.replaceWith(box);
  box.append(pre, button);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(pre.textContent);
    button.textContent = "Copied";
  });
});
// The contents show where this page is.
const [contents] = all("nav[id]"), [current] = all("nav [aria-current]");
if (current && getComputedStyle(contents).overflowY === "auto") contents.scrollTop = current.offsetTop - 100;
