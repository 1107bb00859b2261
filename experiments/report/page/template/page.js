"use strict";
// Figures, filters, light and dark, pictures, commands.
const DATA = JSON.parse(document.getElementById("curves").textContent);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const filters = document.getElementById("filters");
const charts = [];

// -- figures: choose a column and what the curves are drawn against
function choices(names, chosen, choose) {
  const group = document.createElement("div");
  group.setAttribute("role", "group");
  for (const name of names) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: name });
    button.setAttribute("aria-pressed", String(name === chosen));
    button.addEventListener("click", () => {
      all("button", group).forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      choose(name);
    });
    group.append(button);
  }
  return group;
}

function figure(host) {
  const columns = DATA[host.dataset.curves], names = Object.keys(columns);
  const state = { column: names.at(-1), view: Object.keys(columns[names.at(-1)])[0], shown: [] };
  const [tabs, place] = ["tabs", "charts"].map((name) => Object.assign(document.createElement("div"), { className: name }));
  const draw = () => {
    state.shown.forEach((chart) => charts.splice(charts.indexOf(chart), 1));
    const views = columns[state.column];
    state.shown = (views[state.view] ?? Object.values(views)[0]).map((panel) => new Chart(panel));
    charts.push(...state.shown);
    place.replaceChildren(...state.shown.map((chart) => chart.element));
    highlight();
  };
  if (names.length > 1) tabs.append(choices(names, state.column, (name) => { state.column = name; draw(); }));
  const views = Object.keys(columns[state.column]);
  if (views.length > 1) tabs.append(choices(views, state.view, (name) => { state.view = name; draw(); }));
  host.replaceChildren(tabs, place);
  draw();
}

function highlight() {
  const sorter = filters.elements.sorter.value;
  for (const chart of charts) {
    const wanted = chart.panel.lines.some((line) => line.sorter === sorter) ? sorter : "";
    if (wanted !== chart.highlight) { chart.highlight = wanted; chart.draw(); }
  }
}

// -- filters
function filter() {
  const { task, sorter, verdict } = filters.elements, chosen = [task, sorter, verdict].map((some) => some.value);
  const matches = ({ tasks, sorters, kinds }) => [tasks, sorters, kinds].every((words, i) => !chosen[i] || words.split(" ").includes(chosen[i]));
  const items = all("[data-item]");
  items.forEach((item) => { item.hidden = !matches(item.dataset); });
  const active = chosen.some(Boolean);
  for (const group of all("[data-group]")) {
    const left = all("[data-item]", group).filter((item) => !item.hidden).length;
    group.hidden = active && !left;
    if (active) all("details.more:has([data-item])", group).concat(group.matches("details") ? group : []).forEach((some) => { some.open = true; });
  }
  const lines = items.filter((item) => item.matches(".claim"));
  document.getElementById("shown").textContent = active ? `${lines.filter((line) => !line.hidden).length} of ${lines.length} lines` : `${lines.length} lines`;
  filters.querySelector("[type=reset]").disabled = !active;
  [task, sorter, verdict].forEach((select) => select.classList.toggle("on", Boolean(select.value)));
  all("[data-choose]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.choose === verdict.value)));
  highlight();
}
filters.addEventListener("change", filter);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => setTimeout(filter));
all("[data-choose]").forEach((button) => button.addEventListener("click", () => {
  const { verdict } = filters.elements;
  verdict.value = verdict.value === button.dataset.choose ? "" : button.dataset.choose;
  filter();
}));
// A link to something that is filtered away, or folded, shows it.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target?.closest("[hidden]")) { filters.reset(); setTimeout(() => target.scrollIntoView(), 50); }
}
addEventListener("hashchange", reveal);

// -- light and dark
const dark = matchMedia("(prefers-color-scheme: dark)");
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, now = root.dataset.theme || (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* no storage */ }
});

// -- pictures and commands
const large = document.getElementById("large");
all(".enlarge").forEach((button) => button.addEventListener("click", () => {
  large.querySelector("div").replaceChildren(button.querySelector("img").cloneNode());
  large.showModal();
}));
all(".copy").forEach((button) => button.addEventListener("click", async () => {
  const code = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch { // not allowed from the disk in some browsers: select it instead
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1200);
}));

if (matchMedia("(max-width: 46rem)").matches) all(".group").forEach((group) => { group.open = false; }); // counts come first
all("[data-curves]").forEach(figure);
filter();
